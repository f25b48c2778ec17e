//! Rewards by a process of the user, which speaks JSON lines: a line for each answer, and a line with its reward in return.

use std::{
    io::{BufRead, BufReader, Read, Write},
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, sync_channel},
    thread,
    time::{Duration, Instant},
};

use serde::Deserialize;
use serde_json::json;

use super::Judged;
use crate::RlError;

/// The longest line that is read of a process.
const MOST: u64 = 1 << 20;

/// The lines of a process that wait to be read.
const WAITING: usize = 64;

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
    process: Option<Process>,
    failures: u64,
    last: String,
}

/// A running process.
struct Process {
    child: Child,
    input: Option<ChildStdin>,
    lines: Receiver<Result<String, String>>,
}

/// A line of a process.
#[derive(Deserialize)]
struct Reply {
    reward: f64,
}

impl CommandReward {
    /// A process that starts with the first answers.
    pub fn new(settings: CommandSettings) -> Self {
        Self { settings, process: None, failures: 0, last: String::new() }
    }

    /// The number of failures so far, and the reason of the last one.
    pub fn failures(&self) -> Option<(u64, &str)> {
        (self.failures > 0).then_some((self.failures, self.last.as_str()))
    }

    /// The rewards of answers; `None` where all attempts failed.
    ///
    /// # Errors
    /// The process cannot be started.
    pub fn rewards(&mut self, answers: &[Judged<'_>]) -> Result<Vec<Option<f64>>, RlError> {
        answers.iter().map(|answer| self.reward(answer)).collect()
    }

    fn reward(&mut self, answer: &Judged<'_>) -> Result<Option<f64>, RlError> {
        let mut line = json!({
            "prompt": answer.prompt,
            "completion": answer.completion,
            "answer": answer.answer,
        });
        if let Some(object) = line.as_object_mut() {
            for (name, value) in answer.columns {
                object.entry(name.clone()).or_insert_with(|| value.clone());
            }
        }
        let line = format!("{line}\n");
        for _ in 0..=self.settings.retries {
            let process = match self.process.take() {
                Some(process) => process,
                None => Process::start(&self.settings.line).map_err(|source| RlError::Unusable {
                    place: format!("the command `{}`", self.settings.line),
                    reason: format!("cannot be started: {source}"),
                })?,
            };
            let (mut process, limit) = (process, self.settings.limit);
            match process.ask(&line, limit) {
                Ok(reward) => {
                    self.process = Some(process);
                    return Ok(Some(reward));
                }
                // A process that failed once may be out of step, so that another one takes its place.
                Err(reason) => {
                    process.end();
                    self.failures += 1;
                    self.last = reason;
                }
            }
        }
        Ok(None)
    }
}

impl Drop for CommandReward {
    fn drop(&mut self) {
        if let Some(process) = &mut self.process {
            process.end();
        }
    }
}

impl Process {
    fn start(line: &str) -> std::io::Result<Self> {
        let mut child = Command::new("sh")
            .args(["-c", line])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let output = child.stdout.take().expect("the output is piped");
        let input = child.stdin.take();
        let (sender, lines) = sync_channel(WAITING);
        thread::spawn(move || {
            let mut output = BufReader::new(output);
            loop {
                let mut line = Vec::new();
                let read = output.by_ref().take(MOST).read_until(b'\n', &mut line);
                let message = match read {
                    Ok(0) => return,
                    Ok(_) if !line.ends_with(b"\n") && line.len() as u64 == MOST => {
                        Err(format!("its line is longer than {MOST} bytes"))
                    }
                    Ok(_) => String::from_utf8(line).map_err(|_| "its line is not UTF-8 text".to_owned()),
                    Err(error) => Err(format!("its output cannot be read: {error}")),
                };
                let is_end = message.is_err();
                // A process that writes further lines waits here, until it is ended.
                if sender.send(message).is_err() || is_end {
                    return;
                }
            }
        });
        Ok(Self { child, input, lines })
    }

    /// The reward of an answer, or the reason why there is none.
    fn ask(&mut self, line: &str, limit: Duration) -> Result<f64, String> {
        let until = Instant::now() + limit;
        let mut input = self.input.take().ok_or("its input is closed")?;
        // The process may not read, so that another thread waits for it.
        let line = line.to_owned();
        let (done, written) = sync_channel(1);
        thread::spawn(move || {
            let result = input.write_all(line.as_bytes()).and_then(|()| input.flush());
            let _ = done.send(result.map(|()| input));
        });
        let rest = || until.saturating_duration_since(Instant::now());
        let late = || format!("it gave no reward within {} s", limit.as_secs_f64());
        match written.recv_timeout(rest()) {
            Ok(Ok(input)) => self.input = Some(input),
            Ok(Err(_)) => return Err(self.ending().unwrap_or_else(|| "it closed its input".to_owned())),
            Err(_) => return Err(late()),
        }
        let line = match self.lines.recv_timeout(rest()) {
            Ok(line) => line?,
            Err(RecvTimeoutError::Timeout) => return Err(late()),
            Err(RecvTimeoutError::Disconnected) => {
                return Err(self.ending().unwrap_or_else(|| "it closed its output".to_owned()));
            }
        };
        let reply: Reply = serde_json::from_str(&line)
            .map_err(|error| format!("its line is no object with a number `reward`: {error}"))?;
        if reply.reward.is_finite() { Ok(reply.reward) } else { Err("its reward is not finite".to_owned()) }
    }

    /// How the process ended, if it did.
    fn ending(&mut self) -> Option<String> {
        // The end of the output may precede that of the process.
        for _ in 0..20 {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Some(format!("it ended ({status})"));
            }
            thread::sleep(Duration::from_millis(5));
        }
        None
    }

    fn end(&mut self) {
        self.input = None;
        // A process that has ended is only waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
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
        let rewards = command.rewards(&answers).unwrap();
        let (failures, last) =
            command.failures().map_or((0, String::new()), |(count, last)| (count, last.to_owned()));
        (rewards, failures, last)
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
            ("sleep 60", "no reward within 0.7 s"),
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
