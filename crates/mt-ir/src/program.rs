//! A printed program: what the runtime compiles and runs.

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
    /// A type from its parts.
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

    /// The bytes all elements take.
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
    /// The type of the whole array, all shards together.
    pub ty: TensorType,
    /// How the array is split over the program's mesh.
    pub sharding: Sharding,
    /// For an argument: its memory may be reused, so that it must be given up when the program runs.
    pub donated: bool,
    /// The memory of its devices that it is in.
    pub memory: Memory,
}

/// A value that a program computes on its way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgramTemporary {
    /// Where it comes from: the scope path and the value's name or its operation's, such as
    /// `decoder/layers/mlp/mlpwi_0`.
    pub name: String,
    /// The type of the whole array, all shards together.
    pub ty: TensorType,
}

/// A StableHLO module, printed, with what a caller must know of its arguments and results.
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
    /// The largest values in between, before the compiler fuses operations; many are never stored whole.
    pub temporaries: Vec<ProgramTemporary>,
    /// What a run of it does, on all devices together.
    pub counts: Counts,
}
