//! Self-attention, forward and backward, in memory linear in the sequence length.
//!
//! Source: Dao et al. (2022), "FlashAttention". Each block of queries visits the blocks of keys that the mask does not
//! exclude, and keeps a running maximum and a running sum of exponentiated scores. The backward pass recomputes the
//! scores and normalizes them with the saved logarithms of the sums.
//!
//! Scores are stored as `[key][query]`. Maxima, sums, masks and factors belong to queries, so each occupies one lane of
//! a vector, and no reduction runs across lanes. Queries that share keys (the groups of grouped-query attention) are
//! columns of one block.

mod backward;
mod cached;
mod format;
mod forward;
mod invariant;
#[cfg(test)]
mod invariant_tests;
mod operands;
mod product;
mod scratch;
mod sequence;
#[cfg(test)]
mod tests;

use crate::{Element, Instructions, Team, simd};

pub use backward::{Gradients, Residuals};
pub use cached::{Cache, CachedInputs, attend_to_cache};
pub use forward::Results;
pub use invariant::{InvariantInputs, InvariantKeys, InvariantResults, attend_invariantly};
pub use operands::{Operand, Outcome, Shape, Strides};

/// The keys of its own segment that a query sees: those that all fields allow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mask {
    /// Excludes keys after the query's own position.
    pub causal: bool,
    /// With a window of `w`, keys at positions above `position - w`.
    pub window: Option<usize>,
    /// With chunks of `c`, keys with the same `position / c`, rounded down.
    pub chunk: Option<usize>,
}

/// The sizes, mask and instructions of one call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    pub shape: Shape,
    pub mask: Mask,
    /// With a cap of `c`, scores `s` become `c · tanh(s / c)`.
    pub soft_cap: Option<f32>,
    pub instructions: Instructions,
}

/// The arrays of the forward pass. Queries are already scaled.
#[derive(Clone, Copy)]
pub struct Inputs<'a, E> {
    pub query: Operand<'a, E>,
    pub key: Operand<'a, E>,
    pub value: Operand<'a, E>,
    /// `[batch, length]`: a query sees only keys with its own segment number.
    pub segments: &'a [i32],
    /// `[kv_heads, group]`: for each query head, the score of an additional key whose value is zero.
    pub sinks: Option<&'a [f32]>,
}

/// The score of masked keys: its exponential is 0, and it is finite because the difference of two infinities is NaN.
const MASKED: f32 = -1e30;

/// An element type of queries, keys and values.
pub trait Attend: Element {
    /// Computes the context, `softmax(scores) · values`, of all queries.
    fn forward(team: &dyn Team, options: &Options, inputs: &Inputs<'_, Self>, results: &Results<'_, Self>);
    /// Computes the gradients of queries, keys, values and sinks.
    fn backward(
        team: &dyn Team,
        options: &Options,
        inputs: &Inputs<'_, Self>,
        residuals: &Residuals<'_, Self>,
        gradients: Gradients<'_, Self>,
    );
}

/// Runs `$body` with the `$format` that stores elements for the given instructions.
macro_rules! with_format {
    ($instructions:expr, [$single:ident, $widest:ident, $tiled:ident, $emulated:ident], $format:ident => $body:expr) => {
        match $instructions {
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx2 => {
                let $format = format::$single(simd::Avx2::detect().expect("the processor has AVX2"));
                $body
            }
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx512 => {
                let $format = format::$single(simd::Avx512::detect().expect("the processor has AVX-512"));
                $body
            }
            #[cfg(target_arch = "x86_64")]
            Instructions::AmxBf16 => {
                let simd = simd::Avx512Bf16::detect().expect("the processor has products of bf16");
                let $format = format::$tiled(simd);
                $body
            }
            #[cfg(test)]
            Instructions::EmulatedTiles => {
                let $format = format::$emulated(simd::Portable);
                $body
            }
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx512Bf16 => {
                let simd = simd::Avx512Bf16::detect().expect("the processor has products of bf16");
                let $format = format::$widest(simd);
                $body
            }
            _ => {
                let $format = format::$single(simd::Portable);
                $body
            }
        }
    };
}

macro_rules! attend {
    ($element:ty, $single:ident, $widest:ident, $tiled:ident, $emulated:ident) => {
        impl Attend for $element {
            fn forward(
                team: &dyn Team,
                options: &Options,
                inputs: &Inputs<'_, Self>,
                results: &Results<'_, Self>,
            ) {
                inputs.check(options);
                with_format!(options.instructions, [$single, $widest, $tiled, $emulated], format => {
                    forward::run(team, format, options, inputs, results)
                });
            }

            fn backward(
                team: &dyn Team,
                options: &Options,
                inputs: &Inputs<'_, Self>,
                residuals: &Residuals<'_, Self>,
                gradients: Gradients<'_, Self>,
            ) {
                inputs.check(options);
                with_format!(options.instructions, [$single, $widest, $tiled, $emulated], format => {
                    backward::run(team, format, options, inputs, residuals, gradients)
                });
            }
        }
    };
}

attend!(f32, Single, Single, Single, Single);
attend!(half::bf16, Widened, Pairs, tiled, emulated);

impl<E> Inputs<'_, E> {
    fn check(&self, options: &Options) {
        let Shape { batch, length, kv_heads, group, head_dim } = options.shape;
        assert!([batch, length, kv_heads, group, head_dim].iter().all(|size| *size != 0), "no size is 0");
        assert_eq!(self.segments.len(), batch * length, "each position has a segment");
        assert!(self.sinks.is_none_or(|sinks| sinks.len() == kv_heads * group), "each head has a sink");
    }
}
