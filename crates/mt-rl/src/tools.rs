//! Tools that a model calls within its answer: an environment of several turns.
//!
//! A call stands between marks at the end of a turn, as `name: argument` or as an object of JSON with `name` and `arguments`.
//! The tool's text follows it between marks of its own, and the model continues. A tool that fails says so to the model.

use std::{
    process::Command,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use serde_json::{Map, Value, json};

use crate::{
    RlError, math,
    rewards::{Child, Failures, Sandbox, SandboxLimits, code_of},
};

/// A tool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tool {
    /// Numbers and arithmetic, by the checker of mathematical answers.
    Calculator,
    /// A process of the user.
    Command,
    /// Code in the sandbox.
    Python,
}

impl Tool {
    /// All tools with their names.
    pub const ALL: [(&'static str, Self); 3] =
        [("calculator", Self::Calculator), ("command", Self::Command), ("python", Self::Python)];

    /// The tool of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(known, _)| *known == name).map(|(_, tool)| *tool)
    }
}

/// The tools of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolSettings {
    pub tools: Vec<Tool>,
    /// The texts that mark a call, with its end.
    pub call: [String; 2],
    /// The texts that mark the text of a tool, with its end.
    pub response: [String; 2],
    /// The most calls of an answer.
    pub most: usize,
    /// The command line of the processes of [`Tool::Command`].
    pub command: Option<String>,
    /// The number of these processes. All calls of an answer go to the same one.
    pub processes: usize,
    /// The time for each call of the process.
    pub limit: Duration,
    pub sandbox: SandboxLimits,
}

/// A call by an answer.
#[derive(Clone, Copy, Debug)]
pub struct ToolCall<'a> {
    /// The text between the marks of a call.
    pub text: &'a str,
    /// The number of the answer, which decides the process.
    pub answer: usize,
    /// Identifies the answer to the process.
    pub episode: &'a str,
    /// The columns of the prompt's record.
    pub columns: &'a Map<String, Value>,
}

/// The tools of a run, at work.
pub struct Tools {
    settings: ToolSettings,
    /// Each starts with its first call.
    processes: Vec<Mutex<Option<Child>>>,
    sandbox: Option<Sandbox>,
    failures: Mutex<Failures>,
}

impl Tools {
    /// Tools, of which the processes start with their first calls.
    ///
    /// # Errors
    /// The sandbox for code cannot be used on this machine.
    pub fn open(settings: ToolSettings) -> Result<Self, RlError> {
        let has_code = settings.tools.contains(&Tool::Python);
        let sandbox = has_code.then(|| Sandbox::open(settings.sandbox)).transpose();
        let sandbox =
            sandbox.map_err(|reason| RlError::Unusable { place: "the tool `python`".to_owned(), reason })?;
        let processes = (0..settings.processes.max(1)).map(|_| Mutex::new(None)).collect();
        Ok(Self { settings, processes, sandbox, failures: Mutex::new(Failures::default()) })
    }

    /// The most calls of an answer.
    pub fn most(&self) -> usize {
        self.settings.most
    }

    /// The text that ends a call, and so a turn.
    pub fn end_of_call(&self) -> &str {
        &self.settings.call[1]
    }

    /// The failures of the processes so far.
    pub fn failures(&self) -> Failures {
        locked(&self.failures).clone()
    }

