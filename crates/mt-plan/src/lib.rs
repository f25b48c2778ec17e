//! What a run costs, before it runs: how long a step takes, what bounds it, and what it needs of a device's memory.
//!
//! Phase: before all others. `mt-train` and `mt-engine` below make the programs that are judged here; no device is
//! started.

#![forbid(unsafe_code)]

pub mod compile;
pub mod cost;
mod error;
mod estimate;

pub use error::PlanError;
pub use estimate::{Budget, Estimate, MemoryEstimate, Parameters, Verdict};
