//! Rewards of answers: built-in functions, those of the user, code in a sandbox, and their weighted sums.

mod child;
mod code;
mod command;
mod confinement;
mod endpoint;
mod format;
mod functions;
mod model;
mod outcome;
mod python;
mod sandbox;

use std::collections::BTreeMap;

pub use code::{CodeSettings, CodeTest, code_of};
pub use command::{CommandReward, CommandSettings};
pub use endpoint::{EndpointSettings, Url};
pub use format::Marks;
pub use functions::{AnswerRewards, Overlong};
pub use model::RewardModel;
pub use outcome::Failures;
pub use python::PythonSettings;
pub use sandbox::{Ran, Sandbox, SandboxLimits};

pub(crate) use child::Child;

use code::CodeReward;
use endpoint::EndpointReward;
use model::ModelReward;
use outcome::Outcome;
use python::PythonReward;

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
    /// An HTTP endpoint of the user.
    Endpoint,
    /// The share of a prompt's tests that the code passes.
    Code,
    /// A reward model.
    Model,
}

impl Function {
    /// All functions with their names in configurations and records.
    pub const ALL: [(&'static str, Self); 11] = [
        ("format_exact", Self::FormatExact),
        ("format_partial", Self::FormatPartial),
        ("answer", Self::Answer),
        ("exact", Self::Exact),
        ("numeric", Self::Numeric),
        ("math", Self::Math),
        ("overlong", Self::Overlong),
        ("command", Self::Command),
        ("endpoint", Self::Endpoint),
        ("code", Self::Code),
        ("model", Self::Model),
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

    /// Whether the function may fail: a program of the user, code, or a model.
    fn is_external(self) -> bool {
        matches!(self, Self::Command | Self::Endpoint | Self::Code | Self::Model)
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
    /// That of the function [`Function::Endpoint`].
    pub endpoint: Option<EndpointSettings>,
    /// The tests of the function [`Function::Code`].
    pub code: Option<CodeSettings>,
    /// Functions of the user in Python.
    pub python: Option<PythonSettings>,
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
    endpoint: Option<EndpointReward>,
    code: Option<CodeReward>,
    model: Option<ModelReward>,
    python: Option<PythonReward>,
}

impl Judge {
    /// A judge with these functions. A process of the user is started with the first answers.
    ///
    /// # Errors
    /// Functions in Python cannot be imported, or the sandbox for code cannot be used.
    pub fn new(settings: RewardSettings) -> Result<Self, RlError> {
        Ok(Self {
            command: settings.command.clone().map(CommandReward::new),
            endpoint: settings.endpoint.clone().map(EndpointReward::new),
            code: settings.code.clone().map(CodeReward::open).transpose()?,
            python: settings.python.clone().map(PythonReward::start).transpose()?,
            model: None,
            settings,
        })
    }

    /// The same judge with the reward model of the function [`Function::Model`].
    #[must_use]
    pub fn with_model(self, model: Box<dyn RewardModel>) -> Self {
        Self { model: Some(ModelReward::new(model)), ..self }
    }

    /// The functions.
    pub fn settings(&self) -> &RewardSettings {
        &self.settings
    }

    /// Judges answers. Functions of the user that fail are counted and stop nothing.
    ///
    /// # Errors
    /// The process of the user cannot be started at all, or the devices fail.
    pub fn judge(&mut self, answers: &[Judged<'_>]) -> Result<Vec<Verdict>, RlError> {
        let mut verdicts: Vec<Verdict> = answers.iter().map(|answer| self.verdict(answer)).collect();
        for (name, outcomes) in self.outcomes(answers)? {
            for (verdict, outcome) in verdicts.iter_mut().zip(outcomes) {
                match outcome {
                    Outcome::Reward(reward) => verdict.rewards.insert(name.clone(), Some(reward)),
                    Outcome::Failed => verdict.rewards.insert(name.clone(), None),
                    Outcome::NotApplicable => None,
                };
            }
        }
        for verdict in &mut verdicts {
            verdict.total = self.total(&verdict.rewards);
        }
        Ok(verdicts)
    }

    /// The outcomes of the functions that may fail, by their names.
    fn outcomes(&mut self, answers: &[Judged<'_>]) -> Result<Vec<(String, Vec<Outcome>)>, RlError> {
        let mut made = Vec::new();
        if let Some(command) = &mut self.command {
            made.push((Function::Command.name().to_owned(), command.rewards(answers)?));
        }
        if let Some(endpoint) = &mut self.endpoint {
            made.push((Function::Endpoint.name().to_owned(), endpoint.rewards(answers)));
        }
        if let Some(code) = &mut self.code {
            made.push((Function::Code.name().to_owned(), code.rewards(answers, &self.settings.marks)));
        }
        if let Some(model) = &mut self.model {
            made.push((Function::Model.name().to_owned(), model.rewards(answers)?));
        }
        if let Some(python) = &mut self.python {
            for (name, _) in python.functions().to_vec() {
                let outcomes = python.rewards(&name, answers)?;
                made.push((name, outcomes));
            }
        }
        Ok(made)
    }

    /// The failures of each function that may fail so far, by its name.
    pub fn failures(&self) -> Vec<(String, Failures)> {
        let of = |function: Function, failures: &Failures| (function.name().to_owned(), failures.clone());
        let command = self.command.iter().map(|command| of(Function::Command, &command.failures));
        let endpoint = self.endpoint.iter().map(|endpoint| of(Function::Endpoint, &endpoint.failures));
        let code = self.code.iter().map(|code| of(Function::Code, &code.failures));
        let model = self.model.iter().map(|model| of(Function::Model, &model.failures));
        let python = self.python.iter().flat_map(|python| python.failures.clone());
        let all = command.chain(endpoint).chain(code).chain(model).chain(python);
        all.filter(|(_, failures)| failures.count > 0).collect()
    }

    fn total(&self, rewards: &BTreeMap<String, Option<f64>>) -> Option<f64> {
        let built_in = self.settings.functions.iter().map(|(function, weight)| (function.name(), *weight));
        let python = self.settings.python.iter().flat_map(|python| &python.functions);
        let all = built_in.chain(python.map(|(name, weight)| (name.as_str(), *weight)));
        let weighted = all.filter_map(|(name, weight)| Some(weight * (*rewards.get(name)?)?));
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
                Function::Command | Function::Endpoint | Function::Code | Function::Model => return None,
            })
        };
        let functions = self.settings.functions.iter().map(|(function, _)| *function);
        let built_in = functions.filter(|function| !function.is_external());
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
            endpoint: None,
            code: None,
            python: None,
        }
    }

    fn rewards(functions: &[Function], completion: &str, answer: &str, tokens: usize) -> Vec<f64> {
        let weighted: Vec<(Function, f64)> = functions.iter().map(|function| (*function, 1.0)).collect();
        let columns = serde_json::Map::new();
        let judged = Judged { prompt: "", completion, answer: Some(answer), tokens, columns: &columns };
        let verdict = Judge::new(settings(&weighted)).unwrap().judge(&[judged]).unwrap().remove(0);
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
        let mut judge = Judge::new(settings(&weighted)).unwrap();
        let made = judge.judge(&[judged(Some("4")), judged(None)]).unwrap();
        assert_eq!((made[0].total, made[1].total), (Some(1.75), Some(-0.25)));
        assert_eq!(made[1].rewards["exact"], None);
        assert_eq!((made[0].is_correct, made[1].is_correct), (Some(true), None));
        let mut judge = Judge::new(settings(&[(Function::Exact, 1.0)])).unwrap();
        assert_eq!(judge.judge(&[judged(None)]).unwrap()[0].total, None);
    }

    #[test]
    fn a_reward_model_judges_beside_functions() {
        struct Lengths;
        impl RewardModel for Lengths {
            fn rewards(&mut self, answers: &[Judged<'_>]) -> Result<Vec<Result<f64, String>>, RlError> {
                let reward = |answer: &Judged<'_>| match answer.tokens {
                    0 => Ok(f64::NAN),
                    tokens if tokens > 9 => Err("it is too long".to_owned()),
                    tokens => Ok(tokens as f64),
                };
                Ok(answers.iter().map(reward).collect())
            }
        }
        let columns = serde_json::Map::new();
        let judged =
            |tokens| Judged { prompt: "", completion: "4", answer: Some("4"), tokens, columns: &columns };
        let weighted = [(Function::Exact, 1.0), (Function::Model, 0.5)];
        let mut judge = Judge::new(settings(&weighted)).unwrap().with_model(Box::new(Lengths));
        let made = judge.judge(&[judged(3), judged(0), judged(10)]).unwrap();
        let totals: Vec<Option<f64>> = made.iter().map(|verdict| verdict.total).collect();
        assert_eq!(totals, [Some(2.5), Some(1.0), Some(1.0)]);
        assert_eq!(made[1].rewards["model"], None);
        let [(name, failures)] = &judge.failures()[..] else { panic!("one function fails") };
        assert_eq!((name.as_str(), failures.count, failures.last.as_str()), ("model", 2, "it is too long"));
    }
}
