//! Random numbers from keys.

use mt_ir::{Op, TensorType};
use mt_shape::{Axis, DType, axis};

use crate::{Region, Tensor};

const STATE: Axis = axis("state", 2);
const ONE: Axis = axis("state", 1);

/// Where random numbers come from: a value, not a state. The same key gives the same numbers, however the program is
/// scanned, recomputed or split over devices, so each use needs a key of its own, made by [`Key::fold_in`] or
/// [`Key::split`].
#[derive(Clone, Copy)]
pub struct Key<'t>(Tensor<'t>);

impl<'t> Key<'t> {
    /// The key that a `u64` scalar gives.
    #[track_caller]
    pub fn new(seed: Tensor<'t>) -> Self {
        Self(seed.cast(DType::U64))
    }

    /// The key as a `u64` scalar, to carry it through a scan.
    pub fn value(self) -> Tensor<'t> {
        self.0
    }

    /// Another key, which depends on this one and on an integer scalar such as a step or a layer.
    #[track_caller]
    pub fn fold_in(self, data: Tensor<'t>) -> Self {
        // The counter's high bit keeps derived keys apart from the bits that a key draws.
        let high = self.0.region().integer(DType::U64, i64::MIN);
        self.derive(data.cast(DType::U64).logical_or(high))
    }

    /// Another key, which depends on this one and on a name such as a parameter's path.
    #[track_caller]
    pub fn fold_in_name(self, name: &str) -> Self {
        // FNV-1a: any fixed function of the name serves, since ThreeFry does the mixing.
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        self.fold_in(self.0.region().integer(DType::U64, (hash >> 1) as i64))
    }

    /// Several keys, which depend on this one: all distinct, and none equal to what [`Key::fold_in`] makes of this key.
    /// The first ones are the same however many are asked for.
    #[track_caller]
    pub fn split(self, count: usize) -> Vec<Self> {
        // The counter's second-highest bit alone: between what a key draws and what is folded in.
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
        // 24 bits are what an `f32` between 0 and 1 holds at even spacing.
        let shift = self.0.region().full(DType::U32, &[], 8.0);
        self.bits(axes).shift_right(shift).cast(DType::F32) * (1.0 / f64::from(1 << 24))
    }

    /// Standard normal `f32`.
    #[track_caller]
    pub fn normal(self, axes: &[Axis]) -> Tensor<'t> {
        self.normal_within(axes, NORMAL_BOUND)
    }

    /// Normal `f32` of mean 0 and deviation 1 before it is cut to ±2, as initializers use it.
    #[track_caller]
    pub fn truncated_normal(self, axes: &[Axis]) -> Tensor<'t> {
        self.normal_within(axes, TRUNCATED_BOUND)
    }

    /// Normal `f32` of mean 0 and deviation 1 before it is cut to ±`bound`.
    #[track_caller]
    pub fn normal_within(self, axes: &[Axis], bound: f64) -> Tensor<'t> {
        // By inversion: uniform between the values of erf at the bounds, then its inverse. Half a step keeps clear
        // of both bounds.
        let edge = share_within(bound);
        let uniform = self.uniform(axes) + 0.5 / f64::from(1 << 24);
        let value = (uniform * (2.0 * edge) - edge).clamp(-1.0 + 1e-7, 1.0 - 1e-7);
        (value.erf_inv() * std::f64::consts::SQRT_2).clamp(-bound, bound)
    }

    /// The key at a counter. ThreeFry maps counters to blocks one to one, so that other counters give other keys.
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

/// Where normal numbers end that are not meant to be cut.
pub const NORMAL_BOUND: f64 = 6.0;

/// Where truncated normal numbers end, as initializers use them.
pub const TRUNCATED_BOUND: f64 = 2.0;

/// The share of a normal distribution that is at most so many deviations from its mean.
pub fn share_within(deviations: f64) -> f64 {
    erf(deviations / std::f64::consts::SQRT_2)
}

/// The error function to `f64` precision near enough for initializers (Abramowitz and Stegun 7.1.26 is not: this is
/// its Taylor series, summed until terms vanish, for arguments up to about 5).
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
