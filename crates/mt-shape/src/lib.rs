//! The vocabulary of all crates: element types, named axes, meshes and placement rules, arrays in host memory, and
//! trees of leaves.
//!
//! Phase: all. This crate is at the bottom: it depends on no other crate of the workspace and performs no I/O.

#![forbid(unsafe_code)]

mod axis;
mod dtype;
mod float8;
mod host;
pub mod kernels;
pub mod logical;
mod mesh;
mod rules;
mod table;
mod tree;

pub use axis::{Axis, axis};
pub use dtype::{DType, UnknownDType};
pub use float8::Float8;
pub use host::{HostArray, HostArrayError};
pub use logical::LogicalAxis;
pub use mesh::{DeviceAttributes, HybridAxis, Mesh, MeshError, PartitionSpec, Sharding, Topology};
pub use rules::{LogicalRules, PlacedValue, Placement, PlacementNote};
pub use table::{PlacementRow, SplitsNothing, check_axes, placement_table};
pub use tree::{AdapterChoices, Attached, Noise, Path, Tree};
