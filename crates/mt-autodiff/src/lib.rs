//! Reverse-mode differentiation, IR to IR.
//!
//! Phase: build. [`joint`] turns a graph into one that also computes gradients: the forward nodes, then in reverse
//! order the vector-Jacobian product of each, from the one table in `rules`. Regions are differentiated into joint
//! graphs of their own, which `partition` cuts into a forward and a backward region. Remat policies act at that cut; `split`
//! opens per-device code to them.

#![forbid(unsafe_code)]

mod activity;
mod joint;
mod manual;
mod partition;
mod regions;
mod rules;
mod split;

pub use joint::{Joint, joint};

use mt_ir::{Graph, VerifyError, eliminate_dead_code, verify};

/// The error for a graph without a gradient, or for a malformed graph from a transform.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AutodiffError {
    #[error("`{op}` in `{scope}` has no derivative, but a requested gradient passes through it")]
    NotDifferentiable { op: &'static str, scope: String },
    /// A defect of this crate, never of its input.
    #[error("{transform} built a malformed graph: {source}")]
    IllFormed { transform: &'static str, source: Box<VerifyError> },
}

/// The result of a transform after verification.
fn verified(transform: &'static str, graph: Graph) -> Result<Graph, AutodiffError> {
    match verify(&graph) {
        Ok(()) => Ok(graph),
        Err(error) => Err(AutodiffError::IllFormed { transform, source: Box::new(error) }),
    }
}

/// The graph without dead code.
fn cleaned(graph: &Graph) -> Result<Graph, AutodiffError> {
    verified("dead-code elimination", eliminate_dead_code(graph))
}
