//! Logits of a teacher's most probable tokens, stored in ArrayRecord files: one record for each row of tokens.
//!
//! Files and records are those of MaxText: files `teacher_top_k_part_00000_host_000.array_record`, each with the rows of
//! some consecutive batches, and records of the protobuf message `tf.train.Example` with the arrays of [`FEATURES`],
//! flattened.

mod source;
mod writer;

use std::{
    cell::RefCell,
    fs,
    path::{Path, PathBuf},
};

use mt_array_record::Reader;

use crate::{
    batch::arrays::{
        INPUTS, INPUTS_POSITION, INPUTS_SEGMENTATION, TARGETS, TARGETS_SEGMENTATION, TOP_K_INDICES,
        TOP_K_LOGITS,
    },
    error::{DataError, Result},
};

use crate::example::Example;
pub use source::{StoredLogitsOptions, StoredLogitsSource};
pub use writer::{LogitsProgress, LogitsWriter};

/// The ending of the files.
const ENDING: &str = ".array_record";

/// The arrays of integers of a record, each with a number for each position.
const FEATURES: [&str; 5] = [INPUTS, INPUTS_POSITION, INPUTS_SEGMENTATION, TARGETS, TARGETS_SEGMENTATION];

/// The hash of a row's inputs.
const SEQUENCE_HASH: &str = "sequence_hash";

/// The files that are open at once.
const OPEN_FILES: usize = 64;

/// The sizes of each row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogitsShape {
    /// Positions.
    pub length: usize,
    /// Logits of each position.
    pub top_k: usize,
}

/// A row of tokens with the largest logits of each position, in descending order, and their tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct LogitsRow {
    /// The arrays of [`FEATURES`], in that order.
    integers: [Vec<i32>; 5],
    logits: Vec<f32>,
    indices: Vec<i32>,
}

/// A directory of stored logits.
pub struct StoredLogits {
    directory: PathBuf,
    files: Vec<PathBuf>,
    /// The number of rows up to and including each file.
    ends: Vec<u64>,
    shape: LogitsShape,
    /// Files that were read last, the latest first.
    open: RefCell<Vec<(usize, Reader)>>,
}

impl StoredLogits {
    /// Opens a directory, and reads its first record. Every file's index is read; records are read on request.
    ///
    /// # Errors
    /// The directory holds no such files, or one of them is damaged, is no ArrayRecord file, or has records of another form.
    pub fn open(directory: &Path) -> Result<Self> {
        let files = files_in(directory)?;
        let mut ends = Vec::with_capacity(files.len());
        for file in &files {
            let before = ends.last().copied().unwrap_or(0);
            ends.push(before + Reader::open(file)?.len());
        }
        let shape = LogitsShape { length: 0, top_k: 0 };
        let directory = directory.to_owned();
        let mut stored = Self { directory, files, ends, shape, open: RefCell::default() };
        if stored.rows() == 0 {
            return Err(stored.unusable("its files hold no record".to_owned()));
        }
        let first = stored.decode(0, None)?;
        stored.shape = first.shape();
        Ok(stored)
    }

    /// The sizes of the first row, which all others have.
    pub fn shape(&self) -> LogitsShape {
        self.shape
    }

    /// Refuses rows of another length.
    ///
    /// # Errors
    /// The rows have not `length` positions.
    pub fn check_length(&self, length: usize) -> Result<()> {
        let own = self.shape.length;
        if own == length {
            return Ok(());
        }
        Err(DataError::Options(format!(
            "the rows in `{}` have {own} positions, but `max_target_length` is {length}\n\
             hint: use `max_target_length={own}`, or store logits of rows of the other length",
            self.directory.display()
        )))
    }

