//! The verifier: invariants that every transform must preserve.

use crate::{Graph, ShapeError, TensorType, infer};

/// A graph is not well formed. This is a defect in the code that built it, never in a user's input.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum VerifyError {
    #[error("`{op}` in `{scope}` uses a value before it is computed")]
    UseBeforeDefinition { op: &'static str, scope: String },
    #[error("`{op}` in `{scope}` {source}")]
    Shape { op: &'static str, scope: String, source: ShapeError },
    #[error("`{op}` in `{scope}` has results of types {actual:?}, not {expected:?}")]
    ResultTypes { op: &'static str, scope: String, expected: Vec<TensorType>, actual: Vec<TensorType> },
    #[error("output {0} is not computed")]
    UndefinedOutput(usize),
}

/// Checks that every value is computed once and before its uses, and that types follow from the shape rules, in the
/// graph and all its regions.
///
/// # Errors
/// The first violation found.
pub fn verify(graph: &Graph) -> Result<(), VerifyError> {
    let mut defined = vec![false; graph.num_values()];
    for input in graph.inputs() {
        defined[input.index()] = true;
    }
    for node in graph.nodes() {
        // Messages are built only on failure, because graphs are verified after each transform.
        let (op, scope) = (node.op.name(), || node.scope.to_string());
        if node.operands.iter().any(|operand| !defined[operand.index()]) {
            return Err(VerifyError::UseBeforeDefinition { op, scope: scope() });
        }
        for region in node.op.regions() {
            verify(region)?;
        }
        let operands: Vec<&TensorType> = node.operands.iter().map(|value| graph.ty(*value)).collect();
        let expected = match infer(&node.op, &operands) {
            Ok(expected) => expected,
            Err(source) => return Err(VerifyError::Shape { op, scope: scope(), source }),
        };
        if !expected.iter().eq(node.results.iter().map(|value| graph.ty(*value))) {
            let actual = node.results.iter().map(|value| graph.ty(*value).clone()).collect();
            return Err(VerifyError::ResultTypes { op, scope: scope(), expected, actual });
        }
        for result in &node.results {
            defined[result.index()] = true;
        }
    }
    match graph.outputs().iter().position(|output| !defined[output.index()]) {
        Some(index) => Err(VerifyError::UndefinedOutput(index)),
        None => Ok(()),
    }
}
