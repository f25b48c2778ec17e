//! Rewards of answers: built-in functions, processes of the user, and their weighted sums.

mod command;
mod format;
mod functions;

use std::collections::BTreeMap;

pub use command::{CommandReward, CommandSettings};
pub use format::Marks;
pub use functions::{AnswerRewards, Overlong};

use crate::{RlError, math};

/// An answer to judge.
#[derive(Clone, Debug, PartialEq)]
pub struct Judged<'a> {
    pub prompt: &'a str,
    pub completion: &'a str,
    /// The expected answer, if the prompt has one.
    pub answer: Option<&'a str>,
    /// The tokens of the completion.
    pub tokens: usize,
    /// Further columns of the prompt's record, for processes of the user.
    pub columns: &'a serde_json::Map<String, serde_json::Value>,
}

/// A reward function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Function {
    /// All marks of reasoning and solution, in their order.
    FormatExact,
    /// Each mark exactly once.
    FormatPartial,
    /// The solution is the expected answer, or close to it.
    Answer,
    /// 1 if the solution equals the expected answer as a text.
    Exact,
    /// 1 if the last number of the completion equals the expected one.
    Numeric,
    /// 1 if the solution means the same as the expected answer.
    Math,
    /// A penalty that grows as the completion approaches the limit of its length.
    Overlong,
    /// A process of the user.
    Command,
}

impl Function {
    /// All functions with their names in configurations and records.
    pub const ALL: [(&'static str, Self); 8] = [
        ("format_exact", Self::FormatExact),
        ("format_partial", Self::FormatPartial),
        ("answer", Self::Answer),
        ("exact", Self::Exact),
        ("numeric", Self::Numeric),
        ("math", Self::Math),
        ("overlong", Self::Overlong),
        ("command", Self::Command),
    ];

    /// The function of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(known, _)| *known == name).map(|(_, function)| *function)
    }

    /// The name.
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(_, function)| *function == self).expect("all functions have names").0
    }

    /// Whether the function compares with an expected answer.
    pub fn needs_answer(self) -> bool {
        matches!(self, Self::Answer | Self::Exact | Self::Numeric | Self::Math)
    }
}

/// The functions of a run and their constants.
#[derive(Clone, Debug, PartialEq)]
pub struct RewardSettings {
    /// The functions with their weights.
    pub functions: Vec<(Function, f64)>,
    pub marks: Marks,
    pub answer: AnswerRewards,
    pub overlong: Overlong,
    /// The process of the function [`Function::Command`].
    pub command: Option<CommandSettings>,
}

/// The rewards of an answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Verdict {
    /// By function; `None` where it failed.
    pub rewards: BTreeMap<String, Option<f64>>,
    /// The weighted sum of those that did not fail; `None` if all did.
    pub total: Option<f64>,
    /// Whether the solution means the same as the expected answer, if there is one.
    pub is_correct: Option<bool>,
    /// Whether the completion has the expected format.
    pub has_format: bool,
    /// The solution within the completion.
    pub solution: Option<String>,
}

/// Judges answers.
pub struct Judge {
    settings: RewardSettings,
    command: Option<CommandReward>,
}

impl Judge {
    /// A judge with these functions. A process of the user is started with the first answers.
    pub fn new(settings: RewardSettings) -> Self {
        let command = settings.command.clone().map(CommandReward::new);
        Self { settings, command }
    }

    /// The functions.
    pub fn settings(&self) -> &RewardSettings {
        &self.settings
    }

