//! Parquet files.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use parquet::basic::Type as PhysicalType;
use parquet::column::reader::ColumnReader;
use parquet::data_type::ByteArray;
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};

use super::Identity;
use super::guard::guarded;
use super::order::{Block, Order, WindowedOrder};
use crate::error::{DataError, Result};
use crate::files;

/// The most memory for the row groups of a shuffling window, in bytes.
const WINDOW_BYTES: u64 = 256 << 20;
/// Rows decoded at a time.
const READ_ROWS: usize = 4096;
/// The bytes at a file's end, which hold its metadata, that are part of the fingerprint.
const FINGERPRINT_BYTES: u64 = 256 << 10;

/// A string column of parquet files with one document per row. Row groups are decoded on demand and cached.
#[derive(Debug)]
pub(super) struct ParquetDocuments {
    column: String,
    paths: Vec<PathBuf>,
    groups: Vec<Group>,
    blocks: Vec<Block>,
    /// Decoded row groups, oldest first.
    cache: Mutex<VecDeque<(usize, Arc<Texts>)>>,
}

#[derive(Debug, Clone, Copy)]
struct Group {
    file: usize,
    index: usize,
    column: usize,
}

/// The decoded texts of one row group.
#[derive(Debug, Default)]
struct Texts {
    text: String,
    ends: Vec<usize>,
}

impl Texts {
    fn push(&mut self, text: &str) {
        self.text.push_str(text);
        self.ends.push(self.text.len());
    }

    fn text(&self, row: usize) -> &str {
        let start = if row == 0 { 0 } else { self.ends[row - 1] };
        &self.text[start..self.ends[row]]
    }
}

impl ParquetDocuments {
    pub(super) fn open(paths: Vec<PathBuf>, column: &str, identity: &mut Identity) -> Result<Self> {
        let (mut groups, mut blocks, mut first) = (Vec::new(), Vec::new(), 0);
        for (file, path) in paths.iter().enumerate() {
            let (length, checksum) = tail(path)?;
            identity.add(&files::name(path), length, checksum);
            let reader = open_reader(path)?;
            let metadata = reader.metadata();
            let number = find_column(path, metadata.file_metadata().schema_descr(), column)?;
            for (index, group) in metadata.row_groups().iter().enumerate() {
                let invalid = |what: &str| DataError::Parquet {
                    path: path.clone(),
                    reason: format!("row group {index} has {what}"),
                };
                let count =
                    u64::try_from(group.num_rows()).map_err(|_| invalid("a negative number of rows"))?;
                if number >= group.num_columns() {
                    return Err(invalid("fewer columns than the file's schema"));
                }
                if group.column(number).num_values() != group.num_rows() {
                    return Err(invalid("another number of values than of rows"));
                }
                let bytes = u64::try_from(group.column(number).uncompressed_size()).unwrap_or(0);
                groups.push(Group { file, index, column: number });
                blocks.push(Block { first, count, bytes });
                first = count.checked_add(first).ok_or_else(|| invalid("too many rows"))?;
            }
        }
        identity.add(column, 0, 0);
        let documents =
            Self { column: column.into(), paths, groups, blocks, cache: Mutex::new(VecDeque::new()) };
        // Decoding one group now reports undecodable text before any program is compiled.
        if let Some(which) = documents.blocks.iter().position(|block| block.count > 0) {
            documents.group(which)?;
        }
        Ok(documents)
    }

    pub(super) fn len(&self) -> u64 {
        self.blocks.last().map_or(0, |block| block.first + block.count)
    }

    pub(super) fn order(&self, key: u64) -> Order {
        Order::Windowed(WindowedOrder::new(&self.blocks, WINDOW_BYTES, key))
    }

    pub(super) fn read(&self, index: u64) -> Result<String> {
        let which = self.blocks.partition_point(|block| block.first + block.count <= index);
        let texts = self.group(which)?;
        Ok(texts.text((index - self.blocks[which].first) as usize).to_string())
    }

