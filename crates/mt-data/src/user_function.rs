//! Functions of the user in Python, which turn rows of a dataset into others.
//!
//! They run in the user's `python3`, a child process that receives a row as a line of JSON and answers with one. Rows are
//! processed in order and once: a run keeps what they become as its own copy of the data, so that it resumes without
//! Python.

use std::{
    io::{BufRead, BufReader, BufWriter, ErrorKind, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Stdio},
};

use serde_json::{Map, Value, json};

use crate::{
    error::{DataError, Result},
    files,
    python::{INTERPRETER, python_command, python_failure},
    source::{Dataset, Source},
    watch::Watch,
};

/// The program that imports the function and applies it.
const PROGRAM: &str = include_str!("user_function.py");

/// A function of the user.
#[derive(Clone, Debug, PartialEq)]
pub enum UserFunction {
    /// `module.function(row, **arguments)`, which returns a row with conversations.
    Formatting { path: String, arguments: Map<String, Value> },
    /// `process_data(dataset, tokenizer, template, config, row)` in a file. Tokenizer and template are `None`.
    Processor { file: PathBuf, dataset: String, arguments: Map<String, Value> },
}

impl UserFunction {
    /// The key that names the function, with its value.
    fn stated(&self) -> String {
        match self {
            Self::Formatting { path, .. } => format!("`formatting_func_path={path}`"),
            Self::Processor { file, .. } => format!("`dataset_processor_path={}`", file.display()),
        }
    }

    fn request(&self) -> Value {
        match self {
            Self::Formatting { path, arguments } => {
                json!({"kind": "formatting", "path": path, "arguments": arguments})
            }
            Self::Processor { file, dataset, arguments } => {
                json!({"kind": "processor", "path": file, "dataset": dataset, "arguments": arguments})
            }
        }
    }

    /// Writes what the function makes of the rows of a source, which has records, as JSON lines with these columns.
    ///
    /// # Errors
    /// The source cannot be read, there is no interpreter, the function cannot be imported, or it fails for a row.
    pub fn save(&self, source: &Source, columns: &[String], file: &Path, watch: Watch<'_>) -> Result<()> {
        let dataset = Dataset::open_watched(source, watch)?;
        let mut python = Python::start(self)?;
        let mut failure = None;
        let written = files::replace(file, |file| {
            for index in 0..dataset.num_documents() {
                let row = watch.check().and_then(|()| dataset.read(index)).and_then(|row| {
                    python.apply(&row, columns).map_err(|reason| DataError::UserFunction {
                        place: dataset.place(index),
                        function: self.stated(),
                        reason,
                    })
                });
                match row {
                    Ok(row) => writeln!(file, "{row}")?,
                    Err(error) => {
                        failure = Some(error);
                        return Err(ErrorKind::Other.into());
                    }
                }
            }
            Ok(())
        });
        match failure {
            Some(error) => Err(error),
            None => written,
        }
    }
}

/// A running interpreter that has imported a function. It ends with this value.
struct Python {
    child: Child,
    rows: BufWriter<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Python {
    fn start(function: &UserFunction) -> Result<Self> {
        let failed = |reason: String| DataError::NoUserFunction { function: function.stated(), reason };
        let started = python_command(PROGRAM).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = started.map_err(|error| failed(python_failure(&error)))?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let mut python = Self {
            child,
            rows: BufWriter::new(input.expect("its input is a pipe")),
            answers: BufReader::new(output.expect("its output is a pipe")),
        };
        let hint = match function {
            UserFunction::Formatting { .. } => {
                "write `formatting_func_path=module.function`, of a module in the working directory or on PYTHONPATH"
            }
            UserFunction::Processor { .. } => {
                "name a file with `def process_data(dataset_name, tokenizer, template, config, row)`"
            }
        };
        let imported = python.ask(&function.request().to_string());
        imported.map_err(|reason| failed(format!("it cannot be imported: {reason}\nhint: {hint}")))?;
        Ok(python)
    }

    /// The row that the function makes of a row, or what is wrong with it.
    fn apply(&mut self, row: &str, columns: &[String]) -> Result<Value, String> {
        let hint = "hint: correct the function or the row";
        // A row is one line, however it was written.
        let line = match row.contains(['\n', '\r']) {
            true => serde_json::from_str::<Value>(row)
                .map_err(|error| format!("is no JSON: {error}"))?
                .to_string(),
            false => row.to_owned(),
        };
        let made = self.ask(&line).map_err(|reason| format!("{reason}\n{hint}"))?;
        match columns.iter().find(|column| made.get(column.as_str()).is_none()) {
            None => Ok(made),
            Some(missing) => {
                let names: Vec<&String> = made.as_object().into_iter().flat_map(Map::keys).collect();
                let found = if names.is_empty() { "nothing".to_owned() } else { files::quoted(&names) };
                Err(format!("returned {found} without `{missing}`\n{hint}"))
            }
        }
    }

    fn ask(&mut self, line: &str) -> Result<Value, String> {
        let sent = writeln!(self.rows, "{line}").and_then(|()| self.rows.flush());
        let mut answer = String::new();
        let received = sent.and_then(|()| self.answers.read_line(&mut answer));
        if !received.is_ok_and(|length| length > 0) {
            // A process that has closed its pipes has ended, or is about to.
            let status =
                self.child.wait().map_or_else(|error| error.to_string(), |status| status.to_string());
            return Err(format!("`{INTERPRETER}` ended ({status}) instead of answering"));
        }
        let mut answer: Map<String, Value> = serde_json::from_str(&answer)
            .map_err(|error| format!("`{INTERPRETER}` answered no JSON: {error}"))?;
        match (answer.remove("row"), answer.get("error").and_then(Value::as_str)) {
            (Some(row), _) => Ok(row),
            (None, Some(error)) => Err(error.to_owned()),
            (None, None) => Err(format!("`{INTERPRETER}` answered neither a row nor an error")),
        }
    }
}

impl Drop for Python {
    fn drop(&mut self) {
        // It may be within the user's function, for example after a signal.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
