//! The causal depthwise convolution of queries, keys and values.

use mt_shape::DType;
use mt_trace::Tensor;

use super::{TAP, last_segment};
use crate::axes::POSITION;

/// The results of a convolution.
pub(super) struct Convolved<'t> {
    /// `[batch, position, key_heads, projected]`
    pub output: Tensor<'t>,
    /// The inputs at the last tokens: `[batch, tap, key_heads, projected]`. Absent if the kernel has one tap.
    pub window: Option<Tensor<'t>>,
}

/// Convolves each channel with its kernel in `f32`, and applies SiLU. A token sees only tokens of its own document.
/// Without a window, no tokens precede the sequence.
///
/// # Shapes
/// `[batch, position, key_heads, projected], [tap, key_heads, projected], [batch, tap, key_heads, projected],
/// i32[batch, position]`
#[track_caller]
pub(super) fn convolve<'t>(
    x: Tensor<'t>,
    kernel: Tensor<'t>,
    window: Option<Tensor<'t>>,
    segments: Tensor<'t>,
) -> Convolved<'t> {
    let (taps, length) = (kernel.axis(TAP).size, x.axis(POSITION).size);
    let kernel = kernel.cast(DType::F32);
    let first = segments.at(POSITION, 0);
    let before = x.axis(POSITION).with_size(taps - 1);
    let (columns, documents) = match window {
        None => (x.pad(POSITION, taps - 1, 0, 0.0), segments.pad(POSITION, taps - 1, 0, 0.0)),
        Some(window) => {
            let columns = window.cast(x.dtype()).rename(TAP, POSITION).concatenate(&[x], POSITION);
            let earlier = first.broadcast(&[first.axes()[0], before]);
            (columns, earlier.concatenate(&[segments], POSITION))
        }
    };
    let terms = (0..taps).map(|tap| {
        let term = columns.slice(POSITION, tap, tap + length).cast(DType::F32) * kernel.at(TAP, tap);
        if tap + 1 == taps {
            return term;
        }
        let is_same = documents.slice(POSITION, tap, tap + length).equals(segments);
        term * is_same.cast(DType::F32)
    });
    let sum = terms.reduce(|sum, term| sum + term).expect("a kernel has a tap");
    let window = (taps > 1).then(|| last_columns(columns, documents, segments, taps - 1));
    Convolved { output: sum.silu().cast(x.dtype()), window }
}

/// The columns at the last `count` tokens of the last document. Columns of `count` earlier tokens precede those of the
/// sequence, and padding follows its tokens.
#[track_caller]
fn last_columns<'t>(
    columns: Tensor<'t>,
    documents: Tensor<'t>,
    segments: Tensor<'t>,
    count: usize,
) -> Tensor<'t> {
    let region = columns.region();
    let num_tokens = segments.differs(0.0).cast(DType::I32).sum(&[POSITION]);
    let is_current = documents.equals(last_segment(segments, segments.at(POSITION, 0)));
    let places = region.iota(DType::I32, columns.axis(POSITION)).broadcast(&documents.axes());
    let nothing = region.full(columns.dtype(), &columns.axes(), 0.0);
    let chosen = (0..count).map(|tap| {
        let is_chosen = places.equals(num_tokens + tap as f64).logical_and(is_current);
        let column = is_chosen.broadcast(&columns.axes()).select(columns, nothing).sum(&[POSITION]);
        column.unsqueeze(TAP)
    });
    let chosen: Vec<Tensor<'t>> = chosen.collect();
    let window = chosen[0].concatenate(&chosen[1..], TAP);
    let names: Vec<&'static str> =
        columns.axes().iter().map(|own| if own.name == POSITION { TAP } else { own.name }).collect();
    window.order(&names)
}
