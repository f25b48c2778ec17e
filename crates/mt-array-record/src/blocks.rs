//! Blocks of 64 KiB: positions of chunks among block headers, and the headers themselves.
//!
//! Positions are byte offsets in the file. The formulas are those of *Implementation notes* in Riegeli's specification.

use highway::{HighwayHash, HighwayHasher, Key};

use crate::error::Fault;

/// Bytes of a block, with its header.
pub(crate) const BLOCK: u64 = 1 << 16;

const HEADER: u64 = 24;

/// Bytes of a block without its header.
const USABLE: u64 = BLOCK - HEADER;

/// HighwayHash-64 with Riegeli's key, which spells "Riegeli/records\n" twice.
pub(crate) fn hash(bytes: &[u8]) -> u64 {
    const KEY: [u64; 4] =
        [0x2f69_6c65_6765_6952, 0x0a73_6472_6f63_6572, 0x2f69_6c65_6765_6952, 0x0a73_6472_6f63_6572];
    HighwayHasher::new(Key(KEY)).hash64(bytes)
}

/// The little-endian number in the eight bytes at `offset`.
pub(crate) fn number(bytes: &[u8], offset: usize) -> u64 {
    let mut eight = [0; 8];
    eight.copy_from_slice(&bytes[offset..offset + 8]);
    u64::from_le_bytes(eight)
}

/// Bytes from a position to the next block.
fn remaining(position: u64) -> u64 {
    position.wrapping_neg() % BLOCK
}

/// Whether a chunk can begin or end at a position: not inside a block header and not immediately after one.
pub(crate) fn is_chunk_boundary(position: u64) -> bool {
    remaining(position) < USABLE
}

/// End of `length` bytes of a chunk, where the chunk begins at `begin`.
pub(crate) fn end_of_bytes(begin: u64, length: u64) -> u64 {
    let headers = (length + (begin + USABLE - 1) % BLOCK) / USABLE;
    begin + length + headers * HEADER
}

/// End of a chunk with its padding, where header and data take `length` bytes.
///
/// A chunk is padded to as many bytes as it has records.
pub(crate) fn end_of_chunk(begin: u64, length: u64, records: u64) -> u64 {
    let last = begin + records;
    end_of_bytes(begin, length).max(last + remaining(last).saturating_sub(USABLE - 1))
}

/// Bytes between two chunk boundaries without the block headers.
pub(crate) fn length_between(begin: u64, end: u64) -> u64 {
    let usable_before = |position: u64| position - (position % BLOCK).min(HEADER);
    usable_before(end) - usable_before(begin) - (end / BLOCK - begin / BLOCK) * HEADER
}

/// End of a padding chunk at `begin` that ends with a block and has at least `minimum` bytes; `begin` if a block ends there.
pub(crate) fn end_of_padding(begin: u64, minimum: u64) -> u64 {
    let end = begin.next_multiple_of(BLOCK);
    if (1..minimum).contains(&(end - begin)) { end + BLOCK } else { end }
}

/// The header of a block at `block` that interrupts a chunk.
fn header(block: u64, chunk_begin: u64, chunk_end: u64) -> [u8; HEADER as usize] {
    let mut bytes = [0; HEADER as usize];
    bytes[8..16].copy_from_slice(&(block - chunk_begin).to_le_bytes());
    bytes[16..].copy_from_slice(&(chunk_end - block).to_le_bytes());
    let hash = hash(&bytes[8..]);
    bytes[..8].copy_from_slice(&hash.to_le_bytes());
    bytes
}

/// Inserts block headers into the bytes of a whole chunk.
pub(crate) fn interrupt(begin: u64, end: u64, mut chunk: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity((end - begin) as usize);
    while !chunk.is_empty() {
        let mut position = begin + bytes.len() as u64;
        if position.is_multiple_of(BLOCK) {
            bytes.extend(header(position, begin, end));
            position += HEADER;
        }
        let (now, later) = chunk.split_at(chunk.len().min(remaining(position) as usize));
        bytes.extend(now);
        chunk = later;
    }
    bytes
}

/// Removes block headers from bytes that begin with a chunk.
///
/// # Errors
///
/// If `chunk_end` is given and a header differs from the header of a block that interrupts this chunk.
pub(crate) fn join(begin: u64, chunk_end: Option<u64>, bytes: &[u8]) -> Result<Vec<u8>, Fault> {
    let mut joined = Vec::with_capacity(bytes.len());
    let mut offset = 0;
    while offset < bytes.len() {
        let mut position = begin + offset as u64;
        if position.is_multiple_of(BLOCK) {
            let after = (offset + HEADER as usize).min(bytes.len());
            if chunk_end.is_some_and(|end| bytes[offset..after] != header(position, begin, end)) {
                return Err(Fault::damaged(format!("the block header at byte {position} is wrong")));
            }
            offset = after;
            position += HEADER;
        }
        let after = (offset + remaining(position) as usize).min(bytes.len());
        joined.extend(&bytes[offset..after]);
        offset = after;
    }
    Ok(joined)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_block_header_has_the_published_hash() {
        // The first bytes of each file, printed in Riegeli's specification.
        assert_eq!(header(0, 0, 64)[..8], [0x83, 0xaf, 0x70, 0xd1, 0x0d, 0x88, 0x4a, 0x3f]);
    }

    #[test]
    fn bytes_of_a_chunk_survive_the_block_headers() {
        for begin in [0, 64, 25, BLOCK - 1, BLOCK - 30, BLOCK, 3 * BLOCK + 77] {
            for length in [40, 41, USABLE - 1, USABLE, USABLE + 1, 3 * BLOCK + 5] {
                let end = end_of_bytes(begin, length);
                assert_eq!(length_between(begin, end), length, "{begin} {length}");
                let chunk: Vec<u8> = (0..length).map(|index| (index % 251) as u8).collect();
                let bytes = interrupt(begin, end, &chunk);
                assert_eq!(bytes.len() as u64, end - begin, "{begin} {length}");
                assert_eq!(join(begin, Some(end), &bytes), Ok(chunk), "{begin} {length}");
            }
        }
    }
}
