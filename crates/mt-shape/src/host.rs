//! Arrays in host memory.

use bytemuck::Pod;

use crate::{DType, Float8};

/// Alignment of the contents in bytes. An XLA client can use memory with this alignment without a copy.
const ALIGNMENT: usize = 64;

/// A dense row-major array in host memory, aligned to 64 bytes.
pub struct HostArray {
    dtype: DType,
    dims: Vec<usize>,
    num_bytes: usize,
    /// The contents, after up to `ALIGNMENT` bytes of padding. A `Vec` with a larger alignment would be zeroed when it
    /// is allocated: allocators hand out fresh zero pages only for the usual alignments.
    words: Vec<u64>,
    /// The first byte of the contents.
    start: usize,
}

/// The reason why bytes or elements do not fit an array.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HostArrayError {
    #[error("{actual} bytes given for `{dtype}{dims:?}`, which takes {expected}")]
    Size { dtype: DType, dims: Vec<usize>, expected: usize, actual: usize },
    #[error("elements of `{dtype}` were read as values of {size} bytes")]
    ElementSize { dtype: DType, size: usize },
}

impl HostArray {
    /// An array of zero bytes.
    pub fn zeros(dtype: DType, dims: &[usize]) -> Self {
        let num_bytes = dims.iter().product::<usize>() * dtype.byte_size();
        // Fresh pages are zero, so large arrays are not touched before they are filled.
        let words = vec![0_u64; (num_bytes + ALIGNMENT).div_ceil(size_of::<u64>())];
        let address = words.as_ptr().addr();
        let start = address.next_multiple_of(ALIGNMENT) - address;
        Self { dtype, dims: dims.to_vec(), num_bytes, words, start }
    }

    /// Copies `bytes`, the little-endian row-major contents.
    ///
    /// # Errors
    /// The number of bytes differs from the size of an array of this type and these dimensions.
    pub fn from_bytes(dtype: DType, dims: &[usize], bytes: &[u8]) -> Result<Self, HostArrayError> {
        let mut array = Self::zeros(dtype, dims);
        if bytes.len() != array.num_bytes {
            let (expected, actual) = (array.num_bytes, bytes.len());
            return Err(HostArrayError::Size { dtype, dims: dims.to_vec(), expected, actual });
        }
        array.bytes_mut().copy_from_slice(bytes);
        Ok(array)
    }

    /// Copies typed elements, such as `&[f32]` for [`DType::F32`].
    ///
    /// # Errors
    /// The size or number of the elements does not fit.
    pub fn from_slice<T: Pod>(dtype: DType, dims: &[usize], elements: &[T]) -> Result<Self, HostArrayError> {
        if size_of::<T>() != dtype.byte_size() {
            return Err(HostArrayError::ElementSize { dtype, size: size_of::<T>() });
        }
        Self::from_bytes(dtype, dims, bytemuck::cast_slice(elements))
    }

    /// The same elements with other dimensions.
    ///
    /// # Panics
    /// The number of elements differs.
    pub fn reshaped(self, dims: &[usize]) -> Self {
        assert_eq!(self.num_elements(), dims.iter().product::<usize>(), "{:?} as {dims:?}", self.dims);
        Self { dims: dims.to_vec(), ..self }
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The dimensions; empty for a scalar.
    pub fn dims(&self) -> &[usize] {
        &self.dims
    }

    /// The number of elements.
    pub fn num_elements(&self) -> usize {
        self.dims.iter().product()
    }

    /// The contents: little-endian, row-major.
    pub fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[self.start..][..self.num_bytes]
    }

    /// The contents, mutable.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[self.start..][..self.num_bytes]
    }

    /// The elements as values of `T`.
    ///
    /// # Errors
    /// `T` does not have the size of an element.
    pub fn as_slice<T: Pod>(&self) -> Result<&[T], HostArrayError> {
        if size_of::<T>() != self.dtype.byte_size() {
            return Err(HostArrayError::ElementSize { dtype: self.dtype, size: size_of::<T>() });
        }
        Ok(bytemuck::cast_slice(self.bytes()))
    }

    /// Every element as `f64`, for any element type; meant for tests, statistics and reports.
    pub fn to_f64(&self) -> Vec<f64> {
        fn all<T: Pod>(bytes: &[u8], convert: impl Fn(T) -> f64) -> Vec<f64> {
            bytemuck::cast_slice::<u8, T>(bytes).iter().map(|value| convert(*value)).collect()
        }
        let bytes = self.bytes();
        match self.dtype {
            DType::Bool | DType::U8 => all::<u8>(bytes, f64::from),
            // Whatever the upper half of the byte holds.
            DType::I4 => all::<i8>(bytes, |byte| f64::from(byte << 4 >> 4)),
            DType::F8E4M3FN => all::<u8>(bytes, |code| f64::from(Float8::E4M3FN.to_f32(code))),
            DType::F8E5M2 => all::<u8>(bytes, |code| f64::from(Float8::E5M2.to_f32(code))),
            DType::I8 => all::<i8>(bytes, f64::from),
            DType::I16 => all::<i16>(bytes, f64::from),
            DType::U16 => all::<u16>(bytes, f64::from),
            DType::I32 => all::<i32>(bytes, f64::from),
            DType::U32 => all::<u32>(bytes, f64::from),
            DType::I64 => all::<i64>(bytes, |value| value as f64),
            DType::U64 => all::<u64>(bytes, |value| value as f64),
            DType::F16 => all::<half::f16>(bytes, f64::from),
            DType::BF16 => all::<half::bf16>(bytes, f64::from),
            DType::F32 => all::<f32>(bytes, f64::from),
            DType::F64 => all::<f64>(bytes, |value| value),
        }
    }
}

impl Clone for HostArray {
    fn clone(&self) -> Self {
        // A copy's contents begin at another offset in its buffer.
        let mut made = Self::zeros(self.dtype, &self.dims);
        made.bytes_mut().copy_from_slice(self.bytes());
        made
    }
}

impl std::fmt::Debug for HostArray {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "HostArray({}{:?})", self.dtype, self.dims)
    }
}

impl PartialEq for HostArray {
    fn eq(&self, other: &Self) -> bool {
        self.dtype == other.dtype && self.dims == other.dims && self.bytes() == other.bytes()
    }
}
