//! The footer: protobuf messages that locate the chunks. From `cpp/layout.proto` of google/array_record.

use prost::Message;

use crate::{error::Fault, records::DecodedRecords};

/// Version of the ArrayRecord format.
const VERSION: u32 = 1;

/// The first eight bytes of the MD5 sum of "ArrayRecord\n".
pub(crate) const MAGIC: u64 = 0x7193_0e70_4fda_e05e;

/// Location of a chunk of records.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct ArrayRecordFooter {
    /// Beginning of the chunk in the file, in bytes.
    #[prost(uint64, optional, tag = "1")]
    pub(crate) chunk_offset: Option<u64>,
    /// Sum of the records' sizes in bytes.
    #[prost(uint64, optional, tag = "2")]
    pub(crate) decoded_data_size: Option<u64>,
    #[prost(uint64, optional, tag = "3")]
    pub(crate) num_records: Option<u64>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ArrayRecordMetadata {
    #[prost(uint32, optional, tag = "1")]
    version: Option<u32>,
    #[prost(uint64, optional, tag = "2")]
    num_chunks: Option<u64>,
    #[prost(uint64, optional, tag = "3")]
    num_records: Option<u64>,
    /// The writer's options, for people who debug.
    #[prost(string, optional, tag = "4")]
    writer_options: Option<String>,
}

/// First record of the footer chunk.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct RiegeliFooterMetadata {
    #[prost(message, optional, tag = "1")]
    array_record_metadata: Option<ArrayRecordMetadata>,
}

impl RiegeliFooterMetadata {
    pub(crate) fn new(chunks: &[ArrayRecordFooter], writer_options: String) -> Self {
        let metadata = ArrayRecordMetadata {
            version: Some(VERSION),
            num_chunks: Some(chunks.len() as u64),
            num_records: Some(chunks.iter().map(ArrayRecordFooter::num_records).sum()),
            writer_options: Some(writer_options),
        };
        Self { array_record_metadata: Some(metadata) }
    }
}

/// Record of the postscript chunk, which holds it three times.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct RiegeliPostscript {
    /// Beginning of the footer chunk in the file, in bytes.
    #[prost(uint64, optional, tag = "1")]
    pub(crate) footer_offset: Option<u64>,
    #[prost(uint64, optional, tag = "2")]
    pub(crate) magic: Option<u64>,
}

/// Locations of the chunks of records, in the order of the records.
#[derive(Debug, Default)]
pub(crate) struct Index {
    /// Beginning of each chunk in the file, in bytes.
    pub(crate) offsets: Vec<u64>,
    /// Number of records up to the end of each chunk.
    pub(crate) ends: Vec<u64>,
    /// Sum of the sizes of the records of each chunk, in bytes.
    pub(crate) sizes: Vec<u64>,
}

impl Index {
    /// # Errors
    ///
    /// If the messages contradict each other, or a chunk begins behind `footer_offset`.
    pub(crate) fn decode(footer: &DecodedRecords, footer_offset: u64) -> Result<Self, Fault> {
        let metadata = footer.get(0).and_then(|record| RiegeliFooterMetadata::decode(record).ok());
        let metadata = metadata
            .and_then(|metadata| metadata.array_record_metadata)
            .ok_or_else(|| Fault::damaged("the footer has no metadata of an ArrayRecord file"))?;
        let version = metadata.version();
        if version != VERSION {
            return Err(Fault::Unsupported {
                feature: format!("version {version} of the ArrayRecord format is"),
                remedy: "write the file with a version of `array_record` that writes version 1",
            });
        }
        let mut index = Self::default();
        let mut end = 0_u64;
        for position in 1.. {
            let Some(record) = footer.get(position) else { break };
            let chunk = ArrayRecordFooter::decode(record).ok();
            let located = chunk.and_then(|chunk| {
                let offset = chunk.chunk_offset.filter(|offset| *offset < footer_offset)?;
                Some((offset, end.checked_add(chunk.num_records?)?, chunk.decoded_data_size.unwrap_or(0)))
            });
            let number = position - 1;
            let Some((offset, end_of_chunk, size)) = located else {
                return Err(Fault::damaged(format!("the footer does not locate chunk {number}")));
            };
            end = end_of_chunk;
            index.offsets.push(offset);
            index.ends.push(end);
            index.sizes.push(size);
        }
        if index.ends.len() as u64 != metadata.num_chunks() || end != metadata.num_records() {
            let reason = format!(
                "the footer locates {} chunks with {end} records, but its metadata count {} with {}",
                index.ends.len(),
                metadata.num_chunks(),
                metadata.num_records()
            );
            return Err(Fault::Damaged(reason));
        }
        Ok(index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{compression::Compression, records::RecordBuffer};

    fn decode(messages: &[Vec<u8>]) -> Result<Index, Fault> {
        let mut buffer = RecordBuffer::default();
        messages.iter().for_each(|message| buffer.push(message));
        let chunk = buffer.to_chunk(Compression::Uncompressed).unwrap();
        Index::decode(&DecodedRecords::decode(&chunk).unwrap(), 1000)
    }

    fn location(offset: Option<u64>, records: Option<u64>) -> ArrayRecordFooter {
        ArrayRecordFooter { chunk_offset: offset, decoded_data_size: Some(0), num_records: records }
    }

    #[test]
    fn contradictions_in_the_footer_are_named() {
        let good = [location(Some(64), Some(2)), location(Some(200), Some(1))];
        let metadata = RiegeliFooterMetadata::new(&good, String::new()).encode_to_vec();
        let good = good.map(|chunk| chunk.encode_to_vec());
        assert_eq!(decode(&[metadata.clone(), good[0].clone(), good[1].clone()]).unwrap().ends, [2, 3]);

        let check = |messages: &[Vec<u8>], expected: &str| match decode(messages) {
            Err(Fault::Damaged(reason)) => assert_eq!(reason, expected),
            other => panic!("{other:?}"),
        };
        check(&[], "the footer has no metadata of an ArrayRecord file");
        check(&[vec![0xff]], "the footer has no metadata of an ArrayRecord file");
        check(
            &[metadata.clone(), good[0].clone()],
            "the footer locates 1 chunks with 2 records, but its metadata count 2 with 3",
        );
        for wrong in [
            location(None, Some(1)),
            location(Some(1000), Some(1)),
            location(Some(9), None),
            location(Some(9), Some(u64::MAX)),
        ] {
            let messages = [metadata.clone(), good[0].clone(), wrong.encode_to_vec()];
            check(&messages, "the footer does not locate chunk 1");
        }
    }
}
