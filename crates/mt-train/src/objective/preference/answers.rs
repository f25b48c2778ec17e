//! Log-probabilities of answers, which all losses on preference data share.

use mt_data::arrays::{INPUTS, INPUTS_POSITION, INPUTS_SEGMENTATION, LABELS, TARGETS, TARGETS_SEGMENTATION};
use mt_models::Tokens;
use mt_nn::{
    axes::{BATCH, POSITION},
    token_weights,
};
use mt_shape::axis;
use mt_trace::Tensor;

use crate::objective::{BatchArray, BatchTensors, BoundModel, SideOutputs, next_token::token_arrays};

/// The sequences of a row.
pub const SEQUENCE: &str = "sequence";

/// The arrays of a batch whose rows have two sequences each.
pub fn arrays(rows: usize, length: usize, vocab_size: usize) -> Vec<BatchArray> {
    token_arrays(&[axis(BATCH, rows), axis(SEQUENCE, 2), axis(POSITION, length)], vocab_size)
}

/// The array of a number for each row: a verdict or a margin.
pub fn labels(rows: usize) -> BatchArray {
    BatchArray::numbers(LABELS, vec![axis(BATCH, rows)])
}

/// The rows that hold an example: 1, or 0 for padding.
///
/// # Shapes
/// `-> f32[batch]`
pub fn present<'t>(batch: &BatchTensors<'t>) -> Tensor<'t> {
    let first = batch.of(INPUTS_SEGMENTATION).at(SEQUENCE, 0);
    token_weights(first).max(&[POSITION])
}

/// The log-probabilities of answers by one model. Sequences are those of each row.
pub struct Answers<'t> {
    /// `f32[batch, sequence, position]`, 0 where a token has no loss.
    pub each: Tensor<'t>,
    /// The logarithm of the sum of squared probabilities of all tokens, less that of the answer's token, if requested:
    /// `f32[batch, sequence, position]`.
    pub surprise: Option<Tensor<'t>>,
    pub side: SideOutputs<'t>,
}

/// The weights of an answer's tokens: 1, or 0 for prompts and padding.
///
/// # Shapes
/// `-> f32[batch, sequence, position]`
pub fn answer_tokens<'t>(batch: &BatchTensors<'t>) -> Tensor<'t> {
    token_weights(batch.of(TARGETS_SEGMENTATION))
}

/// The first `sequences` sequences of each row, as a model takes them. The sequences of a row stay on its device.
pub fn model_tokens<'t>(batch: &BatchTensors<'t>, sequences: usize) -> Tokens<'t> {
    Tokens {
        source: None,
        tokens: flat(batch, INPUTS, sequences),
        positions: flat(batch, INPUTS_POSITION, sequences),
        segmentation: flat(batch, INPUTS_SEGMENTATION, sequences),
        order: batch.order,
    }
}

fn flat<'t>(batch: &BatchTensors<'t>, name: &str, sequences: usize) -> Tensor<'t> {
    batch.of(name).slice(SEQUENCE, 0, sequences).merge(&[BATCH, SEQUENCE], BATCH)
}

/// The log-probabilities of the targets of each row's first `sequences` sequences. `weights` selects tokens.
///
/// # Shapes
/// `f32[batch, sequence, position] -> f32[batch, sequence, position]`
pub fn log_probabilities<'t>(
    model: &BoundModel<'_, 't>,
    batch: &BatchTensors<'t>,
    weights: Tensor<'t>,
    wants_surprise: bool,
) -> Answers<'t> {
    let sequences = weights.axis(SEQUENCE);
    let rows = weights.axis(BATCH);
    let by_sequence = |flat: Tensor<'t>| flat.split(BATCH, &[rows, sequences]);
    let states = model.hidden(model_tokens(batch, sequences.size));
    let targets = flat(batch, TARGETS, sequences.size);
    let each = by_sequence(model.token_log_probabilities(states.hidden, targets));
    let surprise = wants_surprise.then(|| {
        let squares = by_sequence(model.token_log_squares(states.hidden, targets));
        ((each - squares) * weights).stop_gradient()
    });
    Answers { each: each * weights, surprise, side: states.side }
}
