//! Element types.

use std::{fmt, str::FromStr};

/// The type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DType {
    Bool,
    I4,
    I8,
    I16,
    I32,
    I64,
    U8,
    U16,
    U32,
    U64,
    /// 4 bits of exponent and 3 of mantissa. It has no infinities.
    F8E4M3FN,
    /// 5 bits of exponent and 2 of mantissa.
    F8E5M2,
    F16,
    BF16,
    F32,
    F64,
}

impl DType {
    /// Every element type.
    pub const ALL: [Self; 16] = [
        Self::Bool,
        Self::I4,
        Self::I8,
        Self::I16,
        Self::I32,
        Self::I64,
        Self::U8,
        Self::U16,
        Self::U32,
        Self::U64,
        Self::F8E4M3FN,
        Self::F8E5M2,
        Self::F16,
        Self::BF16,
        Self::F32,
        Self::F64,
    ];

    /// Bytes of one element in host memory. Elements of 4 bits take a byte each, as NumPy and PJRT hold them; devices may
    /// pack two into one.
    pub const fn byte_size(self) -> usize {
        match self {
            Self::Bool | Self::I4 | Self::I8 | Self::U8 | Self::F8E4M3FN | Self::F8E5M2 => 1,
            Self::I16 | Self::U16 | Self::F16 | Self::BF16 => 2,
            Self::I32 | Self::U32 | Self::F32 => 4,
            Self::I64 | Self::U64 | Self::F64 => 8,
        }
    }

    /// Bits of one element's number.
    pub const fn bits(self) -> usize {
        match self {
            Self::I4 => 4,
            _ => 8 * self.byte_size(),
        }
    }

    /// The name in NumPy, Zarr and MaxText's configuration, such as `bfloat16`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bool => "bool",
            Self::I4 => "int4",
            Self::I8 => "int8",
            Self::I16 => "int16",
            Self::I32 => "int32",
            Self::I64 => "int64",
            Self::U8 => "uint8",
            Self::U16 => "uint16",
            Self::U32 => "uint32",
            Self::U64 => "uint64",
            Self::F8E4M3FN => "float8_e4m3fn",
            Self::F8E5M2 => "float8_e5m2",
            Self::F16 => "float16",
            Self::BF16 => "bfloat16",
            Self::F32 => "float32",
            Self::F64 => "float64",
        }
    }

    /// The name in StableHLO's text, such as `bf16`.
    pub const fn stablehlo(self) -> &'static str {
        match self {
            Self::Bool => "i1",
            Self::I4 => "i4",
            Self::I8 => "i8",
            Self::I16 => "i16",
            Self::I32 => "i32",
            Self::I64 => "i64",
            Self::U8 => "ui8",
            Self::U16 => "ui16",
            Self::U32 => "ui32",
            Self::U64 => "ui64",
            Self::F8E4M3FN => "f8E4M3FN",
            Self::F8E5M2 => "f8E5M2",
            Self::F16 => "f16",
            Self::BF16 => "bf16",
            Self::F32 => "f32",
            Self::F64 => "f64",
        }
    }

    /// Whether elements are floating-point numbers. Only these have gradients.
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F8E4M3FN | Self::F8E5M2 | Self::F16 | Self::BF16 | Self::F32 | Self::F64)
    }

    /// Whether elements are signed or unsigned integers.
    pub const fn is_integer(self) -> bool {
        !self.is_float() && !matches!(self, Self::Bool)
    }

    /// Whether elements are unsigned integers.
    pub const fn is_unsigned(self) -> bool {
        matches!(self, Self::U8 | Self::U16 | Self::U32 | Self::U64)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The error for a text that names no element type.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not an element type")]
pub struct UnknownDType(pub String);

impl FromStr for DType {
    type Err = UnknownDType;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL.into_iter().find(|dtype| dtype.name() == text).ok_or_else(|| UnknownDType(text.to_owned()))
    }
}
