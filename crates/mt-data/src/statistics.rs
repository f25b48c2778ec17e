//! What a model that knows only how frequent tokens are would reach.

/// Counts of tokens: the model that a trained one has to beat.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnigramModel {
    counts: Vec<u64>,
    total: u64,
}

impl UnigramModel {
    /// A model that has seen nothing: every token is counted once, so that none is impossible.
    pub fn new(vocab_size: usize) -> Self {
        Self { counts: vec![1; vocab_size], total: vocab_size as u64 }
    }

    /// Counts tokens, those of [`Batch::counted_targets`](crate::Batch::counted_targets) for example; ids outside the
    /// vocabulary are left out.
    pub fn add(&mut self, tokens: impl IntoIterator<Item = i32>) {
        for token in tokens {
            if let Some(count) = usize::try_from(token).ok().and_then(|index| self.counts.get_mut(index)) {
                *count += 1;
                self.total += 1;
            }
        }
    }

    /// Its cross-entropy on `tokens` in nats a token, 0 for no token, infinite for tokens outside the vocabulary.
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

/// Bits per byte from a mean loss in nats a token, the number of tokens and the bytes that they stand for.
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
        // Counts are now 4, 2, 1, 1 of 8.
        let expected = (2f64.ln() + 8f64.ln()) / 2.0;
        assert!((model.cross_entropy([0, 3]) - expected).abs() < 1e-12);
        assert_eq!(model.cross_entropy([]), 0.0);
        assert_eq!(model.cross_entropy([7]), f64::INFINITY);
        assert!((bits_per_byte(2f64.ln(), 3, 6) - 0.5).abs() < 1e-12);
    }
}
