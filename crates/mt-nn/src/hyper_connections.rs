//! Hyper-connections: several residual streams side by side, which each part of a layer reads, mixes and writes by
//! weights that depend on the token (Xie et al., 2025: mHC, manifold-constrained hyper-connections).

use mt_derive::Tree;
use mt_shape::{Axis, DType, HostArray, LogicalAxis, axis, logical};
use mt_trace::{ScanOptions, Tensor};

use crate::{
    NormOptions, RmsNorm,
    axes::{EMBED, STREAMS},
    rms_normalize,
};

/// The axis of all streams' dimensions together: those of the first stream, then those of the second, and so on.
pub const STREAM_EMBED: &str = "stream_embed";
/// The streams after mixing.
pub const MIXED_STREAMS: &str = "mixed_stream";
/// The permutations of the streams, in lexicographic order.
pub const PERMUTATIONS: &str = "permutation";
/// The weights that one parameter matrix yields.
pub const STREAM_WEIGHTS: &str = "stream_weight";
/// The axis of a single number.
pub const ONE: &str = "one";

/// Added to weights and to sums that divide, so that none is zero.
const EPSILON: f64 = 1e-6;

/// Logical axes of the weights of a token's streams.
const OF_TOKENS: [Option<LogicalAxis>; 2] =
    [Some(logical::ACTIVATION_BATCH), Some(logical::ACTIVATION_NORM_LENGTH)];

/// The matrix that mixes residual streams, whose rows and columns sum to 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamMixing {
    /// A positive matrix whose columns and rows are divided by their sums in turn, this many times (Sinkhorn and Knopp,
    /// 1967).
    Sinkhorn { iterations: usize },
    /// A weighted mean of all permutations (mHC-lite). Its sums are exactly 1.
    Permutations,
}

/// The parameters of a part's connection to the residual streams. Names are those of MaxText.
#[derive(Clone, Debug, Tree)]
pub struct HyperConnection<L> {
    /// Normalizes all streams together: `[stream_embed]`. Without it, the norm has no scale.
    pub mhc_norm: Option<RmsNorm<L>>,
    /// `[stream_embed, stream_weight]`: the weights of streams in the part's input.
    pub pre_alpha: L,
    /// `[stream_embed, stream_weight]`: the weights of the part's output in the streams.
    pub post_alpha: L,
    /// `[stream_embed, stream_weight]`: the elements of the mixing matrix, row by row, or the weights of permutations.
    pub res_alpha: L,
    /// `[stream_weight]`
    pub pre_beta: L,
    /// `[stream_weight]`
    pub post_beta: L,
    /// `[residual_stream, mixed_stream]`, or `[permutation]`
    pub res_beta: L,
    /// `[one]`
    pub pre_alpha_scale: L,
    /// `[one]`
    pub post_alpha_scale: L,
    /// `[one]`
    pub res_alpha_scale: L,
}

/// The parameters that sum residual streams behind the last layer.
#[derive(Clone, Debug, Tree)]
pub struct StreamHead<L> {
    /// `[stream_embed, stream_weight]`
    pub hc_fn: L,
    /// `[stream_weight]`
    pub hc_base: L,
    /// `[one]`
    pub hc_scale: L,
}

/// The weights of a part's connection at each token, in `f32`.
#[derive(Clone, Copy)]
pub struct StreamWeights<'t> {
    /// The input of the part, before its norm: `[batch, position, embed]`, in the type of the streams.
    pub input: Tensor<'t>,
    /// The weight of the part's output in each stream: `[batch, position, residual_stream]`.
    written: Tensor<'t>,
    /// The share of each stream in each mixed stream: `[batch, position, residual_stream, mixed_stream]`.
    mixing: Tensor<'t>,
}

