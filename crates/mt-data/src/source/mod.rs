//! Sources of documents.
//!
//! A [`Dataset`] gives random access to documents by index. Large data is not read into memory: each read takes one
//! document (text and JSON lines, by an index of byte offsets from when the dataset was opened), or a window of row
//! groups is cached (parquet).

mod guard;
mod json;
mod order;
mod parquet;
mod text;

use std::path::PathBuf;

use sha2::{Digest, Sha256};

use crate::error::{DataError, Result};
use crate::files;
use crate::repository::{self, Split};
use crate::watch::Watch;

pub(crate) use order::Order;
use parquet::{ParquetDocuments, RowContent};
use text::{FileDocuments, LineContent, LineDocuments};

/// How plain text files divide into documents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TextDocument {
    /// Each file is one document.
    File,
    /// Each line that is not blank is one document.
    Line,
}

/// A source of documents. [`files::expand`](crate::expand_patterns) explains file patterns.
#[derive(Debug, Clone, PartialEq)]
pub enum Source {
    /// Rows of random tokens below `vocab_size`, without padding, for measuring speed. Needs no tokenizer.
    Synthetic { vocab_size: usize },
    /// Plain text files.
    Text { files: Vec<String>, document: TextDocument },
    /// JSON lines: one object per line, with the text under `column`, where `a.b` is the key `b` of the object `a`.
    JsonLines { files: Vec<String>, column: String },
    /// Parquet files, with the text in the string column `column`, where `a.b` is the field `b` of the group `a`.
    Parquet { files: Vec<String>, column: String },
    /// Files of records, each with these columns; without any, with whichever it has. A document is a record as JSON, with
    /// values of any type.
    Records { files: Vec<String>, format: RecordFormat, columns: Vec<String> },
    /// The documentation and source code under the repository at `root`.
    Repository { root: PathBuf, split: Split },
    /// Documents in memory.
    Memory { name: String, documents: Vec<String> },
}

/// The format of files of records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecordFormat {
    /// One JSON object per line.
    JsonLines,
    Parquet,
}

/// An opened source: documents by index, and a fingerprint.
#[derive(Debug)]
pub struct Dataset {
    name: String,
    fingerprint: String,
    documents: Documents,
}

#[derive(Debug)]
enum Documents {
    Synthetic { vocab_size: usize },
    Files(FileDocuments),
    Lines(LineDocuments),
    Parquet(ParquetDocuments),
    Memory(Vec<String>),
}

impl Dataset {
    /// Opens a source.
    ///
    /// Reads text and JSON lines once, for their index, their checksum and their encoding, and checks every line of
    /// JSON. Reads of parquet files the footers and the first row group.
    ///
    /// # Errors
    /// A file is missing, unreadable, of the wrong format or without the column; the dataset has no documents.
    pub fn open(source: &Source) -> Result<Self> {
        Self::open_watched(source, Watch::silent())
    }

    /// [`Dataset::open`] with progress reports and cancellation.
    ///
    /// # Errors
    /// As [`Dataset::open`]; [`DataError::Stopped`].
    pub fn open_watched(source: &Source, watch: Watch<'_>) -> Result<Self> {
        let mut identity = Identity::default();
        let (name, documents) = match source {
            Source::Synthetic { vocab_size } => {
                if *vocab_size == 0 || *vocab_size > i32::MAX as usize {
                    return Err(DataError::Options(format!(
                        "`vocab_size={vocab_size}` is not a valid vocabulary size"
                    )));
                }
                identity.add("synthetic", *vocab_size as u64, 0);
                ("`synthetic`".to_string(), Documents::Synthetic { vocab_size: *vocab_size })
            }
            Source::Text { files, document } => {
                let paths = files::expand(files)?;
                let documents = match document {
                    TextDocument::File => Documents::Files(FileDocuments::open(paths, &mut identity, watch)?),
                    TextDocument::Line => {
                        Documents::Lines(LineDocuments::open(paths, LineContent::Line, &mut identity, watch)?)
                    }
                };
                (files::quoted(files), documents)
            }
            Source::JsonLines { files, column } => {
                let paths = files::expand(files)?;
                let content = LineContent::Text(column.clone());
                let documents = LineDocuments::open(paths, content, &mut identity, watch)?;
                (files::quoted(files), Documents::Lines(documents))
            }
            Source::Parquet { files, column } => {
                let content = RowContent::Text(column.clone());
                let documents = ParquetDocuments::open(files::expand(files)?, content, &mut identity)?;
                (files::quoted(files), Documents::Parquet(documents))
            }
            Source::Records { files, format, columns } => {
                let paths = files::expand(files)?;
                let documents = match format {
                    RecordFormat::JsonLines => {
                        let content = LineContent::Record(columns.clone());
                        Documents::Lines(LineDocuments::open(paths, content, &mut identity, watch)?)
                    }
                    RecordFormat::Parquet => {
                        let content = RowContent::Record(columns.clone());
                        Documents::Parquet(ParquetDocuments::open(paths, content, &mut identity)?)
                    }
                };
                (files::quoted(files), documents)
            }
            Source::Repository { root, split } => {
                let documents = repository::repository_documents(root, *split)?;
                for (path, text) in &documents {
                    identity.add(&path.to_string_lossy(), text.len() as u64, crc32c::crc32c(text.as_bytes()));
                }
                let documents = documents.into_iter().map(|(_, text)| text).collect();
                (format!("`{}`", root.display()), Documents::Memory(documents))
            }
            Source::Memory { name, documents } => {
                for text in documents {
                    identity.add("", text.len() as u64, crc32c::crc32c(text.as_bytes()));
                }
                (format!("`{name}`"), Documents::Memory(documents.clone()))
            }
        };
        let dataset = Self { name, fingerprint: identity.finish(), documents };
        if dataset.num_documents() == 0 {
            let hint = "\nhint: the files exist, but are all empty";
            return Err(DataError::Empty { dataset: dataset.name, hint: hint.into() });
        }
        Ok(dataset)
    }

