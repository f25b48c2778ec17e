//! Reference values in safetensors files.

use std::{fs, path::Path};

use mt_shape::{DType, HostArray};
use safetensors::{Dtype, SafeTensors};

/// The tensors of a file of reference values.
pub struct Golden {
    bytes: Vec<u8>,
}

impl Golden {
    /// Reads `name` of the folder `tests/goldens` of a crate, whose manifest's directory is `manifest`.
    #[track_caller]
    pub fn open(manifest: &str, name: &str) -> Self {
        let path = Path::new(manifest).join("tests/goldens").join(name);
        let bytes = fs::read(&path).unwrap_or_else(|error| panic!("`{}`: {error}", path.display()));
        Self { bytes }
    }

    /// A tensor, of `f32`, `i32` or `i64`.
    #[track_caller]
    pub fn array(&self, name: &str) -> HostArray {
        let tensors = self.tensors();
        let view = tensors.tensor(name).unwrap_or_else(|error| panic!("`{name}`: {error}"));
        let dtype = match view.dtype() {
            Dtype::F32 => DType::F32,
            Dtype::I32 => DType::I32,
            Dtype::I64 => DType::I64,
            other => panic!("`{name}` has the type {other:?}"),
        };
        HostArray::from_bytes(dtype, view.shape(), view.data()).expect("the file has all bytes of a tensor")
    }

    /// The elements of a tensor.
    #[track_caller]
    pub fn numbers(&self, name: &str) -> Vec<f64> {
        self.array(name).to_f64()
    }

    /// The names of the tensors.
    pub fn names(&self) -> Vec<String> {
        self.tensors().names().iter().map(|name| (*name).to_owned()).collect()
    }

    fn tensors(&self) -> SafeTensors<'_> {
        SafeTensors::deserialize(&self.bytes).unwrap_or_else(|error| panic!("reference values: {error}"))
    }
}
