//! What all families have in common.

use mt_config::{DecoderBlock, ModelGroup};
use mt_nn::{ParamSpec, attention::KeysValues};
use mt_shape::{Axis, DType, Path};
use mt_trace::{Key, Tensor};

use crate::{FlopCount, StoredParameter, llama::Llama};

/// A model cannot be built or converted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ModelError {
    #[error(
        "`mlp_activations` has {0} functions, but a feed-forward layer has one or two projections\nhint: use `mlp_activations=silu,linear` for a gated layer"
    )]
    Activations(usize),
}

/// Tokens with their places.
///
/// # Shapes
/// `i32[batch, position]`, each
#[derive(Clone, Copy)]
pub struct Tokens<'t> {
    pub tokens: Tensor<'t>,
    /// The place of each token in its document.
    pub positions: Tensor<'t>,
    /// Which document of its row each token belongs to; 0 is padding.
    pub segmentation: Tensor<'t>,
}

/// Keys and values of earlier tokens, for all layers.
#[derive(Clone, Copy)]
pub struct Cache<'t> {
    /// `[layers, batch, kv_position, kv_heads, head_dim]`
    pub layers: KeysValues<Tensor<'t>>,
    /// The slot of the first token of this call: an `i32` scalar.
    pub start: Tensor<'t>,
    /// Which document each slot belongs to, this call's tokens included; 0 is empty. `i32[batch, kv_position]`
    pub segmentation: Tensor<'t>,
}

/// How a model is run.
#[derive(Clone, Copy, Default)]
pub struct Forward<'t> {
    /// The key of this step's dropout, if activations are dropped.
    pub dropout: Option<Key<'t>>,
    /// Tokens attend to a cache, which is returned with theirs written.
    pub cache: Option<Cache<'t>>,
}

/// The shape of a cache.
#[derive(Clone, Debug, PartialEq)]
pub struct CacheSpec {
    /// Of keys, and of values.
    pub axes: Vec<Axis>,
    pub logical_axes: Vec<Option<&'static str>>,
    pub dtype: DType,
}

/// A language model: parameters, and a function from tokens to logits.
pub trait Model: Send + Sync {
    /// The parameters in the order in which [`Model::logits`] takes them.
    fn parameters(&self) -> Vec<(Path, ParamSpec)>;

    /// How each parameter is stored in MaxText's checkpoints, in the same order.
    fn storage(&self) -> Vec<StoredParameter>;

    /// Scores of every token of the vocabulary as the next one, and the cache if there was one.
    ///
    /// # Shapes
    /// `i32[batch, position] -> [batch, position, vocab]`
    fn logits<'t>(
        &self,
        parameters: &[Tensor<'t>],
        tokens: Tokens<'t>,
        forward: Forward<'t>,
    ) -> (Tensor<'t>, Option<KeysValues<Tensor<'t>>>);

    /// The cache for `batch` sequences of up to `slots` tokens.
    fn cache(&self, batch: usize, slots: usize) -> CacheSpec;

    /// Floating-point operations of training.
    fn flops(&self) -> FlopCount;

    /// The number of weights.
    fn num_parameters(&self) -> usize {
        self.parameters().iter().map(|(_, spec)| spec.num_elements()).sum()
    }

    /// The number of weights that act on one token: all, unless tokens are sent to some of the experts only.
    fn num_active_parameters(&self) -> usize {
        self.num_parameters()
    }
}

/// Builds the model that a configuration describes.
///
/// # Errors
/// The configuration's values do not make a model.
pub fn build(group: &ModelGroup) -> Result<Box<dyn Model>, ModelError> {
    match group.decoder_block {
        DecoderBlock::Llama2 | DecoderBlock::Mistral => Ok(Box::new(Llama::from_config(group)?)),
    }
}
