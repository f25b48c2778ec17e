//! Values of the tokens that follow each token in its document.

use mt_trace::Tensor;

use crate::{SequenceOrder, axes::POSITION};

/// The value of the token `steps` places after each token, or 0 if it is not of the same document. Segment 0 is padding.
///
/// # Shapes
/// `[batch, position], i32[batch, position] -> [batch, position]`
#[track_caller]
pub fn following<'t>(
    values: Tensor<'t>,
    segmentation: Tensor<'t>,
    steps: usize,
    order: SequenceOrder,
) -> Tensor<'t> {
    let length = values.axis(POSITION).size;
    let steps = steps.min(length);
    let later = |stored: Tensor<'t>| {
        let read = order.read(stored, POSITION);
        let shifted = match length - steps {
            0 => read.region().full(read.dtype(), &read.axes(), 0.0),
            _ => read.slice(POSITION, steps, length).pad(POSITION, 0, steps, 0.0),
        };
        order.store(shifted, POSITION)
    };
    let is_same = later(segmentation).equals(segmentation).logical_and(segmentation.differs(0.0));
    let zero = values.region().full(values.dtype(), &values.axes(), 0.0);
    is_same.select(later(values), zero)
}