    /// Judges answers. Functions of the user that fail are counted and stop nothing.
    ///
    /// # Errors
    /// The process of the user cannot be started at all.
    pub fn judge(&mut self, answers: &[Judged<'_>]) -> Result<Vec<Verdict>, RlError> {
        let mut verdicts: Vec<Verdict> = answers.iter().map(|answer| self.verdict(answer)).collect();
        if let Some(command) = &mut self.command {
            let name = Function::Command.name();
            for (verdict, reward) in verdicts.iter_mut().zip(command.rewards(answers)?) {
                verdict.rewards.insert(name.to_owned(), reward);
            }
        }
        for verdict in &mut verdicts {
            verdict.total = self.total(&verdict.rewards);
        }
        Ok(verdicts)
    }

    /// The failures of the user's process so far, and the reason of the last one.
    pub fn failures(&self) -> Option<(u64, &str)> {
        self.command.as_ref().and_then(CommandReward::failures)
    }

    fn total(&self, rewards: &BTreeMap<String, Option<f64>>) -> Option<f64> {
        let weighted = self
            .settings
            .functions
            .iter()
            .filter_map(|(function, weight)| Some(weight * (*rewards.get(function.name())?)?));
        weighted.fold(None, |sum: Option<f64>, reward| Some(sum.unwrap_or(0.0) + reward))
    }

    /// The verdict of the built-in functions.
    fn verdict(&self, answer: &Judged<'_>) -> Verdict {
        let marks = &self.settings.marks;
        let solution = marks.solution(answer.completion);
        let is_correct = answer.answer.map(|expected| {
            // Without marks, the whole completion may be the answer, or its last number.
            let found = solution.or(math::boxed(answer.completion));
            match found {
                Some(found) => math::equal(expected, found),
                None => functions::is_plain_match(expected, answer.completion),
            }
        });
        let reward = |function: Function| {
            let settings = &self.settings;
            Some(match function {
                Function::FormatExact => settings.answer.of_exact_format(marks.are_exact(answer.completion)),
                Function::FormatPartial => settings.answer.of_marks(&marks.counts(answer.completion)),
                Function::Answer => settings.answer.of_solution(answer.answer?, solution),
                Function::Exact => {
                    let given = solution.unwrap_or(answer.completion);
                    f64::from(u8::from(given.trim() == answer.answer?.trim()))
                }
                Function::Numeric => functions::numeric(answer.answer?, answer.completion),
                Function::Math => f64::from(u8::from(is_correct?)),
                Function::Overlong => settings.overlong.penalty(answer.tokens),
                Function::Command => return None,
            })
        };
        let functions = self.settings.functions.iter().map(|(function, _)| *function);
        let built_in = functions.filter(|function| *function != Function::Command);
        Verdict {
            rewards: built_in.map(|function| (function.name().to_owned(), reward(function))).collect(),
            total: None,
            is_correct,
            has_format: marks.are_exact(answer.completion),
            solution: solution.or(math::boxed(answer.completion)).map(str::to_owned),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(functions: &[(Function, f64)]) -> RewardSettings {
        RewardSettings {
            functions: functions.to_vec(),
            marks: Marks {
                reasoning: ["<reasoning>".to_owned(), "</reasoning>".to_owned()],
                solution: ["<answer>".to_owned(), "</answer>".to_owned()],
                begins_in_prompt: false,
            },
            answer: AnswerRewards {
                exact: 5.0,
                white_space: 1.5,
                exact_format: 3.0,
                partial_format: 0.5,
                within_10_percent: 0.5,
                within_20_percent: 0.25,
                wrong_format: -0.5,
                wrong: -1.0,
            },
            overlong: Overlong { limit: 20, buffer: 10 },
            command: None,
        }
    }

    fn rewards(functions: &[Function], completion: &str, answer: &str, tokens: usize) -> Vec<f64> {
        let weighted: Vec<(Function, f64)> = functions.iter().map(|function| (*function, 1.0)).collect();
        let columns = serde_json::Map::new();
        let judged = Judged { prompt: "", completion, answer: Some(answer), tokens, columns: &columns };
        let verdict = Judge::new(settings(&weighted)).judge(&[judged]).unwrap().remove(0);
        functions.iter().map(|function| verdict.rewards[function.name()].unwrap()).collect()
    }

    #[test]
    fn formats_and_answers_have_their_rewards() {
        use Function::{Answer, FormatExact, FormatPartial};
        let all = [FormatExact, FormatPartial, Answer];
        let whole = |answer: &str| format!("<reasoning>2+2</reasoning>\n<answer>{answer}</answer>\n");
        for (completion, answer, expected) in [
            (whole("4"), "4", [3.0, 2.0, 5.0]),
            (whole(" 4 "), "4", [3.0, 2.0, 1.5]),
            (whole(r"\frac{8}{2}"), "4", [3.0, 2.0, 5.0]),
            (whole("108"), "100", [3.0, 2.0, 0.5]),
            (whole("119"), "100", [3.0, 2.0, 0.25]),
            (whole("5"), "100", [3.0, 2.0, -1.0]),
            ("4".to_owned(), "4", [0.0, -2.0, 0.0]),
            ("<answer>4</answer>".to_owned(), "4", [0.0, 0.0, 5.0]),
            (format!("{}<answer>", whole("4")), "4", [0.0, 1.0, 5.0]),
            (format!("x{}", whole("4")), "4", [0.0, 2.0, 5.0]),
        ] {
            assert_eq!(rewards(&all, &completion, answer, 1), expected, "{completion}");
        }
    }

    #[test]
    fn plain_answers_are_compared_as_texts_numbers_and_mathematics() {
        use Function::{Exact, Math, Numeric};
        let all = [Exact, Numeric, Math];
        for (completion, answer, expected) in [
            ("42", "42", [1.0, 1.0, 1.0]),
            (" 42\n", "42", [1.0, 1.0, 1.0]),
            ("The sum is 1,042.", "1042", [0.0, 1.0, 1.0]),
            (r"So \boxed{\frac{1}{2}}", "0.5", [0.0, 0.0, 1.0]),
            ("42 or 43", "42", [0.0, 0.0, 0.0]),
            ("", "42", [0.0, 0.0, 0.0]),
        ] {
            assert_eq!(rewards(&all, completion, answer, 1), expected, "{completion}");
        }
    }

    #[test]
    fn long_answers_are_penalized_softly() {
        let of = |tokens| rewards(&[Function::Overlong], "", "", tokens)[0];
        assert_eq!([of(0), of(10), of(15), of(20), of(30)], [0.0, 0.0, -0.5, -1.0, -1.0]);
    }

    #[test]
    fn sums_are_weighted_and_leave_out_what_failed() {
        let columns = serde_json::Map::new();
        let judged = |answer| Judged { prompt: "", completion: "4", answer, tokens: 15, columns: &columns };
        let weighted = [(Function::Exact, 2.0), (Function::Overlong, 0.5)];
        let mut judge = Judge::new(settings(&weighted));
        let made = judge.judge(&[judged(Some("4")), judged(None)]).unwrap();
        assert_eq!((made[0].total, made[1].total), (Some(1.75), Some(-0.25)));
        assert_eq!(made[1].rewards["exact"], None);
        assert_eq!((made[0].is_correct, made[1].is_correct), (Some(true), None));
        let mut judge = Judge::new(settings(&[(Function::Exact, 1.0)]));
        assert_eq!(judge.judge(&[judged(None)]).unwrap()[0].total, None);
    }
}
