//! Training loop, metrics and tasks.

#![forbid(unsafe_code)]

pub mod metrics;
