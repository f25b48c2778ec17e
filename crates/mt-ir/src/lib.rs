//! SSA graphs of StableHLO operations: pure shape rules, a verifier, dead-code elimination, and the printer.
//!
//! Phase: build. This crate is positional and free of FFI. `mt-trace` builds graphs from named axes, `mt-autodiff`
//! differentiates them, and `mt-runtime` compiles the text printed here.

#![forbid(unsafe_code)]

mod counts;
mod graph;
mod op;
mod print;
mod program;
mod shape_rules;
mod temporaries;
mod transform;
mod verify;

pub use counts::Counts;
pub use graph::{Graph, Node, ValueId};
pub use op::{
    Binary, Collective, CollectiveKind, Comparison, CustomVjp, Dot, GatherDims, Kernel, Literal,
    ManualComputation, Memory, Op, Precision, Reduction, Remat, SavePolicy, Scalar, Scan, ScatterDims,
    ScatterKind, Unary, While,
};
pub use print::{Boundary, CpuKernels, PrintOptions, Target, print_program};
pub use program::{Program, ProgramTemporary, ProgramValue, TensorType};
pub use shape_rules::{ShapeError, infer};
pub use transform::{eliminate_dead_code, extract};
pub use verify::{VerifyError, verify};
