//! TFRecord files: records, each behind its length, with masked checksums (CRC-32C) of the length and of the record.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::damage::DamagedFiles;
use crate::error::{DataError, Result};
use crate::files;
use crate::storage::{Content, FileCompression, Spool, compression_of};

/// Bytes before a record: its length, and the checksum of the length.
const HEADER: u64 = 12;
/// Bytes behind a record: its checksum.
const TRAILER: u64 = 4;
/// Bytes that are read at once while records are counted.
const WINDOW: u64 = 16 << 10;

/// The checksum as files store it: rotated and shifted, so that a checksum of data that holds checksums stays meaningful.
fn masked(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

fn number(bytes: &[u8]) -> u64 {
    let mut eight = [0; 8];
    eight.copy_from_slice(&bytes[..8]);
    u64::from_le_bytes(eight)
}

fn checksum(bytes: &[u8]) -> u32 {
    let mut four = [0; 4];
    four.copy_from_slice(&bytes[..4]);
    u32::from_le_bytes(four)
}

/// An open file of records.
#[derive(Debug)]
pub(crate) struct TfRecordFile {
    content: Content,
    /// The offset of each record's header, followed by the end of the file.
    starts: Vec<u64>,
    /// A checksum of the checksums of all records.
    pub(crate) checksum: u32,
}

impl TfRecordFile {
    /// Opens a file, which may be compressed with gzip, zlib or Zstandard, and finds its records: those before its damage, if
    /// that is skipped.
    ///
    /// # Errors
    /// The file cannot be read, or a length does not agree with its checksum or with the size of the file.
    pub(crate) fn open(
        path: &Path,
        spool: &Arc<Spool>,
        keep_open: bool,
        damaged_files: &DamagedFiles,
    ) -> Result<Self> {
        let compression = match compression_of(path)? {
            FileCompression::None if is_zlib(path)? => FileCompression::Zlib,
            compression => compression,
        };
        let content =
            Content::with_compression(path.to_owned(), compression, spool, keep_open, damaged_files)?;
        let (mut starts, mut checksum) = (vec![0], 0);
        let mut window = Window { content: &content, start: 0, bytes: Vec::new() };
        let mut offset = 0;
        while offset < content.length {
            let record = starts.len() as u64 - 1;
            match next_record(&mut window, path, record, offset) {
                Ok((end, sum)) => {
                    checksum = crc32c::crc32c_append(checksum, &sum);
                    offset = end;
                    starts.push(end);
                }
                // The place of the next record is unknown.
                Err(error) => {
                    damaged_files.skip(error)?;
                    break;
                }
            }
        }
        Ok(Self { content, starts, checksum })
    }

    pub(crate) fn len(&self) -> u64 {
        self.starts.len() as u64 - 1
    }

    /// The size of the decompressed file in bytes.
    pub(crate) fn size(&self) -> u64 {
        self.content.length
    }

    /// Reads the record `index`, which is less than [`TfRecordFile::len`], and verifies its checksums.
    pub(crate) fn read(&self, index: u64) -> Result<Vec<u8>> {
        let (start, end) = (self.starts[index as usize], self.starts[index as usize + 1]);
        let mut bytes = vec![0; (end - start) as usize];
        self.content.read_exact_at(&mut bytes, start)?;
        let damaged = |reason: &str| damaged(&self.content.path, index, reason.into());
        let length = bytes.len() as u64 - HEADER - TRAILER;
        if number(&bytes) != length {
            return Err(damaged("its length has changed since the file was opened"));
        }
        let stored = checksum(&bytes[bytes.len() - TRAILER as usize..]);
        bytes.truncate(bytes.len() - TRAILER as usize);
        bytes.drain(..HEADER as usize);
        if masked(&bytes) != stored {
            return Err(damaged("the checksum of its bytes differs"));
        }
        Ok(bytes)
    }
}

/// The end of the record at an offset, and its checksum.
fn next_record(
    window: &mut Window<'_>,
    path: &Path,
    record: u64,
    offset: u64,
) -> Result<(u64, [u8; TRAILER as usize])> {
    let length = window.content.length;
    let cut = || damaged(path, record, format!("the file ends inside it, at byte {length}"));
    let header = window.bytes(offset, HEADER)?.ok_or_else(cut)?;
    if masked(&header[..8]) != checksum(&header[8..]) {
        let reason = match record {
            0 => "the file does not begin with a record of a TFRecord file",
            _ => "the checksum of its length differs",
        };
        return Err(damaged(path, record, reason.into()));
    }
    let end = number(header).checked_add(offset + HEADER).ok_or_else(cut)?;
    let trailer = window.bytes(end, TRAILER)?.ok_or_else(cut)?;
    let mut sum = [0; TRAILER as usize];
    sum.copy_from_slice(trailer);
    Ok((end + TRAILER, sum))
}

fn damaged(path: &Path, record: u64, reason: String) -> DataError {
    let hint = "copy the file from its source again, or write it again";
    DataError::Record { path: path.into(), record, reason, hint }
}

/// Whether the first bytes of a file are those of a record.
pub(crate) fn is_tf_record(head: &[u8]) -> bool {
    head.len() >= HEADER as usize && masked(&head[..8]) == checksum(&head[8..])
}

/// Whether a file is a zlib stream instead of records.
fn is_zlib(path: &Path) -> Result<bool> {
    use std::os::unix::fs::FileExt;
    let mut first = [0; HEADER as usize];
    let read = files::open(path)?.read_at(&mut first, 0).map_err(DataError::io("read", path))?;
    let is_header = first[0] == 0x78 && u16::from_be_bytes([first[0], first[1]]).is_multiple_of(31);
    Ok(read >= 2 && is_header && !is_tf_record(&first[..read]))
}

/// Bytes of the content around a position.
struct Window<'a> {
    content: &'a Content,
    start: u64,
    bytes: Vec<u8>,
}

