//! Hashes of words and of sequences of words, and sets of them.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};

use twox_hash::XxHash3_64;

/// A hasher of numbers that are hashes already.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Itself(u64);

impl Hasher for Itself {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        self.0 = XxHash3_64::oneshot(bytes);
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = value;
    }
}

/// A set of hashes.
pub(crate) type Seen = HashSet<u64, BuildHasherDefault<Itself>>;
/// The number of occurrences of hashes, and the place of the first.
pub(crate) type Counts = HashMap<u64, (usize, usize), BuildHasherDefault<Itself>>;

/// The hash of a text.
pub(crate) fn hash(text: &str) -> u64 {
    XxHash3_64::oneshot(text.as_bytes())
}

/// The hashes of words, with their bits spread.
pub(crate) fn mixed(words: &[&str]) -> Vec<u64> {
    words.iter().map(|word| mix(hash(word))).collect()
}

/// Spreads the bits of a number over all bits.
pub(crate) fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// The hashes of all sequences of `n` words, from the hashes of the words.
pub(crate) fn rolled(words: &[u64], n: usize) -> Vec<u64> {
    const BASE: u64 = 0x9e37_79b9_7f4a_7c15;
    if n == 0 || words.len() < n {
        return Vec::new();
    }
    let oldest = (1..n).fold(1_u64, |power, _| power.wrapping_mul(BASE));
    let mut sum = 0_u64;
    let mut grams = Vec::with_capacity(words.len() + 1 - n);
    for (place, word) in words.iter().enumerate() {
        if place >= n {
            sum = sum.wrapping_sub(words[place - n].wrapping_mul(oldest));
        }
        sum = sum.wrapping_mul(BASE).wrapping_add(*word);
        if place + 1 >= n {
            grams.push(mix(sum));
        }
    }
    grams
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_sequences_have_equal_hashes_anywhere() {
        let words: Vec<u64> = ["a", "b", "c", "x", "a", "b", "c"].iter().map(|word| hash(word)).collect();
        let grams = rolled(&words, 3);
        assert_eq!((grams.len(), grams[0] == grams[4], grams[0] == grams[1]), (5, true, false));
        assert!(rolled(&words[..2], 3).is_empty());
    }
}
