//! Writing the logits of a teacher, in files that are complete once they have their name.

use std::{
    fs::{self, File},
    io::Write as _,
    num::NonZeroU32,
    path::{Path, PathBuf},
};

use mt_array_record::{Compression, Writer, WriterOptions};
use mt_shape::HostArray;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{ENDING, FEATURES, LogitsRow};
use crate::{
    batch::Batch,
    error::{DataError, Result},
    stream::Position,
};

/// The file that records complete files.
const PROGRESS_FILE: &str = "teacher_top_k.json";

/// The version of that file.
const VERSION: u32 = 1;

/// The contents of a directory, and the position at which its data goes on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LogitsProgress {
    version: u32,
    /// The properties, by name, that all files of the directory have in common.
    identity: Value,
    /// Batches in complete files.
    pub batches: u64,
    /// The batches of the files that hold as many as they can.
    pub full_batches: u64,
    /// The position of the data behind `full_batches`.
    pub position: Position,
}

/// Writes files of stored logits. A killed process leaves whole files and one with another ending.
pub struct LogitsWriter {
    directory: PathBuf,
    batches_per_file: u64,
    progress: LogitsProgress,
    file: Option<OpenFile>,
}

/// A file without its final name.
struct OpenFile {
    writer: Writer,
    partial: PathBuf,
    path: PathBuf,
    batches: u64,
}

impl LogitsWriter {
    /// Opens a directory for further batches: behind those of its full files if an earlier process has begun it. `begin` is
    /// the position of the data before the first batch.
    ///
    /// # Errors
    /// The directory cannot be written, or holds logits of another identity, or files that this program has not written.
    pub fn open(directory: &Path, identity: Value, batches_per_file: u64, begin: Position) -> Result<Self> {
        fs::create_dir_all(directory).map_err(DataError::io("create", directory))?;
        let path = directory.join(PROGRESS_FILE);
        let (progress, is_new) = match fs::read(&path) {
            Ok(text) => (Self::again(directory, &text, &identity)?, false),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                if super::files_in(directory).is_ok() {
                    return Err(DataError::StoredLogits {
                        place: format!("`{}`", directory.display()),
                        reason: format!(
                            "it holds files `*{ENDING}`, but not `{PROGRESS_FILE}`, which tells how they go on"
                        ),
                    });
                }
                let position = begin;
                (LogitsProgress { version: VERSION, identity, batches: 0, full_batches: 0, position }, true)
            }
            Err(error) => return Err(DataError::io("read", path)(error)),
        };
        let writer = Self { directory: directory.to_owned(), batches_per_file, progress, file: None };
        if is_new {
            // Files without this record could not be continued.
            writer.record()?;
        }
        Ok(writer)
    }

    /// The files that earlier processes have completed.
    pub fn progress(&self) -> &LogitsProgress {
        &self.progress
    }

    fn again(directory: &Path, text: &[u8], identity: &Value) -> Result<LogitsProgress> {
        let wrong = |reason: String| DataError::StoredLogits {
            place: format!("`{}`", directory.join(PROGRESS_FILE).display()),
            reason,
        };
        let progress: LogitsProgress =
            serde_json::from_slice(text).map_err(|error| wrong(format!("it is damaged: {error}")))?;
        if progress.version != VERSION {
            return Err(wrong(format!("its version is {}, not {VERSION}", progress.version)));
        }
        let properties = identity.as_object().into_iter().flatten();
        for (property, now) in properties {
            let then = progress.identity.get(property).unwrap_or(&Value::Null);
            if then != now {
                return Err(DataError::Options(format!(
                    "`{}` holds logits with another {property}: `{then}`, which now is `{now}`\n\
                     hint: repeat the earlier command to go on, or name another directory",
                    directory.display()
                )));
            }
        }
        Ok(progress)
    }

    /// Appends the rows of a batch with its logits, `f32[rows, length, k]`, and their tokens, `i32[rows, length, k]`. `after`
    /// is the position of the data behind the batch.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn write(
        &mut self,
        batch: &Batch,
        logits: &HostArray,
        indices: &HostArray,
        after: Position,
    ) -> Result<()> {
        let batches_per_file = self.batches_per_file;
        let file = match &mut self.file {
            Some(file) => file,
            None => self
                .file
                .insert(OpenFile::create(&self.directory, self.progress.full_batches / batches_per_file)?),
        };
        for row in rows(batch, logits, indices) {
            file.writer.write(&row.to_record())?;
        }
        file.batches += 1;
        if file.batches == batches_per_file {
            self.close(Some(after))?;
        }
        Ok(())
    }

    /// Completes the last file, which may have fewer batches than the others.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn finish(mut self) -> Result<LogitsProgress> {
        self.close(None)?;
        Ok(self.progress)
    }

    /// Gives the open file its name, and records it. Without a position the file is written again when the directory goes on.
    fn close(&mut self, after: Option<Position>) -> Result<()> {
        let Some(OpenFile { writer, partial, path, batches }) = self.file.take() else { return Ok(()) };
        writer.finish()?;
        let complete = || -> std::io::Result<()> {
            File::open(&partial)?.sync_all()?;
            fs::rename(&partial, &path)?;
            File::open(&self.directory)?.sync_all()
        };
        complete().map_err(DataError::io("write", &path))?;
        self.progress.batches = self.progress.full_batches + batches;
        if let Some(position) = after {
            self.progress.full_batches = self.progress.batches;
            self.progress.position = position;
        }
        self.record()
    }

    /// Writes the progress to its file, atomically and durably.
    fn record(&self) -> Result<()> {
        let path = self.directory.join(PROGRESS_FILE);
        let text = serde_json::to_string_pretty(&self.progress).expect("progress is representable in JSON");
        let record = || -> std::io::Result<()> {
            let partial = path.with_extension("json.partial");
            let mut file = File::create(&partial)?;
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            fs::rename(&partial, &path)?;
            File::open(&self.directory)?.sync_all()
        };
        record().map_err(DataError::io("write", &path))
    }
}

impl OpenFile {
    fn create(directory: &Path, number: u64) -> Result<Self> {
        let name = format!("teacher_top_k_part_{number:05}_host_000{ENDING}");
        let (path, partial) = (directory.join(&name), directory.join(format!("{name}.partial")));
        // One record a group, as MaxText, so that a shuffled read decodes nothing else.
        let options = WriterOptions { group_size: NonZeroU32::MIN, compression: Compression::default() };
        Ok(Self { writer: Writer::create(&partial, options)?, partial, path, batches: 0 })
    }
}

/// The rows of a batch.
fn rows<'a>(
    batch: &'a Batch,
    logits: &'a HostArray,
    indices: &'a HostArray,
) -> impl Iterator<Item = LogitsRow> + 'a {
    let logits: &[f32] = logits.as_slice().expect("logits are `f32`");
    let indices: &[i32] = indices.as_slice().expect("tokens are `i32`");
    let (width, length) = (logits.len() / batch.rows, batch.integers(FEATURES[0]).len() / batch.rows);
    (0..batch.rows).map(move |row| LogitsRow {
        integers: FEATURES.map(|name| batch.integers(name)[row * length..][..length].to_vec()),
        logits: logits[row * width..][..width].to_vec(),
        indices: indices[row * width..][..width].to_vec(),
    })
}
