//! A linear classifier of quality: logistic regression over hashed words and pairs of words.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::{CleanError, Result};
use crate::hashing::{mix, mixed, rolled};
use crate::words::{simplified, words};

/// The number of features, as a logarithm.
const BITS: u32 = 18;
/// The most words of a document that count.
const MOST_WORDS: usize = 2000;
const EPOCHS: usize = 5;
const RATE: f64 = 0.5;
/// One in ten documents is held out.
const HELD_OUT: u64 = 10;
const SIGNATURE: &[u8; 8] = b"MTQUAL01";

/// The features of a document: the shares of its words and pairs of words.
pub type Features = Vec<(u32, f32)>;

/// The features of a text.
pub fn features(text: &str) -> Features {
    let simple = simplified(text);
    let mut words = mixed(&words(&simple));
    words.truncate(MOST_WORDS);
    let mut places: Vec<u32> =
        words.iter().chain(&rolled(&words, 2)).map(|gram| (gram >> (64 - BITS)) as u32).collect();
    places.sort_unstable();
    let mut features = Features::new();
    for place in places {
        match features.last_mut() {
            Some((last, count)) if *last == place => *count += 1.0,
            _ => features.push((place, 1.0)),
        }
    }
    // Repetition counts less than variety, and length not at all.
    features.iter_mut().for_each(|(_, count)| *count = count.sqrt());
    let norm = features.iter().map(|(_, count)| count * count).sum::<f32>().sqrt().max(1.0);
    features.iter_mut().for_each(|(_, count)| *count /= norm);
    features
}

/// The weights of features.
#[derive(Debug, Clone, PartialEq)]
pub struct Classifier {
    bias: f32,
    weights: Vec<f32>,
}

/// The quality of a classifier on documents that it did not learn from.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    pub good: u64,
    pub bad: u64,
    /// The share of documents on the right side of one half, the mean of both classes.
    pub accuracy: f64,
    /// The probability that a good document scores more than a bad one.
    pub area_under_curve: f64,
}

impl Classifier {
    /// Learns to tell documents apart: one in ten of each class is held out, and measured at the end. Both classes weigh the
    /// same, whatever their numbers. The result is a function of the documents and their order.
    ///
    /// # Errors
    /// A class has fewer than 20 documents.
    pub fn train(good: &[Features], bad: &[Features]) -> Result<(Self, Measured)> {
        for (name, documents) in [("good", good), ("bad", bad)] {
            if documents.len() < 20 {
                return Err(CleanError::Options(format!(
                    "the classifier has {} {name} documents\nhint: give at least 20 of each class; a thousand are better",
                    documents.len()
                )));
            }
        }
        let is_held = |place: usize| mix(place as u64).is_multiple_of(HELD_OUT);
        let labelled = |documents, label: f64| {
            let documents: &[Features] = documents;
            documents.iter().enumerate().map(move |(place, features)| (place, features, label))
        };
        let all: Vec<(usize, &Features, f64)> = labelled(good, 1.0).chain(labelled(bad, 0.0)).collect();
        let mut trained: Vec<&(usize, &Features, f64)> =
            all.iter().filter(|(place, ..)| !is_held(*place)).collect();
        let share = |label: f64| {
            let count = trained.iter().filter(|(.., of)| *of == label).count();
            trained.len() as f64 / (2.0 * count.max(1) as f64)
        };
        let class_weights = [share(0.0), share(1.0)];
        let mut model = Self { bias: 0.0, weights: vec![0.0; 1 << BITS] };
        let (mut squares, mut bias_square) = (vec![1e-6_f32; 1 << BITS], 1e-6_f32);
        for epoch in 0..EPOCHS {
            trained.sort_by_key(|(place, _, label)| {
                mix((*place as u64) << 8 | (epoch as u64) << 1 | *label as u64)
            });
            for (_, features, label) in &trained {
                let error = (model.score(features) - label) * class_weights[*label as usize];
                // AdaGrad: rare words keep a large rate.
                for (place, value) in features.iter() {
                    let gradient = error as f32 * value;
                    let square = &mut squares[*place as usize];
                    *square += gradient * gradient;
                    model.weights[*place as usize] -= RATE as f32 * gradient / square.sqrt();
                }
                bias_square += (error * error) as f32;
                model.bias -= (RATE * error) as f32 / bias_square.sqrt();
            }
        }
        let held = |label: f64| -> Vec<f64> {
            let of_class = all.iter().filter(|(place, _, of)| is_held(*place) && *of == label);
            of_class.map(|(_, features, _)| model.score(features)).collect()
        };
        let measured = measure(&held(1.0), &held(0.0));
        Ok((model, measured))
    }

