//! Causal depthwise convolutions.

use mt_derive::Tree;
use mt_shape::DType;
use mt_trace::Tensor;

use crate::axes::POSITION;

/// Places relative to a token that a convolution covers.
pub const TAP: &str = "tap";
/// The channels of a convolution.
pub const CHANNEL: &str = "channel";
/// An axis of size 1 in the filters of depthwise convolutions.
pub const ONE: &str = "one";

/// The filter of a convolution that mixes no channels.
#[derive(Clone, Debug, Tree)]
pub struct DepthwiseKernel<L> {
    /// `[tap, one, channel]`. The last tap is that of the token itself.
    pub kernel: L,
}

/// A convolution of each channel with a filter of its own.
#[derive(Clone, Copy)]
pub(crate) struct Convolution<'t> {
    /// `[tap, …]`, over the axes of the channels.
    pub kernel: Tensor<'t>,
    /// Over the axes of the channels.
    pub bias: Option<Tensor<'t>>,
    /// The distance of two taps in tokens.
    pub dilation: usize,
}

/// The results of a convolution.
pub(crate) struct Convolved<'t> {
    /// With the axes of the inputs.
    pub output: Tensor<'t>,
    /// The inputs at the last tokens, with [`TAP`] instead of positions. Absent if the filter has one tap.
    pub window: Option<Tensor<'t>>,
}

/// Convolves each channel with its filter in `f32`, adds the bias, and applies SiLU. A token sees only tokens of its own
/// document. Without a window, no tokens precede the sequence.
///
/// # Shapes
/// `[batch, position, …], [batch, tap, …], i32[batch, position]`
#[track_caller]
pub(crate) fn convolve<'t>(
    x: Tensor<'t>,
    convolution: &Convolution<'t>,
    window: Option<Tensor<'t>>,
    segments: Tensor<'t>,
) -> Convolved<'t> {
    let Convolution { kernel, bias, dilation } = *convolution;
    let taps = kernel.axis(TAP).size;
    let reach = (taps - 1) * dilation;
    let (columns, documents) = with_columns_before(x, window, segments, reach);
    let sum = filtered(columns, kernel.cast(DType::F32), documents, segments, dilation);
    let sum = bias.map_or(sum, |bias| sum + bias.cast(DType::F32));
    let window = (taps > 1).then(|| last_columns(columns, documents, segments, reach));
    Convolved { output: sum.silu().cast(x.dtype()), window }
}

/// The products of a filter with the columns of each token's document, summed over taps.
///
/// The derivative by the columns is a filter of the cotangents as well. The compiler makes vectors of its loop, and not of
/// one over the terms' derivatives, each of which is padded.
///
/// # Shapes
/// `[batch, columns, …], f32[tap, …], i32[batch, columns], i32[batch, position] -> f32[batch, position, …]`, where the
/// columns are positions as well
#[track_caller]
fn filtered<'t>(
    columns: Tensor<'t>,
    kernel: Tensor<'t>,
    documents: Tensor<'t>,
    segments: Tensor<'t>,
    dilation: usize,
) -> Tensor<'t> {
    let [sum] = columns.region().custom_vjp(
        "filtered",
        [columns, kernel, documents, segments],
        [true, true, false, false],
        |_, arguments| [filter(arguments, dilation)],
        |_, arguments| ([filter(arguments, dilation)], arguments.to_vec()),
        |_, residuals, [cotangent]| {
            let (columns, kernel) = (residuals[0], residuals[1]);
            let (documents, segments) = (residuals[2], residuals[3]);
            let taps = kernel.axis(TAP).size;
            let (length, reach) = (segments.axis(POSITION).size, (taps - 1) * dilation);
            let padded = cotangent.pad(POSITION, reach, reach, 0.0);
            let readers = segments.pad(POSITION, reach, reach, NO_DOCUMENT);
            let by_columns = (0..taps).map(|tap| {
                let start = reach - tap * dilation;
                let end = start + length + reach;
                let is_same = readers.slice(POSITION, start, end).equals(documents).cast(DType::F32);
                padded.slice(POSITION, start, end) * kernel.at(TAP, tap) * is_same
            });
            let by_columns = by_columns.reduce(|sum, term| sum + term).expect("a kernel has a tap");
            let summed = cotangent.axes();
            let summed = summed.iter().map(|own| own.name).filter(|name| !kernel.has_axis(name));
            let summed: Vec<&'static str> = summed.collect();
            let by_kernel = (0..taps).map(|tap| {
                let (column, is_same) = of_tap([columns, documents, segments], tap * dilation);
                (column * is_same * cotangent).sum(&summed).unsqueeze(TAP)
            });
            let by_kernel: Vec<Tensor<'_>> = by_kernel.collect();
            let by_kernel = by_kernel[0].concatenate(&by_kernel[1..], TAP);
            vec![by_columns.cast(columns.dtype()), by_kernel]
        },
    );
    sum
}

