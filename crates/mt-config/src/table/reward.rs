//! Reward models.

use super::KeyGroup;
use crate::{groups::RewardType, key::Key};

/// The subject that the keys of this group act on.
const SUBJECT: &str = "reward models";

pub(super) const GROUP: KeyGroup = KeyGroup {
    name: "Reward",
    title: "Reward models",
    prefix: Some("reward"),
    keys: &[
        Key::of::<RewardType>(
            "reward_type",
            "outcome",
            "Judge whole answers, learned from pairs (`outcome`), or the steps of an answer, learned from labels \
             (`process`).",
        )
        .only_with("use_reward", &[])
        .acts_on(SUBJECT)
        .own(),
        Key::integer(
            "num_reward_heads",
            1,
            "Heads of an ensemble, each with initial values of its own. The reward is their mean.",
        )
        .at_least(1.0)
        .only_with("use_reward", &[])
        .acts_on(SUBJECT)
        .own(),
        Key::optional_text(
            "margin_column",
            "Column of a number by which the chosen answer's reward has to exceed the rejected one's; no margin if none.",
        )
        .only_with("reward_type", &["outcome"])
        .acts_on("data")
        .own(),
        Key::float(
            "center_rewards_coefficient",
            0.0,
            "Weight of the squared sum of both rewards of a pair, which keeps rewards near zero.",
        )
        .at_least(0.0)
        .only_with("reward_type", &["outcome"])
        .acts_on(SUBJECT)
        .own(),
        Key::text(
            "step_separator",
            "\n",
            "Text after each step of an answer, whose last token has the step's label.",
        )
        .only_with("reward_type", &["process"])
        .acts_on("data")
        .own(),
        Key::boolean(
            "train_on_last_step_only",
            false,
            "Learn only the label of the last step of each answer.",
        )
        .only_with("reward_type", &["process"])
        .acts_on("data")
        .own(),
    ],
};
