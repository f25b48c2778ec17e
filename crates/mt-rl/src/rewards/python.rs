//! Rewards by functions of the user in Python, which run in the user's `python3`, a child that speaks JSON lines.

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use mt_data::{python_command, python_failure};
use serde_json::{Map, Value, json};

use super::{
    Judged,
    child::Child,
    outcome::{Failures, Outcome},
};
use crate::RlError;

/// The program that imports the functions and calls them.
const PROGRAM: &str = include_str!("python.py");

/// The time for importing a module, which may import large ones itself.
const IMPORTING: Duration = Duration::from_secs(300);

/// The functions of a run and their limits.
#[derive(Clone, Debug, PartialEq)]
pub struct PythonSettings {
    /// The file with the functions.
    pub path: PathBuf,
    /// The functions with their weights.
    pub functions: Vec<(String, f64)>,
    /// The time for each answer.
    pub limit: Duration,
    /// The number of further attempts after a process that hung or ended.
    pub retries: usize,
}

/// A Python process that judges answers.
pub(super) struct PythonReward {
    settings: PythonSettings,
    process: Option<Child>,
    /// By function.
    pub failures: BTreeMap<String, Failures>,
}

/// A reply other than a reward.
enum Mishap {
    /// The function raised an exception, which it would raise again.
    Raised(String),
    /// The process is of no use any more.
    Lost(String),
}

impl PythonReward {
    /// Starts the process and imports the functions.
    ///
    /// # Errors
    /// There is no interpreter, or the functions cannot be imported.
    pub fn start(settings: PythonSettings) -> Result<Self, RlError> {
        let process = Some(start(&settings)?);
        Ok(Self { settings, process, failures: BTreeMap::new() })
    }

    /// The functions with their weights.
    pub fn functions(&self) -> &[(String, f64)] {
        &self.settings.functions
    }

