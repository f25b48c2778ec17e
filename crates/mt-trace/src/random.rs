//! Random numbers from keys.

use mt_ir::{Op, TensorType};
use mt_shape::{Axis, DType, axis};

use crate::{Region, Tensor};

const STATE: Axis = axis("state", 2);
const ONE: Axis = axis("state", 1);

/// A source of random numbers: a value, not a state. The same key gives the same numbers, however the program is
/// scanned, recomputed or sharded, so each use needs its own key, made by [`Key::fold_in`] or [`Key::split`].
#[derive(Clone, Copy)]
pub struct Key<'t>(Tensor<'t>);

impl<'t> Key<'t> {
    /// The key with the value of a `u64` scalar.
    #[track_caller]
    pub fn new(seed: Tensor<'t>) -> Self {
        Self(seed.cast(DType::U64))
    }

    /// The key as a `u64` scalar, to carry it through a scan.
    pub fn value(self) -> Tensor<'t> {
        self.0
    }

    /// A key derived from this one and an integer scalar, such as a step or a layer.
    #[track_caller]
    pub fn fold_in(self, data: Tensor<'t>) -> Self {
        // The counter's high bit separates derived keys from the bits that a key draws.
        let high = self.0.region().integer(DType::U64, i64::MIN);
        self.derive(data.cast(DType::U64).logical_or(high))
    }

    /// A key derived from this one and a name, such as a parameter's path.
    #[track_caller]
    pub fn fold_in_name(self, name: &str) -> Self {
        // FNV-1a. Any fixed function of the name works, because ThreeFry does the mixing.
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        self.fold_in(self.0.region().integer(DType::U64, (hash >> 1) as i64))
    }

    /// Several keys derived from this one: all distinct, and different from every key that [`Key::fold_in`] derives.
    /// The first keys do not depend on the number requested.
    #[track_caller]
    pub fn split(self, count: usize) -> Vec<Self> {
        // Only the counter's second-highest bit is set: the range between drawn bits and folded keys.
        let counter = |index: usize| self.0.region().integer(DType::U64, 1 << 62 | index as i64);
        let mut keys = Vec::with_capacity(count);
        for index in 0..count {
            keys.push(self.derive(counter(index)));
        }
        keys
    }

    /// Uniformly random 32-bit numbers.
    #[track_caller]
    pub fn bits(self, axes: &[Axis]) -> Tensor<'t> {
        let zero = self.0.region().integer(DType::U64, 0);
        self.generate(zero, DType::U32, axes)
    }

    /// Uniformly random `f32` in `0..1`.
    #[track_caller]
    pub fn uniform(self, axes: &[Axis]) -> Tensor<'t> {
        // An `f32` between 0 and 1 holds 24 bits at even spacing.
        let shift = self.0.region().full(DType::U32, &[], 8.0);
        self.bits(axes).shift_right(shift).cast(DType::F32) * (1.0 / f64::from(1 << 24))
    }

    /// Standard normal `f32`.
    #[track_caller]
    pub fn normal(self, axes: &[Axis]) -> Tensor<'t> {
        self.normal_within(axes, NORMAL_BOUND)
    }

    /// Normal `f32` with mean 0 and standard deviation 1 before truncation to ±2, as initializers use it.
    #[track_caller]
    pub fn truncated_normal(self, axes: &[Axis]) -> Tensor<'t> {
        self.normal_within(axes, TRUNCATED_BOUND)
    }

    /// Normal `f32` with mean 0 and standard deviation 1 before truncation to ±`bound`.
    #[track_caller]
    pub fn normal_within(self, axes: &[Axis], bound: f64) -> Tensor<'t> {
        // By inversion: uniform between the values of erf at the bounds, then its inverse. Half a step of distance
        // avoids both bounds.
        let edge = share_within(bound);
        let uniform = self.uniform(axes) + 0.5 / f64::from(1 << 24);
        let value = (uniform * (2.0 * edge) - edge).clamp(-1.0 + 1e-7, 1.0 - 1e-7);
        (value.erf_inv() * std::f64::consts::SQRT_2).clamp(-bound, bound)
    }

    /// The key at a counter. ThreeFry maps counters to blocks one to one, so different counters give different keys.
    #[track_caller]
    fn derive(self, counter: Tensor<'t>) -> Self {
        Self(self.generate(counter, DType::U64, &[ONE]).squeeze("state"))
    }

    #[track_caller]
    fn generate(self, counter: Tensor<'t>, dtype: DType, axes: &[Axis]) -> Tensor<'t> {
        let state = self.0.unsqueeze("state").concatenate(&[counter.unsqueeze("state")], "state");
        let dims: Vec<usize> = axes.iter().map(|axis| axis.size).collect();
        let op = Op::RandomBits { ty: TensorType::new(dtype, dims) };
        state.apply(op, &[], &[&[STATE], axes])[1]
    }
}

/// Bound of normal numbers that are not meant to be truncated.
pub const NORMAL_BOUND: f64 = 6.0;

/// Bound of truncated normal numbers, as initializers use them.
pub const TRUNCATED_BOUND: f64 = 2.0;

/// The probability that a normal number is at most `deviations` standard deviations from its mean.
pub fn share_within(deviations: f64) -> f64 {
    erf(deviations / std::f64::consts::SQRT_2)
}

/// The error function, as its Taylor series summed until terms vanish, for arguments up to about 5. Initializers need
/// nearly `f64` precision, which Abramowitz and Stegun 7.1.26 does not give.
fn erf(x: f64) -> f64 {
    let (mut term, mut sum) = (x, x);
    for n in 1..200 {
        term *= -x * x / f64::from(n);
        sum += term / f64::from(2 * n + 1);
    }
    (sum * std::f64::consts::FRAC_2_SQRT_PI).clamp(-1.0, 1.0)
}

impl<'t> Region<'t> {
    /// A key from a constant seed.
    #[track_caller]
    pub fn key(self, seed: u64) -> Key<'t> {
        Key(self.integer(DType::U64, seed as i64))
    }
}
