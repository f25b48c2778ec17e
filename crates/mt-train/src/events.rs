//! Events of a run, for its caller.

use std::{path::PathBuf, sync::Arc};

use mt_config::{Difference, Notice};

use crate::metrics::{EvaluationRecord, StepRecord};

/// Something that happened in a run. This crate prints nothing: the caller shows events as it likes.
#[derive(Clone, Debug)]
pub enum Event {
    /// The input was found to be right; long work begins.
    Accepted,
    Notice(Notice),
    /// Text in lines that a key requests, such as a table of placements.
    Report(String),
    /// How far reading the data or training a tokenizer is. Sent many times a second.
    Progress(mt_data::Progress),
    /// The run continues from a checkpoint.
    Resumed {
        /// The first step to be done.
        step: u64,
        /// The checkpoint's directory.
        checkpoint: PathBuf,
        /// Values of the configuration that are others than those the run was saved with.
        changes: Vec<Difference>,
    },
    /// The loop over steps begins.
    Started {
        first_step: u64,
        total_steps: u64,
    },
    Step(StepRecord),
    Evaluation(EvaluationRecord),
    /// The loop over steps ended.
    Ended,
}

/// Receives events, from any thread, in the order in which they happen.
pub type Observer = Arc<dyn Fn(Event) + Send + Sync>;

/// Sends a note to an observer.
pub(crate) fn note(observer: &Observer, text: impl Into<String>) {
    observer(Event::Notice(Notice::Note(text.into())));
}

/// Sends a warning to an observer.
pub(crate) fn warn(observer: &Observer, text: impl Into<String>) {
    observer(Event::Notice(Notice::Warning(text.into())));
}