impl<'t> HyperConnection<Tensor<'t>> {
    /// Computes the weights of the streams and the part's input.
    ///
    /// # Shapes
    /// `[batch, position, residual_stream, embed]`
    #[track_caller]
    pub fn weights(&self, streams: Tensor<'t>, mixing: StreamMixing, norm: NormOptions) -> StreamWeights<'t> {
        let count = streams.axis(STREAMS);
        let wide = streams.cast(DType::F32);
        let normalized = match &self.mhc_norm {
            Some(own) => {
                let scale = own.scale.split(STREAM_EMBED, &[count, streams.axis(EMBED)]);
                RmsNorm { scale }.forward_over_scale(wide, norm)
            }
            None => rms_normalize(wide, &[STREAMS, EMBED], norm.epsilon),
        };
        // One product reads the streams once.
        let wide_parameter = |parameter: &Tensor<'t>| parameter.cast(DType::F32);
        let alphas = wide_parameter(&self.pre_alpha)
            .concatenate(&[&self.post_alpha, &self.res_alpha].map(wide_parameter), STREAM_WEIGHTS);
        let all = projected(normalized, alphas);
        let scaled = |first: usize, size: usize, scale: Tensor<'t>| {
            all.slice(STREAM_WEIGHTS, first, first + size) * scale.cast(DType::F32).squeeze(ONE)
        };
        let of_streams = |first: usize, scale: Tensor<'t>, beta: Tensor<'t>| {
            (scaled(first, count.size, scale) + beta.cast(DType::F32))
                .sigmoid()
                .rename(STREAM_WEIGHTS, STREAMS)
        };
        let read = of_streams(0, self.pre_alpha_scale, self.pre_beta) + EPSILON;
        let written = of_streams(count.size, self.post_alpha_scale, self.post_beta) * 2.0;
        let first = 2 * count.size;
        let logits = scaled(first, all.axis(STREAM_WEIGHTS).size - first, self.res_alpha_scale);
        let beta = self.res_beta.cast(DType::F32);
        let mixing = match mixing {
            StreamMixing::Sinkhorn { iterations } => {
                let matrix = [count, axis(MIXED_STREAMS, count.size)];
                doubly_stochastic(logits.split(STREAM_WEIGHTS, &matrix) + beta, iterations)
            }
            StreamMixing::Permutations => {
                mean_of_permutations(logits.rename(STREAM_WEIGHTS, PERMUTATIONS) + beta, count)
            }
        };
        let input = (wide * read).sum(&[STREAMS]).cast(streams.dtype());
        StreamWeights { input, written, mixing }
    }
}

impl<'t> StreamWeights<'t> {
    /// The mixed streams, to which the part's output is added.
    ///
    /// # Shapes
    /// `[batch, position, residual_stream, embed], [batch, position, embed] ->
    /// [batch, position, residual_stream, embed]`
    #[track_caller]
    pub fn join(&self, streams: Tensor<'t>, output: Tensor<'t>) -> Tensor<'t> {
        let axes = streams.axes();
        let mixed =
            self.mixing.cast(streams.dtype()).contract(streams, &[STREAMS]).rename(MIXED_STREAMS, STREAMS);
        let written = self.written.cast(output.dtype()).broadcast(&axes) * output.broadcast(&axes);
        mixed.broadcast(&axes) + written
    }
}

