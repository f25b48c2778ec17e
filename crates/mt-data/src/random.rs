//! Seeded hashes and permutations of an index, which need neither a table nor a sequence of calls.

/// Mixes 64 bits (the finalizer of SplitMix64): every input bit reaches every output bit.
pub(crate) fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Combines several numbers into one key. The order matters.
pub(crate) fn key(numbers: &[u64]) -> u64 {
    numbers.iter().fold(0x6d61_7874_6578_7400, |state, number| mix(state ^ mix(*number)))
}

/// A number from 0 below 1, of 53 bits, which the type holds exactly.
pub(crate) fn uniform(bits: u64) -> f64 {
    (bits >> 11) as f64 / (1_u64 << 53) as f64
}

/// A seeded permutation of `0..size` that is computed, not stored.
///
/// A Feistel network permutes the range up to the next even power of two. A result outside `0..size` is permuted again
/// until it falls inside, on average fewer than four times. So random access to a shuffled dataset of any size costs no
/// memory, and a position can be resumed without replaying earlier ones.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Permutation {
    size: u64,
    half_bits: u32,
    key: u64,
}

impl Permutation {
    const ROUNDS: u64 = 6;

    /// The permutation of `0..size` for a key.
    pub fn new(size: u64, key: u64) -> Self {
        let bits = u64::BITS - size.saturating_sub(1).leading_zeros();
        Self { size, half_bits: bits.div_ceil(2).max(1), key }
    }

    /// The image of `index`, which is less than `size`.
    pub fn apply(&self, index: u64) -> u64 {
        debug_assert!(index < self.size, "index {index} is outside a permutation of {}", self.size);
        let mut value = self.rounds(index);
        while value >= self.size {
            value = self.rounds(value);
        }
        value
    }

    fn rounds(&self, value: u64) -> u64 {
        let mask = (1u64 << self.half_bits) - 1;
        let (mut left, mut right) = (value >> self.half_bits, value & mask);
        for round in 0..Self::ROUNDS {
            let mixed = mix(self.key ^ mix(right ^ (round << 56)));
            (left, right) = (right, (left ^ mixed) & mask);
        }
        (left << self.half_bits) | right
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn permutation_is_one(size in 1u64..2000, key in any::<u64>()) {
            let permutation = Permutation::new(size, key);
            let mut seen = vec![false; size as usize];
            for index in 0..size {
                let value = permutation.apply(index) as usize;
                prop_assert!(!seen[value], "{value} comes twice");
                seen[value] = true;
            }
        }
    }

    #[test]
    fn permutation_depends_on_the_key_and_moves_most_elements() {
        let (one, two) = (Permutation::new(10_000, 1), Permutation::new(10_000, 2));
        let fixed = (0..10_000).filter(|&i| one.apply(i) == i).count();
        let same = (0..10_000).filter(|&i| one.apply(i) == two.apply(i)).count();
        assert!(fixed < 10 && same < 10, "{fixed} fixed points, {same} equal images");
    }

    #[test]
    fn permutation_of_huge_sizes_stays_in_range() {
        for size in [u64::from(u32::MAX), (1 << 40) + 1, 1 << 62] {
            let permutation = Permutation::new(size, 3);
            for index in [0, 1, size / 2, size - 1] {
                assert!(permutation.apply(index) < size);
            }
        }
    }
}
