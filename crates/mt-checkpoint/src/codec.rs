//! The encoding of a chunk's bytes.

use std::io::{self, Read, Write};

use flate2::{Compression, read::GzDecoder, write::GzEncoder};

/// A codec from bytes to bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ByteCodec {
    Zstd {
        level: i32,
        /// Whether frames end with a checksum of their contents. Readers learn it from the frame.
        checksum: bool,
    },
    /// As early checkpoints of MaxText and those of Pax are compressed. It ends with a checksum.
    Gzip,
    /// Appends the CRC-32C of the preceding bytes.
    Crc32c,
}

/// Bytes of one entry of a shard's index: offset and length of an inner chunk.
const INDEX_ENTRY: usize = 16;
const CHECKSUM: usize = 4;
const MISSING: u64 = u64::MAX;

/// Applies the codecs in order.
pub(crate) fn encode(codecs: &[ByteCodec], mut bytes: Vec<u8>) -> io::Result<Vec<u8>> {
    for codec in codecs {
        bytes = match codec {
            ByteCodec::Zstd { level, checksum } => {
                let mut compressor = zstd::bulk::Compressor::new(*level)?;
                compressor.include_checksum(*checksum)?;
                compressor.compress(&bytes)?
            }
            ByteCodec::Gzip => {
                let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
                encoder.write_all(&bytes)?;
                encoder.finish()?
            }
            ByteCodec::Crc32c => {
                let checksum = crc32c::crc32c(&bytes);
                bytes.extend(checksum.to_le_bytes());
                bytes
            }
        };
    }
    Ok(bytes)
}

/// Undoes the codecs, last first, and checks that the result has `decoded_size` bytes.
pub(crate) fn decode(codecs: &[ByteCodec], encoded: &[u8], decoded_size: usize) -> Result<Vec<u8>, String> {
    let mut bytes = std::borrow::Cow::Borrowed(encoded);
    for codec in codecs.iter().rev() {
        match codec {
            ByteCodec::Zstd { .. } => {
                let decompressed = decompress(&bytes, decoded_size);
                bytes = decompressed.map_err(|error| format!("decompression failed: {error}"))?.into();
            }
            ByteCodec::Gzip => {
                let mut decompressed = Vec::new();
                // Damaged data must not fill the memory.
                let limit = decoded_size as u64 + CHECKSUM as u64 + 1;
                let read = GzDecoder::new(&*bytes).take(limit).read_to_end(&mut decompressed);
                read.map_err(|error| format!("decompression failed: {error}"))?;
                bytes = decompressed.into();
            }
            ByteCodec::Crc32c => {
                let contents = without_checksum(&bytes)?.len();
                match &mut bytes {
                    std::borrow::Cow::Borrowed(borrowed) => *borrowed = &borrowed[..contents],
                    std::borrow::Cow::Owned(owned) => owned.truncate(contents),
                }
            }
        }
    }
    if bytes.len() != decoded_size {
        return Err(format!("a chunk decodes to {} bytes, {decoded_size} are expected", bytes.len()));
    }
    Ok(bytes.into_owned())
}

/// Undoes the codecs of a stream, whose end must be read for checksums to be checked. Errors of the operating system have
/// its error code; others are those of damaged data.
pub(crate) fn decoder<'r>(
    codecs: &[ByteCodec],
    encoded: Box<dyn Read + 'r>,
) -> io::Result<Box<dyn Read + 'r>> {
    codecs.iter().rev().try_fold(encoded, |stream, codec| -> io::Result<Box<dyn Read + 'r>> {
        Ok(match codec {
            ByteCodec::Zstd { .. } => Box::new(zstd::stream::read::Decoder::new(stream)?),
            ByteCodec::Gzip => Box::new(GzDecoder::new(stream)),
            ByteCodec::Crc32c => Box::new(CheckedStream::new(stream)),
        })
    })
}

/// A stream without the checksum at its end, which is checked there.
struct CheckedStream<'r> {
    inner: Box<dyn Read + 'r>,
    checksum: u32,
    /// The last bytes so far, which are the checksum if the stream ends.
    held: Vec<u8>,
}