    /// The number of documents, including empty ones.
    pub fn num_documents(&self) -> u64 {
        match &self.documents {
            Documents::Synthetic { .. } => u64::MAX,
            Documents::Files(files) => files.len(),
            Documents::Lines(lines) => lines.len(),
            Documents::Parquet(parquet) => parquet.len(),
            Documents::Memory(documents) => documents.len() as u64,
        }
    }

    /// The text of the document `index`, which is less than [`Dataset::num_documents`].
    ///
    /// # Errors
    /// A file has changed or vanished, or its content is damaged.
    pub fn read(&self, index: u64) -> Result<String> {
        match &self.documents {
            Documents::Synthetic { .. } => Ok(String::new()),
            Documents::Files(files) => files.read(index),
            Documents::Lines(lines) => lines.read(index),
            Documents::Parquet(parquet) => parquet.read(index),
            Documents::Memory(documents) => Ok(documents[index as usize].clone()),
        }
    }

    /// The location of a document for messages, such as its file and line.
    pub fn place(&self, index: u64) -> String {
        match &self.documents {
            Documents::Lines(lines) => lines.place(index),
            Documents::Parquet(parquet) => parquet.place(index),
            Documents::Synthetic { .. } | Documents::Files(_) | Documents::Memory(_) => {
                format!("document {index} of {}", self.name)
            }
        }
    }

    /// All documents in order, for training a tokenizer and for inspection.
    pub fn documents(&self) -> impl Iterator<Item = Result<String>> + '_ {
        let count = if self.synthetic_vocab_size().is_some() { 0 } else { self.num_documents() };
        (0..count).map(|index| self.read(index))
    }

    /// A description of the source for messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A hash of the names (without directories), sizes and contents of the files, and of the column.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// The vocabulary of a synthetic source.
    pub(crate) fn synthetic_vocab_size(&self) -> Option<usize> {
        match &self.documents {
            Documents::Synthetic { vocab_size } => Some(*vocab_size),
            _ => None,
        }
    }

    /// The order in which one epoch visits the documents; `key` is `None` if they are not shuffled.
    pub(crate) fn order(&self, key: Option<u64>) -> Order {
        match (&self.documents, key) {
            (_, None) => Order::Sequential,
            (Documents::Parquet(parquet), Some(key)) => parquet.order(key),
            (_, Some(key)) => Order::shuffled(self.num_documents(), key),
        }
    }
}

/// The hash that identifies a dataset.
#[derive(Default)]
pub(crate) struct Identity {
    hash: Sha256,
}

impl Identity {
    /// Adds one file or document.
    pub(crate) fn add(&mut self, name: &str, length: u64, checksum: u32) {
        self.hash.update((name.len() as u64).to_le_bytes());
        self.hash.update(name);
        self.hash.update(length.to_le_bytes());
        self.hash.update(checksum.to_le_bytes());
    }

    fn finish(self) -> String {
        hex(&self.hash.finalize()[..16])
    }
}

/// Lower-case hexadecimal.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
