//! Reading GGUF.

use std::{
    collections::{HashMap, HashSet},
    path::Path,
    sync::Arc,
};

use mt_shape::HostArray;

use super::{
    ALIGNMENT, ALIGNMENT_KEY, GgufValue, MAGIC, MOST_DIMS, STORED_TYPES, StoredType, VERSION, value::types,
};
use crate::{
    error::{CheckpointError, Result},
    weights::{self, DOWNLOAD_HINT, ElementType, TensorInfo, WeightsFile, read_dense},
};

/// An open GGUF file. Opening reads its metadata; tensors are read on request.
#[derive(Debug)]
pub struct GgufFile {
    file: WeightsFile,
    metadata: Vec<(String, GgufValue)>,
    tensors: Vec<TensorInfo>,
    places: HashMap<String, usize>,
}

impl GgufFile {
    /// Opens a file.
    ///
    /// # Errors
    /// The file is not of this format, is of another version, or is incomplete: a user error.
    pub fn open(path: &Path) -> Result<Self> {
        let file = WeightsFile::open(path)?;
        let mut header = Header { file: &file, buffer: Vec::new(), start: 0, place: 0 };
        if header.bytes(4)? != MAGIC {
            return Err(file.bad("it does not begin with `GGUF`", DOWNLOAD_HINT));
        }
        let version = header.u32()?;
        if version.swap_bytes() <= VERSION && version > VERSION {
            let hint = "convert it to little-endian order first";
            return Err(file.bad("its numbers are in big-endian order", hint));
        }
        if !(2..=VERSION).contains(&version) {
            let reason = format!("its GGUF version {version} is not supported, only 2 and {VERSION} are");
            return Err(file.bad(reason, "write it again with a current version of llama.cpp"));
        }
        let (num_tensors, num_values) = (header.u64()?, header.u64()?);
        let mut metadata = Vec::new();
        for _ in 0..num_values {
            let (key, kind) = (header.text()?, header.u32()?);
            metadata.push((key, header.value(kind, true)?));
        }
        let alignment = metadata.iter().find(|(key, _)| key == ALIGNMENT_KEY);
        let alignment = alignment.map_or(Some(ALIGNMENT), |(_, value)| value.as_u64());
        let Some(alignment) = alignment.filter(|alignment| alignment.is_power_of_two()) else {
            return Err(file.bad(format!("its `{ALIGNMENT_KEY}` is not a power of two"), ""));
        };
        let mut listed = Vec::new();
        for _ in 0..num_tensors {
            listed.push(header.tensor()?);
        }
        let start = header.place.next_multiple_of(alignment);
        let (mut tensors, mut names) = (Vec::new(), HashSet::new());
        for Listed { name, dims, stored, offset } in listed {
            if !names.insert(name.clone()) {
                return Err(file.bad(format!("it holds two tensors `{name}`"), ""));
            }
            let tensor = located(&file, (name, dims), stored, start.checked_add(offset))?;
            tensors.push(tensor);
        }
        let places = tensors.iter().enumerate().map(|(place, tensor)| (tensor.name.clone(), place)).collect();
        Ok(Self { file, metadata, tensors, places })
    }

    /// The path of the file.
    pub fn path(&self) -> &Path {
        &self.file.path
    }

    /// The metadata, in the file's order.
    pub fn metadata(&self) -> &[(String, GgufValue)] {
        &self.metadata
    }

    /// The tensors, in the file's order.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// Reads a tensor.
    ///
    /// # Errors
    /// There is no such tensor, it is quantized, or the file became shorter.
    pub fn read(&self, name: &str) -> Result<HostArray> {
        let Some(&place) = self.places.get(name) else {
            return Err(weights::unknown_tensor(self.path(), name));
        };
        let tensor = &self.tensors[place];
        let dtype = tensor.readable()?;
        read_dense(dtype, &tensor.dims, |bytes| self.file.read_at(bytes, tensor.range.start))
    }
}

/// A tensor of the header.
struct Listed {
    name: String,
    dims: Vec<usize>,
    stored: &'static StoredType,
    offset: u64,
}

fn located(
    file: &WeightsFile,
    (name, dims): (String, Vec<usize>),
    stored: &StoredType,
    start: Option<u64>,
) -> Result<TensorInfo> {
    let row = dims.last().copied().unwrap_or(1) as u64;
    if !row.is_multiple_of(stored.block) {
        let reason =
            format!("tensor `{name}` has rows of {row} elements, which `{}` does not allow", stored.name);
        return Err(file.bad(reason, ""));
    }
    let elements = dims.iter().try_fold(1_u64, |product, &dim| product.checked_mul(dim as u64));
    let bytes = elements.and_then(|elements| (elements / stored.block).checked_mul(stored.bytes));
    let end = start.zip(bytes).and_then(|(start, bytes)| start.checked_add(bytes));
    let (Some(start), Some(bytes), Some(end)) = (start, bytes, end.filter(|end| *end <= file.length)) else {
        let reason = format!("tensor `{name}` exceeds the file's {} bytes", file.length);
        return Err(file.bad(reason, DOWNLOAD_HINT));
    };
    let dtype = match stored.dtype {
        Some(dtype) => ElementType::Known(dtype),
        None => ElementType::Other(stored.name.to_owned()),
    };
    Ok(TensorInfo { name, dtype, dims, file: Arc::clone(&file.path), range: start..end, num_bytes: bytes })
}

