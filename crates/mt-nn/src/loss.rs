//! Losses over tokens.

use mt_shape::DType;
use mt_trace::Tensor;

use crate::axes::{BATCH, POSITION, VOCAB};

/// The sum of a loss over tokens, and the sum of their weights.
#[derive(Clone, Copy)]
pub struct TokenLoss<'t> {
    pub total: Tensor<'t>,
    pub weights: Tensor<'t>,
}

impl<'t> TokenLoss<'t> {
    /// The mean over weighted tokens; 0 if no token has weight.
    #[track_caller]
    pub fn mean(self) -> Tensor<'t> {
        self.total / self.weights.maximum(1e-8)
    }
}

/// Cross-entropy in nats between the distributions that `logits` give and `targets`, over tokens whose segment id is
/// not 0. Computed in `f32`.
///
/// # Shapes
/// `[batch, position, vocab], i32[batch, position], i32[batch, position] -> f32[], f32[]`
#[track_caller]
pub fn token_cross_entropy<'t>(
    logits: Tensor<'t>,
    targets: Tensor<'t>,
    segmentation: Tensor<'t>,
) -> TokenLoss<'t> {
    let logits = logits.cast(DType::F32);
    // A comparison with every token instead of a lookup: it stays local when the vocabulary is split over devices.
    let tokens = logits.region().iota(DType::I32, logits.axis(VOCAB)).broadcast(&logits.axes());
    let is_target = tokens.equals(targets);
    let zeros = logits.region().full(DType::F32, &logits.axes(), 0.0);
    let target_logit = is_target.select(logits, zeros).sum(&[VOCAB]);
    let loss = logits.log_sum_exp(VOCAB) - target_logit;
    let weights = segmentation.differs(0.0).cast(DType::F32);
    TokenLoss { total: (loss * weights).sum(&[BATCH, POSITION]), weights: weights.sum(&[BATCH, POSITION]) }
}
