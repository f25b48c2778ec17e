//! Sampled answers in training: what configurations say of them in the terms of `mt-rl`, the sampling of batches, and
//! evaluations.

mod exam;
mod sampling;

use std::time::Duration;

use mt_config::{KlEstimator, KlPlace, RewardAggregation, RewardScale, RlAlgorithm, RlGroup, RolloutGroup};
use mt_rl::{
    AdvantageRule, BatchRules, PromptSet,
    advantages::{Estimator, Lambda, Scale},
    rewards::{AnswerRewards, CommandSettings, Function, Marks, Overlong, RewardSettings},
};

use crate::TrainError;

pub(crate) use sampling::{HostMetric, Sampling};

/// How the rollouts of a run become rows.
pub(crate) fn rules(keys: &RlGroup) -> BatchRules {
    let estimator = match keys.estimator() {
        KlEstimator::K1 => Estimator::K1,
        KlEstimator::K2 => Estimator::K2,
        KlEstimator::K3 => Estimator::K3,
    };
    let is_in_reward = keys.place_of_divergence() == KlPlace::Reward && keys.beta() > 0.0;
    BatchRules {
        advantage: advantage(keys),
        penalty: is_in_reward.then(|| (keys.beta(), estimator)),
        uses_recorded: keys.use_recorded_advantages,
        // Algorithms that compare answers with others learn nothing from equal ones.
        masks_degenerate: keys.degenerate_group_masking
            && !matches!(keys.loss_algo, RlAlgorithm::ReinforcePlusPlus | RlAlgorithm::Ppo),
        masks_truncated: keys.mask_truncated_completions,
        with_old: !keys.compares_with_itself(),
        with_sampler: keys.has_sampler(),
    }
}

fn advantage(keys: &RlGroup) -> AdvantageRule {
    let epsilon = keys.advantage_epsilon;
    let scale = match keys.scale() {
        RewardScale::Group => Scale::Group,
        RewardScale::Batch => Scale::Batch,
        RewardScale::Off => Scale::None,
    };
    match keys.loss_algo {
        RlAlgorithm::Rloo => AdvantageRule::LeaveOneOut { normalize: keys.normalize_advantages },
        RlAlgorithm::ReinforcePlusPlus => AdvantageRule::Tokens,
        RlAlgorithm::ReinforcePlusPlusBaseline => AdvantageRule::GroupThenBatch,
        RlAlgorithm::Ppo => AdvantageRule::Temporal {
            gamma: keys.gae_gamma,
            lambda: match keys.gae_length_alpha {
                Some(alpha) => Lambda::ByLength { alpha },
                None => Lambda::Fixed(keys.gae_lambda),
            },
        },
        RlAlgorithm::Grpo
        | RlAlgorithm::GspoToken
        | RlAlgorithm::Gspo
        | RlAlgorithm::DrGrpo
        | RlAlgorithm::Dapo
        | RlAlgorithm::Cispo => match keys.multi_objective_aggregation {
            RewardAggregation::SumThenNormalize => AdvantageRule::Group { scale, epsilon },
            RewardAggregation::NormalizeThenSum => {
                AdvantageRule::EachFunction { weights: keys.weights(), epsilon }
            }
        },
    }
}

/// Refuses prompts without the expected answers that a reward function compares with.
pub(crate) fn check_answers(
    keys: &RlGroup,
    settings: &RolloutGroup,
    prompts: &PromptSet,
) -> Result<(), TrainError> {
    let functions = reward_settings(keys, settings).functions;
    let needing = functions.iter().find(|(function, _)| function.needs_answer());
    let (Some((function, _)), Some(index)) = (needing, prompts.without_answer()) else { return Ok(()) };
    Err(TrainError::NoAnswer { function: function.name(), text: prompts.prompts[index].text.clone() })
}

/// The reward functions of a run.
fn reward_settings(keys: &RlGroup, settings: &RolloutGroup) -> RewardSettings {
    let weights = keys.weights();
    let weight = |function: Function| weights.get(function.name()).copied().unwrap_or(1.0);
    // The names have been checked with the configuration.
    let functions = settings.functions().into_iter().filter_map(Function::named);
    let command = settings.reward_command.clone().map(|line| CommandSettings {
        line,
        limit: Duration::from_secs_f64(settings.reward_timeout),
        retries: settings.reward_retries,
    });
    RewardSettings {
        functions: functions.map(|function| (function, weight(function))).collect(),
        marks: Marks {
            reasoning: [settings.reasoning_start_token.clone(), settings.reasoning_end_token.clone()],
            solution: [settings.solution_start_token.clone(), settings.solution_end_token.clone()],
            begins_in_prompt: settings.reasoning_start_token_in_prompt,
        },
        answer: AnswerRewards {
            exact: settings.reward_exact_answer,
            white_space: settings.reward_white_space_format_match,
            exact_format: settings.reward_exact_format_match,
            partial_format: settings.reward_partial_format_match,
            within_10_percent: settings.reward_ratio_guess_to_answer_high,
            within_20_percent: settings.reward_ratio_guess_to_answer_low,
            wrong_format: settings.penalty_incorrect_format,
            wrong: settings.penalty_incorrect_answer,
        },
        overlong: Overlong { limit: keys.completion_length(), buffer: settings.overlong_buffer_length },
        command,
    }
}
