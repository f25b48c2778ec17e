//! SSA graphs of StableHLO operations: shape rules, verifier, printer.
#![forbid(unsafe_code)]
mod program;
pub use program::{Program, ProgramValue, TensorType};