    /// The number of rows.
    pub fn rows(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    /// The number of files.
    pub fn num_files(&self) -> usize {
        self.files.len()
    }

    /// Reads a row, whose sizes and tokens are checked.
    ///
    /// # Errors
    /// The record is damaged, has another form or other sizes, or holds numbers that are no tokens or logits.
    pub fn row(&self, index: u64, vocab_size: usize) -> Result<LogitsRow> {
        self.decode(index, Some(vocab_size))
    }

    /// Checks all rows: as [`Self::row`], and that the logits of each position are in descending order, of distinct
    /// tokens. `report` receives the number of rows that are done.
    ///
    /// # Errors
    /// As [`Self::row`], for the first row that is wrong.
    pub fn check(&self, vocab_size: usize, mut report: impl FnMut(u64)) -> Result<()> {
        for index in 0..self.rows() {
            let row = self.row(index, vocab_size)?;
            let k = self.shape.top_k;
            let mut seen = Vec::with_capacity(k);
            for position in 0..self.shape.length {
                let of = position * k..(position + 1) * k;
                if !row.logits[of.clone()].is_sorted_by(|larger, smaller| larger >= smaller) {
                    let reason = format!("the logits of position {position} are not in descending order");
                    return Err(self.wrong_record(index, reason));
                }
                seen.clear();
                seen.extend_from_slice(&row.indices[of]);
                seen.sort_unstable();
                if seen.windows(2).any(|pair| pair[0] == pair[1]) {
                    let reason = format!("position {position} has two logits of one token");
                    return Err(self.wrong_record(index, reason));
                }
            }
            report(index + 1);
        }
        Ok(())
    }

    /// The identity of the data for positions in it: the files' names and their numbers of rows.
    fn fingerprint(&self) -> String {
        let name = |path: &PathBuf| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let files = self.files.iter().zip(&self.ends).map(|(file, end)| format!("{} {end}\n", name(file)));
        let text: String = files.collect();
        format!("{} rows in {} files, {:08x}", self.rows(), self.files.len(), crc32c::crc32c(text.as_bytes()))
    }

    fn decode(&self, index: u64, vocab_size: Option<usize>) -> Result<LogitsRow> {
        let number = self.ends.partition_point(|end| *end <= index);
        let within = index - number.checked_sub(1).map_or(0, |before| self.ends[before]);
        let record = self.record(number, within)?;
        let row = LogitsRow::read(&record).map_err(|reason| self.wrong_record(index, reason))?;
        let Some(vocab_size) = vocab_size else { return Ok(row) };
        let (own, expected) = (row.shape(), self.shape);
        if own != expected {
            let reason = format!(
                "it has {} positions with {} logits each, but the first record has {} with {}",
                own.length, own.top_k, expected.length, expected.top_k
            );
            return Err(self.wrong_record(index, reason));
        }
        row.check(vocab_size).map_err(|reason| self.wrong_record(index, reason))?;
        Ok(row)
    }

    fn record(&self, number: usize, within: u64) -> Result<Vec<u8>> {
        let mut open = self.open.borrow_mut();
        match open.iter().position(|(known, _)| *known == number) {
            Some(0) => {}
            Some(place) => open[..=place].rotate_right(1),
            None => {
                let reader = Reader::open(&self.files[number])?;
                open.truncate(OPEN_FILES - 1);
                open.insert(0, (number, reader));
            }
        }
        Ok(open[0].1.read(within)?)
    }

    fn unusable(&self, reason: String) -> DataError {
        DataError::StoredLogits { place: format!("`{}`", self.directory.display()), reason }
    }

    fn wrong_record(&self, index: u64, reason: String) -> DataError {
        let number = self.ends.partition_point(|end| *end <= index);
        let within = index - number.checked_sub(1).map_or(0, |before| self.ends[before]);
        let place = format!("record {} of `{}`", within + 1, self.files[number].display());
        DataError::StoredLogits { place, reason }
    }
}

/// The files of a directory in the order of their names, which is that of the batches.
fn files_in(directory: &Path) -> Result<Vec<PathBuf>> {
    let read = || -> std::io::Result<Vec<PathBuf>> {
        let entries: Vec<fs::DirEntry> = directory.read_dir()?.collect::<std::io::Result<_>>()?;
        let is_file = |entry: &&fs::DirEntry| entry.file_name().to_string_lossy().ends_with(ENDING);
        Ok(entries.iter().filter(is_file).map(fs::DirEntry::path).collect())
    };
    let mut files = read().map_err(DataError::io("read", directory))?;
    if files.is_empty() {
        let reason = format!("it has no file `*{ENDING}`");
        return Err(DataError::StoredLogits { place: format!("`{}`", directory.display()), reason });
    }
    files.sort();
    Ok(files)
}

impl LogitsRow {
    fn shape(&self) -> LogitsShape {
        let length = self.integers[0].len();
        LogitsShape { length, top_k: self.logits.len() / length.max(1) }
    }

    /// Reads a record.
    fn read(record: &[u8]) -> Result<Self, String> {
        let example = Example::read(record).ok_or(
            "it is no `tf.train.Example`, the form of MaxText's `save_top_k_teacher_logits` since 2026; \
             earlier versions wrote pickled or safetensors records",
        )?;
        let mut integers: [Vec<i32>; 5] = Default::default();
        for (array, name) in integers.iter_mut().zip(FEATURES) {
            *array = example.integers(name)?;
        }
        let length = integers[0].len();
        let wrong = integers.iter().zip(FEATURES).find(|(array, _)| array.len() != length);
        if let Some((array, name)) = wrong {
            return Err(format!("`{name}` has {} elements, but `{INPUTS}` has {length}", array.len()));
        }
        let (logits, indices) = (example.floats(TOP_K_LOGITS)?.to_vec(), example.integers(TOP_K_INDICES)?);
        if length == 0 || logits.is_empty() || !logits.len().is_multiple_of(length) {
            return Err(format!("`{TOP_K_LOGITS}` has {} elements for {length} positions", logits.len()));
        }
        if logits.len() != indices.len() {
            let (count, other) = (indices.len(), logits.len());
            return Err(format!("`{TOP_K_INDICES}` has {count} elements, but `{TOP_K_LOGITS}` has {other}"));
        }
        Ok(Self { integers, logits, indices })
    }

    fn to_record(&self) -> Vec<u8> {
        let wide = |array: &[i32]| array.iter().map(|value| i64::from(*value)).collect();
        let mut example = Example::default();
        for (array, name) in self.integers.iter().zip(FEATURES) {
            example.set_integers(name, wide(array));
        }
        example.set_floats(TOP_K_LOGITS, self.logits.clone());
        example.set_integers(TOP_K_INDICES, wide(&self.indices));
        // MaxText's is Python's hash, which differs from process to process, and nothing reads it.
        let bytes: Vec<u8> = self.integers[0].iter().flat_map(|token| token.to_le_bytes()).collect();
        example.set_integers(SEQUENCE_HASH, vec![i64::from(crc32c::crc32c(&bytes))]);
        example.to_bytes()
    }

    fn check(&self, vocab_size: usize) -> Result<(), String> {
        let tokens =
            [(INPUTS, &self.integers[0]), (TARGETS, &self.integers[3]), (TOP_K_INDICES, &self.indices)];
        for (name, tokens) in tokens {
            let is_token = |token: i32| usize::try_from(token).is_ok_and(|token| token < vocab_size);
            if let Some(token) = tokens.iter().find(|token| !is_token(**token)) {
                return Err(format!(
                    "`{name}` holds the token {token}, but `vocab_size` is {vocab_size}: the logits are those of a model \
                     with another vocabulary"
                ));
            }
        }
        match self.logits.iter().find(|logit| !logit.is_finite()) {
            Some(logit) => Err(format!("`{TOP_K_LOGITS}` holds {logit}")),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
