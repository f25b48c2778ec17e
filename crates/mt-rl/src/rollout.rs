//! A sampled answer to a prompt, as programs exchange it: one JSON object a line.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// An answer to a prompt, with the probabilities of its tokens and its rewards. Lists have a number for each token of the
/// completion.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rollout {
    /// The step of the run that sampled it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<u64>,
    /// The prompt, among all of the run. Successive rollouts of one group are compared with each other; without a group,
    /// successive rollouts with equal prompts are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<u64>,
    /// The number of the answer among those to its prompt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sample: Option<u64>,
    /// The tokens of the prompt.
    pub prompt: Vec<u32>,
    /// The tokens of the answer, with the one that ends it.
    pub completion: Vec<u32>,
    /// The log-probabilities with which the sampler drew the tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log_probabilities: Option<Vec<f32>>,
    /// The log-probabilities by the trainer's weights at the time of sampling, which differ from the sampler's if both
    /// compute differently.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub old_log_probabilities: Option<Vec<f32>>,
    /// The log-probabilities by the reference model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reference_log_probabilities: Option<Vec<f32>>,
    /// The values that a value model expected before each token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub values: Option<Vec<f32>>,
    /// Which tokens are learned, 1 or 0; all of them if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mask: Option<Vec<u8>>,
    /// The weighted sum of `rewards`. Absent if no function gave one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reward: Option<f64>,
    /// The reward by each function; null where a function failed.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub rewards: BTreeMap<String, Option<f64>>,
    /// The advantage with which the run trained.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub advantage: Option<Advantage>,
    /// Why the answer ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finish: Option<Finish>,
    /// The text of the answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// The expected answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answer: Option<String>,
}

/// An advantage: one for all tokens of an answer, or one for each.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Advantage {
    OfAnswer(f64),
    OfTokens(Vec<f64>),
}

/// Log-probabilities of certain tokens may exceed 0 by this.
const ROUNDING: f32 = 1e-3;

/// The end of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Finish {
    /// A token ended it.
    Stop,
    /// It reached the limit of its length.
    Length,
}

impl Rollout {
    /// Reads a line.
    ///
    /// # Errors
    /// The reason why the line is no rollout.
    pub fn read(line: &str) -> Result<Self, String> {
        let rollout: Self =
            serde_json::from_str(line).map_err(|error| format!("is not a rollout: {error}"))?;
        rollout.check()?;
        Ok(rollout)
    }

    /// Whether lists have the right lengths.
    fn check(&self) -> Result<(), String> {
        if self.prompt.is_empty() {
            return Err("`prompt` has no token".to_owned());
        }
        let tokens = self.completion.len();
        let lists = [
            ("log_probabilities", &self.log_probabilities),
            ("old_log_probabilities", &self.old_log_probabilities),
            ("reference_log_probabilities", &self.reference_log_probabilities),
            ("values", &self.values),
        ];
        let lengths = lists.iter().filter_map(|(name, list)| Some((*name, list.as_ref()?.len())));
        let of_tokens = match &self.advantage {
            Some(Advantage::OfTokens(values)) => Some(("advantage", values.len())),
            _ => None,
        };
        let mask = self.mask.as_ref().map(|mask| ("mask", mask.len()));
        for (name, length) in lengths.chain(of_tokens).chain(mask) {
            if length != tokens {
                return Err(format!("`{name}` has {length} elements, but `completion` has {tokens}"));
            }
        }
        if self.mask.iter().flatten().any(|element| *element > 1) {
            return Err("`mask` holds an element that is neither 0 nor 1".to_owned());
        }
        // JSON has no other numbers, but the type of log-probabilities is narrower than JSON's numbers.
        for (name, list) in lists {
            if list.iter().flatten().any(|value| !value.is_finite()) {
                return Err(format!("`{name}` holds a number that is out of range"));
            }
        }
        for name in ["log_probabilities", "old_log_probabilities", "reference_log_probabilities"] {
            let list = lists.iter().find(|(known, _)| *known == name).and_then(|(_, list)| list.as_ref());
            if let Some(value) = list.into_iter().flatten().find(|value| **value > ROUNDING) {
                return Err(format!(
                    "`{name}` holds {value}, but the logarithm of a probability is at most 0"
                ));
            }
        }
        Ok(())
    }

    /// Whether a token of the completion is learned.
    pub fn is_learned(&self, token: usize) -> bool {
        self.mask.as_ref().is_none_or(|mask| mask[token] == 1)
    }

    /// The log-probabilities by the policy that sampled the answer: the trainer's, or else the sampler's.
    pub fn old(&self) -> Option<&[f32]> {
        self.old_log_probabilities.as_deref().or(self.log_probabilities.as_deref())
    }

    /// Whether this rollout, which follows `before`, answers the same prompt.
    pub fn continues(&self, before: &Self) -> bool {
        match (self.group, before.group) {
            (Some(own), Some(other)) => own == other && self.step == before.step,
            (None, None) => self.prompt == before.prompt,
            _ => false,
        }
    }

    /// The rollout as a line, without its end.
    pub fn line(&self) -> String {
        serde_json::to_string(self).expect("texts and finite numbers are representable in JSON")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_as_they_are_written() {
        let rollout = Rollout {
            step: Some(3),
            group: Some(1),
            sample: Some(0),
            prompt: vec![1, 2],
            completion: vec![3, 4],
            // The shortest text of a number in f32 gives the same number.
            log_probabilities: Some(vec![-0.1, -1.234_567_9e-5]),
            mask: Some(vec![1, 0]),
            reward: Some(0.1 + 0.2),
            rewards: [("format".to_owned(), Some(0.5)), ("command".to_owned(), None)].into(),
            advantage: Some(Advantage::OfTokens(vec![0.5, -0.25])),
            finish: Some(Finish::Stop),
            text: Some("a\n\u{1f600}".to_owned()),
            answer: Some("b".to_owned()),
            ..Rollout::default()
        };
        assert_eq!(Rollout::read(&rollout.line()), Ok(rollout.clone()));
        assert!(!rollout.line().contains('\n'));
        assert!(rollout.is_learned(0) && !rollout.is_learned(1));
        let least = Rollout::read(r#"{"prompt":[1],"completion":[]}"#).unwrap();
        assert_eq!((least.old(), least.reward), (None, None));
    }

    #[test]
    fn wrong_lines_are_refused() {
        for (line, expected) in [
            ("{", "is not a rollout"),
            (r#"{"completion":[1]}"#, "missing field `prompt`"),
            (r#"{"prompt":[],"completion":[1]}"#, "`prompt` has no token"),
            (r#"{"prompt":[1],"completion":[1],"logprobs":[0]}"#, "unknown field `logprobs`"),
            (
                r#"{"prompt":[1],"completion":[1,2],"log_probabilities":[-1]}"#,
                "`log_probabilities` has 1 elements, but `completion` has 2",
            ),
            (r#"{"prompt":[1],"completion":[1],"mask":[2]}"#, "neither 0 nor 1"),
            (r#"{"prompt":[1],"completion":[1],"advantage":[1,2]}"#, "`advantage` has 2 elements"),
            (r#"{"prompt":[1],"completion":[1],"values":[1e300]}"#, "out of range"),
            (r#"{"prompt":[1],"completion":[1],"log_probabilities":[0.5]}"#, "at most 0"),
            (r#"{"prompt":[-1],"completion":[1]}"#, "invalid value"),
        ] {
            let error = Rollout::read(line).unwrap_err();
            assert!(error.contains(expected), "{line}: {error}");
        }
    }
}
