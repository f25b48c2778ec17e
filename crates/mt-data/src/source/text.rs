//! Plain text and JSON lines.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use rayon::prelude::*;
use serde_json::Value;

use super::Identity;
use crate::error::{DataError, Result};
use crate::files;

/// As many files stay open between reads; more are opened for each read.
const MAX_OPEN_FILES: usize = 256;

/// One document a file.
#[derive(Debug)]
pub(super) struct FileDocuments {
    paths: Vec<PathBuf>,
}

impl FileDocuments {
    pub(super) fn open(paths: Vec<PathBuf>, identity: &mut Identity) -> Result<Self> {
        let checked = paths.par_iter().map(|path| read_text(path)).map(|text| {
            text.map(|text| (text.len() as u64, crc32c::crc32c(text.as_bytes()), text.trim().is_empty()))
        });
        let checked = checked.collect::<Vec<_>>().into_iter().collect::<Result<Vec<_>>>()?;
        for (path, (length, checksum, _)) in paths.iter().zip(&checked) {
            identity.add(&files::name(path), *length, *checksum);
        }
        // Blank files keep their index; only a set of nothing but blank ones is empty.
        let all_blank = checked.iter().all(|(_, _, blank)| *blank);
        Ok(Self { paths: if all_blank { Vec::new() } else { paths } })
    }

    pub(super) fn len(&self) -> u64 {
        self.paths.len() as u64
    }

    pub(super) fn read(&self, index: u64) -> Result<String> {
        read_text(&self.paths[index as usize])
    }
}

fn read_text(path: &Path) -> Result<String> {
    let bytes = fs::read(path).map_err(DataError::io("read", path))?;
    String::from_utf8(bytes).map(without_mark).map_err(|error| {
        let valid = error.utf8_error().valid_up_to();
        let line = 1 + error.as_bytes()[..valid].iter().filter(|byte| **byte == b'\n').count() as u64;
        DataError::NotUtf8 { path: path.into(), offset: valid as u64, line }
    })
}

/// Some editors start a file with a byte order mark, which is no part of its text and no valid JSON.
fn without_mark(mut text: String) -> String {
    if text.starts_with('\u{feff}') {
        text.drain(..'\u{feff}'.len_utf8());
    }
    text
}

/// One document a line: the line itself, or the text under a column of the JSON object that it holds.
#[derive(Debug)]
pub(super) struct LineDocuments {
    files: Vec<LineFile>,
    /// Index of each file's first document, and at the end the number of documents.
    firsts: Vec<u64>,
    column: Option<String>,
    keep_open: bool,
}

#[derive(Debug)]
struct LineFile {
    path: PathBuf,
    length: u64,
    checksum: u32,
    /// Where each line that is not blank starts.
    starts: Vec<u64>,
    file: OnceLock<File>,
}

impl LineDocuments {
    pub(super) fn open(paths: Vec<PathBuf>, column: Option<String>, identity: &mut Identity) -> Result<Self> {
        let files = paths.into_par_iter().map(index_lines).collect::<Vec<_>>();
        let files = files.into_iter().collect::<Result<Vec<_>>>()?;
        let mut firsts = vec![0];
        for file in &files {
            identity.add(&files::name(&file.path), file.length, file.checksum);
            firsts.push(firsts[firsts.len() - 1] + file.starts.len() as u64);
        }
        identity.add(column.as_deref().unwrap_or(""), 0, 0);
        let keep_open = files.len() <= MAX_OPEN_FILES;
        let documents = Self { files, firsts, column, keep_open };
        if documents.column.is_some() {
            // A wrong column shows before anything is compiled.
            for (file, first) in documents.files.iter().zip(&documents.firsts) {
                if !file.starts.is_empty() {
                    documents.read(*first)?;
                }
            }
        }
        Ok(documents)
    }

    pub(super) fn len(&self) -> u64 {
        self.firsts[self.firsts.len() - 1]
    }

    pub(super) fn read(&self, index: u64) -> Result<String> {
        let which = self.firsts.partition_point(|first| *first <= index) - 1;
        let file = &self.files[which];
        let line = file.read_line((index - self.firsts[which]) as usize, self.keep_open)?;
        match &self.column {
            None => Ok(line.text),
            Some(column) => {
                json_text(&line.text, column).map_err(|problem| file.json_error(line.start, column, problem))
            }
        }
    }
}

struct Line {
    start: u64,
    text: String,
}

