//! Metadata of GGUF files.

/// A value of the metadata.
#[derive(Clone, Debug, PartialEq)]
pub enum GgufValue {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    Text(String),
    U64(u64),
    I64(i64),
    F64(f64),
    /// The number of the elements' type, and the elements.
    Array(u32, Vec<GgufValue>),
}

/// The numbers of types.
pub(super) mod types {
    pub const U8: u32 = 0;
    pub const I8: u32 = 1;
    pub const U16: u32 = 2;
    pub const I16: u32 = 3;
    pub const U32: u32 = 4;
    pub const I32: u32 = 5;
    pub const F32: u32 = 6;
    pub const BOOL: u32 = 7;
    pub const TEXT: u32 = 8;
    pub const ARRAY: u32 = 9;
    pub const U64: u32 = 10;
    pub const I64: u32 = 11;
    pub const F64: u32 = 12;
}

impl GgufValue {
    /// An array of texts.
    pub fn texts(texts: impl IntoIterator<Item = String>) -> Self {
        Self::Array(types::TEXT, texts.into_iter().map(Self::Text).collect())
    }

    /// An array of numbers.
    pub fn floats(numbers: impl IntoIterator<Item = f32>) -> Self {
        Self::Array(types::F32, numbers.into_iter().map(Self::F32).collect())
    }

    /// An array of integers.
    pub fn integers(numbers: impl IntoIterator<Item = i32>) -> Self {
        Self::Array(types::I32, numbers.into_iter().map(Self::I32).collect())
    }

    /// The value, if it is an integer that is not negative.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Self::U8(value) => Some(value.into()),
            Self::U16(value) => Some(value.into()),
            Self::U32(value) => Some(value.into()),
            Self::U64(value) => Some(value),
            Self::I8(value) => value.try_into().ok(),
            Self::I16(value) => value.try_into().ok(),
            Self::I32(value) => value.try_into().ok(),
            Self::I64(value) => value.try_into().ok(),
            _ => None,
        }
    }

    /// The value, if it is a text.
    pub fn as_text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }

    pub(super) fn type_number(&self) -> u32 {
        match self {
            Self::U8(_) => types::U8,
            Self::I8(_) => types::I8,
            Self::U16(_) => types::U16,
            Self::I16(_) => types::I16,
            Self::U32(_) => types::U32,
            Self::I32(_) => types::I32,
            Self::F32(_) => types::F32,
            Self::Bool(_) => types::BOOL,
            Self::Text(_) => types::TEXT,
            Self::Array(..) => types::ARRAY,
            Self::U64(_) => types::U64,
            Self::I64(_) => types::I64,
            Self::F64(_) => types::F64,
        }
    }

    /// Appends the value without its type.
    pub(super) fn encode(&self, bytes: &mut Vec<u8>) {
        match self {
            Self::U8(value) => bytes.extend(value.to_le_bytes()),
            Self::I8(value) => bytes.extend(value.to_le_bytes()),
            Self::U16(value) => bytes.extend(value.to_le_bytes()),
            Self::I16(value) => bytes.extend(value.to_le_bytes()),
            Self::U32(value) => bytes.extend(value.to_le_bytes()),
            Self::I32(value) => bytes.extend(value.to_le_bytes()),
            Self::F32(value) => bytes.extend(value.to_le_bytes()),
            Self::Bool(value) => bytes.push(u8::from(*value)),
            Self::Text(text) => encode_text(text, bytes),
            Self::U64(value) => bytes.extend(value.to_le_bytes()),
            Self::I64(value) => bytes.extend(value.to_le_bytes()),
            Self::F64(value) => bytes.extend(value.to_le_bytes()),
            Self::Array(kind, values) => {
                bytes.extend(kind.to_le_bytes());
                bytes.extend((values.len() as u64).to_le_bytes());
                values.iter().for_each(|value| value.encode(bytes));
            }
        }
    }
}

/// Appends a text: its length and its bytes.
pub(super) fn encode_text(text: &str, bytes: &mut Vec<u8>) {
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text.as_bytes());
}