/// Padding behind the segments of a sequence, which equals no document.
const NO_DOCUMENT: f64 = -1.0;

#[track_caller]
fn filter<'t>([columns, kernel, documents, segments]: [Tensor<'t>; 4], dilation: usize) -> Tensor<'t> {
    let taps = kernel.axis(TAP).size;
    let terms = (0..taps).map(|tap| {
        let (column, is_same) = of_tap([columns, documents, segments], tap * dilation);
        let term = column * kernel.at(TAP, tap);
        // The last tap is that of the token itself.
        if tap + 1 == taps { term } else { term * is_same }
    });
    terms.reduce(|sum, term| sum + term).expect("a kernel has a tap")
}

/// The columns from `start`, one for each token, and whether they are of the token's document, as 0 or 1.
#[track_caller]
fn of_tap<'t>([columns, documents, segments]: [Tensor<'t>; 3], start: usize) -> (Tensor<'t>, Tensor<'t>) {
    let of_tokens = |tensor: Tensor<'t>| tensor.slice(POSITION, start, start + segments.axis(POSITION).size);
    let is_same = of_tokens(documents).equals(segments);
    (of_tokens(columns).cast(DType::F32), is_same.cast(DType::F32))
}

/// The columns of a sequence behind those of `count` earlier tokens, and the segments of all of them. The earlier tokens
/// are those of a window, which belong to the first document, or none.
///
/// # Shapes
/// `[batch, position, …], [batch, tap, …], i32[batch, position]`
#[track_caller]
pub(crate) fn with_columns_before<'t>(
    x: Tensor<'t>,
    window: Option<Tensor<'t>>,
    segments: Tensor<'t>,
    count: usize,
) -> (Tensor<'t>, Tensor<'t>) {
    let Some(window) = window else {
        return (x.pad(POSITION, count, 0, 0.0), segments.pad(POSITION, count, 0, 0.0));
    };
    let columns = window.cast(x.dtype()).rename(TAP, POSITION).concatenate(&[x], POSITION);
    let first = segments.at(POSITION, 0);
    let earlier = first.broadcast(&[first.axes()[0], x.axis(POSITION).with_size(count)]);
    (columns, earlier.concatenate(&[segments], POSITION))
}

/// The columns at the last `count` tokens of the last document. Columns of `count` earlier tokens precede those of the
/// sequence, and padding follows its tokens.
#[track_caller]
pub(crate) fn last_columns<'t>(
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

/// The segment of the last token of each row, or `otherwise` in rows without tokens.
///
/// # Shapes
/// `i32[batch, position], i32[batch] -> i32[batch]`
#[track_caller]
pub(crate) fn last_segment<'t>(segments: Tensor<'t>, otherwise: Tensor<'t>) -> Tensor<'t> {
    let places = segments.region().iota(DType::I32, segments.axis(POSITION)) + 1.0;
    let places = segments.differs(0.0).cast(DType::I32) * places;
    let last = places.max(&[POSITION]);
    let segment = (segments * places.equals(last).cast(DType::I32)).sum(&[POSITION]);
    last.equals(0.0).select(otherwise, segment)
}