fn index_lines(path: PathBuf) -> Result<LineFile> {
    let mut reader = BufReader::with_capacity(1 << 20, files::open(&path)?);
    let (mut starts, mut offset, mut checksum, mut number) = (Vec::new(), 0u64, 0, 0u64);
    let mut line = Vec::new();
    loop {
        line.clear();
        let length = reader.read_until(b'\n', &mut line).map_err(DataError::io("read", &path))?;
        if length == 0 {
            break;
        }
        number += 1;
        checksum = crc32c::crc32c_append(checksum, &line);
        match std::str::from_utf8(&line) {
            Ok(text) if text.trim().is_empty() => {}
            Ok(_) => starts.push(offset),
            Err(error) => {
                let offset = offset + error.valid_up_to() as u64;
                return Err(DataError::NotUtf8 { path, offset, line: number });
            }
        }
        offset += length as u64;
    }
    Ok(LineFile { path, length: offset, checksum, starts, file: OnceLock::new() })
}

impl LineFile {
    fn read_line(&self, index: usize, keep_open: bool) -> Result<Line> {
        let start = self.starts[index];
        let end = self.starts.get(index + 1).copied().unwrap_or(self.length);
        let mut bytes = vec![0; (end - start) as usize];
        let opened;
        let file = match self.file.get() {
            Some(file) => file,
            None if keep_open => {
                opened = files::open(&self.path)?;
                self.file.get_or_init(|| opened)
            }
            None => {
                opened = files::open(&self.path)?;
                &opened
            }
        };
        file.read_exact_at(&mut bytes, start).map_err(DataError::io("read", &self.path))?;
        // Blank lines may lie between this line and the next document.
        if let Some(newline) = bytes.iter().position(|byte| *byte == b'\n') {
            bytes.truncate(newline);
        }
        if bytes.last() == Some(&b'\r') {
            bytes.pop();
        }
        let text = String::from_utf8(bytes).map_err(|error| DataError::NotUtf8 {
            path: self.path.clone(),
            offset: start + error.utf8_error().valid_up_to() as u64,
            line: self.line_number(start),
        })?;
        Ok(Line { start, text: if start == 0 { without_mark(text) } else { text } })
    }

    /// The number of the line that starts at `offset`; counted only for messages.
    fn line_number(&self, offset: u64) -> u64 {
        let Ok(file) = File::open(&self.path) else { return 0 };
        let mut reader = BufReader::new(std::io::Read::take(file, offset));
        let mut number = 1;
        loop {
            let chunk = match reader.fill_buf() {
                Ok(chunk) if !chunk.is_empty() => chunk,
                _ => return number,
            };
            number += chunk.iter().filter(|byte| **byte == b'\n').count() as u64;
            let length = chunk.len();
            reader.consume(length);
        }
    }

    fn json_error(&self, start: u64, column: &str, problem: JsonProblem) -> DataError {
        let (path, line, column) = (self.path.clone(), self.line_number(start), column.to_string());
        let place = format!(", line {line},");
        match problem {
            JsonProblem::Syntax(reason) => DataError::Json { path, line, reason },
            JsonProblem::Missing(available) => DataError::MissingColumn {
                path,
                place: place.trim_end_matches(',').into(),
                column,
                available,
            },
            JsonProblem::Type(found) => DataError::ColumnType {
                path,
                place: place.trim_end_matches(',').into(),
                column,
                found: found.into(),
            },
        }
    }
}

#[derive(Debug, PartialEq)]
enum JsonProblem {
    Syntax(String),
    Missing(String),
    Type(&'static str),
}

/// The text under `column`; a null is an empty document.
fn json_text(line: &str, column: &str) -> Result<String, JsonProblem> {
    let value: Value = serde_json::from_str(line).map_err(|error| {
        let hint = if matches!(line.trim(), "[" | "{") || line.trim_start().starts_with('[') {
            "\nhint: each line must be a JSON object of its own; write an indented file or an array as JSON lines, for \
             example with `jq -c .[]`"
        } else {
            "\nhint: mend or remove the line; each must be one JSON object, such as `{\"text\": \"…\"}`"
        };
        // The parser says `line 1`, which would contradict the line of the file.
        let reason = error.to_string();
        let reason = reason.split(" at line ").next().unwrap_or(&reason).to_string();
        JsonProblem::Syntax(format!("not valid JSON at column {}: {reason}{hint}", error.column()))
    })?;
    let Value::Object(object) = &value else {
        let hint = "\nhint: each line must be a JSON object of its own, such as `{\"text\": \"…\"}`";
        return Err(JsonProblem::Syntax(format!("holds {}, not a JSON object{hint}", kind(&value))));
    };
    let mut found = object.get(column);
    if found.is_none() && column.contains('.') {
        found = column.split('.').try_fold(&value, |value, name| value.get(name));
    }
    match found {
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Null) => Ok(String::new()),
        Some(other) => Err(JsonProblem::Type(kind(other))),
        None => {
            let names: Vec<&String> = object.keys().collect();
            Err(JsonProblem::Missing(if names.is_empty() {
                "no column".into()
            } else {
                files::quoted(&names)
            }))
        }
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a truth value",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}
