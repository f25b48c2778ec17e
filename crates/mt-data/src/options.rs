//! The options of a data pipeline.

use std::sync::Arc;

use crate::conversation::Conversations;
use crate::damage::Damage;
use crate::error::{DataError, Result};
use crate::fill_in_the_middle::FillInTheMiddle;
use crate::source::Source;

/// How documents fill rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packing {
    /// One document per row. A longer document is cut or continues in further rows.
    Off,
    /// Rows are cut from the stream of documents: no padding, and documents are split at the ends of rows.
    ConcatThenSplit,
    /// Each document goes into the first open row with room for it, so only documents longer than a row are split.
    FirstFit,
    /// As first-fit packing, but of the documents of a window of rows at once: the longest first, each into the row that
    /// it fills best. Rows have hardly any padding.
    BestFit,
}

/// The tokens of a document that are targets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Targets {
    /// All but the first one: each position predicts the token that follows its input.
    Next,
    /// All. Inputs have no meaning, and the user of the batch replaces them.
    All,
}

/// The examples that rows hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Examples {
    /// Packed documents, in one sequence.
    Documents,
    /// One judged answer, with its verdict.
    JudgedAnswers,
    /// One pair of answers, in two sequences.
    Pairs,
    /// One pair of answers, in two sequences, whose last tokens have rewards, with the margin.
    RankedAnswers,
    /// One answer, whose steps have classes.
    JudgedSteps,
}

impl Examples {
    /// The sequences of a row.
    pub const fn sequences(self) -> usize {
        match self {
            Self::Documents | Self::JudgedAnswers | Self::JudgedSteps => 1,
            Self::Pairs | Self::RankedAnswers => 2,
        }
    }

    /// Whether rows have verdicts or margins.
    pub const fn have_labels(self) -> bool {
        matches!(self, Self::JudgedAnswers | Self::RankedAnswers)
    }
}

/// The treatment of rows that do not fill a batch after the last epoch. Epochs are contiguous, so rows and batches
/// extend from one epoch into the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Remainder {
    /// Drops the rows (training).
    Drop,
    /// Adds padding rows to fill the batch (evaluation).
    Pad,
}

/// A dataset, and its conversion to batches.
#[derive(Debug, Clone, PartialEq)]
pub struct DatasetOptions {
    /// The documents.
    pub source: Source,
    /// How the documents, which are records, become conversations; `None` for plain text.
    pub conversations: Option<Arc<Conversations>>,
    /// The examples of rows.
    pub examples: Examples,
    /// Tokens in a row.
    pub length: usize,
    /// Rows of a batch, on all hosts together.
    pub batch_rows: usize,
    /// The index of this host among `num_hosts`. It gets an equal, contiguous share of the rows.
    pub host_index: usize,
    /// The number of hosts.
    pub num_hosts: usize,
    /// The number of hosts that read, which are the first ones and share the rows; `None` for all. The other hosts get as many
    /// rows, of padding, without end.
    pub num_readers: Option<usize>,
    /// The number of streams to which examples are assigned, and which are packed apart. The order of the rows depends on it, not
    /// on the number of hosts. A host that feeds whole streams reads no documents of the others.
    pub streams: usize,
    /// How documents fill rows.
    pub packing: Packing,
    /// Whether the tokens of a document beyond the length of a row are dropped instead of continued in another row. By
    /// default, they are dropped if documents are not packed.
    pub drops_long_ends: Option<bool>,
    /// The tokens of a document that are targets.
    pub targets: Targets,
    /// The most documents in a row.
    pub max_segments: Option<usize>,
    /// Whether each epoch visits the documents in a random order of its own.
    pub shuffle: bool,
    /// The seed of these orders and of synthetic tokens.
    pub seed: u64,
    /// Whether an evaluation visits the documents in the random order of the seed's first epoch.
    pub evaluates_shuffled: bool,
    /// The number of passes over the documents; `None` for data without end.
    pub num_epoch: Option<u64>,
    /// Whether each document starts with BOS, if the tokenizer has one.
    pub add_bos: bool,
    /// Whether each document ends with EOS, if the tokenizer has one.
    pub add_eos: bool,
    /// Whether the EOS that ends a document has a loss.
    pub trains_eos: bool,
    /// How plain text is rearranged, so that a model learns to fill gaps.
    pub fill_in_the_middle: Option<FillInTheMiddle>,
    /// The directory of packed rows of earlier runs, if rows are kept.
    pub row_cache: Option<std::path::PathBuf>,
    /// The model's vocabulary size. A document with a token outside of it is an error.
    pub vocab_size: Option<usize>,
    /// The treatment of an incomplete last batch.
    pub remainder: Remainder,
    /// Whether batches of padding follow the last one, for hosts whose documents end before those of others. An incomplete
    /// last batch is then filled with padding.
    pub continues: bool,
    /// The treatment of documents that cannot be read.
    pub damage: Damage,
    /// Threads that read and tokenize; 0 for one per core. The batches do not depend on it.
    pub threads: usize,
    /// The most of these threads that read documents at the same time; 0 and 1 for one. The batches do not depend on it.
    pub reading_threads: usize,
    /// Documents that are read ahead of their use, all streams together. The batches do not depend on it.
    pub documents_ahead: usize,
    /// Bytes of memory for documents that are tokenized ahead of their use. The batches do not depend on it.
    pub memory: u64,
}