    /// The probability that a document is good.
    pub fn score(&self, features: &Features) -> f64 {
        let sum: f32 = features.iter().map(|(place, value)| self.weights[*place as usize] * value).sum();
        1.0 / (1.0 + (-f64::from(sum + self.bias)).exp())
    }

    /// The bytes of a file of the classifier.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = SIGNATURE.to_vec();
        bytes.extend(self.bias.to_le_bytes());
        for (place, weight) in self.weights.iter().enumerate().filter(|(_, weight)| **weight != 0.0) {
            bytes.extend((place as u32).to_le_bytes());
            bytes.extend(weight.to_le_bytes());
        }
        bytes
    }

    /// Reads a file of a classifier.
    ///
    /// # Errors
    /// It cannot be read, or is none.
    pub fn load(path: &Path) -> Result<Self> {
        let bytes = std::fs::read(path).map_err(CleanError::io("read", path))?;
        let damaged =
            || CleanError::Damaged { path: path.into(), reason: "it is no classifier of quality".into() };
        let numbers = bytes.strip_prefix(SIGNATURE).ok_or_else(damaged)?;
        let mut words = numbers.chunks_exact(4).map(|word| [word[0], word[1], word[2], word[3]]);
        let mut model = Self {
            bias: f32::from_le_bytes(words.next().ok_or_else(damaged)?),
            weights: vec![0.0; 1 << BITS],
        };
        while let (Some(place), Some(weight)) = (words.next(), words.next()) {
            *model.weights.get_mut(u32::from_le_bytes(place) as usize).ok_or_else(damaged)? =
                f32::from_le_bytes(weight);
        }
        Ok(model)
    }
}

fn measure(good: &[f64], bad: &[f64]) -> Measured {
    let share = |scores: &[f64], is: &dyn Fn(f64) -> bool| {
        scores.iter().filter(|score| is(**score)).count() as f64 / scores.len().max(1) as f64
    };
    let mut all: Vec<(f64, bool)> =
        good.iter().map(|score| (*score, true)).chain(bad.iter().map(|score| (*score, false))).collect();
    all.sort_by(|one, two| one.0.total_cmp(&two.0));
    let (mut below, mut pairs) = (0.0, 0.0);
    for equal in all.chunk_by(|one, two| one.0 == two.0) {
        let goods = equal.iter().filter(|(_, is_good)| *is_good).count() as f64;
        let bads = equal.len() as f64 - goods;
        pairs += goods * (below + bads / 2.0);
        below += bads;
    }
    Measured {
        good: good.len() as u64,
        bad: bad.len() as u64,
        accuracy: (share(good, &|score| score >= 0.5) + share(bad, &|score| score < 0.5)) / 2.0,
        area_under_curve: pairs / (good.len() * bad.len()).max(1) as f64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn documents(words: &[&str], seed: u64) -> Vec<Features> {
        let word = |place: u64| words[(mix(place) % words.len() as u64) as usize];
        (0..200)
            .map(|document| {
                let text: Vec<&str> = (0..40).map(|place| word(seed + 1000 * document + place)).collect();
                features(&text.join(" "))
            })
            .collect()
    }

    #[test]
    fn classes_of_other_words_are_told_apart() {
        let good = documents(&["river", "mill", "the", "of", "water", "stone"], 1);
        let bad = documents(&["buy", "now", "the", "of", "cheap", "stone"], 2);
        let (model, measured) = Classifier::train(&good, &bad).unwrap();
        assert!(measured.accuracy > 0.99 && measured.area_under_curve > 0.99, "{measured:?}");
        assert!(measured.good > 5 && measured.bad > 5);
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("quality.bin");
        std::fs::write(&path, model.to_bytes()).unwrap();
        assert_eq!(Classifier::load(&path).unwrap(), model);
        assert_eq!(Classifier::train(&good, &bad).unwrap().0, model);
        assert!(Classifier::train(&good[..3], &bad).unwrap_err().to_string().contains("3 good documents"));
        std::fs::write(&path, b"nothing").unwrap();
        assert!(Classifier::load(&path).unwrap_err().to_string().contains("no classifier"));
    }

    #[test]
    fn areas_count_pairs() {
        let measured = measure(&[0.9, 0.4], &[0.4, 0.1]);
        assert_eq!((measured.accuracy, measured.area_under_curve), (0.75, 0.875));
    }
}