impl<'r> CheckedStream<'r> {
    fn new(inner: Box<dyn Read + 'r>) -> Self {
        Self { inner, checksum: 0, held: Vec::new() }
    }
}

impl Read for CheckedStream<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        let mut bytes = std::mem::take(&mut self.held);
        let wanted = (buffer.len() + CHECKSUM - bytes.len()) as u64;
        self.inner.by_ref().take(wanted).read_to_end(&mut bytes)?;
        let count = bytes.len().checked_sub(CHECKSUM);
        let count = count.ok_or_else(|| io::Error::other("it is too short to have a checksum"))?;
        self.held = bytes.split_off(count);
        self.checksum = crc32c::crc32c_append(self.checksum, &bytes);
        buffer[..count].copy_from_slice(&bytes);
        if count == 0 {
            let stored = u32::from_le_bytes(self.held[..].try_into().expect("a checksum is held"));
            if stored != self.checksum {
                return Err(io::Error::other(format!(
                    "its checksum is {:08x}, not {stored:08x}",
                    self.checksum
                )));
            }
        }
        Ok(count)
    }
}

/// Returns at most one byte more than `decoded_size`. Memory for the whole result is reserved only if the frame itself
/// states that size, because `decoded_size` comes from metadata, which may be damaged.
fn decompress(frame: &[u8], decoded_size: usize) -> io::Result<Vec<u8>> {
    let told = zstd::zstd_safe::get_frame_content_size(frame).ok().flatten();
    if told == Some(decoded_size as u64) {
        return zstd::bulk::decompress(frame, decoded_size);
    }
    let mut bytes = Vec::new();
    let most = (decoded_size as u64).saturating_add(1);
    zstd::stream::read::Decoder::with_buffer(frame)?.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The locations of a shard's inner chunks, in row-major order of the inner grid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ShardIndex {
    /// Offset and length; `None` for a chunk that is not stored.
    pub entries: Vec<Option<(u64, u64)>>,
}

impl ShardIndex {
    pub fn encoded_size(num_chunks: usize, checksum: bool) -> usize {
        num_chunks.saturating_mul(INDEX_ENTRY).saturating_add(if checksum { CHECKSUM } else { 0 })
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(Self::encoded_size(self.entries.len(), true));
        for entry in &self.entries {
            let (offset, length) = entry.unwrap_or((MISSING, MISSING));
            bytes.extend(offset.to_le_bytes());
            bytes.extend(length.to_le_bytes());
        }
        bytes.extend(crc32c::crc32c(&bytes).to_le_bytes());
        bytes
    }

    pub fn decode(encoded: &[u8], checksum: bool) -> Result<Self, String> {
        let contents = if checksum {
            without_checksum(encoded).map_err(|reason| format!("the shard index: {reason}"))?
        } else {
            encoded
        };
        let number = |bytes: &[u8]| bytes.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte));
        let entries = contents
            .chunks_exact(INDEX_ENTRY)
            .map(|entry| (number(&entry[..8]), number(&entry[8..])))
            .map(|entry| (entry != (MISSING, MISSING)).then_some(entry))
            .collect();
        Ok(Self { entries })
    }
}

