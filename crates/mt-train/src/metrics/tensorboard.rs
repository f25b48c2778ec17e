//! TensorBoard event files.
//!
//! An event file is a sequence of records, each framed by its length and two checksums. A record is an `Event` protocol
//! buffer. This module encodes the few fields that scalars need.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::{Metrics, MetricsError};

/// Writes one event file.
pub(crate) struct EventFile {
    path: PathBuf,
    file: BufWriter<File>,
}

impl EventFile {
    /// Creates a file in `directory` whose name sorts after those of earlier starts.
    ///
    /// `first_step` is the first step of this start. TensorBoard discards the values of this and later steps in earlier
    /// files.
    pub(crate) fn create(directory: &Path, first_step: u64) -> Result<Self, MetricsError> {
        /// Distinguishes the files that one process creates in the same second.
        static CREATED: AtomicU32 = AtomicU32::new(0);

        fs::create_dir_all(directory).map_err(MetricsError::io("create", directory))?;
        let name = format!(
            "events.out.tfevents.{:010}.{}.{}.{}",
            since_epoch().as_secs(),
            host_name(),
            std::process::id(),
            CREATED.fetch_add(1, Ordering::Relaxed)
        );
        let path = directory.join(name);
        let file = File::create_new(&path).map_err(MetricsError::io("create", &path))?;
        let mut events = Self { path, file: BufWriter::new(file) };
        events.write_record(&event(0, |event| event.bytes(3, b"brain.Event:2")))?;
        // A session log with status START makes readers discard later steps of earlier files.
        events.write_record(&event(first_step, |event| {
            let mut session_log = Message::default();
            session_log.integer(1, 1);
            event.bytes(7, &session_log.0);
        }))?;
        events.publish()?;
        Ok(events)
    }

    /// Writes each value as a scalar under its name.
    pub(crate) fn write(&mut self, step: u64, metrics: &Metrics) -> Result<(), MetricsError> {
        let mut summary = Message::default();
        for (name, value) in metrics.iter() {
            let mut scalar = Message::default();
            scalar.bytes(1, name.as_bytes());
            scalar.float(2, value as f32);
            summary.bytes(1, &scalar.0);
        }
        self.write_record(&event(step, |event| event.bytes(5, &summary.0)))
    }

    /// Flushes written events to the system, so that TensorBoard sees them.
    pub(crate) fn publish(&mut self) -> Result<(), MetricsError> {
        self.file.flush().map_err(MetricsError::io("write", &self.path))
    }

    fn write_record(&mut self, data: &[u8]) -> Result<(), MetricsError> {
        self.file.write_all(&framed(data)).map_err(MetricsError::io("write", &self.path))
    }
}

/// An `Event` with the current time and the fields that `fill` adds.
fn event(step: u64, fill: impl FnOnce(&mut Message)) -> Vec<u8> {
    let mut event = Message::default();
    event.double(1, since_epoch().as_secs_f64());
    event.integer(2, step);
    fill(&mut event);
    event.0
}

/// A record: length, checksum of the length, data, checksum of the data.
fn framed(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    let mut record = Vec::with_capacity(data.len() + 16);
    record.extend_from_slice(&length);
    record.extend_from_slice(&masked_checksum(&length).to_le_bytes());
    record.extend_from_slice(data);
    record.extend_from_slice(&masked_checksum(data).to_le_bytes());
    record
}

/// CRC-32C, rotated and shifted as the record format requires, so that records can be nested.
fn masked_checksum(data: &[u8]) -> u32 {
    crc32c::crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// A protocol buffer message under construction.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn integer(&mut self, field: u32, value: u64) {
        self.key(field, 0);
        self.variable(value);
    }

    fn double(&mut self, field: u32, value: f64) {
        self.key(field, 1);
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    fn bytes(&mut self, field: u32, value: &[u8]) {
        self.key(field, 2);
        self.variable(value.len() as u64);
        self.0.extend_from_slice(value);
    }

    fn float(&mut self, field: u32, value: f32) {
        self.key(field, 5);
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    fn key(&mut self, field: u32, wire_type: u32) {
        self.variable(u64::from(field << 3 | wire_type));
    }

    /// Seven bits per byte, least significant first, with the high bit set on all bytes except the last.
    fn variable(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }
}

fn since_epoch() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// The machine's name, restricted to characters that are valid in a file name.
pub(crate) fn host_name() -> String {
    let name: String = fs::read_to_string("/proc/sys/kernel/hostname")
        .unwrap_or_default()
        .trim()
        .chars()
        .filter(|character| character.is_ascii_alphanumeric() || "-_.".contains(*character))
        .collect();
    if name.is_empty() { "localhost".to_owned() } else { name }
}

#[cfg(test)]
mod tests {
    use super::super::record::tests::measured_step;
    use super::*;

    /// Splits a file into its records and checks their frames.
    fn records(mut bytes: &[u8]) -> Vec<&[u8]> {
        let mut records = Vec::new();
        while !bytes.is_empty() {
            let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
            let checksum = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
            let data = &bytes[12..12 + length];
            assert_eq!(checksum(8), masked_checksum(&bytes[..8]));
            assert_eq!(checksum(12 + length), masked_checksum(data));
            records.push(data);
            bytes = &bytes[16 + length..];
        }
        records
    }

    #[test]
    fn frames_carry_the_masked_checksum() {
        // The published check value of CRC-32C, e3069283, masked.
        assert_eq!(masked_checksum(b"123456789"), 0xc78a_b0e5);
        assert_eq!(records(&framed(b"abc")), [b"abc"]);
    }

    #[test]
    fn integers_have_variable_length() {
        for (value, expected) in [(0, &[0x00][..]), (127, &[0x7f]), (128, &[0x80, 1]), (300, &[0xac, 2])] {
            let mut message = Message::default();
            message.variable(value);
            assert_eq!(message.0, expected);
        }
    }

    #[test]
    fn a_file_holds_version_start_and_scalars() {
        let directory = tempfile::tempdir().unwrap();
        let mut events = EventFile::create(directory.path(), 4).unwrap();
        events.write(4, &measured_step(4, 2.5).record().metrics).unwrap();
        events.publish().unwrap();
        let bytes = fs::read(&events.path).unwrap();
        let records = records(&bytes);
        assert_eq!(records.len(), 3);
        assert!(records[0].ends_with(b"\x1a\x0dbrain.Event:2"));
        assert!(records[1].ends_with(&[0x10, 4, 0x3a, 2, 0x08, 1]));
        let scalar = [&b"\x0a\x14\x0a\x0dlearning/loss\x15"[..], &2.5f32.to_le_bytes()].concat();
        assert!(records[2].windows(scalar.len()).any(|window| window == scalar));

        // A second start in the same second does not overwrite the first.
        EventFile::create(directory.path(), 5).unwrap();
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 2);
    }
}
