//! A baseline for losses: the cross-entropy of a unigram model.

/// A unigram model, which predicts tokens by their frequency. A trained model has to do better.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnigramModel {
    counts: Vec<u64>,
    total: u64,
}

impl UnigramModel {
    /// A model without data. Every token counts once, so that none has probability 0.
    pub fn new(vocab_size: usize) -> Self {
        Self { counts: vec![1; vocab_size], total: vocab_size as u64 }
    }

    /// Counts tokens, such as those of [`Batch::counted_targets`](crate::Batch::counted_targets). Ids outside the
    /// vocabulary are ignored.
    pub fn add(&mut self, tokens: impl IntoIterator<Item = i32>) {
        for token in tokens {
            if let Some(count) = usize::try_from(token).ok().and_then(|index| self.counts.get_mut(index)) {
                *count += 1;
                self.total += 1;
            }
        }
    }

    /// The mean cross-entropy on `tokens` in nats per token: 0 without tokens, infinite for tokens outside the
    /// vocabulary.
    pub fn cross_entropy(&self, tokens: impl IntoIterator<Item = i32>) -> f64 {
        let (mut sum, mut number) = (0.0, 0u64);
        for token in tokens {
            let count = usize::try_from(token).ok().and_then(|index| self.counts.get(index)).copied();
            sum -= (count.unwrap_or(0) as f64 / self.total as f64).ln();
            number += 1;
        }
        if number == 0 { 0.0 } else { sum / number as f64 }
    }
}

/// Bits per byte from a mean loss in nats per token, the number of tokens and the number of bytes that they encode.
pub fn bits_per_byte(nats_per_token: f64, tokens: u64, bytes: u64) -> f64 {
    nats_per_token / std::f64::consts::LN_2 * tokens as f64 / bytes as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unigram_matches_the_formula() {
        let mut model = UnigramModel::new(4);
        assert!((model.cross_entropy([0, 1, 2, 3]) - 4f64.ln()).abs() < 1e-12);
        model.add([0, 0, 0, 1, 9, -1]);
        // The counts are now 4, 2, 1, 1, of a total of 8.
        let expected = (2f64.ln() + 8f64.ln()) / 2.0;
        assert!((model.cross_entropy([0, 3]) - expected).abs() < 1e-12);
        assert_eq!(model.cross_entropy([]), 0.0);
        assert_eq!(model.cross_entropy([7]), f64::INFINITY);
        assert!((bits_per_byte(2f64.ln(), 3, 6) - 0.5).abs() < 1e-12);
    }
}
