//! Checksums of the bytes that were read, so that a check of every byte reads each of them once.

use std::{
    collections::{BTreeMap, HashMap},
    io::{self, Read},
    ops::Range,
    path::{Path, PathBuf},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use crate::manifest::FileRecord;

/// Ranges that do not overlap, by their starts.
type Ranges = BTreeMap<u64, FileRecord>;

/// The ranges of files that were read, with the checksum of each.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    is_kept: AtomicBool,
    ranges: Mutex<HashMap<PathBuf, Ranges>>,
}

impl Seen {
    /// Keeps checksums from now on.
    pub fn keep(&self) {
        self.is_kept.store(true, Ordering::Relaxed);
    }

    /// Notes bytes that were read at an offset of a file.
    pub fn note(&self, file: &Path, start: u64, bytes: &[u8]) {
        if self.is_kept.load(Ordering::Relaxed) {
            self.add(file, start, FileRecord::of(&[bytes]));
        }
    }

    fn add(&self, file: &Path, start: u64, record: FileRecord) {
        if record.bytes == 0 {
            return;
        }
        let mut files = self.ranges.lock().unwrap_or_else(PoisonError::into_inner);
        let ranges = files.entry(file.to_owned()).or_default();
        let ends_before =
            ranges.range(..=start).next_back().is_none_or(|(at, held)| at + held.bytes <= start);
        let is_free = ends_before && ranges.range(start..start + record.bytes).next().is_none();
        // A range that overlaps an earlier one is not noted, so that its new bytes are read again.
        if is_free {
            ranges.insert(start, record);
        }
    }

    /// The record of a file: of the noted ranges, and of the others as `read` opens them.
    pub fn record_of<R: Read>(
        &self,
        file: &Path,
        bytes: u64,
        mut read: impl FnMut(Range<u64>) -> io::Result<R>,
    ) -> io::Result<FileRecord> {
        let ranges = self.ranges.lock().unwrap_or_else(PoisonError::into_inner).get(file).cloned();
        let mut record = FileRecord::default();
        for (start, seen) in ranges.unwrap_or_default() {
            if start + seen.bytes > bytes {
                break;
            }
            if record.bytes < start {
                let gap = read(record.bytes..start)?;
                extend(&mut record, gap)?;
            }
            let length = usize::try_from(seen.bytes).map_err(io::Error::other)?;
            record.crc32c = crc32c::crc32c_combine(record.crc32c, seen.crc32c, length);
            record.bytes += seen.bytes;
        }
        if record.bytes < bytes {
            let rest = read(record.bytes..bytes)?;
            extend(&mut record, rest)?;
        }
        Ok(record)
    }

    /// A stream that notes what is read of it.
    pub fn noting<R: Read>(&self, file: &Path, start: u64, stream: R) -> Noting<'_, R> {
        Noting { seen: self, file: file.to_owned(), start, record: FileRecord::default(), stream }
    }
}

/// Adds the bytes of a stream.
fn extend(record: &mut FileRecord, mut stream: impl Read) -> io::Result<()> {
    let mut buffer = vec![0; 1 << 20];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(count) => record.add(&buffer[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

pub(crate) struct Noting<'s, R> {
    seen: &'s Seen,
    file: PathBuf,
    start: u64,
    record: FileRecord,
    stream: R,
}

impl<R: Read> Read for Noting<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.stream.read(buffer)?;
        if self.seen.is_kept.load(Ordering::Relaxed) {
            self.record.add(&buffer[..count]);
        }
        Ok(count)
    }
}

impl<R> Drop for Noting<'_, R> {
    fn drop(&mut self) {
        self.seen.add(&self.file, self.start, self.record);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONTENTS: &[u8] = b"0123456789abcdef";

    /// Notes ranges, and checks the record of the whole and the bytes that were read for it.
    fn check(noted: &[(usize, usize)], expected: usize) {
        let (seen, file) = (Seen::default(), Path::new("file"));
        seen.note(file, 0, CONTENTS);
        seen.keep();
        for (start, end) in noted {
            seen.note(file, *start as u64, &CONTENTS[*start..*end]);
        }
        let mut read = 0;
        let record = seen.record_of(file, CONTENTS.len() as u64, |range| {
            read += range.end - range.start;
            Ok(&CONTENTS[range.start as usize..range.end as usize])
        });
        assert_eq!(record.unwrap(), FileRecord::of(&[CONTENTS]), "{noted:?}");
        assert_eq!(read as usize, expected, "{noted:?}");
    }

    #[test]
    fn bytes_are_read_once() {
        check(&[], 16);
        check(&[(0, 16)], 0);
        check(&[(4, 6), (0, 2), (12, 16)], 8);
        check(&[(4, 8), (2, 6), (7, 9), (4, 8), (8, 9)], 11);
        check(&[(3, 3)], 16);
    }

    #[test]
    fn streams_are_noted_as_far_as_they_were_read() {
        let (seen, file) = (Seen::default(), Path::new("file"));
        seen.keep();
        let mut buffer = [0; 5];
        seen.noting(file, 3, &CONTENTS[3..]).read_exact(&mut buffer).unwrap();
        let read = |range: Range<u64>| Ok(&CONTENTS[range.start as usize..range.end as usize]);
        let mut ranges = Vec::new();
        let record = seen.record_of(file, 16, |range| {
            ranges.push(range.clone());
            read(range)
        });
        assert_eq!(record.unwrap(), FileRecord::of(&[CONTENTS]));
        assert_eq!(ranges, [0..3, 8..16]);
    }

    #[test]
    fn damage_that_was_read_is_found() {
        let (seen, file) = (Seen::default(), Path::new("file"));
        seen.keep();
        seen.note(file, 2, b"X3");
        let record =
            seen.record_of(file, 16, |range| Ok(&CONTENTS[range.start as usize..range.end as usize]));
        assert_ne!(record.unwrap(), FileRecord::of(&[CONTENTS]));
    }
}
