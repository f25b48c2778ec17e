//! Packed rows on disk, so that a later run with the same data, tokenizer and options does not tokenize them again.
//!
//! A directory is named by a hash of all that determines the rows. Its files hold successive rows of a stream, with the
//! position behind each, and a checksum of the content.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::error::{DataError, Result};
use crate::packing::{Piece, Row};
use crate::source::hex;
use crate::state::StreamPosition;

/// The rows of a file.
pub(crate) const CHUNK_ROWS: u64 = 256;
const SIGNATURE: &[u8; 8] = b"MTROWS01";
/// Signature and checksum.
const HEADER: usize = 12;

/// The cache of a stream's rows.
#[derive(Debug, Clone)]
pub(crate) struct RowCache {
    directory: PathBuf,
    stream: u64,
}

/// Successive rows, each with the position behind it.
#[derive(Debug, Default)]
pub(crate) struct Chunk {
    pub rows: Vec<(Row, StreamPosition)>,
    /// Whether the data ends behind the rows.
    pub ended: bool,
}

impl RowCache {
    /// The cache below a directory of all caches, for rows that follow from `properties`.
    pub(crate) fn new(root: &Path, properties: &BTreeMap<String, String>, stream: u64) -> Self {
        let mut hash = Sha256::new();
        for (name, value) in properties {
            hash.update(format!("{}:{name}{}:{value}", name.len(), value.len()));
        }
        Self { directory: root.join(hex(&hash.finalize()[..16])), stream }
    }

    fn path(&self, chunk: u64) -> PathBuf {
        self.directory.join(format!("stream-{:05}-{chunk:08}.rows", self.stream))
    }

    /// The rows of a chunk, if it is in the cache.
    ///
    /// # Errors
    /// The file is damaged, or cannot be read.
    pub(crate) fn load(&self, chunk: u64) -> Result<Option<Chunk>> {
        let path = self.path(chunk);
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(DataError::io("read", path)(error)),
        };
        let damaged = |reason: &str| DataError::CachedRows { path: path.clone(), reason: reason.to_owned() };
        if bytes.len() < HEADER || !bytes.starts_with(SIGNATURE) {
            return Err(damaged("it does not begin as such a file"));
        }
        let checksum = u32::from_le_bytes(std::array::from_fn(|byte| bytes[SIGNATURE.len() + byte]));
        if crc32c::crc32c(&bytes[HEADER..]) != checksum {
            return Err(damaged("its checksum is wrong"));
        }
        let content =
            zstd::stream::decode_all(&bytes[HEADER..]).map_err(|error| damaged(&error.to_string()))?;
        let mut reader = Reader { bytes: &content };
        reader.chunk().map(Some).ok_or_else(|| damaged("its content ends too early"))
    }

    /// Adds a chunk. A file has its name once it is complete, so that runs may share a cache.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn save(&self, chunk: u64, content: &Chunk) -> Result<()> {
        let path = self.path(chunk);
        let mut plain = Vec::new();
        write_chunk(&mut plain, content);
        let packed = zstd::stream::encode_all(plain.as_slice(), 1).map_err(DataError::io("write", &path))?;
        let mut bytes = SIGNATURE.to_vec();
        bytes.extend(crc32c::crc32c(&packed).to_le_bytes());
        bytes.extend(packed);
        let partial = path.with_extension(format!("partial-{}", std::process::id()));
        let write = || {
            fs::create_dir_all(&self.directory)?;
            fs::write(&partial, &bytes)?;
            fs::File::open(&partial)?.sync_all()?;
            fs::rename(&partial, &path)
        };
        write().map_err(DataError::io("write", &path))
    }
}

fn write_list(bytes: &mut Vec<u8>, list: &[i32]) {
    bytes.extend((list.len() as u32).to_le_bytes());
    list.iter().for_each(|value| bytes.extend(value.to_le_bytes()));
}

fn write_piece(bytes: &mut Vec<u8>, piece: &Piece) {
    write_list(bytes, &piece.tokens);
    let has_loss: Vec<i32> = piece.has_loss.iter().map(|has_loss| i32::from(*has_loss)).collect();
    for list in [&has_loss, &piece.classes, &piece.documents, &piece.positions] {
        write_list(bytes, list);
    }
}

fn write_chunk(bytes: &mut Vec<u8>, chunk: &Chunk) {
    bytes.extend((chunk.rows.len() as u32).to_le_bytes());
    bytes.push(u8::from(chunk.ended));
    for (row, position) in &chunk.rows {
        let StreamPosition { epoch, document, token, skip_rows, rows, read } = *position;
        for number in [epoch, document, token, skip_rows, rows, read, row.filled as u64, row.bytes] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend(row.label.to_le_bytes());
        bytes.extend((row.segments.len() as u32).to_le_bytes());
        bytes.push(u8::from(row.second.is_some()));
        row.segments.iter().chain(&row.second).for_each(|piece| write_piece(bytes, piece));
    }
}

struct Reader<'a> {
    bytes: &'a [u8],
}

impl Reader<'_> {
    fn take<const COUNT: usize>(&mut self) -> Option<[u8; COUNT]> {
        let (taken, rest) = self.bytes.split_first_chunk::<COUNT>()?;
        self.bytes = rest;
        Some(*taken)
    }

    fn count(&mut self) -> Option<usize> {
        self.take().map(|bytes| u32::from_le_bytes(bytes) as usize)
    }

    fn number(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }

    fn flag(&mut self) -> Option<bool> {
        self.take::<1>().map(|[byte]| byte != 0)
    }

    fn list(&mut self) -> Option<Vec<i32>> {
        let length = self.count()?.checked_mul(4)?;
        let (taken, rest) = self.bytes.split_at_checked(length)?;
        self.bytes = rest;
        let (values, _) = taken.as_chunks::<4>();
        Some(values.iter().map(|bytes| i32::from_le_bytes(*bytes)).collect())
    }

    fn piece(&mut self) -> Option<Piece> {
        Some(Piece {
            tokens: self.list()?,
            has_loss: self.list()?.into_iter().map(|has_loss| has_loss != 0).collect(),
            classes: self.list()?,
            documents: self.list()?,
            positions: self.list()?,
        })
    }

    fn chunk(&mut self) -> Option<Chunk> {
        let (count, ended) = (self.count()?, self.flag()?);
        let mut chunk = Chunk { rows: Vec::new(), ended };
        for _ in 0..count {
            let [epoch, document, token, skip_rows, rows, read, filled, bytes] = {
                let mut numbers = [0; 8];
                for number in &mut numbers {
                    *number = self.number()?;
                }
                numbers
            };
            let label = f32::from_le_bytes(self.take()?);
            let (num_segments, has_second) = (self.count()?, self.flag()?);
            let segments = (0..num_segments).map(|_| self.piece()).collect::<Option<Vec<_>>>()?;
            let second = if has_second { Some(self.piece()?) } else { None };
            let row = Row { filled: filled as usize, bytes, segments, second, label };
            chunk.rows.push((row, StreamPosition { epoch, document, token, skip_rows, rows, read }));
        }
        Some(chunk)
    }
}