impl<'t> StreamHead<Tensor<'t>> {
    /// The weighted sum of the streams.
    ///
    /// # Shapes
    /// `[batch, position, residual_stream, embed] -> [batch, position, embed]`
    #[track_caller]
    pub fn forward(&self, streams: Tensor<'t>, norm: NormOptions) -> Tensor<'t> {
        let wide = streams.cast(DType::F32);
        let normalized = rms_normalize(wide, &[STREAMS, EMBED], norm.epsilon);
        let logits = projected(normalized, self.hc_fn.cast(DType::F32));
        let logits = logits * self.hc_scale.cast(DType::F32).squeeze(ONE) + self.hc_base.cast(DType::F32);
        let weights = logits.sigmoid().rename(STREAM_WEIGHTS, STREAMS) + EPSILON;
        (wide * weights).sum(&[STREAMS]).cast(streams.dtype())
    }
}

/// Products of all streams with a matrix.
///
/// # Shapes
/// `[batch, position, residual_stream, embed], [stream_embed, stream_weight] -> [batch, position, stream_weight]`
fn projected<'t>(streams: Tensor<'t>, matrix: Tensor<'t>) -> Tensor<'t> {
    let own = [streams.axis(STREAMS), streams.axis(EMBED)];
    let product = matrix.split(STREAM_EMBED, &own).dot(streams, &[STREAMS, EMBED]);
    product.constrain(&[OF_TOKENS.as_slice(), &[None]].concat())
}

/// The matrix of these logits whose columns sum to 1, and whose rows nearly do.
///
/// # Shapes
/// `[…, residual_stream, mixed_stream] -> […, residual_stream, mixed_stream]`
fn doubly_stochastic(logits: Tensor<'_>, iterations: usize) -> Tensor<'_> {
    let positive = logits.softmax(MIXED_STREAMS) + EPSILON;
    let first = divided(positive, STREAMS);
    if iterations < 2 {
        return first;
    }
    let rounds = axis("iteration", iterations - 1);
    let nothing = Nothing { slice: None };
    let ([matrix], []) =
        logits.region().scan(ScanOptions::over(rounds), [first], &nothing, |_, [matrix], _| {
            ([divided(divided(matrix, MIXED_STREAMS), STREAMS)], [])
        });
    matrix.constrain(&[OF_TOKENS.as_slice(), &[None, None]].concat())
}

/// The inputs of a loop whose steps are alike.
#[derive(Tree)]
struct Nothing<L> {
    slice: Option<L>,
}

/// Divides by the sums over an axis.
fn divided<'t>(matrix: Tensor<'t>, over: &'static str) -> Tensor<'t> {
    matrix / (matrix.sum(&[over]) + EPSILON)
}

/// The mean of all permutation matrices, weighted by the softmax of these logits.
///
/// # Shapes
/// `[…, permutation] -> […, residual_stream, mixed_stream]`
fn mean_of_permutations(logits: Tensor<'_>, streams: Axis) -> Tensor<'_> {
    let all = permutations(streams.size);
    let mut values = vec![0.0_f32; all.len() * streams.size * streams.size];
    for (number, targets) in all.iter().enumerate() {
        for (stream, target) in targets.iter().enumerate() {
            values[(number * streams.size + stream) * streams.size + target] = 1.0;
        }
    }
    let axes = [axis(PERMUTATIONS, all.len()), streams, axis(MIXED_STREAMS, streams.size)];
    let dims: Vec<usize> = axes.iter().map(|axis| axis.size).collect();
    let table = HostArray::from_slice(DType::F32, &dims, &values).expect("one number for each element");
    logits.softmax(PERMUTATIONS).contract(logits.region().table(table, &axes), &[PERMUTATIONS])
}

/// The permutations of `0..size`, in lexicographic order.
fn permutations(size: usize) -> Vec<Vec<usize>> {
    let mut all = vec![Vec::new()];
    for _ in 0..size {
        let longer = |begun: &Vec<usize>| {
            let begun = begun.clone();
            (0..size).filter(move |next| !begun.contains(next)).collect::<Vec<_>>()
        };
        all = all
            .iter()
            .flat_map(|begun| longer(begun).into_iter().map(|next| [begun.as_slice(), &[next]].concat()))
            .collect();
    }
    all
}

/// The number of permutations of this number of streams.
pub fn num_permutations(streams: usize) -> usize {
    (1..=streams).product()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permutations_are_in_lexicographic_order() {
        let expected = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];
        assert_eq!(permutations(3), expected.map(|row| row.to_vec()));
        for size in 0..6 {
            assert_eq!(permutations(size).len(), num_permutations(size));
        }
    }
}