impl DatasetOptions {
    /// Endless, shuffled, packed training data for one host.
    pub fn training(source: Source, length: usize, batch_rows: usize) -> Self {
        Self {
            source,
            conversations: None,
            examples: Examples::Documents,
            length,
            batch_rows,
            host_index: 0,
            num_hosts: 1,
            num_readers: None,
            streams: 1,
            packing: Packing::ConcatThenSplit,
            drops_long_ends: None,
            targets: Targets::Next,
            max_segments: None,
            shuffle: true,
            seed: 0,
            evaluates_shuffled: false,
            num_epoch: None,
            add_bos: true,
            add_eos: true,
            trains_eos: true,
            fill_in_the_middle: None,
            row_cache: None,
            vocab_size: None,
            remainder: Remainder::Drop,
            continues: false,
            damage: Damage::Stop,
            threads: 0,
            reading_threads: 16,
            documents_ahead: 500,
            memory: 1 << 30,
        }
    }

    /// Packed evaluation data for one host: every document once, in order, to its last token.
    pub fn evaluation(source: Source, length: usize, batch_rows: usize) -> Self {
        Self {
            shuffle: false,
            num_epoch: Some(1),
            remainder: Remainder::Pad,
            ..Self::training(source, length, batch_rows)
        }
    }

    /// Whether the tokens of a document beyond the length of a row are dropped.
    pub(crate) fn drops_long_ends(&self) -> bool {
        self.drops_long_ends.unwrap_or(self.packing == Packing::Off)
    }

    /// The number of hosts that read.
    pub(crate) fn readers(&self) -> usize {
        self.num_readers.unwrap_or(self.num_hosts)
    }

    pub(crate) fn check(&self) -> Result<()> {
        let readers = self.readers();
        let problem = if self.length == 0 || self.batch_rows == 0 {
            format!("a batch of {} rows of length {} is empty", self.batch_rows, self.length)
        } else if self.num_hosts == 0 || self.host_index >= self.num_hosts {
            format!("host {} of {} does not exist", self.host_index, self.num_hosts)
        } else if readers == 0 || readers > self.num_hosts {
            format!("{readers} of {} hosts cannot read the data", self.num_hosts)
        } else if !self.batch_rows.is_multiple_of(readers) {
            format!(
                "{readers} hosts cannot share a batch of {} rows equally\nhint: choose `per_device_batch_size` so that the \
                 number of rows is a multiple of the number of hosts that read",
                self.batch_rows
            )
        } else if self.streams == 0 {
            "there is no stream of rows\nhint: use `packing_streams=1` or more".into()
        } else if !self.batch_rows.is_multiple_of(self.streams) {
            format!(
                "{} packing streams cannot fill a batch of {} rows equally\nhint: choose `packing_streams` as a divisor of the \
                 number of rows",
                self.streams, self.batch_rows
            )
        } else if self.num_epoch == Some(0) {
            "`num_epoch=0` reads nothing\nhint: use 1 or more, or -1 for data without end".into()
        } else if self.max_segments == Some(0) {
            "a row needs room for at least one segment\nhint: use `max_segments_per_seq=-1` for any number"
                .into()
        } else {
            return Ok(());
        };
        Err(DataError::Options(problem))
    }
}
