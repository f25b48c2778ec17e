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

use mt_ir::{Graph, VerifyError, eliminate_dead_code, verify};

/// A graph has no gradient, or a transform made one that is not well formed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AutodiffError {
    #[error("`{op}` in `{scope}` has no derivative, but a gradient was asked through it")]
    NotDifferentiable { op: &'static str, scope: String },
    /// A fault of this crate, never of what it was given.
    #[error("{transform} made a graph that is not well formed: {source}")]
    IllFormed { transform: &'static str, source: Box<VerifyError> },
}

/// The result of a transform, once it is known to be well formed.
fn verified(transform: &'static str, graph: Graph) -> Result<Graph, AutodiffError> {
    match verify(&graph) {
        Ok(()) => Ok(graph),
        Err(error) => Err(AutodiffError::IllFormed { transform, source: Box::new(error) }),
    }
}

/// What is left of a graph without what no output depends on.
fn cleaned(graph: &Graph) -> Result<Graph, AutodiffError> {
    verified("dead-code elimination", eliminate_dead_code(graph))
}
