//! The head of reward models: scores instead of logits of the vocabulary.

use mt_nn::{
    AdapterArray, Initializer, Linear, ParamSpec,
    axes::{EMBED, SCORE},
};
use mt_shape::{DType, LogicalAxis, axis, logical};
use mt_trace::Tensor;

use super::{DecoderConfig, part::SpecBuilder};

/// The scores of a reward model. They are linear in the hidden states that the head receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScoreConfig {
    /// The number of scores: the members of an ensemble, or the classes of a step.
    pub count: usize,
    /// Whether the scores have biases.
    pub has_bias: bool,
}

/// Logical axes of scores.
pub(super) const SCORES: [Option<LogicalAxis>; 3] =
    [Some(logical::ACTIVATION_EMBED_AND_LOGITS_BATCH), Some(logical::ACTIVATION_LENGTH), None];

impl ScoreConfig {
    /// The parameters. Each score has initial values of its own, with the variance `1 / embed`.
    pub(super) fn specs(self, builder: &SpecBuilder, config: &DecoderConfig) -> Linear<ParamSpec> {
        let scores = axis(SCORE, self.count);
        // Adapters are trained in `f32` above a base of any type, and so is the head beside them.
        let dtype = if config.adapters.is_some() { DType::F32 } else { builder.dtype };
        let declare = |axes, logical_axes, initializer| ParamSpec {
            axes,
            logical_axes,
            adapter: config.adapters.as_ref().map(|_| AdapterArray::Whole),
            ..builder.array([], initializer).with_dtype(dtype)
        };
        let initializer = Initializer::fan_in(1.0, config.embed.size);
        let kernel = declare(vec![config.embed, scores], vec![Some(logical::EMBED_VOCAB), None], initializer);
        let bias = self.has_bias.then(|| declare(vec![scores], vec![None], Initializer::Zeros));
        Linear::dense(kernel).with_bias(bias)
    }
}

/// The scores of each position, computed in `f32`.
///
/// # Shapes
/// `[batch, position, embed] -> f32[batch, position, score]`
pub(super) fn apply<'t>(head: &Linear<Tensor<'t>>, hidden: Tensor<'t>) -> Tensor<'t> {
    let scores = hidden.cast(DType::F32).scope("scores", |x| head.forward(x, &[EMBED]));
    scores.constrain(&SCORES)
}
