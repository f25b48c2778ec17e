//! Files that grow while a model writes them, and continue after an interruption.

use std::{
    fs::{self, File, OpenOptions},
    io::{ErrorKind, Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

use serde_json::{Value, json};

use crate::failure::Failure;

/// The progress of a file.
#[derive(Debug)]
struct Progress {
    /// The options that decide the content.
    options: Value,
    /// The prompts or rounds that are done.
    done: u64,
    /// The bytes that they have written.
    bytes: u64,
    /// Counts that are reported at the end.
    counts: Vec<u64>,
}

impl Progress {
    /// The progress in a record.
    fn read(bytes: &[u8]) -> Result<Self, String> {
        let value: Value = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        let counts = value["counts"].as_array().map(|all| all.iter().map(Value::as_u64).collect());
        let known = value["done"].as_u64().zip(value["bytes"].as_u64()).zip(counts.flatten());
        let ((done, bytes), counts) = known.ok_or("it has no `done`, `bytes` and `counts`")?;
        Ok(Self { options: value["options"].clone(), done, bytes, counts })
    }

    fn text(&self) -> String {
        let Self { options, done, bytes, counts } = self;
        json!({"options": options, "done": done, "bytes": bytes, "counts": counts}).to_string()
    }
}

/// A file of JSON lines. Beside it, a file with the ending `.progress` records the progress until it is complete.
pub struct Output {
    path: PathBuf,
    file: File,
    progress: Progress,
}

impl Output {
    /// Creates the file, or continues it after an interruption.
    ///
    /// # Errors
    /// The file is complete, was begun with other options, or cannot be written.
    pub fn open(path: &Path, options: Value, num_counts: usize) -> Result<Self, Failure> {
        let record = record_of(path);
        let progress = match fs::read(&record) {
            Ok(bytes) => {
                let known = Progress::read(&bytes).map_err(|error| {
                    Failure::user(format!(
                        "`{}` records no progress: {error}\nhint: remove it and `{}` to begin anew",
                        record.display(),
                        path.display()
                    ))
                })?;
                if known.options != options || known.counts.len() != num_counts {
                    return Err(Failure::user(format!(
                        "`{}` was begun with other options or files\nhint: repeat the first command, or remove it and `{}`",
                        path.display(),
                        record.display()
                    )));
                }
                known
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {
                if path.exists() {
                    return Err(Failure::user(format!(
                        "`{}` exists already\nhint: remove it, or name another `--output`",
                        path.display()
                    )));
                }
                Progress { options, done: 0, bytes: 0, counts: vec![0; num_counts] }
            }
            Err(error) => return Err(failed("read", &record, &error)),
        };
        if let Some(directory) = path.parent().filter(|directory| !directory.as_os_str().is_empty()) {
            fs::create_dir_all(directory).map_err(|error| failed("create", directory, &error))?;
        }
        let opened = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
        let mut file = opened.map_err(|error| failed("write", path, &error))?;
        let length = file.metadata().map_err(|error| failed("read", path, &error))?.len();
        if length < progress.bytes {
            return Err(Failure::user(format!(
                "`{}` has {length} bytes, but {} were written\nhint: remove it and `{}` to begin anew",
                path.display(),
                progress.bytes,
                record.display()
            )));
        }
        // Lines behind the recorded ones are those of a step that was interrupted.
        let placed = file.set_len(progress.bytes).and_then(|()| file.seek(SeekFrom::End(0)));
        placed.map_err(|error| failed("write", path, &error))?;
        let output = Self { path: path.to_owned(), file, progress };
        output.record()?;
        Ok(output)
    }

    /// The prompts or rounds that are done.
    pub fn done(&self) -> u64 {
        self.progress.done
    }

    /// The counts so far.
    pub fn counts(&self) -> &[u64] {
        &self.progress.counts
    }

    /// The lines that are written.
    pub fn rows(&mut self) -> Result<Vec<Value>, Failure> {
        let mut text = String::new();
        let read = self.file.seek(SeekFrom::Start(0)).and_then(|_| self.file.read_to_string(&mut text));
        read.map_err(|error| failed("read", &self.path, &error))?;
        let row = |line: &str| serde_json::from_str(line);
        text.lines().map(row).collect::<Result<_, _>>().map_err(|error| {
            Failure::user(format!("`{}` holds a line that is no JSON: {error}", self.path.display()))
        })
    }

    /// Adds the lines of further prompts or rounds, and to the counts.
    pub fn add(&mut self, rows: &[Value], done: u64, counts: &[u64]) -> Result<(), Failure> {
        let text: String = rows.iter().map(|row| format!("{row}\n")).collect();
        let written = self.file.write_all(text.as_bytes()).and_then(|()| self.file.sync_data());
        written.map_err(|error| failed("write", &self.path, &error))?;
        self.progress.done += done;
        self.progress.bytes += text.len() as u64;
        self.progress.counts.iter_mut().zip(counts).for_each(|(all, more)| *all += more);
        self.record()
    }

    /// Ends the file.
    pub fn finish(self) -> Result<(), Failure> {
        let record = record_of(&self.path);
        fs::remove_file(&record).map_err(|error| failed("remove", &record, &error))
    }

    /// Writes the record of the progress, in place of the last one.
    fn record(&self) -> Result<(), Failure> {
        let (record, text) = (record_of(&self.path), self.progress.text());
        let new = record.with_extension("progress.new");
        let written = File::create(&new).and_then(|mut file| {
            file.write_all(text.as_bytes())?;
            file.sync_all()
        });
        written.and_then(|()| fs::rename(&new, &record)).map_err(|error| failed("write", &record, &error))
    }
}

/// The path of the record beside a file.
fn record_of(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".progress");
    name.into()
}

fn failed(action: &str, path: &Path, error: &std::io::Error) -> Failure {
    let message = format!("cannot {action} `{}`: {error}", path.display());
    match error.kind() {
        ErrorKind::PermissionDenied | ErrorKind::IsADirectory | ErrorKind::NotADirectory => {
            Failure::user(message)
        }
        _ => Failure::run(message),
    }
}
