//! GRPO and its relatives: an answer's reward compared with those of the other answers to its prompt.

use super::{deviation, mean, members};

/// The deviation by which differences from the group's mean are divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// That of the group's rewards (GRPO).
    Group,
    /// That of all rewards of the batch.
    Batch,
    /// None (Dr. GRPO).
    None,
}

/// `(R − mean of the group) / (deviation + epsilon)`, with deviations over n − 1. Answers without a reward have the
/// advantage 0.
pub fn group_relative(groups: &[usize], rewards: &[Option<f64>], scale: Scale, epsilon: f64) -> Vec<f64> {
    let known: Vec<f64> = rewards.iter().flatten().copied().collect();
    let of_batch = deviation(&known, 1);
    let mut advantages = vec![0.0; rewards.len()];
    for members in members(groups) {
        let of_group: Vec<f64> = members.iter().filter_map(|index| rewards[*index]).collect();
        let center = mean(&of_group);
        let divisor = match scale {
            Scale::Group => deviation(&of_group, 1) + epsilon,
            Scale::Batch => of_batch + epsilon,
            Scale::None => 1.0,
        };
        for index in members {
            if let Some(reward) = rewards[index] {
                advantages[index] = (reward - center) / divisor;
            }
        }
    }
    advantages
}

/// GDPO: each function's rewards are normalized within their groups, summed by weight, and normalized over the batch.
/// `by_function` has the rewards of each function, for all answers.
pub fn normalize_then_sum(
    groups: &[usize],
    by_function: &[Vec<Option<f64>>],
    weights: &[f64],
    epsilon: f64,
) -> Vec<f64> {
    let mut sums: Vec<Option<f64>> = vec![None; groups.len()];
    for (rewards, weight) in by_function.iter().zip(weights) {
        let normalized = group_relative(groups, rewards, Scale::Group, epsilon);
        for ((sum, normalized), reward) in sums.iter_mut().zip(normalized).zip(rewards) {
            if reward.is_some() {
                *sum = Some(sum.unwrap_or(0.0) + weight * normalized);
            }
        }
    }
    let known: Vec<f64> = sums.iter().flatten().copied().collect();
    let (center, divisor) = (mean(&known), deviation(&known, 1) + epsilon);
    sums.into_iter().map(|sum| sum.map_or(0.0, |sum| (sum - center) / divisor)).collect()
}
