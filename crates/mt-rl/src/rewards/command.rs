//! Rewards by a process of the user, which speaks JSON lines: a line for each answer, and a line with its reward in return.

use std::{process::Command, time::Duration};

use super::{
    Judged,
    child::Child,
    outcome::{Failures, Outcome, request, reward_of},
};
use crate::RlError;

/// The process of a run and its limits.
#[derive(Clone, Debug, PartialEq)]
pub struct CommandSettings {
    /// The command line, for `sh -c`.
    pub line: String,
    /// The time for each answer.
    pub limit: Duration,
    /// The number of further attempts after a failure.
    pub retries: usize,
}

/// A process that judges answers.
pub struct CommandReward {
    settings: CommandSettings,
    process: Option<Child>,
    pub(super) failures: Failures,
}

impl CommandReward {
    /// A process that starts with the first answers.
    pub fn new(settings: CommandSettings) -> Self {
        Self { settings, process: None, failures: Failures::default() }
    }

    /// The rewards of answers.
    ///
    /// # Errors
    /// The process cannot be started.
    pub(super) fn rewards(&mut self, answers: &[Judged<'_>]) -> Result<Vec<Outcome>, RlError> {
        answers.iter().map(|answer| self.reward(answer)).collect()
    }

    fn reward(&mut self, answer: &Judged<'_>) -> Result<Outcome, RlError> {
        let line = request(answer).to_string();
        for _ in 0..=self.settings.retries {
            let mut process =
                match self.process.take() {
                    Some(process) => process,
                    None => Child::start(Command::new("sh").args(["-c", &self.settings.line])).map_err(
                        |source| RlError::Unusable {
                            place: format!("the command `{}`", self.settings.line),
                            reason: format!("cannot be started: {source}"),
                        },
                    )?,
                };
            let reply = process.ask(&line, self.settings.limit);
            match reply.and_then(|line| reward_of(&line)) {
                Ok(reward) => {
                    self.process = Some(process);
                    return Ok(Outcome::Reward(reward));
                }
                // A process that failed once may be out of step, so that another one takes its place.
                Err(reason) => self.failures.add(reason),
            }
        }
        Ok(Outcome::Failed)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn rewards(line: &str, retries: usize, completions: &[&str]) -> (Vec<Option<f64>>, u64, String) {
        let limit = Duration::from_millis(700);
        let mut command = CommandReward::new(CommandSettings { line: line.to_owned(), limit, retries });
        let columns = serde_json::Map::from_iter([("level".to_owned(), json!(3))]);
        let answers: Vec<Judged<'_>> = completions
            .iter()
            .map(|completion| Judged {
                prompt: "p",
                completion,
                answer: Some("a"),
                tokens: 1,
                columns: &columns,
            })
            .collect();
        let rewards = command.rewards(&answers).unwrap().into_iter().map(|outcome| match outcome {
            Outcome::Reward(reward) => Some(reward),
            Outcome::NotApplicable | Outcome::Failed => None,
        });
        (rewards.collect(), command.failures.count, command.failures.last)
    }

    const PYTHON: &str = "python3 -u -c '
import json, sys
for line in sys.stdin:
    row = json.loads(line)
    print(json.dumps({\"reward\": len(row[\"completion\"]) + row[\"level\"]}))'";

    #[test]
    fn a_process_judges_answers() {
        assert_eq!(rewards(PYTHON, 0, &["", "ab"]), (vec![Some(3.0), Some(5.0)], 0, String::new()));
    }

    #[test]
    fn failures_stop_nothing_and_are_counted() {
        for (line, expected) in [
            ("sleep 60", "no answer within 0.7 s"),
            ("exit 3", "it ended (exit status: 3)"),
            ("while read line; do echo '{\"reward\": NaN}'; done", "no object with a number"),
            ("while read line; do echo '{\"reward\": \"1\"}'; done", "no object with a number"),
            ("while read line; do echo '{\"reward\": 1e999}'; done", "no object with a number"),
            ("head -c 3000000 /dev/zero | tr '\\0' x; sleep 60", "longer than 1048576 bytes"),
            ("yes garbage", "no object with a number"),
            ("no_such_program_at_all", "it ended"),
        ] {
            let (rewards, failures, last) = rewards(line, 1, &["a"]);
            assert_eq!((rewards, failures), (vec![None], 2), "{line}: {last}");
            assert!(last.contains(expected), "{line}: {last}");
        }
    }

    #[test]
    fn another_process_takes_the_place_of_one_that_failed() {
        let directory = tempfile::tempdir().unwrap();
        let mark = directory.path().join("mark");
        let line = format!(
            "if [ -e {mark} ]; then while read line; do echo '{{\"reward\": 2}}'; done; else touch {mark}; exit 1; fi",
            mark = mark.display()
        );
        let (rewards, failures, _) = rewards(&line, 1, &["a", "b"]);
        assert_eq!((rewards, failures), (vec![Some(2.0), Some(2.0)], 1));
    }
}
