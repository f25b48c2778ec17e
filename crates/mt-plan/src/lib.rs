//! The cost of a run before it starts: the time of a step, its bound, and its memory on each device.
//!
//! Phase: before the others. `mt-train` and `mt-engine`, which are below, provide the programs; no device is started.

#![forbid(unsafe_code)]

pub mod compile;
pub mod cost;
mod error;
mod estimate;

pub use error::PlanError;
pub use estimate::{Budget, Estimate, MemoryEstimate, Parameters, Verdict};
