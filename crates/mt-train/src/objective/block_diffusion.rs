//! Block diffusion: filling in masked tokens block by block (Arriola et al., 2025).

use mt_config::{CanvasPolicy, TrainConfig};
use mt_data::{BlockMasking, Tokenizer};

use super::{CorruptedText, TextCorruption};
use crate::TrainError;

/// The objective of masked tokens, which the model predicts from the other tokens of their block and from all earlier
/// blocks.
pub type BlockDiffusion = CorruptedText<BlockMasking>;

/// The masks that the configuration describes. They follow the seed of the data.
pub(crate) fn masking_of(settings: &TrainConfig) -> BlockMasking {
    let group = &settings.objective;
    BlockMasking {
        block: settings.model.layers.causal_block_size,
        // Without a mask id, the configuration is refused.
        mask_id: group.block_diffusion_mask_id.map_or(0, |mask| mask as i32),
        min_noise: group.block_diffusion_min_noise,
        has_seeds: group.block_diffusion_canvas_policy == CanvasPolicy::SeedAndMask,
        seed: settings.data.data_shuffle_seed,
    }
}

impl TextCorruption for BlockMasking {
    type Change = Self;

    const NAME: &'static str = "block diffusion";

    fn change(&self, _tokenizer: Option<&Tokenizer>, _vocab_size: usize) -> Result<Self, TrainError> {
        Ok(*self)
    }
}