/// The bytes that are read from the file at a time.
const PORTION: u64 = 1 << 20;

/// Reads the header from the front.
struct Header<'f> {
    file: &'f WeightsFile,
    /// The bytes of the file from `start` on.
    buffer: Vec<u8>,
    start: u64,
    /// The offset of the next byte.
    place: u64,
}

impl Header<'_> {
    fn bytes(&mut self, count: u64) -> Result<&[u8]> {
        let file = self.file;
        let Some(end) = self.place.checked_add(count).filter(|end| *end <= file.length) else {
            return Err(file.bad("it ends within its header", DOWNLOAD_HINT));
        };
        if end > self.start + self.buffer.len() as u64 {
            let length = count.max(PORTION).min(file.length - self.place);
            self.buffer.resize(length as usize, 0);
            file.read_at(&mut self.buffer, self.place)?;
            self.start = self.place;
        }
        let first = (self.place - self.start) as usize;
        self.place = end;
        Ok(&self.buffer[first..first + count as usize])
    }

    fn array<const COUNT: usize>(&mut self) -> Result<[u8; COUNT]> {
        let bytes = self.bytes(COUNT as u64)?;
        Ok(bytes.try_into().expect("as many bytes were requested"))
    }

    fn u32(&mut self) -> Result<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn text(&mut self) -> Result<String> {
        let (length, file) = (self.u64()?, self.file);
        let text = String::from_utf8(self.bytes(length)?.to_vec());
        text.map_err(|_| file.bad("a text of its header is not UTF-8", DOWNLOAD_HINT))
    }

    /// A value of a type. Only a value that is not itself in an array may be one.
    fn value(&mut self, kind: u32, is_outer: bool) -> Result<GgufValue> {
        Ok(match kind {
            types::U8 => GgufValue::U8(self.array::<1>()?[0]),
            types::I8 => GgufValue::I8(i8::from_le_bytes(self.array()?)),
            types::U16 => GgufValue::U16(u16::from_le_bytes(self.array()?)),
            types::I16 => GgufValue::I16(i16::from_le_bytes(self.array()?)),
            types::U32 => GgufValue::U32(self.u32()?),
            types::I32 => GgufValue::I32(i32::from_le_bytes(self.array()?)),
            types::F32 => GgufValue::F32(f32::from_le_bytes(self.array()?)),
            types::BOOL => GgufValue::Bool(self.array::<1>()?[0] != 0),
            types::TEXT => GgufValue::Text(self.text()?),
            types::U64 => GgufValue::U64(self.u64()?),
            types::I64 => GgufValue::I64(i64::from_le_bytes(self.array()?)),
            types::F64 => GgufValue::F64(f64::from_le_bytes(self.array()?)),
            types::ARRAY if is_outer => {
                let (kind, count) = (self.u32()?, self.u64()?);
                // No memory is reserved for a count that the file may not hold.
                let mut values = Vec::new();
                for _ in 0..count {
                    values.push(self.value(kind, false)?);
                }
                GgufValue::Array(kind, values)
            }
            other => {
                let reason = format!("a value of its header has the unknown type {other}");
                return Err(self.file.bad(reason, DOWNLOAD_HINT));
            }
        })
    }

    fn tensor(&mut self) -> Result<Listed> {
        let file = self.file;
        let (name, num_dims) = (self.text()?, self.u32()? as usize);
        if num_dims > MOST_DIMS {
            return Err(file.bad(format!("tensor `{name}` has {num_dims} dimensions"), DOWNLOAD_HINT));
        }
        let mut dims = Vec::new();
        for _ in 0..num_dims {
            let dim = usize::try_from(self.u64()?).ok().filter(|dim| *dim > 0);
            dims.insert(0, dim.ok_or_else(|| bad_dim(file, &name))?);
        }
        let kind = self.u32()?;
        let Some(stored) = STORED_TYPES.iter().find(|stored| stored.id == kind) else {
            return Err(file.bad(format!("tensor `{name}` has the unknown type {kind}"), DOWNLOAD_HINT));
        };
        Ok(Listed { name, dims, stored, offset: self.u64()? })
    }
}

fn bad_dim(file: &WeightsFile, name: &str) -> CheckpointError {
    file.bad(format!("tensor `{name}` has a dimension without elements"), DOWNLOAD_HINT)
}
