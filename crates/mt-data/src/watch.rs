//! Progress of long work, and its cancellation.

use crate::error::{DataError, Result};

/// Tasks of this crate that can take minutes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// Reading files to index them and compute their checksums, in bytes.
    IndexFiles,
    /// Opening files of records, in files.
    OpenFiles,
    /// Writing records in another format.
    ConvertRecords,
    /// Passing documents through the steps of cleaning, in documents.
    CleanDocuments,
    /// Comparing the keys of documents, in keys.
    FindDuplicates,
    /// Counting the words on which a tokenizer is trained, in bytes of text.
    CountWords,
    /// Learning the merges of a tokenizer, in tokens of its vocabulary.
    LearnMerges,
}

/// The progress of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    pub task: Task,
    pub done: u64,
    /// The final value of `done`, if it is known.
    pub total: Option<u64>,
}

/// Two functions of the caller: one receives the progress of long work, the other tells whether to stop.
///
/// Both are called from several threads, many times a second.
#[derive(Clone, Copy)]
pub struct Watch<'a> {
    report: &'a (dyn Fn(Progress) + Sync),
    is_stopped: &'a (dyn Fn() -> bool + Sync),
}

impl<'a> Watch<'a> {
    /// Work stops with [`DataError::Stopped`] soon after `is_stopped` returns `true`.
    pub fn new(report: &'a (dyn Fn(Progress) + Sync), is_stopped: &'a (dyn Fn() -> bool + Sync)) -> Self {
        Self { report, is_stopped }
    }

    /// A watch that ignores progress and never stops.
    pub fn silent() -> Watch<'static> {
        Watch { report: &|_| {}, is_stopped: &|| false }
    }

    /// Reports progress.
    ///
    /// # Errors
    /// [`DataError::Stopped`] if the caller wants the work to stop.
    pub fn advance(&self, task: Task, done: u64, total: Option<u64>) -> Result<()> {
        (self.report)(Progress { task, done, total });
        self.check()
    }

    /// # Errors
    /// [`DataError::Stopped`] if the caller wants the work to stop.
    pub(crate) fn check(&self) -> Result<()> {
        if (self.is_stopped)() { Err(DataError::Stopped) } else { Ok(()) }
    }
}