    /// The call with which a turn ends.
    pub fn call_of<'a>(&self, turn: &'a str) -> Option<&'a str> {
        let [begin, end] = &self.settings.call;
        let before = turn.trim_end().strip_suffix(end.as_str())?;
        Some(before.rsplit_once(begin.as_str())?.1)
    }

    /// The responses to calls, each between its marks and with whether the tool succeeded, in the order of the calls.
    /// Calls run side by side: code on as many processors as there are, and as many calls of processes as there are of
    /// these. A process answers its calls in their order.
    pub fn respond(&self, calls: &[ToolCall<'_>]) -> Vec<(String, bool)> {
        let made = Mutex::new(vec![(String::new(), false); calls.len()]);
        let answer = |index: usize| {
            let said = self.result(&calls[index]);
            let is_success = said.is_ok();
            let text = said.unwrap_or_else(|reason| format!("error: {reason}"));
            let [begin, end] = &self.settings.response;
            locked(&made)[index] = (format!("{begin}{text}{end}"), is_success);
        };
        let mut of_processes = vec![Vec::new(); self.processes.len()];
        let mut others = Vec::new();
        for (index, call) in calls.iter().enumerate() {
            match self.tool_of(call.text) {
                Ok((Tool::Command, ..)) => of_processes[self.process_of(call)].push(index),
                _ => others.push(index),
            }
        }
        let next = AtomicUsize::new(0);
        let workers = thread::available_parallelism().map_or(1, usize::from).min(others.len());
        thread::scope(|scope| {
            for own in of_processes.iter().filter(|own| !own.is_empty()) {
                scope.spawn(|| own.iter().copied().for_each(&answer));
            }
            for _ in 0..workers {
                scope.spawn(|| {
                    while let Some(index) = others.get(next.fetch_add(1, Ordering::Relaxed)) {
                        answer(*index);
                    }
                });
            }
        });
        made.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of the process that answers a call.
    fn process_of(&self, call: &ToolCall<'_>) -> usize {
        call.answer % self.processes.len()
    }

    /// The tool that a call names, its name and its arguments.
    fn tool_of(&self, call: &str) -> Result<(Tool, String, Value), String> {
        let (name, arguments) = read_call(call).ok_or("a call is written as `name: argument`")?;
        let tool = Tool::named(&name).filter(|tool| self.settings.tools.contains(tool));
        Ok((tool.ok_or_else(|| format!("there is no tool `{name}`"))?, name, arguments))
    }

    fn result(&self, call: &ToolCall<'_>) -> Result<String, String> {
        let (tool, name, arguments) = self.tool_of(call.text)?;
        match tool {
            Tool::Calculator => {
                let expression = first_text(&arguments);
                let value =
                    math::number(&expression).ok_or_else(|| format!("`{expression}` is no number"))?;
                Ok(plain(value))
            }
            Tool::Python => {
                let sandbox = self.sandbox.as_ref().ok_or("there is no sandbox")?;
                let code = first_text(&arguments);
                let ran = sandbox
                    .run(&["python3", "-I", "-X", "utf8", "-c", code_of(&code)], b"")
                    .map_err(|error| format!("the sandbox cannot be started: {error}"))?;
                let text = String::from_utf8_lossy(&ran.output).trim_end().to_owned();
                match ran.status {
                    Some(status) if status.success() => Ok(text),
                    Some(status) => Err(format!("the code ended with {status}\n{text}")),
                    None => Err("the code took too long or wrote too much".to_owned()),
                }
            }
            Tool::Command => {
                let ToolCall { episode, columns, .. } = call;
                let line =
                    json!({"episode": episode, "name": name, "arguments": arguments, "columns": columns});
                let said = self.ask(self.process_of(call), &line.to_string());
                said.inspect_err(|reason| locked(&self.failures).add(reason.clone()))
                    .map_err(|_| "the tool failed".into())
            }
        }
    }

    /// The text with which a process responds; it is started anew after a failure.
    fn ask(&self, process: usize, line: &str) -> Result<String, String> {
        let command = self.settings.command.as_deref().unwrap_or_default();
        let mut place = locked(&self.processes[process]);
        let mut process = match place.take() {
            Some(process) => process,
            None => Child::start(Command::new("sh").args(["-c", command]))
                .map_err(|error| format!("`{command}` cannot be started: {error}"))?,
        };
        let reply = process.ask(line, self.settings.limit)?;
        let reply: Map<String, Value> = serde_json::from_str(&reply)
            .map_err(|error| format!("its line is no object with a `text`: {error}"))?;
        let text = reply.get("text").and_then(Value::as_str).ok_or("its line has no `text`")?.to_owned();
        *place = Some(process);
        Ok(text)
    }
}

/// The value behind a lock. A thread that panicked left nothing half done in it.
fn locked<T>(value: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    value.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The name of a tool and its arguments.
fn read_call(call: &str) -> Option<(String, Value)> {
    let call = call.trim();
    if call.starts_with('{') {
        let object: Map<String, Value> = serde_json::from_str(call).ok()?;
        let name = object.get("name")?.as_str()?.to_owned();
        return Some((name, object.get("arguments").cloned().unwrap_or_else(|| json!({}))));
    }
    let (name, argument) = call.split_once(':')?;
    Some((name.trim().to_owned(), Value::String(argument.trim().to_owned())))
}

/// The text that the arguments of a tool are or have first.
fn first_text(arguments: &Value) -> String {
    match arguments {
        Value::String(text) => text.clone(),
        Value::Object(object) => object.values().next().map(first_text).unwrap_or_default(),
        other => other.to_string(),
    }
}

/// A number without a fraction that it does not have.
fn plain(value: f64) -> String {
    if value.fract() == 0.0 && value.abs() < 1e15 { format!("{value:.0}") } else { format!("{value}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tools(tools: &[Tool], command: &str) -> Tools {
        tools_within(tools, command, 30_000)
    }

    fn tools_within(tools: &[Tool], command: &str, milliseconds: u64) -> Tools {
        let mark = |text: &str| [format!("<{text}>"), format!("</{text}>")];
        Tools::open(ToolSettings {
            tools: tools.to_vec(),
            call: mark("call"),
            response: mark("said"),
            most: 2,
            command: Some(command.to_owned()),
            processes: 2,
            limit: Duration::from_millis(milliseconds),
            sandbox: SandboxLimits {
                time: Duration::from_secs(3),
                memory: 1 << 29,
                processes: 16,
                files: 1 << 20,
            },
        })
        .unwrap()
    }

    fn said(tools: &Tools, call: &str) -> (String, bool) {
        let columns = Map::from_iter([("level".to_owned(), json!(2))]);
        tools.respond(&[ToolCall { text: call, answer: 3, episode: "1-2-3", columns: &columns }]).remove(0)
    }

    #[test]
    fn a_call_ends_a_turn() {
        let tools = tools(&[Tool::Calculator], "");
        for (turn, expected) in [
            ("So <call>calculator: 1+1</call>", Some("calculator: 1+1")),
            ("<call>a: b</call> and <call>c: d</call>\n", Some("c: d")),
            ("<call>a: b</call> done", None),
            ("a: b</call>", None),
        ] {
            assert_eq!(tools.call_of(turn), expected, "{turn}");
        }
    }

    #[test]
    fn the_calculator_computes() {
        let tools = tools(&[Tool::Calculator], "");
        for (call, expected) in [
            ("calculator: 12*34", "408"),
            (r#"{"name": "calculator", "arguments": {"expression": "(1+2)/4"}}"#, "0.75"),
            ("calculator: 2^10 - 1", "1023"),
            ("calculator: x+", "error: `x+` is no number"),
            ("abacus: 1", "error: there is no tool `abacus`"),
            ("command: 1", "error: there is no tool `command`"),
            ("12*34", "error: a call is written as `name: argument`"),
        ] {
            let (text, is_success) = said(&tools, call);
            assert_eq!(text, format!("<said>{expected}</said>"), "{call}");
            assert_eq!(is_success, !expected.starts_with("error"), "{call}");
        }
    }

    #[test]
    fn a_process_is_a_tool_whose_failures_are_counted() {
        let program = "python3 -u -c '
import json, sys
for line in sys.stdin:
    row = json.loads(line)
    print(json.dumps({\"text\": row[\"episode\"] + row[\"arguments\"] * row[\"columns\"][\"level\"]}))'";
        let one = tools(&[Tool::Command], program);
        assert_eq!(said(&one, "command: ab"), ("<said>1-2-3abab</said>".to_owned(), true));
        assert_eq!(one.failures().count, 0);
        for (line, reason) in [
            ("exit 1", "it ended"),
            ("sleep 9", "within 0.7 s"),
            ("yes", "no object"),
            ("yes {}", "no `text`"),
        ] {
            let other = tools_within(&[Tool::Command], line, 700);
            let failed = ("<said>error: the tool failed</said>".to_owned(), false);
            assert_eq!([said(&other, "command: a"), said(&other, "command: a")], [failed.clone(), failed]);
            assert!(
                other.failures().count == 2 && other.failures().last.contains(reason),
                "{:?}",
                other.failures()
            );
        }
    }
    #[test]
    fn calls_run_side_by_side_and_are_answered_in_their_order() {
        // Two processes meet in a directory, which they could not if one waited for the other.
        let directory = tempfile::tempdir().unwrap();
        let program = format!(
            "python3 -u -c '
import json, os, sys, time
for line in sys.stdin:
    row = json.loads(line)
    open(os.path.join(\"{}\", str(os.getpid())), \"w\").close()
    while len(os.listdir(\"{}\")) < 2: time.sleep(0.01)
    print(json.dumps({{\"text\": row[\"episode\"] + \" \" + str(os.getpid())}}))'",
            directory.path().display(),
            directory.path().display(),
        );
        let tools = tools(&[Tool::Command, Tool::Calculator], &program);
        let columns = Map::new();
        let episodes: Vec<String> = (0..6).map(|answer| format!("answer {answer}")).collect();
        let calls: Vec<ToolCall<'_>> = episodes
            .iter()
            .enumerate()
            .map(|(answer, episode)| {
                let text = if answer == 4 { "calculator: 2+3" } else { "command: x" };
                ToolCall { text, answer, episode, columns: &columns }
            })
            .collect();
        let made = tools.respond(&calls);
        assert_eq!(tools.failures().count, 0, "{:?}", tools.failures());
        assert!(made.iter().all(|(_, is_success)| *is_success), "{made:?}");
        assert_eq!(made[4].0, "<said>5</said>");
        let process = |answer: usize| -> &str {
            let text = made[answer].0.strip_prefix(&format!("<said>answer {answer} ")).unwrap();
            text.strip_suffix("</said>").unwrap()
        };
        assert_ne!(process(0), process(1));
        assert_eq!([process(0), process(1), process(1)], [process(2), process(3), process(5)]);
    }
}
