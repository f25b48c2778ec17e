//! A printed program, which the runtime compiles and runs.

use std::sync::Arc;

use mt_shape::{DType, Mesh, Sharding};

use crate::{Counts, Memory};

/// Element type and dimensions of a value.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TensorType {
    pub dtype: DType,
    pub dims: Vec<usize>,
}

impl TensorType {
    /// A type from element type and dimensions.
    pub fn new(dtype: DType, dims: impl Into<Vec<usize>>) -> Self {
        Self { dtype, dims: dims.into() }
    }

    /// The type of a scalar.
    pub fn scalar(dtype: DType) -> Self {
        Self { dtype, dims: Vec::new() }
    }

    /// The number of dimensions.
    pub fn rank(&self) -> usize {
        self.dims.len()
    }

    /// The number of elements.
    pub fn num_elements(&self) -> usize {
        self.dims.iter().product()
    }

    /// The number of bytes of all elements.
    pub fn byte_size(&self) -> usize {
        self.num_elements() * self.dtype.byte_size()
    }
}

impl std::fmt::Display for TensorType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}{:?}", self.dtype, self.dims)
    }
}

/// An argument or a result of a program.
#[derive(Clone, Debug, PartialEq)]
pub struct ProgramValue {
    /// A name for messages, such as `params.decoder.layers.mlp.wi_0`.
    pub name: String,
    /// Type of the whole array, all shards together.
    pub ty: TensorType,
    /// Sharding of the array over the program's mesh.
    pub sharding: Sharding,
    /// For an argument: whether its memory may be reused for results. The caller then loses the array when the program
    /// runs.
    pub donated: bool,
    /// The memory that holds it.
    pub memory: Memory,
}

/// An intermediate value of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgramTemporary {
    /// Origin of the value: the scope path, and the value's name or its operation's, such as
    /// `decoder/layers/mlp/mlpwi_0`.
    pub name: String,
    /// Type of the whole array, all shards together.
    pub ty: TensorType,
}

/// A printed StableHLO module with a description of its arguments and results.
#[derive(Clone, Debug)]
pub struct Program {
    /// The name, for caches, dumps and messages, such as `train_step`.
    pub name: String,
    /// The StableHLO text, with Shardy annotations if the mesh has more than one device.
    pub text: String,
    /// The devices the program runs on.
    pub mesh: Arc<Mesh>,
    pub inputs: Vec<ProgramValue>,
    pub outputs: Vec<ProgramValue>,
    /// The largest intermediate values before the compiler fuses operations; many are never stored whole.
    pub temporaries: Vec<ProgramTemporary>,
    /// The work of one run on all devices together.
    pub counts: Counts,
    /// Remarks for the user, such as why the program calls no kernel.
    pub notes: Vec<String>,
}
