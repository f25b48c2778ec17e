//! The source of a teacher's logits: the model itself, or stored ones.

use std::path::PathBuf;

use mt_data::{
    LogitsShape,
    arrays::{TOP_K_INDICES, TOP_K_LOGITS},
};
use mt_nn::axes::{BATCH, POSITION, TOKEN, VOCAB};
use mt_shape::{DType, axis};
use mt_trace::Tensor;

use crate::objective::{BatchArray, FrozenModel};

/// The axis of the tokens whose logits are stored.
pub const TOP: &str = "top";

const RUN: &str = "run";

/// The source of a teacher's logits.
#[derive(Clone)]
pub enum Teaching {
    /// A model that runs beside the student.
    Model(FrozenModel),
    /// The largest logits of each position, which the batches hold.
    Stored { directory: PathBuf, shape: LogitsShape },
}

impl Teaching {
    /// The arrays that batches have in addition to those of text.
    pub(super) fn arrays(&self, rows: usize, vocab_size: usize) -> Vec<BatchArray> {
        let Self::Stored { shape, .. } = self else { return Vec::new() };
        let axes = vec![axis(BATCH, rows), axis(POSITION, shape.length), axis(TOP, shape.top_k)];
        let array = |name, dtype, below| BatchArray { name, dtype, axes: axes.clone(), below };
        vec![array(TOP_K_LOGITS, DType::F32, None), array(TOP_K_INDICES, DType::I32, Some(vocab_size))]
    }
}

/// The stored logits and the student's logits of the same tokens. Both are distributions over these tokens alone.
///
/// # Shapes
/// `f32[batch, position, top], i32[batch, position, top], [batch, position, vocab] ->
/// f32[batch, position, vocab], [batch, position, vocab]`
pub(super) fn of_stored_tokens<'t>(
    [logits, tokens]: [Tensor<'t>; 2],
    student: Tensor<'t>,
) -> [Tensor<'t>; 2] {
    let [rows, positions] = [BATCH, POSITION].map(|name| tokens.axis(name));
    let flat =
        |tensor: Tensor<'t>, last| tensor.order(&[BATCH, POSITION, last]).merge(&[BATCH, POSITION], TOKEN);
    let chosen = flat(student, VOCAB).take_runs(TOKEN, VOCAB, flat(tokens, TOP), axis(RUN, 1));
    let chosen = chosen.squeeze(RUN).split(TOKEN, &[rows, positions]);
    [logits, chosen].map(|logits| logits.rename(TOP, VOCAB))
}
