//! Seeded hashes of numbers, from which seeds and draws follow without a sequence of calls.

/// Mixes 64 bits (the finalizer of SplitMix64).
fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Combines several numbers into one. The order matters.
pub fn key(numbers: &[u64]) -> u64 {
    numbers.iter().fold(0x726f_6c6c_6f75_7400, |state, number| mix(state ^ mix(*number)))
}

/// Draws that follow from a seed.
#[derive(Clone, Debug)]
pub(crate) struct Draws {
    seed: u64,
    count: u64,
}

impl Draws {
    pub fn new(seed: u64) -> Self {
        Self { seed, count: 0 }
    }

    /// A number below `bound`, which is positive.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.count += 1;
        // The high half of the product is uniform to within 2⁻⁶⁴ times the bound.
        let product = u128::from(key(&[self.seed, self.count])) * u128::from(bound);
        (product >> 64) as u64
    }
}
