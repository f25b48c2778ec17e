//! Gradients of random graphs with nested regions, against forward-mode derivatives from an interpreter.

#![forbid(unsafe_code)]

#[path = "../../mt-ir/tests/support/mod.rs"]
mod support;

use mt_autodiff::{Joint, joint};
use mt_ir::{Graph, eliminate_dead_code, verify};
use proptest::prelude::*;

use support::{Dual, choices, constant, graph, outputs, run};

/// Irregular numbers.
fn number(index: usize) -> f64 {
    (1.0 + 2.3 * index as f64).sin()
}

/// Checks `graph`'s gradients for the marked inputs and outputs, at irregular inputs: along a direction, the change of
/// the outputs predicted by the gradients equals the interpreter's.
fn check(graph: &Graph, with_respect_to: &[bool], wanted: &[bool]) -> Result<Joint, TestCaseError> {
    let joint =
        joint(graph, with_respect_to, wanted).map_err(|error| TestCaseError::fail(error.to_string()))?;
    prop_assert_eq!(verify(&joint.graph), Ok(()));
    let values: Vec<f64> = (0..graph.inputs().len()).map(number).collect();
    let direction: Vec<f64> = (0..values.len())
        .map(|index| if with_respect_to[index] { number(index + 20) } else { 0.0 })
        .collect();
    let along: Vec<Vec<Dual>> = values
        .iter()
        .zip(&direction)
        .map(|(value, tangent)| vec![Dual { value: *value, tangent: *tangent }])
        .collect();
    let changed = run(graph, &along);
    let cotangents: Vec<f64> =
        (0..wanted.iter().filter(|wanted| **wanted).count()).map(|index| number(index + 40)).collect();
    let moving = changed.iter().zip(wanted).filter(|(_, wanted)| **wanted);
    let terms: Vec<f64> =
        moving.zip(&cotangents).map(|((output, _), weight)| output[0].tangent * weight).collect();
    let expected: f64 = terms.iter().sum();

    let inputs: Vec<Vec<Dual>> =
        values.iter().chain(&cotangents).map(|value| vec![constant(*value)]).collect();
    for graph in [&joint.graph, &eliminate_dead_code(&joint.graph)] {
        prop_assert_eq!(verify(graph), Ok(()));
        let results = run(graph, &inputs);
        for (result, changed) in results.iter().zip(&changed) {
            prop_assert!(result[0].value.to_bits() == changed[0].value.to_bits());
        }
        let products: Vec<f64> = joint
            .gradients
            .iter()
            .zip(&direction)
            .filter_map(|(gradient, step)| gradient.map(|index| results[index][0].value * step))
            .collect();
        let actual: f64 = products.iter().sum();
        // Rounding errors scale with the summed terms and with the factors along the way.
        let scale = 1.0 + terms.iter().chain(&products).map(|term| term.abs()).sum::<f64>();
        if scale < 1e6 {
            prop_assert!((actual - expected).abs() <= 1e-8 * scale, "{actual} instead of {expected}");
        }
    }
    Ok(joint)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn gradients(choices in choices(), outputs in outputs()) {
        let graph = graph(&choices, &outputs);
        check(&graph, &[true; 3], &vec![true; outputs.len()])?;
    }

    /// With respect to some inputs, for some outputs.
    #[test]
    fn some_gradients(choices in choices(), outputs in outputs(), by in any::<[bool; 3]>(), of in any::<[bool; 3]>()) {
        let graph = graph(&choices, &outputs);
        check(&graph, &by, &of[..outputs.len()])?;
    }

    /// The joint graph is an ordinary graph: its gradients are second derivatives.
    #[test]
    fn second_derivatives(choices in prop::collection::vec(any::<(u8, usize, usize, usize)>(), 1..8), output in any::<usize>()) {
        let graph = graph(&choices, &[output]);
        let first = check(&graph, &[true; 3], &[true])?;
        let first = eliminate_dead_code(&first.graph);
        let (inputs, outputs) = (first.inputs().len(), first.outputs().len());
        check(&first, &vec![true; inputs], &vec![true; outputs])?;
    }
}