    /// The rewards of answers by a function.
    ///
    /// # Errors
    /// A new process cannot import the functions.
    pub fn rewards(&mut self, function: &str, answers: &[Judged<'_>]) -> Result<Vec<Outcome>, RlError> {
        answers.iter().map(|answer| self.reward(function, answer)).collect()
    }

    fn reward(&mut self, function: &str, answer: &Judged<'_>) -> Result<Outcome, RlError> {
        let line = json!({
            "function": function,
            "prompt": answer.prompt,
            "completion": answer.completion,
            "answer": answer.answer,
            "columns": answer.columns,
        })
        .to_string();
        for _ in 0..=self.settings.retries {
            let mut process = match self.process.take() {
                Some(process) => process,
                None => start(&self.settings)?,
            };
            let reply = process.ask(&line, self.settings.limit).map_err(Mishap::Lost);
            let failures = self.failures.entry(function.to_owned()).or_default();
            match reply.and_then(|line| read(&line)) {
                Ok(outcome) => {
                    self.process = Some(process);
                    return Ok(outcome);
                }
                Err(Mishap::Raised(reason)) => {
                    self.process = Some(process);
                    failures.add(reason);
                    return Ok(Outcome::Failed);
                }
                Err(Mishap::Lost(reason)) => failures.add(reason),
            }
        }
        Ok(Outcome::Failed)
    }
}

fn read(line: &str) -> Result<Outcome, Mishap> {
    let reply: Map<String, Value> = serde_json::from_str(line)
        .map_err(|error| Mishap::Lost(format!("its line is no object of JSON: {error}")))?;
    if let Some(error) = reply.get("error").and_then(Value::as_str) {
        return Err(Mishap::Raised(error.to_owned()));
    }
    match reply.get("reward") {
        Some(Value::Null) => Ok(Outcome::NotApplicable),
        Some(Value::Number(reward)) => Ok(Outcome::Reward(reward.as_f64().unwrap_or_default())),
        _ => Err(Mishap::Lost("its line has neither a reward nor an error".to_owned())),
    }
}

/// A process that has imported the functions.
fn start(settings: &PythonSettings) -> Result<Child, RlError> {
    let unusable = |reason: String| RlError::Unusable {
        place: format!("`reward_functions_path={}`", settings.path.display()),
        reason,
    };
    let started = Child::start(&mut python_command(PROGRAM));
    let mut process = started.map_err(|error| unusable(python_failure(&error)))?;
    let names: Vec<&String> = settings.functions.iter().map(|(name, _)| name).collect();
    let request = json!({"path": settings.path, "functions": names}).to_string();
    let imported = process.ask(&request, IMPORTING).map_err(Mishap::Lost).and_then(|line| read(&line));
    imported.map_err(|(Mishap::Raised(reason) | Mishap::Lost(reason))| {
        unusable(format!(
            "it cannot be imported: {reason}\nhint: name a file with functions such as \
             `def length(prompts, completions, **columns): return [-len(text) for text in completions]`"
        ))
    })?;
    Ok(process)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const MODULE: &str = "
import os, time
def plain(prompts, completions, level): return [len(completions[0]) + level[0]]
def any_columns(prompts, completions, **columns):
    print('printed text is no reply')
    assert columns['answer'] == ['a']
    return [columns['level'][0] / 2]
def none(completions, **columns): return [None]
def raises(**columns): raise KeyError('x')
def nan(**columns): return [float('nan')]
def two(**columns): return [1.0, 2.0]
def text(**columns): return ['one']
def exits(**columns): raise SystemExit(3)
def crashes(**columns): os._exit(5)
def hangs(completions, **columns):
    while completions[0] == 'hang': time.sleep(1)
    return [1.0]
";

    fn start(directory: &tempfile::TempDir, functions: &[&str]) -> Result<PythonReward, RlError> {
        let path = directory.path().join("functions.py");
        fs::write(&path, MODULE).unwrap();
        PythonReward::start(PythonSettings {
            path,
            functions: functions.iter().map(|name| ((*name).to_owned(), 1.0)).collect(),
            limit: Duration::from_secs(2),
            retries: 1,
        })
    }

    fn outcomes(python: &mut PythonReward, function: &str, completions: &[&str]) -> Vec<Outcome> {
        let columns = Map::from_iter([("level".to_owned(), json!(3)), ("answer".to_owned(), json!("b"))]);
        let judged =
            |completion| Judged { prompt: "p", completion, answer: Some("a"), tokens: 1, columns: &columns };
        let answers: Vec<Judged<'_>> = completions.iter().copied().map(judged).collect();
        python.rewards(function, &answers).unwrap()
    }

    #[test]
    fn functions_judge_answers() {
        let directory = tempfile::tempdir().unwrap();
        let mut python = start(&directory, &["plain", "any_columns", "none"]).unwrap();
        assert_eq!(outcomes(&mut python, "plain", &["", "ab"]), [Outcome::Reward(3.0), Outcome::Reward(5.0)]);
        assert_eq!(outcomes(&mut python, "any_columns", &["x"]), [Outcome::Reward(1.5)]);
        assert_eq!(outcomes(&mut python, "none", &["x"]), [Outcome::NotApplicable]);
        assert!(python.failures.values().all(|failures| failures.count == 0), "{:?}", python.failures);
    }

    #[test]
    fn failures_stop_nothing_and_are_counted() {
        let directory = tempfile::tempdir().unwrap();
        // Exceptions are raised once; processes that are lost are tried again.
        for (function, count, expected) in [
            ("raises", 1, "KeyError: 'x' ("),
            ("nan", 1, "it returned nan"),
            ("two", 1, "it returned 2 rewards"),
            ("text", 1, "could not convert string to float"),
            ("exits", 1, "SystemExit: 3"),
            ("crashes", 2, "it ended (exit status: 5)"),
        ] {
            let mut python = start(&directory, &[function]).unwrap();
            assert_eq!(outcomes(&mut python, function, &["a"]), [Outcome::Failed], "{function}");
            let Failures { count: own, last } = &python.failures[function];
            assert!(*own == count && last.contains(expected), "{function}: {own}, {last}");
        }
        let mut python = start(&directory, &["hangs"]).unwrap();
        let made = outcomes(&mut python, "hangs", &["hang", "go on"]);
        assert_eq!(made, [Outcome::Failed, Outcome::Reward(1.0)]);
        assert!(python.failures["hangs"].last.contains("no answer within 2 s"), "{:?}", python.failures);
    }

    #[test]
    fn what_cannot_be_imported_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let error = start(&directory, &["absent"]).err().unwrap();
        assert!(error.is_user_error() && error.to_string().contains("no function `absent`"), "{error}");
        let path = directory.path().join("broken.py");
        fs::write(&path, "import no_such_module_at_all").unwrap();
        let functions = vec![("x".to_owned(), 1.0)];
        let settings = PythonSettings { path, functions, limit: IMPORTING, retries: 0 };
        let error = PythonReward::start(settings).err().unwrap().to_string();
        assert!(
            error.contains("No module named 'no_such_module_at_all'") && error.contains("hint: "),
            "{error}"
        );
    }
}
