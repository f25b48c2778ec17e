//! Pseudorandom numbers, the same in every run.

use mt_shape::HostArray;

use crate::f32_array;

/// A generator of pseudorandom numbers, xorshift64 by Marsaglia. Its quality suffices for test inputs alone.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// A generator whose sequence depends on the seed alone.
    pub fn new(seed: u64) -> Self {
        let state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x2545_f491_4f6c_dd1d;
        // A state of 0 would stay 0.
        Self(state.max(1))
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// A number of `low..high`, uniformly distributed.
    pub fn between(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * ((self.bits() >> 11) as f64 / (1_u64 << 53) as f64)
    }

    /// An integer of `0..bound`.
    pub fn below(&mut self, bound: usize) -> usize {
        ((self.bits() >> 33) % bound as u64) as usize
    }
}

/// Numbers of both signs, uniformly distributed; their standard deviation is about 0.9.
pub fn numbers(seed: u64, count: usize) -> Vec<f64> {
    let mut random = Random::new(seed);
    (0..count).map(|_| random.between(-1.5, 1.5)).collect()
}

/// An array of `f32` with [`numbers`] as its elements.
pub fn random_array(seed: u64, dims: &[usize]) -> HostArray {
    f32_array(dims, &numbers(seed, dims.iter().product()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_fill_their_ranges() {
        let values = numbers(7, 10_000);
        assert!(values.iter().all(|value| (-1.5..1.5).contains(value)));
        let deviation = crate::deviation(&values);
        assert!((deviation - 3.0 / 12.0_f64.sqrt()).abs() < 0.02, "{deviation}");
        assert_eq!(values, numbers(7, 10_000));
        assert_ne!(values[..10], numbers(8, 10)[..]);
        let mut random = Random::new(0);
        let mut counts = [0; 3];
        (0..3000).for_each(|_| counts[random.below(3)] += 1);
        assert!(counts.iter().all(|count| (900..1100).contains(count)), "{counts:?}");
    }
}
