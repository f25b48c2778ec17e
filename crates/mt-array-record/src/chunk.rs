//! Chunks: a header of 40 bytes, data, and padding.

use std::{fs::File, os::unix::fs::FileExt, path::PathBuf};

use crate::{
    blocks,
    error::{ArrayRecordError, Fault, Result},
};

/// Bytes of a chunk header.
const HEADER: u64 = 40;

/// Types of chunks.
pub(crate) mod kind {
    pub(crate) const SIGNATURE: u8 = b's';
    pub(crate) const PADDING: u8 = b'p';
    pub(crate) const SIMPLE: u8 = b'r';
    pub(crate) const TRANSPOSED: u8 = b't';
}

/// A chunk without its hashes and padding.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Chunk {
    /// One of [`kind`], or a value that this crate does not know.
    pub(crate) kind: u8,
    /// Number of records, below 2⁵⁶.
    pub(crate) records: u64,
    /// Sum of the records' sizes in bytes.
    pub(crate) decoded_size: u64,
    pub(crate) data: Vec<u8>,
}

impl Chunk {
    pub(crate) fn signature() -> Self {
        Self { kind: kind::SIGNATURE, records: 0, decoded_size: 0, data: Vec::new() }
    }

    /// Padding from `begin` to the end of a block; none if a block ends at `begin`.
    pub(crate) fn padding(begin: u64) -> Option<Self> {
        let end = blocks::end_of_padding(begin, HEADER);
        let length = (end > begin).then(|| blocks::length_between(begin, end) - HEADER)?;
        Some(Self { kind: kind::PADDING, records: 0, decoded_size: 0, data: vec![0; length as usize] })
    }

    /// The bytes of the chunk at `begin`, with block headers and padding.
    pub(crate) fn to_bytes(&self, begin: u64) -> Vec<u8> {
        let mut header = [0; HEADER as usize];
        header[8..16].copy_from_slice(&(self.data.len() as u64).to_le_bytes());
        header[16..24].copy_from_slice(&blocks::hash(&self.data).to_le_bytes());
        header[24..32].copy_from_slice(&(self.records << 8 | u64::from(self.kind)).to_le_bytes());
        header[32..].copy_from_slice(&self.decoded_size.to_le_bytes());
        let hash = blocks::hash(&header[8..]);
        header[..8].copy_from_slice(&hash.to_le_bytes());

        let end = blocks::end_of_chunk(begin, HEADER + self.data.len() as u64, self.records);
        let mut bytes = [&header[..], &self.data].concat();
        bytes.resize(blocks::length_between(begin, end) as usize, 0);
        blocks::interrupt(begin, end, &bytes)
    }
}

/// A file that chunks are read from, by position.
#[derive(Debug)]
pub(crate) struct ChunkFile {
    pub(crate) path: PathBuf,
    file: File,
    /// Size in bytes at the time of opening.
    pub(crate) size: u64,
}

impl ChunkFile {
    pub(crate) fn open(path: PathBuf) -> Result<Self> {
        let opened = File::open(&path).and_then(|file| Ok((file.metadata()?, file)));
        let (metadata, file) = opened.map_err(ArrayRecordError::io("open", &path))?;
        if !metadata.is_file() {
            let reason = "it is not a regular file".to_owned();
            return Err(ArrayRecordError::NotArrayRecord { path, reason });
        }
        Ok(Self { path, file, size: metadata.len() })
    }

    /// Reads the bytes from `begin` to `end`, which is not beyond the size at the time of opening.
    pub(crate) fn bytes(&self, begin: u64, end: u64) -> Result<Vec<u8>> {
        let mut bytes = vec![0; (end - begin) as usize];
        self.file.read_exact_at(&mut bytes, begin).map_err(ArrayRecordError::io("read", &self.path))?;
        Ok(bytes)
    }

    /// Reads and verifies the chunk that begins at `begin`.
    ///
    /// # Errors
    ///
    /// If the bytes at `begin` are no chunk, a hash differs, or the file cannot be read.
    pub(crate) fn chunk(&self, begin: u64) -> Result<Chunk> {
        let damaged = |reason: &str| Fault::damaged(reason).at(&self.path, begin);
        if begin >= self.size || !blocks::is_chunk_boundary(begin) {
            return Err(damaged("no chunk can begin here"));
        }
        let header_end = blocks::end_of_bytes(begin, HEADER);
        if header_end > self.size {
            return Err(damaged("the file ends inside a chunk header"));
        }
        let bytes = self.bytes(begin, header_end)?;
        let header = blocks::join(begin, None, &bytes).map_err(|fault| fault.at(&self.path, begin))?;
        if blocks::number(&header, 0) != blocks::hash(&header[8..]) {
            return Err(damaged("the hash of the chunk header differs"));
        }
        let (data_size, data_hash) = (blocks::number(&header, 8), blocks::number(&header, 16));
        let (records, kind) = (blocks::number(&header, 24) >> 8, header[24]);
        // The first condition keeps the sums of the second from overflowing.
        if data_size > self.size || blocks::end_of_chunk(begin, HEADER + data_size, records) > self.size {
            return Err(damaged("the file ends inside a chunk"));
        }
        let end = blocks::end_of_chunk(begin, HEADER + data_size, records);
        let bytes = self.bytes(begin, blocks::end_of_bytes(begin, HEADER + data_size))?;
        let mut data = blocks::join(begin, Some(end), &bytes).map_err(|fault| fault.at(&self.path, begin))?;
        data.drain(..HEADER as usize);
        if blocks::hash(&data) != data_hash {
            return Err(damaged("the hash of the chunk's data differs"));
        }
        Ok(Chunk { kind, records, decoded_size: blocks::number(&header, 32), data })
    }
}
