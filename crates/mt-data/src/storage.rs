//! Files that are read at any position, also if they are compressed.
//!
//! The order of documents is a function of the position alone, so every document has to be read without those before
//! it. A compressed file has no such positions: its content is decompressed once, when the dataset is opened, into a
//! temporary file that has no name and vanishes with the process.

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use crate::damage::DamagedFiles;
use crate::error::{DataError, Result};
use crate::files;

/// Bytes of the temporary file that one compressed file takes at a time.
const EXTENT: u64 = 4 << 20;

/// The largest window of Zstandard, as a logarithm: that of `zstd --ultra --long=31`.
const ZSTD_WINDOW_LOG_MAX: u32 = 31;

/// The compression of a whole file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileCompression {
    None,
    Gzip,
    /// A zlib stream, the option `ZLIB` of TFRecord files.
    Zlib,
    Zstd,
}

impl FileCompression {
    /// The compression that the first bytes of a file announce. A zlib stream may begin as a text does, so that only
    /// readers of TFRecord files look for it.
    pub(crate) fn of(first: &[u8]) -> Self {
        match first {
            [0x1f, 0x8b, 8, ..] => Self::Gzip,
            // A frame of data, or one to skip, with which files of parallel compressors begin.
            [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Self::Zstd,
            _ => Self::None,
        }
    }

    /// The compression that the name of a file to be written asks for.
    pub fn of_name(path: &Path) -> Self {
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("gz") => Self::Gzip,
            Some("zst" | "zstd") => Self::Zstd,
            _ => Self::None,
        }
    }

    /// The name of the compression in messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Gzip => "gzip",
            Self::Zlib => "zlib",
            Self::Zstd => "zstd",
        }
    }

    /// The decompressed bytes of a file.
    pub(crate) fn reader<'a>(self, file: impl Read + 'a) -> io::Result<Box<dyn Read + 'a>> {
        Ok(match self {
            Self::None => Box::new(file),
            // Files of parallel compressors, and concatenated ones, have several members.
            Self::Gzip => {
                Box::new(flate2::bufread::MultiGzDecoder::new(BufReader::with_capacity(1 << 17, file)))
            }
            Self::Zlib => {
                Box::new(flate2::bufread::ZlibDecoder::new(BufReader::with_capacity(1 << 17, file)))
            }
            Self::Zstd => {
                let mut decoder = zstd::stream::read::Decoder::new(file)?;
                decoder.window_log_max(ZSTD_WINDOW_LOG_MAX)?;
                Box::new(decoder)
            }
        })
    }
}

/// The compression of a file, from its first bytes.
pub(crate) fn compression_of(path: &Path) -> Result<FileCompression> {
    let mut first = [0; 8];
    let read = files::open(path)?.read_at(&mut first, 0).map_err(DataError::io("read", path))?;
    Ok(FileCompression::of(&first[..read]))
}

/// The decompressed bytes of a whole file.
pub(crate) fn read_all(path: &Path) -> Result<Vec<u8>> {
    let compression = compression_of(path)?;
    let mut bytes = Vec::new();
    let mut reader = compression.reader(files::open(path)?).map_err(DataError::io("read", path))?;
    match reader.read_to_end(&mut bytes) {
        Ok(_) => Ok(bytes),
        Err(error) => Err(undecodable(path, compression, bytes.len() as u64, error)),
    }
}

/// The error of a file whose bytes cannot be read or decompressed, where `good` bytes of the content precede the fault.
pub(crate) fn undecodable(
    path: &Path,
    compression: FileCompression,
    good: u64,
    error: io::Error,
) -> DataError {
    if compression == FileCompression::None || error.raw_os_error().is_some() {
        return DataError::io("read", path)(error);
    }
    let reason = match error.kind() {
        io::ErrorKind::UnexpectedEof => "it is cut off".to_owned(),
        _ => format!("it is damaged ({error})"),
    };
    DataError::Compressed { path: path.into(), compression: compression.name(), good, reason }
}

