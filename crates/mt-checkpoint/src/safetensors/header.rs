//! The header of a safetensors file: the length of a JSON object, and the object, which locates every tensor.
//!
//! This code replaces the `safetensors` crate, which needs the whole file in memory, refuses a file for one unknown
//! element type, and names no tensor in its errors.

use std::{collections::HashSet, fmt, ops::Range};

use mt_shape::DType;
use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, MapAccess, Visitor},
};
use serde_json::{Map, Value as Json, json};

use crate::{
    error::Result,
    weights::{DOWNLOAD_HINT, ElementType, TensorInfo, WeightsFile, checked_size},
};

/// Bytes of the header's length.
const LENGTH_SIZE: u64 = 8;
/// The longest header that the format permits.
const MAXIMUM_HEADER: u64 = 100_000_000;
/// The key that holds text about the file instead of a tensor.
pub(super) const METADATA_KEY: &str = "__metadata__";
/// The element types in the format's own order, larger ones later. Files start with the largest.
const DTYPES: [(&str, DType); 15] = [
    ("BOOL", DType::Bool),
    ("U8", DType::U8),
    ("I8", DType::I8),
    ("F8_E5M2", DType::F8E5M2),
    ("F8_E4M3", DType::F8E4M3FN),
    ("I16", DType::I16),
    ("U16", DType::U16),
    ("F16", DType::F16),
    ("BF16", DType::BF16),
    ("I32", DType::I32),
    ("U32", DType::U32),
    ("F32", DType::F32),
    ("F64", DType::F64),
    ("I64", DType::I64),
    ("U64", DType::U64),
];

/// Whether the format has an element type.
pub(super) fn has(dtype: DType) -> bool {
    DTYPES.iter().any(|(_, known)| *known == dtype)
}

/// The rank of an element type in the format's order.
pub(super) fn rank(dtype: DType) -> usize {
    let rank = DTYPES.iter().position(|(_, known)| *known == dtype);
    rank.expect("tensors of other types are refused when they are announced")
}

/// The header of a file that holds these tensors one after the other.
pub(super) fn encode<'a>(
    tensors: impl Iterator<Item = (&'a str, DType, &'a [usize], Range<u64>)>,
) -> Vec<u8> {
    let mut header = Map::new();
    header.insert(METADATA_KEY.to_owned(), json!({"format": "pt"}));
    for (name, dtype, dims, range) in tensors {
        let (dtype, _) = DTYPES[rank(dtype)];
        let place = json!({"dtype": dtype, "shape": dims, "data_offsets": [range.start, range.end]});
        header.insert(name.to_owned(), place);
    }
    let mut text = Json::Object(header).to_string().into_bytes();
    // Tensors start at a multiple of eight, so that those of the largest types are aligned in a mapped file.
    text.resize(text.len().next_multiple_of(LENGTH_SIZE as usize), b' ');
    [&(text.len() as u64).to_le_bytes(), text.as_slice()].concat()
}

/// Reads the list of tensors in a file, in the order of their offsets.
pub(super) fn read(file: &WeightsFile) -> Result<Vec<TensorInfo>> {
    let too_short = |reason| file.bad(reason, DOWNLOAD_HINT);
    if file.length < LENGTH_SIZE {
        return Err(too_short(format!("it is cut short: it has {} bytes", file.length)));
    }
    let mut length = [0; LENGTH_SIZE as usize];
    file.read_at(&mut length, 0)?;
    let length = u64::from_le_bytes(length);
    if length > MAXIMUM_HEADER {
        let reason = format!("it is not a safetensors file: its header would take {length} bytes");
        return Err(file.bad(reason, DOWNLOAD_HINT));
    }
    let data = LENGTH_SIZE + length;
    if data > file.length {
        return Err(too_short(format!(
            "it is cut short, or not a safetensors file: its header takes {length} bytes, the file has {}",
            file.length
        )));
    }
    let mut text = vec![0; length as usize];
    file.read_at(&mut text, LENGTH_SIZE)?;
    let header: Header = serde_json::from_slice(&text)
        .map_err(|error| file.bad(format!("its header lists no tensors: {error}"), DOWNLOAD_HINT))?;
    let mut tensors = header
        .0
        .into_iter()
        .map(|(name, place)| tensor(file, data, name, place))
        .collect::<Result<Vec<_>>>()?;
    tensors.sort_by_key(|tensor| (tensor.range.start, tensor.range.end));
    check_places(file, data, &tensors)?;
    Ok(tensors)
}

fn tensor(file: &WeightsFile, data: u64, name: String, place: Place) -> Result<TensorInfo> {
    let Place { dtype, shape: dims, data_offsets: (start, end) } = place;
    let known = DTYPES.iter().find(|(known, _)| *known == dtype).map(|(_, known)| *known);
    let places = start.checked_add(data).zip(end.checked_add(data)).filter(|_| start <= end);
    let Some((first, last)) = places else {
        return Err(file.bad(format!("tensor `{name}` lies at bytes {start}..{end}"), ""));
    };
    let num_bytes = end - start;
    let expected = checked_size(&dims, known.map_or(1, DType::byte_size));
    if expected.is_none() || known.is_some() && expected != Some(num_bytes) {
        let takes = expected.map_or("2^63 or more".to_owned(), |bytes| bytes.to_string());
        let reason = format!("tensor `{name}`, {dtype}{dims:?}, has {num_bytes} bytes: it takes {takes}");
        return Err(file.bad(reason, ""));
    }
    let dtype = known.map_or(ElementType::Other(dtype), ElementType::Known);
    Ok(TensorInfo { name, dtype, dims, file: file.path.clone(), range: first..last, num_bytes })
}

/// Checks that the tensors fill the file, and that each byte belongs to exactly one of them.
fn check_places(file: &WeightsFile, data: u64, tensors: &[TensorInfo]) -> Result<()> {
    let mut end = data;
    let mut previous: Option<&TensorInfo> = None;
    for tensor in tensors {
        let name = &tensor.name;
        if tensor.range.start < end {
            let other = previous.map_or("the header", |previous| &previous.name);
            return Err(file.bad(format!("tensors `{other}` and `{name}` overlap"), ""));
        }
        if tensor.range.start > end {
            let gap = tensor.range.start - end;
            return Err(file.bad(format!("{gap} bytes before tensor `{name}` belong to no tensor"), ""));
        }
        if tensor.range.end > file.length {
            let (needed, length) = (tensor.range.end, file.length);
            let reason =
                format!("it is cut short: tensor `{name}` ends at byte {needed}, the file has {length}");
            return Err(file.bad(reason, DOWNLOAD_HINT));
        }
        end = tensor.range.end;
        previous = Some(tensor);
    }
    if end < file.length {
        let reason = format!("{} bytes after its last tensor belong to no tensor", file.length - end);
        return Err(file.bad(reason, DOWNLOAD_HINT));
    }
    Ok(())
}

#[derive(Deserialize)]
struct Place {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: (u64, u64),
}

/// The tensors as listed. A map would hide duplicate names.
struct Header(Vec<(String, Place)>);

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(HeaderVisitor)
    }
}

struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = Header;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with the place of each tensor")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
        let mut tensors = Vec::new();
        let mut names = HashSet::new();
        while let Some(name) = map.next_key::<String>()? {
            if name == METADATA_KEY {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            if !names.insert(name.clone()) {
                return Err(serde::de::Error::custom(format!("tensor `{name}` appears twice")));
            }
            let place = map
                .next_value()
                .map_err(|error| serde::de::Error::custom(format!("tensor `{name}`: {error}")))?;
            tensors.push((name, place));
        }
        Ok(Header(tensors))
    }
}
