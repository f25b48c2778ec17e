//! Keys under which equal and similar documents meet.
//!
//! Similar documents share a key for each band of minimal hashes that is equal in both. Two documents whose sets of n-grams
//! overlap by a share `s` meet with probability `1 - (1 - s^rows)^bands`.

use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_128;

use crate::hashing::{hash, mix, rolled};
use crate::words::{simplified, words};

/// The bits of a key that hold the number of its band.
const BAND_BITS: u32 = 16;
/// The band of keys of equal documents.
const EXACT: u128 = 0;

/// How near-duplicates are found.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MinHash {
    /// The words of a shingle.
    pub n_gram: usize,
    pub bands: usize,
    /// The minimal hashes of a band.
    pub rows: usize,
    pub seed: u64,
}

impl Default for MinHash {
    /// FineWeb's numbers, by which documents meet that share three quarters of their 5-grams.
    fn default() -> Self {
        Self { n_gram: 5, bands: 14, rows: 8, seed: 1 }
    }
}

/// The key of a document's text.
pub(crate) fn exact_key(text: &str) -> u128 {
    (XxHash3_128::oneshot(text.trim().as_bytes()) >> BAND_BITS) | (EXACT << (128 - BAND_BITS))
}

/// Whether a key is that of equal documents.
pub(crate) fn is_exact(key: u128) -> bool {
    key >> (128 - BAND_BITS) == EXACT
}

/// Computes the keys of documents.
#[derive(Debug)]
pub(crate) struct Signer {
    options: MinHash,
    /// The factors and summands of the hash functions.
    functions: Vec<(u64, u64)>,
}

impl Signer {
    pub(crate) fn new(options: MinHash) -> Self {
        let of = |number: u64| mix(mix(options.seed).wrapping_add(number));
        let functions = 0..(options.bands * options.rows) as u64;
        Self {
            options,
            functions: functions.map(|number| (of(2 * number) | 1, of(2 * number + 1))).collect(),
        }
    }

    /// The keys of a document, one for each band; none if it has fewer words than a shingle.
    pub(crate) fn keys(&self, text: &str) -> Vec<u128> {
        let simple = simplified(text);
        let hashes: Vec<u64> = words(&simple).iter().map(|word| hash(word)).collect();
        let mut shingles = rolled(&hashes, self.options.n_gram);
        if shingles.is_empty() {
            return Vec::new();
        }
        // A repeated shingle changes no minimum.
        shingles.sort_unstable();
        shingles.dedup();
        let mut minima = vec![u64::MAX; self.functions.len()];
        for block in shingles.chunks(256) {
            for (minimum, (factor, summand)) in minima.iter_mut().zip(&self.functions) {
                let least =
                    block.iter().map(|shingle| shingle.wrapping_mul(*factor).wrapping_add(*summand)).min();
                *minimum = (*minimum).min(least.unwrap_or(u64::MAX));
            }
        }
        let bands = minima.chunks(self.options.rows.max(1)).enumerate();
        bands
            .map(|(band, minima)| {
                let bytes: Vec<u8> = minima.iter().flat_map(|minimum| minimum.to_le_bytes()).collect();
                let key = XxHash3_128::oneshot(&bytes);
                (key >> BAND_BITS) | ((band as u128 + 1) << (128 - BAND_BITS))
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(words: impl Iterator<Item = u64>) -> String {
        words
            .map(|word| {
                format!(
                    "w{} ",
                    char::from(b'a' + (word % 26) as u8).to_string().repeat(1 + (word / 26) as usize)
                )
            })
            .collect()
    }

    #[test]
    fn similar_documents_share_keys_and_others_do_not() {
        let signer = Signer::new(MinHash::default());
        let keys = |start: u64, changed: u64| {
            signer.keys(&text((start..start + 200).map(|word| if word == changed { 0 } else { word })))
        };
        let shared = |one: &[u128], two: &[u128]| one.iter().filter(|key| two.contains(key)).count();
        let (base, near, far) = (keys(0, 999), keys(0, 100), keys(400, 999));
        assert_eq!((base.len(), shared(&base, &base), shared(&base, &far)), (14, 14, 0));
        assert!(shared(&base, &near) > 3);
        assert!(base.iter().all(|key| !is_exact(*key)) && is_exact(exact_key("a")));
        assert_eq!(exact_key(" a\n"), exact_key("a"));
        assert!(signer.keys("too short a text").is_empty());
    }
}
