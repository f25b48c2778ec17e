//! From the losses of tokens to that of a batch.

use mt_config::LossAggregation;
use mt_nn::axes::{BATCH, POSITION};
use mt_trace::Tensor;

/// The share of a micro-batch in the loss of its batch. `divisors` are the numbers of tokens and of answers in the whole
/// batch. Answers without a learned token do not count.
///
/// # Shapes
/// `f32[batch, position], f32[batch, position] -> f32[]`
pub fn share<'t>(
    aggregation: LossAggregation,
    losses: Tensor<'t>,
    mask: Tensor<'t>,
    divisors: &[Tensor<'t>],
    completion_length: usize,
) -> Tensor<'t> {
    let (tokens, answers) = (divisors[0], divisors[1]);
    let of_answers = (losses * mask).sum(&[POSITION]);
    let total = of_answers.sum(&[BATCH]);
    match aggregation {
        LossAggregation::TokenMean => total / tokens,
        LossAggregation::SequenceMeanTokenMean => {
            let means = of_answers / mask.sum(&[POSITION]).maximum(1.0);
            means.sum(&[BATCH]) / answers
        }
        LossAggregation::SequenceMeanTokenScale => total / answers / completion_length as f64,
        LossAggregation::SeqMeanTokenSum | LossAggregation::SequenceMeanTokenSumNorm => total / answers,
    }
}