impl Window<'_> {
    /// `count` bytes from `offset` on; `None` if the content ends before.
    fn bytes(&mut self, offset: u64, count: u64) -> Result<Option<&[u8]>> {
        let end = offset + count;
        if end > self.content.length {
            return Ok(None);
        }
        if offset < self.start || end > self.start + self.bytes.len() as u64 {
            let size = WINDOW.min(self.content.length - offset);
            self.bytes.resize(size as usize, 0);
            self.start = offset;
            self.content.read_exact_at(&mut self.bytes, offset)?;
        }
        let first = (offset - self.start) as usize;
        Ok(Some(&self.bytes[first..first + count as usize]))
    }
}

/// Writes a TFRecord file.
pub(crate) struct TfRecordWriter {
    path: PathBuf,
    file: Sink,
}

enum Sink {
    Plain(BufWriter<File>),
    Gzip(Box<flate2::write::GzEncoder<BufWriter<File>>>),
}

impl TfRecordWriter {
    /// Creates a file, or replaces the existing one. TensorFlow reads files that are not compressed, or with gzip.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn create(path: &Path, compression: FileCompression) -> Result<Self> {
        let file = BufWriter::new(File::create(path).map_err(DataError::io("create", path))?);
        let file = match compression {
            FileCompression::Gzip => {
                Sink::Gzip(Box::new(flate2::write::GzEncoder::new(file, flate2::Compression::default())))
            }
            _ => Sink::Plain(file),
        };
        Ok(Self { path: path.into(), file })
    }

    pub(crate) fn write(&mut self, record: &[u8]) -> Result<()> {
        let length = (record.len() as u64).to_le_bytes();
        let [head, tail] = [masked(&length), masked(record)].map(u32::to_le_bytes);
        let file: &mut dyn Write = match &mut self.file {
            Sink::Plain(file) => file,
            Sink::Gzip(file) => file,
        };
        let mut write = || {
            file.write_all(&length)?;
            file.write_all(&head)?;
            file.write_all(record)?;
            file.write_all(&tail)
        };
        write().map_err(DataError::io("write", &self.path))
    }

    pub(crate) fn finish(self) -> Result<()> {
        let finished = || -> io::Result<()> {
            let file = match self.file {
                Sink::Plain(file) => file,
                Sink::Gzip(file) => (*file).finish()?,
            };
            file.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()
        };
        finished().map_err(DataError::io("write", &self.path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records() -> Vec<Vec<u8>> {
        let record = |length: u64| (0..length).map(|n| (n * n % 251) as u8).collect();
        [0, 1, 5, 300, 70_000, 2].into_iter().map(record).collect()
    }

    fn write(path: &Path, compression: FileCompression) {
        let mut writer = TfRecordWriter::create(path, compression).unwrap();
        records().iter().for_each(|record| writer.write(record).unwrap());
        writer.finish().unwrap();
    }

    fn read(path: &Path) -> Result<Vec<Vec<u8>>> {
        let file = TfRecordFile::open(path, &Arc::default(), true, &DamagedFiles::default())?;
        (0..file.len()).map(|index| file.read(index)).collect()
    }

    #[test]
    fn records_are_read_with_every_compression() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("records");
        for compression in [FileCompression::None, FileCompression::Gzip] {
            write(&path, compression);
            assert_eq!(read(&path).unwrap(), records());
        }
        write(&path, FileCompression::None);
        let plain = std::fs::read(&path).unwrap();
        let mut zlib = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::default());
        zlib.write_all(&plain).unwrap();
        std::fs::write(&path, zlib.finish().unwrap()).unwrap();
        assert_eq!(read(&path).unwrap(), records());
        std::fs::write(&path, zstd::encode_all(&plain[..], 1).unwrap()).unwrap();
        assert_eq!(read(&path).unwrap(), records());
        std::fs::write(&path, b"").unwrap();
        assert_eq!(read(&path).unwrap(), Vec::<Vec<u8>>::new());
    }

    #[test]
    fn every_damaged_byte_is_detected_and_its_record_named() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("records");
        write(&path, FileCompression::None);
        let good = std::fs::read(&path).unwrap();
        let mut ends = Vec::new();
        for record in records() {
            ends.push(ends.last().copied().unwrap_or(0) + record.len() + 16);
        }
        for position in (0..400).chain((400..good.len()).step_by(997)) {
            let mut bytes = good.clone();
            bytes[position] ^= 4;
            std::fs::write(&path, &bytes).unwrap();
            let record = ends.partition_point(|end| *end <= position);
            let message = read(&path).unwrap_err().to_string();
            assert!(message.contains(&format!("records`, record {}: ", record + 1)), "{position}: {message}");
        }
        for length in [1, 11, 15, 17, 400, good.len() - 1] {
            std::fs::write(&path, &good[..length]).unwrap();
            let error = read(&path).unwrap_err();
            assert!(
                error.is_user_error() && error.to_string().contains("the file ends inside it"),
                "{error}"
            );
        }
    }
}
