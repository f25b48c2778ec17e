//! Rewards of code: the share of a prompt's tests that it passes, in a sandbox.

use std::{thread, time::SystemTime};

use serde_json::{Map, Value, json};

use super::{
    Judged,
    format::Marks,
    outcome::{Failures, Outcome, at_once},
    sandbox::{Sandbox, SandboxLimits},
};
use crate::{RlError, seeds::key};

/// The program in the sandbox.
const PROGRAM: &str = include_str!("code.py");

/// The first line of its output.
const BEGIN: &str = "begin\n";

/// The tests of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CodeSettings {
    /// The column with the tests of a prompt.
    pub column: String,
    pub limits: SandboxLimits,
}

/// A test of code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CodeTest {
    /// Code in Python that follows the answer's and raises no exception.
    Script(String),
    /// The output that the answer's code prints for an input. White space at the ends of lines does not matter.
    Output { input: String, output: String },
}

impl CodeTest {
    /// The tests of a prompt: a script, or a list of scripts and of objects with `input` and `output`.
    ///
    /// # Errors
    /// The reason why there are none.
    pub fn of(columns: &Map<String, Value>, column: &str) -> Result<Vec<Self>, String> {
        let wrong = || {
            format!(
                "`{column}` is neither a script nor a list of scripts and of objects with `input` and `output`\nhint: \
                 write tests such as `\"assert twice(2) == 4\"` or `{{\"input\": \"2\", \"output\": \"4\"}}`"
            )
        };
        let test = |value: &Value| match value {
            Value::String(script) => Ok(Self::Script(script.clone())),
            Value::Object(pair) => {
                let text = |name: &str| pair.get(name).and_then(Value::as_str).map(str::to_owned);
                let both = text("input").zip(text("output"));
                both.map(|(input, output)| Self::Output { input, output }).ok_or_else(wrong)
            }
            _ => Err(wrong()),
        };
        match columns.get(column) {
            Some(script @ Value::String(_)) => Ok(vec![test(script)?]),
            Some(Value::Array(tests)) if !tests.is_empty() => tests.iter().map(test).collect(),
            _ => Err(wrong()),
        }
    }
}

/// The code in an answer: the last block between fences, or all of it.
pub fn code_of(text: &str) -> &str {
    const FENCE: &str = "```";
    let Some((before, _)) = text.rsplit_once(FENCE) else { return text };
    // A fence that is not closed is an opening one.
    let whole = if before.matches(FENCE).count() % 2 == 1 { before } else { text };
    let block = whole.rsplit_once(FENCE).map_or(whole, |(_, block)| block);
    // The first line names the language.
    block.split_once('\n').map_or(block, |(_, code)| code)
}

/// Tests of code in a sandbox.
pub(super) struct CodeReward {
    settings: CodeSettings,
    sandbox: Sandbox,
    pub failures: Failures,
}

impl CodeReward {
    /// Tries the sandbox.
    ///
    /// # Errors
    /// It cannot be used on this machine.
    pub fn open(settings: CodeSettings) -> Result<Self, RlError> {
        let sandbox = Sandbox::open(settings.limits)
            .map_err(|reason| RlError::Unusable { place: "the sandbox for code".to_owned(), reason })?;
        Ok(Self { settings, sandbox, failures: Failures::default() })
    }

    /// The rewards of answers, of which each processor judges one at a time.
    pub fn rewards(&mut self, answers: &[Judged<'_>], marks: &Marks) -> Vec<Outcome> {
        let workers = thread::available_parallelism().map_or(1, usize::from);
        let mut failures = std::mem::take(&mut self.failures);
        let outcomes = at_once(answers, workers, &mut failures, |answer, fail| {
            let solution = marks.solution(answer.completion).unwrap_or(answer.completion);
            self.share(answer, code_of(solution)).map_or_else(
                |reason| {
                    fail(reason);
                    Outcome::Failed
                },
                Outcome::Reward,
            )
        });
        self.failures = failures;
        outcomes
    }

    /// The share of tests that code passes.
    fn share(&self, answer: &Judged<'_>, code: &str) -> Result<f64, String> {
        let tests = CodeTest::of(answer.columns, &self.settings.column)?;
        let mut passed = 0;
        for test in &tests {
            passed += usize::from(self.passes(code, test)?);
        }
        Ok(passed as f64 / tests.len() as f64)
    }

    /// Whether code passes a test. It fails if its time is over, if it floods its output, or if it crashes.
    fn passes(&self, code: &str, test: &CodeTest) -> Result<bool, String> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let number = format!("{:016x}", key(&[now.as_nanos() as u64, code.len() as u64]));
        let (input, tests) = match test {
            CodeTest::Script(script) => ("", Some(script)),
            CodeTest::Output { input, .. } => (input.as_str(), None),
        };
        let mut lines =
            json!({"code": code, "input": input, "has_tests": tests.is_some()}).to_string() + "\n";
        if let Some(tests) = tests {
            lines += &(json!({"tests": tests, "number": number}).to_string() + "\n");
        }
        let ran = self.sandbox.run(&["python3", "-I", "-X", "utf8", "-c", PROGRAM], lines.as_bytes());
        let ran = ran.map_err(|error| format!("the sandbox cannot be started: {error}"))?;
        let output = String::from_utf8_lossy(&ran.output);
        let Some(output) = output.strip_prefix(BEGIN) else {
            return match ran.status {
                None => Ok(false),
                Some(status) => Err(format!("the sandbox ran no Python ({status})")),
            };
        };
        if !ran.status.is_some_and(|status| status.success()) {
            return Ok(false);
        }
        Ok(match test {
            CodeTest::Script(_) => output.lines().last() == Some(number.as_str()),
            CodeTest::Output { output: expected, .. } => is_same_text(output, expected),
        })
    }
}

/// Whether texts differ at most by white space at the ends of lines and of the whole.
fn is_same_text(one: &str, other: &str) -> bool {
    let lines = |text: &str| -> Vec<String> {
        text.trim_end().lines().map(|line| line.trim_end().to_owned()).collect()
    };
    lines(one) == lines(other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_is_found_in_answers() {
        for (text, expected) in [
            ("x = 1", "x = 1"),
            ("So:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
            ("```\nx = 1\n```\nor\n```py\nx = 2\n```", "x = 2\n"),
            ("```python\nx = 1", "x = 1"),
        ] {
            assert_eq!(code_of(text), expected, "{text}");
        }
    }

    #[test]
    fn tests_are_read() {
        let of = |value: Value| CodeTest::of(&Map::from_iter([("tests".to_owned(), value)]), "tests");
        assert_eq!(of(json!("assert f()")), Ok(vec![CodeTest::Script("assert f()".to_owned())]));
        let both = of(json!(["assert f()", {"input": "1", "output": "2"}])).unwrap();
        assert_eq!(both[1], CodeTest::Output { input: "1".to_owned(), output: "2".to_owned() });
        for wrong in [json!([]), json!(3), json!([3]), json!([{"input": "1"}]), Value::Null] {
            assert!(of(wrong.clone()).unwrap_err().contains("`tests` is neither"), "{wrong}");
        }
        assert!(is_same_text("1 \n2\n\n", "1\n2") && !is_same_text("1\n2", "1\n 2"));
    }
}
