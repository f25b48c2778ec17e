//! Generalized advantage estimation (Schulman et al., 2016), with VAPO's factor that grows with the length.

use super::{Tokens, mean};

/// The weight of later temporal differences.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Lambda {
    Fixed(f64),
    /// `max(0, 1 − 1 / (alpha × tokens))` (VAPO).
    ByLength {
        alpha: f64,
    },
}

impl Lambda {
    fn of(self, tokens: usize) -> f64 {
        match self {
            Self::Fixed(lambda) => lambda,
            Self::ByLength { alpha } => (1.0 - 1.0 / (alpha * tokens.max(1) as f64)).max(0.0),
        }
    }
}

/// The advantages of an answer's tokens before they are whitened, and the targets of a value model.
#[derive(Clone, Debug, PartialEq)]
pub struct Gae {
    pub advantages: Vec<f64>,
    pub returns: Vec<f64>,
}

/// `A_t = sum over k of (gamma × lambda)^k × d_(t+k)`, with `d_t = r_t + gamma × V_(t+1) − V_t`. The value after the last
/// token is 0.
pub fn generalized(tokens: &Tokens, reward: f64, gamma: f64, lambda: Lambda) -> Gae {
    let rewards = tokens.rewards(reward);
    let lambda = lambda.of(rewards.len());
    let mut advantages = vec![0.0; rewards.len()];
    let (mut later, mut next) = (0.0, 0.0);
    for token in (0..rewards.len()).rev() {
        let value = tokens.values[token];
        let difference = rewards[token] + gamma * next - value;
        later = difference + gamma * lambda * later;
        advantages[token] = later;
        next = value;
    }
    let returns = advantages.iter().zip(&tokens.values).map(|(advantage, value)| advantage + value).collect();
    Gae { advantages, returns }
}

/// `(A − mean) / sqrt(variance + 1e-8)` over all tokens of the batch, with the variance over n − 1.
pub fn whitened(answers: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let all: Vec<f64> = answers.iter().flatten().copied().collect();
    let center = mean(&all);
    let squares: f64 = all.iter().map(|value| (value - center).powi(2)).sum();
    let variance = if all.len() > 1 { squares / (all.len() - 1) as f64 } else { 0.0 };
    let divisor = (variance + 1e-8).sqrt();
    answers.iter().map(|answer| answer.iter().map(|value| (value - center) / divisor).collect()).collect()
}