/// The temporary file of a dataset's decompressed content.
#[derive(Debug, Default)]
pub(crate) struct Spool {
    file: OnceLock<File>,
    /// The extents that are taken.
    taken: AtomicU64,
}

impl Spool {
    fn file(&self) -> io::Result<&File> {
        if let Some(file) = self.file.get() {
            return Ok(file);
        }
        let file = tempfile::tempfile()?;
        // Another thread may have set one in the meantime, which then is the only one.
        Ok(self.file.get_or_init(|| file))
    }

    fn take(&self) -> u64 {
        self.taken.fetch_add(1, Ordering::Relaxed) * EXTENT
    }
}

/// The content of a file, by position.
#[derive(Debug)]
pub(crate) struct Content {
    pub(crate) path: PathBuf,
    /// The number of bytes.
    pub(crate) length: u64,
    place: Place,
}

#[derive(Debug)]
enum Place {
    /// In the file itself, which stays open if `keep_open` is set.
    File { file: OnceLock<File>, keep_open: bool },
    /// In extents of the dataset's temporary file.
    Spool { spool: Arc<Spool>, extents: Vec<u64> },
}

impl Content {
    /// Opens a file, and decompresses it if it is compressed: up to its damage, if that is skipped.
    pub(crate) fn open(
        path: PathBuf,
        spool: &Arc<Spool>,
        keep_open: bool,
        damaged: &DamagedFiles,
    ) -> Result<Self> {
        let compression = compression_of(&path)?;
        Self::with_compression(path, compression, spool, keep_open, damaged)
    }

    /// As [`Content::open`], of a file whose compression is known.
    pub(crate) fn with_compression(
        path: PathBuf,
        compression: FileCompression,
        spool: &Arc<Spool>,
        keep_open: bool,
        damaged: &DamagedFiles,
    ) -> Result<Self> {
        let file = files::open(&path)?;
        if compression == FileCompression::None {
            let length = file.metadata().map_err(DataError::io("read", &path))?.len();
            let place = Place::File { file: OnceLock::new(), keep_open };
            return Ok(Self { path, length, place });
        }
        let mut reader = compression.reader(file).map_err(DataError::io("read", &path))?;
        let (mut extents, mut length) = (Vec::new(), 0);
        let mut buffer = vec![0; EXTENT as usize];
        let mut is_cut = false;
        while !is_cut {
            let mut filled = 0;
            while filled < buffer.len() && !is_cut {
                match reader.read(&mut buffer[filled..]) {
                    Ok(0) => break,
                    Ok(read) => filled += read,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => {
                        damaged.skip(undecodable(&path, compression, length + filled as u64, error))?;
                        is_cut = true;
                    }
                }
            }
            if filled == 0 {
                break;
            }
            let extent = spool.take();
            let written = spool.file().and_then(|file| file.write_all_at(&buffer[..filled], extent));
            written.map_err(|source| DataError::Spool {
                path: path.clone(),
                directory: std::env::temp_dir(),
                source,
            })?;
            extents.push(extent);
            length += filled as u64;
        }
        Ok(Self { path, length, place: Place::Spool { spool: spool.clone(), extents } })
    }

    /// Fills `bytes` with the content at `offset`.
    pub(crate) fn read_exact_at(&self, mut bytes: &mut [u8], mut offset: u64) -> Result<()> {
        let read = |error| DataError::io("read", &self.path)(error);
        match &self.place {
            Place::File { file, keep_open } => {
                let opened;
                let file = match file.get() {
                    Some(file) => file,
                    None => {
                        opened = files::open(&self.path)?;
                        if *keep_open { file.get_or_init(|| opened) } else { &opened }
                    }
                };
                file.read_exact_at(bytes, offset).map_err(read)
            }
            Place::Spool { spool, extents } => {
                while !bytes.is_empty() {
                    let (extent, within) = ((offset / EXTENT) as usize, offset % EXTENT);
                    let count = bytes.len().min((EXTENT - within) as usize);
                    let (now, later) = bytes.split_at_mut(count);
                    let start =
                        extents.get(extent).ok_or_else(|| read(io::ErrorKind::UnexpectedEof.into()))?;
                    let file = spool.file().map_err(read)?;
                    file.read_exact_at(now, start + within).map_err(read)?;
                    (bytes, offset) = (later, offset + count as u64);
                }
                Ok(())
            }
        }
    }

