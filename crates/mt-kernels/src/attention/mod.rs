//! Attention of sequences to themselves, forward and backward, in memory linear in the length.
//!
//! The method is that of Dao et al. (2022): blocks of queries visit the blocks of keys that the mask does not exclude
//! and keep a running maximum and sum of scores. The derivative computes scores again from the logarithms of the sums.
//!
//! Scores are stored with a row for each key and a column for each query: maxima, sums, masks and factors belong to
//! queries and so to places of a vector, and nothing is summed across one. Queries that share keys are columns of one
//! block.

mod backward;
mod cached;
mod format;
mod forward;
mod operands;
mod product;
mod scratch;
mod sequence;
#[cfg(test)]
mod tests;

use crate::{Element, Instructions, Team, simd};

pub use backward::{Gradients, Residuals};
pub use cached::{CachedInputs, attend_to_cache};
pub use forward::Results;
pub use operands::{Operand, Outcome, Shape, Strides};

/// Which keys of its own segment a query sees: those that all of these allow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mask {
    /// Keys at or before the query's own place.
    pub causal: bool,
    /// With a window of `w`, keys at places above `place - w`.
    pub window: Option<usize>,
    /// With chunks of `c`, keys with the same `place / c`, rounded down.
    pub chunk: Option<usize>,
}

/// What is computed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    pub shape: Shape,
    pub mask: Mask,
    /// With a cap of `c`, scores `s` become `c · tanh(s / c)`.
    pub soft_cap: Option<f32>,
    pub instructions: Instructions,
}

/// What is attended with, and to. Queries are already scaled.
#[derive(Clone, Copy)]
pub struct Inputs<'a, E> {
    pub query: Operand<'a, E>,
    pub key: Operand<'a, E>,
    pub value: Operand<'a, E>,
    /// `[batch, length]`: a query sees keys of its own segment.
    pub segments: &'a [i32],
    /// `[kv_heads, group]`: one more score for each head, of a key whose value is zero.
    pub sinks: Option<&'a [f32]>,
}

/// What masked scores are set to: low enough to vanish, finite so that their differences are numbers.
const MASKED: f32 = -1e30;

/// What queries, keys and values can be made of.
pub trait Attend: Element {
    /// What queries make of values.
    fn forward(team: &dyn Team, options: &Options, inputs: &Inputs<'_, Self>, results: &Results<'_, Self>);
    /// The gradients of what the forward pass was given.
    fn backward(
        team: &dyn Team,
        options: &Options,
        inputs: &Inputs<'_, Self>,
        residuals: &Residuals<'_, Self>,
        gradients: Gradients<'_, Self>,
    );
}

/// Runs `$body` with `$format`, which stores elements for the instructions that are to be used.
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
