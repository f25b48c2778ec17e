//! Values and gradients of every operation, computed by the CPU plugin.
//!
//! Values are compared with plain Rust, gradients with finite differences in `f64`, and gradients in narrower types
//! with those in `f64`.

#![forbid(unsafe_code)]

mod constants;
mod control;
mod dots;
mod elementwise;
mod harness;
mod indexing;
mod movement;
mod random;
mod reductions;
mod sharding;
