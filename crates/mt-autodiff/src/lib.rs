//! Reverse-mode differentiation, IR to IR.
//!
//! Phase: build. [`joint`] turns a graph into one that also computes gradients: the forward nodes, then for each of
//! them, backwards, the vector-Jacobian product that the one table in `rules` gives. Regions are differentiated into
//! a joint graph of their own, which `partition` cuts into a forward and a backward region: that cut is where remat
//! policies act.

#![forbid(unsafe_code)]

mod activity;
mod joint;
mod partition;
mod regions;
mod rules;

pub use joint::{Joint, joint};

/// A graph has no gradient.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AutodiffError {
    #[error("`{op}` in `{scope}` has no derivative, but a gradient was asked through it")]
    NotDifferentiable { op: &'static str, scope: String },
}
