//! RLOO: an answer's reward compared with the mean of the other answers to its prompt.

use super::{deviation, mean, members};

/// `R − mean of the other rewards of the group`; with `normalize`, then `(A − mean) / (deviation + 1e-4)` over the batch, as
/// TRL does. Answers without a reward, and answers without others, have the advantage 0.
pub fn leave_one_out(groups: &[usize], rewards: &[Option<f64>], normalize: bool) -> Vec<f64> {
    let mut advantages: Vec<Option<f64>> = vec![None; rewards.len()];
    for members in members(groups) {
        let known: Vec<(usize, f64)> =
            members.iter().filter_map(|index| Some((*index, rewards[*index]?))).collect();
        let sum: f64 = known.iter().map(|(_, reward)| reward).sum();
        let others = known.len().saturating_sub(1);
        for (index, reward) in known {
            let advantage = if others == 0 { 0.0 } else { reward - (sum - reward) / others as f64 };
            advantages[index] = Some(advantage);
        }
    }
    if normalize {
        let known: Vec<f64> = advantages.iter().flatten().copied().collect();
        let (center, divisor) = (mean(&known), deviation(&known, 1) + 1e-4);
        for advantage in advantages.iter_mut().flatten() {
            *advantage = (*advantage - center) / divisor;
        }
    }
    advantages.into_iter().map(|advantage| advantage.unwrap_or(0.0)).collect()
}