    /// The decoded row group `which`, from the cache if possible.
    fn group(&self, which: usize) -> Result<Arc<Texts>> {
        // The lock is held while decoding, so that two readers never decode the same group twice. The cache is valid at
        // every moment, so a poisoned lock is usable.
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, texts)) = cache.iter().find(|(group, _)| *group == which) {
            return Ok(texts.clone());
        }
        let Group { file, index, .. } = self.groups[which];
        let texts = guarded(|| self.decode(which)).unwrap_or_else(|reason| {
            let reason = format!("row group {index}, column `{}`: {reason}", self.column);
            Err(DataError::Parquet { path: self.paths[file].clone(), reason })
        })?;
        let texts = Arc::new(texts);
        // The groups of one window stay in the cache, even if a dictionary-encoded group is larger than expected. A
        // window's documents are visited in random order, and evicting one of its groups would decode it again for
        // every document.
        let size = |group: usize| self.blocks[group].bytes;
        let mut total =
            cache.iter().fold(size(which), |total, (group, _)| total.saturating_add(size(*group)));
        while total > WINDOW_BYTES
            && let Some((group, _)) = cache.pop_front()
        {
            total = total.saturating_sub(size(group));
        }
        cache.push_back((which, texts.clone()));
        Ok(texts)
    }

    fn decode(&self, which: usize) -> Result<Texts> {
        let Group { file, index, column } = self.groups[which];
        let path = &self.paths[file];
        let broken = |reason: String| DataError::Parquet {
            path: path.clone(),
            reason: format!("row group {index}, column `{}`: {reason}", self.column),
        };
        let unreadable = |error: ParquetError| broken(reason(&error));
        let reader = open_reader(path)?;
        if index >= reader.num_row_groups() {
            return Err(broken("the file changed since it was opened".into()));
        }
        let group = reader.get_row_group(index).map_err(unreadable)?;
        let ColumnReader::ByteArrayColumnReader(mut values_reader) =
            group.get_column_reader(column).map_err(unreadable)?
        else {
            return Err(broken("the file changed since it was opened".into()));
        };
        let max_level = group.metadata().schema_descr().column(column).max_def_level();
        let expected = self.blocks[which].count as usize;
        let mut texts = Texts::default();
        let (mut values, mut levels): (Vec<ByteArray>, Vec<i16>) = (Vec::new(), Vec::new());
        while texts.ends.len() < expected {
            values.clear();
            levels.clear();
            let rows = READ_ROWS.min(expected - texts.ends.len());
            let definition = (max_level > 0).then_some(&mut levels);
            let (read, _, _) =
                values_reader.read_records(rows, definition, None, &mut values).map_err(unreadable)?;
            if read == 0 {
                return Err(broken(format!("has {} rows instead of {expected}", texts.ends.len())));
            }
            let mut values = values.iter();
            for row in 0..read {
                // A null is an empty document, so that every row keeps its index.
                if max_level > 0 && levels.get(row).copied() != Some(max_level) {
                    texts.push("");
                    continue;
                }
                let value = values.next().ok_or_else(|| broken("has fewer values than rows".into()))?;
                let text = std::str::from_utf8(value.data()).map_err(|error| {
                    let row = texts.ends.len();
                    broken(format!("row {row} is not UTF-8 text from its byte {} on", error.valid_up_to()))
                })?;
                texts.push(text);
            }
        }
        Ok(texts)
    }
}

fn open_reader(path: &Path) -> Result<SerializedFileReader<std::fs::File>> {
    let file = files::open(path)?;
    guarded(|| SerializedFileReader::new(file).map_err(|error| reason(&error)))
        .unwrap_or_else(Err)
        .map_err(|reason| DataError::Parquet { path: path.into(), reason })
}

/// The library's message without its kind prefix, in this crate's style.
fn reason(error: &ParquetError) -> String {
    let text = match error {
        ParquetError::General(text) | ParquetError::EOF(text) | ParquetError::NYI(text) => text.clone(),
        other => other.to_string(),
    };
    let mut characters = text.trim_end_matches('.').chars();
    characters.next().map(|first| first.to_lowercase().chain(characters).collect()).unwrap_or_default()
}

/// The length of a file and a checksum of its end.
fn tail(path: &Path) -> Result<(u64, u32)> {
    use std::os::unix::fs::FileExt;
    let file = files::open(path)?;
    let length = file.metadata().map_err(DataError::io("read", path))?.len();
    let size = length.min(FINGERPRINT_BYTES);
    let mut end = vec![0; size as usize];
    file.read_exact_at(&mut end, length - size).map_err(DataError::io("read", path))?;
    Ok((length, crc32c::crc32c(&end)))
}

fn find_column(
    path: &Path,
    schema: &parquet::schema::types::SchemaDescriptor,
    column: &str,
) -> Result<usize> {
    let columns = schema.columns();
    let Some(number) = columns.iter().position(|leaf| leaf.path().string() == column) else {
        let names: Vec<String> = columns.iter().map(|leaf| leaf.path().string()).collect();
        let available = if names.is_empty() { "no column".into() } else { files::quoted(&names) };
        return Err(DataError::MissingColumn {
            path: path.into(),
            place: String::new(),
            column: column.into(),
            available,
        });
    };
    let leaf = &columns[number];
    let wrong = |found: String| DataError::ColumnType {
        path: path.into(),
        place: String::new(),
        column: column.into(),
        found,
    };
    if leaf.max_rep_level() > 0 {
        return Err(wrong("lists".into()));
    }
    match leaf.physical_type() {
        PhysicalType::BYTE_ARRAY => Ok(number),
        other => Err(wrong(format!("values of type {other}"))),
    }
}
