//! Rejection sampling (RAFT, STaR): the best answers to each prompt are learned as they are.

use super::members;

/// The answers that are learned, and how many of each group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Best {
    /// The most answers of a group.
    pub most: usize,
    /// The least reward of an answer, if there is one.
    pub least: Option<f64>,
}

/// 1 for the answers with the largest rewards of their groups, of equal ones the first; 0 for all others.
pub fn best(groups: &[usize], rewards: &[Option<f64>], rule: Best) -> Vec<f64> {
    let mut advantages = vec![0.0; rewards.len()];
    for members in members(groups) {
        let mut known: Vec<(usize, f64)> =
            members.into_iter().filter_map(|index| Some((index, rewards[index]?))).collect();
        known.retain(|(_, reward)| rule.least.is_none_or(|least| *reward >= least));
        known.sort_by(|(_, one), (_, other)| other.total_cmp(one));
        for (index, _) in known.into_iter().take(rule.most) {
            advantages[index] = 1.0;
        }
    }
    advantages
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_answers_of_each_group_are_kept() {
        let groups = [0, 0, 0, 1, 1, 1];
        let rewards = [Some(0.5), Some(1.0), Some(1.0), None, Some(-1.0), Some(0.0)];
        let of = |most, least| best(&groups, &rewards, Best { most, least });
        assert_eq!(of(1, None), [0.0, 1.0, 0.0, 0.0, 0.0, 1.0]);
        assert_eq!(of(2, None), [0.0, 1.0, 1.0, 0.0, 1.0, 1.0]);
        assert_eq!(of(9, Some(1.0)), [0.0, 1.0, 1.0, 0.0, 0.0, 0.0]);
    }
}
