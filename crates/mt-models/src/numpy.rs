//! Random numbers as NumPy draws them: `default_rng(seed).integers`, which is PCG64 (O'Neill, 2014) seeded by
//! `SeedSequence`.

/// NumPy's default generator.
pub(crate) struct Generator {
    state: u128,
    increment: u128,
    /// The upper half of the last 64 bits, if it has not been used.
    half: Option<u32>,
}

const MULTIPLIER: u128 = 0x2360_ed05_1fc6_5da4_4385_df64_9fcc_f645;

/// NumPy's hash of seeds, whose factor changes with each number.
struct SeedHash {
    factor: u32,
    multiplier: u32,
}

impl SeedHash {
    fn next(&mut self, value: u32) -> u32 {
        let mixed = value ^ self.factor;
        self.factor = self.factor.wrapping_mul(self.multiplier);
        let mixed = mixed.wrapping_mul(self.factor);
        mixed ^ (mixed >> 16)
    }
}

/// The four words of `SeedSequence(seed).generate_state(4, uint64)`.
fn seed_words(seed: u64) -> [u64; 4] {
    const POOL: usize = 4;
    let entropy = [seed as u32, (seed >> 32) as u32, 0, 0];
    let mut hash = SeedHash { factor: 0x43b0_d7e5, multiplier: 0x931e_8875 };
    let mut pool = entropy.map(|word| hash.next(word));
    let mix = |one: u32, other: u32| {
        let mixed = one.wrapping_mul(0xca01_f9dd).wrapping_sub(other.wrapping_mul(0x4973_f715));
        mixed ^ (mixed >> 16)
    };
    for source in 0..POOL {
        for target in (0..POOL).filter(|target| *target != source) {
            pool[target] = mix(pool[target], hash.next(pool[source]));
        }
    }
    let mut hash = SeedHash { factor: 0x8b51_f9dd, multiplier: 0x58f3_8ded };
    let words: Vec<u64> = (0..2 * POOL).map(|index| u64::from(hash.next(pool[index % POOL]))).collect();
    std::array::from_fn(|index| words[2 * index] | (words[2 * index + 1] << 32))
}

impl Generator {
    /// `numpy.random.default_rng(seed)`
    pub fn seeded(seed: u64) -> Self {
        let [a, b, c, d] = seed_words(seed).map(u128::from);
        let (start, sequence) = ((a << 64) | b, (c << 64) | d);
        let mut generator = Self { state: 0, increment: (sequence << 1) | 1, half: None };
        generator.step();
        generator.state = generator.state.wrapping_add(start);
        generator.step();
        generator
    }

    fn step(&mut self) {
        self.state = self.state.wrapping_mul(MULTIPLIER).wrapping_add(self.increment);
    }

    fn bits(&mut self) -> u32 {
        if let Some(half) = self.half.take() {
            return half;
        }
        self.step();
        let folded = (self.state >> 64) as u64 ^ self.state as u64;
        let word = folded.rotate_right((self.state >> 122) as u32);
        self.half = Some((word >> 32) as u32);
        word as u32
    }

    /// The next of `integers(0, bound, dtype=int32)`.
    pub fn below(&mut self, bound: u32) -> u32 {
        if bound <= 1 {
            return 0;
        }
        let rejected = (u32::MAX - (bound - 1)) % bound;
        loop {
            let product = u64::from(self.bits()) * u64::from(bound);
            if product as u32 >= rejected {
                return (product >> 32) as u32;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `numpy.random.default_rng(seed).integers(0, bound, 5, dtype=numpy.int32)`, by NumPy 2.
    #[test]
    fn draws_are_those_of_numpy() {
        for (seed, bound, expected) in [
            (0, 8301, [7061, 5287, 4242, 2239, 2555]),
            (10007, 8301, [1245, 6834, 5146, 431, 4547]),
            (40028, 1, [0, 0, 0, 0, 0]),
            (3, 2, [1, 0, 0, 0, 0]),
            (5, 2147483647, [1440510675, 1728730614, 48647418, 1735039633, 1006851807]),
            (1099511627783, 1073741823, [221743210, 891004807, 654450076, 274131825, 18264800]),
            (123456789, 1500000000, [1351477256, 41569108, 510818724, 1322090331, 438461648]),
        ] {
            let mut generator = Generator::seeded(seed);
            assert_eq!([(); 5].map(|()| generator.below(bound)), expected, "seed {seed}, bound {bound}");
        }
    }
}
