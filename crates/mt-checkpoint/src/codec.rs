//! The encoding of a chunk's bytes.

use std::io::Read;

/// A codec from bytes to bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ByteCodec {
    Zstd {
        level: i32,
    },
    /// Appends the CRC-32C of the preceding bytes.
    Crc32c,
}

/// Bytes of one entry of a shard's index: offset and length of an inner chunk.
const INDEX_ENTRY: usize = 16;
const CHECKSUM: usize = 4;
const MISSING: u64 = u64::MAX;

/// Applies the codecs in order.
pub(crate) fn encode(codecs: &[ByteCodec], mut bytes: Vec<u8>) -> std::io::Result<Vec<u8>> {
    for codec in codecs {
        bytes = match codec {
            ByteCodec::Zstd { level } => zstd::bulk::compress(&bytes, *level)?,
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

/// Returns at most one byte more than `decoded_size`. Memory for the whole result is reserved only if the frame itself
/// states that size, because `decoded_size` comes from metadata, which may be damaged.
fn decompress(frame: &[u8], decoded_size: usize) -> std::io::Result<Vec<u8>> {
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

    const CODECS: [ByteCodec; 2] = [ByteCodec::Zstd { level: 1 }, ByteCodec::Crc32c];

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
    fn sizes_come_from_the_frame_where_it_tells_them() {
        let bytes: Vec<u8> = (0..200).cycle().take(5000).collect();
        let codecs = [ByteCodec::Zstd { level: 1 }];
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
