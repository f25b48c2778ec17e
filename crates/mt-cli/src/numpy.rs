//! Arrays in NumPy's file format (NEP 1), version 1: a header that describes the array, then its elements.

use std::{fs, path::Path};

use mt_shape::{DType, HostArray};

use crate::failure::Failure;

const MAGIC: &[u8] = b"\x93NUMPY";

/// Writes an array.
pub fn write(path: &Path, array: &HostArray) -> Result<(), Failure> {
    let descriptor = match array.dtype() {
        DType::F64 => "<f8",
        DType::F16 => "<f2",
        DType::I32 => "<i4",
        _ => "<f4",
    };
    let dims: Vec<String> = array.dims().iter().map(|dim| format!("{dim},")).collect();
    let mut header =
        format!("{{'descr': '{descriptor}', 'fortran_order': False, 'shape': ({}), }}", dims.join(" "));
    // The elements start at a multiple of 64 bytes.
    let start = (MAGIC.len() + 4 + header.len() + 1).next_multiple_of(64);
    header.push_str(&" ".repeat(start - MAGIC.len() - 4 - header.len() - 1));
    header.push('\n');
    let mut bytes = [MAGIC, &[1, 0], &(header.len() as u16).to_le_bytes(), header.as_bytes()].concat();
    bytes.extend_from_slice(array.bytes());
    fs::write(path, bytes)
        .map_err(|error| Failure::run(format!("cannot write `{}`: {error}", path.display())))
}

/// Reads an array of floating-point numbers.
pub fn read(path: &Path) -> Result<HostArray, Failure> {
    let wrong = |reason: &str| {
        Failure::user(format!(
            "cannot read `{}` as a NumPy array: {reason}\nhint: write it with `numpy.save`, as float32 or float64",
            path.display()
        ))
    };
    let bytes = fs::read(path).map_err(|error| wrong(&error.to_string()))?;
    let rest =
        bytes.strip_prefix(MAGIC).ok_or_else(|| wrong("it does not begin with NumPy's magic string"))?;
    let (length, from) = match rest {
        [1, _, low, high, ..] => (usize::from(u16::from_le_bytes([*low, *high])), 4),
        [2 | 3, _, a, b, c, d, ..] => (u32::from_le_bytes([*a, *b, *c, *d]) as usize, 6),
        _ => return Err(wrong("its version is not known")),
    };
    let header = rest.get(from..from + length).ok_or_else(|| wrong("it is cut off"))?;
    let header = String::from_utf8_lossy(header);
    let dtype = match between(&header, "'descr': '", "'") {
        Some("<f4") => DType::F32,
        Some("<f8") => DType::F64,
        Some("<f2") => DType::F16,
        _ => return Err(wrong("its elements are not little-endian floating-point numbers")),
    };
    if between(&header, "'fortran_order': ", ",") != Some("False") {
        return Err(wrong("its elements are in Fortran's order"));
    }
    let dims = between(&header, "'shape': (", ")").ok_or_else(|| wrong("it has no shape"))?;
    let dims: Result<Vec<usize>, _> =
        dims.split(',').map(str::trim).filter(|dim| !dim.is_empty()).map(str::parse).collect();
    let dims = dims.map_err(|_| wrong("its shape is no list of numbers"))?;
    HostArray::from_bytes(dtype, &dims, &rest[from + length..]).map_err(|error| wrong(&error.to_string()))
}

fn between<'a>(text: &'a str, before: &str, after: &str) -> Option<&'a str> {
    let rest = &text[text.find(before)? + before.len()..];
    Some(&rest[..rest.find(after)?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_come_back() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.npy");
        for dims in [&[][..], &[3], &[2, 1, 4]] {
            let count = dims.iter().product::<usize>();
            let numbers: Vec<f32> = (0..count).map(|number| number as f32 / 3.0).collect();
            let array = HostArray::from_slice(DType::F32, dims, &numbers).unwrap();
            write(&path, &array).unwrap();
            assert_eq!(read(&path).unwrap(), array);
            assert_eq!((fs::metadata(&path).unwrap().len() as usize - 4 * count) % 64, 0);
        }
        fs::write(&path, b"text").unwrap();
        assert!(read(&path).is_err());
    }
}
