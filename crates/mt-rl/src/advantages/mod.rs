//! Advantages: how much better an answer, or one of its tokens, is than expected.
//!
//! Each algorithm has one function, in a file of its own. They compute in `f64` on the host, for all answers of a batch at
//! once, before the first step with that batch.

mod best;
mod group;
mod leave_one_out;
mod reinforce;
mod temporal;

pub use best::{Best, best};
pub use group::{Scale, group_relative, normalize_then_sum};
pub use leave_one_out::leave_one_out;
pub use reinforce::{reinforce_plus_plus, reinforce_plus_plus_baseline};
pub use temporal::{Gae, Lambda, generalized, whitened};

/// The estimator of a divergence from the log-ratio of one sampled token (Schulman, 2020).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Estimator {
    /// The log-ratio.
    K1,
    /// Half its square.
    K2,
    /// `exp(-x) - 1 + x`, which is positive and unbiased.
    K3,
}

impl Estimator {
    /// The estimate from `log_ratio`, the log-probability by the policy less that by the reference.
    pub fn of(self, log_ratio: f64) -> f64 {
        match self {
            Self::K1 => log_ratio,
            Self::K2 => 0.5 * log_ratio * log_ratio,
            Self::K3 => (-log_ratio).exp_m1() + log_ratio,
        }
    }
}

/// The tokens of an answer that are learned, with the penalties of its reward.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tokens {
    /// The divergence from the reference at each token, times its weight in the reward.
    pub penalties: Vec<f64>,
    /// The values before each token, if a value model gives them.
    pub values: Vec<f64>,
}

impl Tokens {
    /// The rewards of the tokens: less the penalties, plus the answer's own reward at the last one.
    fn rewards(&self, reward: f64) -> Vec<f64> {
        let mut rewards: Vec<f64> = self.penalties.iter().map(|penalty| -penalty).collect();
        if let Some(last) = rewards.last_mut() {
            *last += reward;
        }
        rewards
    }
}

/// The mean; 0 of no number.
fn mean(values: &[f64]) -> f64 {
    if values.is_empty() { 0.0 } else { values.iter().sum::<f64>() / values.len() as f64 }
}

/// The standard deviation, with the sum of squares divided by the number of values less `freedom`; 0 of too few numbers.
fn deviation(values: &[f64], freedom: usize) -> f64 {
    let Some(count) = values.len().checked_sub(freedom).filter(|count| *count > 0) else { return 0.0 };
    let center = mean(values);
    let squares: f64 = values.iter().map(|value| (value - center).powi(2)).sum();
    (squares / count as f64).sqrt()
}

/// The indices of the answers of each group. Groups are numbered from 0.
fn members(groups: &[usize]) -> Vec<Vec<usize>> {
    let mut members = vec![Vec::new(); groups.iter().max().map_or(0, |last| last + 1)];
    for (index, group) in groups.iter().enumerate() {
        members[*group].push(index);
    }
    members
}

/// Whether each answer belongs to a group whose rewards are all equal, so that it teaches nothing. Answers without a reward
/// do not count.
pub fn degenerate(groups: &[usize], rewards: &[Option<f64>]) -> Vec<bool> {
    let mut is_degenerate = vec![false; groups.len()];
    for members in members(groups) {
        let mut known = members.iter().filter_map(|index| rewards[*index]);
        let first = known.next();
        if first.is_none_or(|first| known.all(|reward| reward == first)) {
            members.into_iter().for_each(|index| is_degenerate[index] = true);
        }
    }
    is_degenerate
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_with_equal_rewards_are_degenerate() {
        let rewards = [Some(1.0), Some(1.0), Some(0.0), Some(1.0), None, Some(2.0), None, None];
        let found = degenerate(&[0, 0, 1, 1, 2, 2, 3, 3], &rewards);
        assert_eq!(found, [true, true, false, false, true, true, true, true]);
    }

    #[test]
    fn estimators_agree_in_the_first_order() {
        for x in [-0.7, 0.0, 1e-9, 1.3] {
            let exact = f64::exp(-x) - 1.0 + x;
            assert!((Estimator::K3.of(x) - exact).abs() < 1e-15, "{x}");
            assert_eq!((Estimator::K1.of(x), Estimator::K2.of(x)), (x, x * x / 2.0));
        }
    }

    #[test]
    fn deviations_of_few_numbers_are_zero() {
        assert_eq!((deviation(&[3.0], 1), deviation(&[], 0), mean(&[])), (0.0, 0.0, 0.0));
        assert_eq!(deviation(&[1.0, 3.0], 1), 2f64.sqrt());
        assert_eq!(deviation(&[1.0, 3.0], 0), 1.0);
    }
}