fn without_checksum(bytes: &[u8]) -> Result<&[u8], String> {
    let (contents, stored) =
        bytes.split_last_chunk::<CHECKSUM>().ok_or("it is too short to have a checksum")?;
    let (stored, found) = (u32::from_le_bytes(*stored), crc32c::crc32c(contents));
    if stored == found { Ok(contents) } else { Err(format!("its checksum is {found:08x}, not {stored:08x}")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gzip_is_read_and_checked() {
        let (codecs, bytes) = ([ByteCodec::Gzip], vec![7; 5000]);
        let encoded = encode(&codecs, bytes.clone()).unwrap();
        assert_eq!(decode(&codecs, &encoded, 5000).unwrap(), bytes);
        assert!(decode(&codecs, &encoded, 4999).is_err());
        for position in 10..encoded.len() {
            let mut damaged = encoded.clone();
            damaged[position] ^= 1;
            // A flip of a bit without a meaning is not found, and changes no number.
            let found = decode(&codecs, &damaged, 5000);
            assert!(found.is_err() || found.is_ok_and(|decoded| decoded == bytes), "{position}");
        }
        let mut stream = decoder(&codecs, Box::new(&encoded[..])).unwrap();
        let mut decoded = Vec::new();
        stream.read_to_end(&mut decoded).unwrap();
        assert_eq!(decoded, bytes);
    }

    const CODECS: [ByteCodec; 2] = [ByteCodec::Zstd { level: 1, checksum: false }, ByteCodec::Crc32c];

    #[test]
    fn encoded_chunks_decode_and_damage_is_noticed() {
        let bytes: Vec<u8> = (0..200).collect();
        let encoded = encode(&CODECS, bytes.clone()).unwrap();
        assert_eq!(decode(&CODECS, &encoded, 200).unwrap(), bytes);
        assert!(decode(&CODECS, &encoded, 199).is_err());
        assert!(decode(&CODECS, &encoded, 201).is_err());
        for position in 0..encoded.len() {
            let mut damaged = encoded.clone();
            damaged[position] ^= 4;
            assert!(decode(&CODECS, &damaged, 200).is_err());
            assert!(decode(&CODECS, &encoded[..position], 200).is_err());
        }
    }

    #[test]
    fn streams_decode_and_damage_is_noticed() {
        let bytes: Vec<u8> = (0..200).cycle().take(3000).collect();
        let orders: [&[ByteCodec]; 4] = [
            &[],
            &CODECS,
            &[ByteCodec::Crc32c],
            &[ByteCodec::Crc32c, ByteCodec::Zstd { level: 1, checksum: false }],
        ];
        for codecs in orders {
            let encoded = encode(codecs, bytes.clone()).unwrap();
            let read = |encoded: &[u8]| -> io::Result<Vec<u8>> {
                let mut decoded = Vec::new();
                let stream: Box<dyn Read + '_> = Box::new(io::Cursor::new(encoded));
                decoder(codecs, stream)?.read_to_end(&mut decoded)?;
                Ok(decoded)
            };
            assert_eq!(read(&encoded).unwrap(), bytes);
            for position in (0..encoded.len()).filter(|_| !codecs.is_empty()) {
                let mut damaged = encoded.clone();
                damaged[position] ^= 4;
                assert!(read(&damaged).is_err() || read(&damaged).unwrap() == bytes, "{codecs:?} {position}");
                assert!(read(&encoded[..position]).is_err(), "{codecs:?} {position}");
            }
        }
    }

    #[test]
    fn sizes_come_from_the_frame_where_it_tells_them() {
        let bytes: Vec<u8> = (0..200).cycle().take(5000).collect();
        let codecs = [ByteCodec::Zstd { level: 1, checksum: false }];
        let telling = encode(&codecs, bytes.clone()).unwrap();
        // Orbax's writer streams, and the size of a stream is unknown when it begins.
        let streamed = zstd::stream::encode_all(bytes.as_slice(), 1).unwrap();
        for (frame, told) in [(telling, Some(5000)), (streamed, None)] {
            assert_eq!(zstd::zstd_safe::get_frame_content_size(&frame).ok(), Some(told));
            assert_eq!(decode(&codecs, &frame, 5000).as_ref(), Ok(&bytes));
            for wrong in [0, 4999, 5001, usize::MAX / 4, usize::MAX] {
                assert!(decode(&codecs, &frame, wrong).unwrap_err().contains("are expected"), "{wrong}");
            }
        }
    }

    #[test]
    fn indexes_decode() {
        let index = ShardIndex { entries: vec![Some((0, 7)), None, Some((7, 1 << 40))] };
        let encoded = index.encode();
        assert_eq!(encoded.len(), ShardIndex::encoded_size(3, true));
        assert_eq!(ShardIndex::decode(&encoded, true), Ok(index));
        assert!(ShardIndex::decode(&encoded[1..], true).is_err());
    }
}
