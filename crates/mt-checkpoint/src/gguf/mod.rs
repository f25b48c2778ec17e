//! GGUF, the format of llama.cpp: one file with metadata and tensors.
//!
//! ```text
//! magic, version, number of tensors, number of metadata values
//! metadata: key, type, value
//! tensors: name, dimensions (the innermost first), type, offset in the data
//! padding, then the data of each tensor at a multiple of the alignment
//! ```

mod reader;
mod value;
mod writer;

pub use reader::GgufFile;
pub use value::GgufValue;
pub use writer::{GgufTensor, GgufWriter, WrittenGguf};

use mt_shape::DType;

/// The first four bytes of a file.
pub(crate) const MAGIC: &[u8; 4] = b"GGUF";
/// The version that is written.
const VERSION: u32 = 3;
/// The metadata key of the alignment of tensors.
const ALIGNMENT_KEY: &str = "general.alignment";
/// The alignment of files that do not state one.
const ALIGNMENT: u64 = 32;
/// The most dimensions of a tensor.
const MOST_DIMS: usize = 4;

/// A type of tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GgufType {
    F32,
    F16,
    Bf16,
    /// Blocks of 32 numbers: a scale in `f16`, and 32 signed bytes.
    Q8_0,
}

impl GgufType {
    /// The number of elements in a block, which lie in one row.
    pub fn block(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 1,
            Self::Q8_0 => 32,
        }
    }

    /// The bytes of a block.
    pub fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Q8_0 => 34,
        }
    }

    fn id(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q8_0 => 8,
            Self::Bf16 => 30,
        }
    }
}

/// A type of tensors in files.
struct StoredType {
    id: u32,
    name: &'static str,
    /// Elements and bytes of a block.
    block: u64,
    bytes: u64,
    /// The type of elements that can be read.
    dtype: Option<DType>,
}

const fn plain(id: u32, name: &'static str, bytes: u64, dtype: DType) -> StoredType {
    StoredType { id, name, block: 1, bytes, dtype: Some(dtype) }
}

const fn quantized(id: u32, name: &'static str, block: u64, bytes: u64) -> StoredType {
    StoredType { id, name, block, bytes, dtype: None }
}

const STORED_TYPES: &[StoredType] = &[
    plain(0, "f32", 4, DType::F32),
    plain(1, "f16", 2, DType::F16),
    plain(24, "i8", 1, DType::I8),
    plain(25, "i16", 2, DType::I16),
    plain(26, "i32", 4, DType::I32),
    plain(27, "i64", 8, DType::I64),
    plain(28, "f64", 8, DType::F64),
    plain(30, "bf16", 2, DType::BF16),
    quantized(2, "q4_0", 32, 18),
    quantized(3, "q4_1", 32, 20),
    quantized(6, "q5_0", 32, 22),
    quantized(7, "q5_1", 32, 24),
    quantized(8, "q8_0", 32, 34),
    quantized(9, "q8_1", 32, 40),
    quantized(10, "q2_k", 256, 84),
    quantized(11, "q3_k", 256, 110),
    quantized(12, "q4_k", 256, 144),
    quantized(13, "q5_k", 256, 176),
    quantized(14, "q6_k", 256, 210),
    quantized(15, "q8_k", 256, 292),
    quantized(16, "iq2_xxs", 256, 66),
    quantized(17, "iq2_xs", 256, 74),
    quantized(18, "iq3_xxs", 256, 98),
    quantized(19, "iq1_s", 256, 50),
    quantized(20, "iq4_nl", 32, 18),
    quantized(21, "iq3_s", 256, 110),
    quantized(22, "iq2_s", 256, 82),
    quantized(23, "iq4_xs", 256, 136),
    quantized(29, "iq1_m", 256, 56),
    quantized(34, "tq1_0", 256, 54),
    quantized(35, "tq2_0", 256, 66),
    quantized(39, "mxfp4", 32, 17),
    quantized(40, "nvfp4", 64, 36),
    quantized(41, "q1_0", 128, 18),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_types_are_known_to_the_reader() {
        for kind in [GgufType::F32, GgufType::F16, GgufType::Bf16, GgufType::Q8_0] {
            let stored = STORED_TYPES.iter().find(|stored| stored.id == kind.id()).unwrap();
            assert_eq!((stored.block, stored.bytes), (kind.block() as u64, kind.block_bytes() as u64));
        }
    }
}