    /// The content in order.
    pub(crate) fn reader(&self) -> Result<Box<dyn Read + '_>> {
        match &self.place {
            Place::File { .. } => Ok(Box::new(files::open(&self.path)?)),
            Place::Spool { .. } => Ok(Box::new(Sequential { content: self, offset: 0 })),
        }
    }
}

/// Reads decompressed content in order.
struct Sequential<'a> {
    content: &'a Content,
    offset: u64,
}

impl Read for Sequential<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let count = (self.content.length - self.offset).min(bytes.len() as u64) as usize;
        self.content.read_exact_at(&mut bytes[..count], self.offset).map_err(io::Error::other)?;
        self.offset += count as u64;
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    #[test]
    fn compressed_content_is_read_at_any_position() {
        let directory = tempfile::tempdir().unwrap();
        let bytes: Vec<u8> =
            (0..EXTENT as u32 * 2 + 12_345).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        let halves = [gzip(&bytes[..777_777]), gzip(&bytes[777_777..])].concat();
        let files = [
            ("plain", bytes.clone(), FileCompression::None),
            ("members.txt", halves, FileCompression::Gzip),
            ("frame", zstd::encode_all(&bytes[..], 1).unwrap(), FileCompression::Zstd),
        ];
        let spool = Arc::default();
        for (name, stored, compression) in files {
            let path = directory.path().join(name);
            std::fs::write(&path, stored).unwrap();
            let content = Content::open(path.clone(), &spool, true, &DamagedFiles::default()).unwrap();
            assert_eq!((compression_of(&path).unwrap(), content.length), (compression, bytes.len() as u64));
            for (offset, count) in [(0, 10), (EXTENT - 5, 10), (5, 2 * EXTENT), (bytes.len() as u64 - 1, 1)] {
                let mut found = vec![0; count as usize];
                content.read_exact_at(&mut found, offset).unwrap();
                assert!(found == bytes[offset as usize..(offset + count) as usize], "{name} {offset}");
            }
            let mut whole = Vec::new();
            content.reader().unwrap().read_to_end(&mut whole).unwrap();
            assert!(whole == bytes && read_all(&path).unwrap() == bytes, "{name}");
            assert!(content.read_exact_at(&mut [0; 2], bytes.len() as u64 - 1).is_err());
        }
    }

    #[test]
    fn cut_and_damaged_files_are_named() {
        let directory = tempfile::tempdir().unwrap();
        let text = "some line of text\n".repeat(20_000);
        for (name, stored) in
            [("a.gz", gzip(text.as_bytes())), ("b.zst", zstd::encode_all(text.as_bytes(), 3).unwrap())]
        {
            let path = directory.path().join(name);
            std::fs::write(&path, &stored[..stored.len() - 9]).unwrap();
            let cut =
                Content::open(path.clone(), &Arc::default(), true, &DamagedFiles::default()).unwrap_err();
            assert!(cut.is_user_error() && cut.to_string().contains("it is cut off\nhint: "), "{cut}");
            // Zstandard's frames have a checksum only on request.
            if name == "b.zst" {
                continue;
            }
            let mut damaged = stored.clone();
            let middle = stored.len() / 2;
            damaged[middle] ^= 0x55;
            std::fs::write(&path, &damaged).unwrap();
            let error = Content::open(path, &Arc::default(), true, &DamagedFiles::default()).unwrap_err();
            assert!(error.is_user_error() && error.to_string().contains(name), "{error}");
        }
    }
}
