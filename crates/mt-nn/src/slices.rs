//! Columns of a fused projection.

use mt_trace::Tensor;

/// Cuts a tensor into slices along an axis that is not placed. Their widths make up its size.
///
/// The derivative concatenates those of the slices. That of one slice pads, and compilers make no vectors of loops that add
/// padded tensors.
#[track_caller]
pub(crate) fn slices<'t, const N: usize>(
    tensor: Tensor<'t>,
    axis: &'static str,
    widths: [usize; N],
) -> [Tensor<'t>; N] {
    tensor.region().custom_vjp(
        "slices",
        [tensor],
        [true],
        |_, [tensor]| cut(tensor, axis, widths),
        |_, [tensor]| (cut(tensor, axis, widths), Vec::new()),
        |_, _, cotangents| vec![cotangents[0].concatenate(&cotangents[1..], axis)],
    )
}

#[track_caller]
fn cut<'t, const N: usize>(tensor: Tensor<'t>, axis: &'static str, widths: [usize; N]) -> [Tensor<'t>; N] {
    let mut start = 0;
    widths.map(|width| {
        let slice = tensor.slice(axis, start, start + width);
        start += width;
        slice
    })
}
