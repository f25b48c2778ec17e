//! Rewards by a reward model, which runs above this crate.

use super::{
    Judged,
    outcome::{Failures, Outcome},
};
use crate::RlError;

/// A model that judges answers.
pub trait RewardModel {
    /// The rewards of answers in their order, or the reasons why answers have none.
    ///
    /// # Errors
    /// The devices fail.
    fn rewards(&mut self, answers: &[Judged<'_>]) -> Result<Vec<Result<f64, String>>, RlError>;
}

/// A reward model and its failures.
pub(super) struct ModelReward {
    model: Box<dyn RewardModel>,
    pub failures: Failures,
}

impl ModelReward {
    pub fn new(model: Box<dyn RewardModel>) -> Self {
        Self { model, failures: Failures::default() }
    }

    /// The rewards of answers.
    pub fn rewards(&mut self, answers: &[Judged<'_>]) -> Result<Vec<Outcome>, RlError> {
        let outcome = |made: Result<f64, String>| match made {
            Ok(reward) if reward.is_finite() => Outcome::Reward(reward),
            Ok(_) => {
                self.failures.add("its reward is not finite".to_owned());
                Outcome::Failed
            }
            Err(reason) => {
                self.failures.add(reason);
                Outcome::Failed
            }
        };
        Ok(self.model.rewards(answers)?.into_iter().map(outcome).collect())
    }
}
