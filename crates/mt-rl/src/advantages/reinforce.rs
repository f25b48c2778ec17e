//! REINFORCE++ and its variant with a baseline (Hu, 2025).

use super::{Tokens, deviation, group::Scale, group_relative, mean};

/// Keeps quotients finite where all advantages are equal.
const EPSILON: f64 = 1e-8;

/// The rewards of the remaining tokens, with the penalties of divergence, normalized over all tokens of the batch with the
/// deviation over n. One list for each answer; an answer without a reward has the advantage 0 and does not count.
pub fn reinforce_plus_plus(answers: &[Tokens], rewards: &[Option<f64>]) -> Vec<Vec<f64>> {
    let returns = |(tokens, reward): (&Tokens, &Option<f64>)| {
        let mut returns = tokens.rewards((*reward)?);
        for token in (0..returns.len().saturating_sub(1)).rev() {
            returns[token] += returns[token + 1];
        }
        Some(returns)
    };
    let returns: Vec<Option<Vec<f64>>> = answers.iter().zip(rewards).map(returns).collect();
    let all: Vec<f64> = returns.iter().flatten().flatten().copied().collect();
    let (center, divisor) = (mean(&all), deviation(&all, 0) + EPSILON);
    let normalized = |(returns, tokens): (Option<Vec<f64>>, &Tokens)| match returns {
        Some(returns) => returns.into_iter().map(|value| (value - center) / divisor).collect(),
        None => vec![0.0; tokens.penalties.len()],
    };
    returns.into_iter().zip(answers).map(normalized).collect()
}

/// `R − mean of the group`, normalized over the answers of the batch with the deviation over n.
pub fn reinforce_plus_plus_baseline(groups: &[usize], rewards: &[Option<f64>]) -> Vec<f64> {
    let differences = group_relative(groups, rewards, Scale::None, 0.0);
    let known: Vec<f64> = differences
        .iter()
        .zip(rewards)
        .filter(|(_, reward)| reward.is_some())
        .map(|(difference, _)| *difference)
        .collect();
    let (center, divisor) = (mean(&known), deviation(&known, 0) + EPSILON);
    let normalized =
        |(difference, reward): (f64, &Option<f64>)| reward.map_or(0.0, |_| (difference - center) / divisor);
    differences.into_iter().zip(rewards).map(normalized).collect()
}
