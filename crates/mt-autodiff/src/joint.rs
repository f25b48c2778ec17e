//! The joint graph: a function together with its gradients.

use std::collections::HashMap;

use mt_ir::{Binary, Graph, Node, Op, ValueId};

use crate::{
    AutodiffError,
    activity::{active_values, needs_cotangent},
    regions::{self, Tape},
    rules, verified,
};

/// A graph that computes a function and its vector-Jacobian product.
#[derive(Clone, Debug)]
pub struct Joint {
    /// Inputs: those of the function, then the cotangents of the requested outputs. Outputs: those of the function,
    /// then the gradients.
    pub graph: Graph,
    /// For each input of the function, the output of `graph` that is its gradient; `None` if the gradient is zero
    /// everywhere or was not requested.
    pub gradients: Vec<Option<usize>>,
    /// The number of outputs of the function.
    pub num_outputs: usize,
}

/// Differentiates `graph` with respect to the inputs that `with_respect_to` marks, for cotangents of the outputs that
/// `cotangents` marks; the other outputs have cotangent zero.
///
/// # Errors
/// A requested gradient passes through an operation without a derivative, or the resulting graph is malformed.
pub fn joint(graph: &Graph, with_respect_to: &[bool], cotangents: &[bool]) -> Result<Joint, AutodiffError> {
    let mut builder = Graph::new();
    let arguments: Vec<ValueId> =
        graph.inputs().iter().map(|input| builder.input(graph.ty(*input).clone())).collect();
    let seeds: Vec<Option<ValueId>> = graph
        .outputs()
        .iter()
        .zip(cotangents)
        .map(|(output, wanted)| wanted.then(|| builder.input(graph.ty(*output).clone())))
        .collect();
    let active = active_values(graph, with_respect_to);
    let needs = needs_cotangent(graph, &active, cotangents);
    let mut differentiation =
        Differentiation { graph, builder, map: HashMap::new(), active, needs, cotangents: HashMap::new() };
    let (outputs, gradients) = differentiation.run(&arguments, &seeds)?;
    let num_outputs = outputs.len();
    let mut all = outputs;
    let gradients = gradients
        .into_iter()
        .zip(with_respect_to)
        .map(|(gradient, wanted)| {
            gradient.filter(|_| *wanted).map(|gradient| {
                all.push(gradient);
                all.len() - 1
            })
        })
        .collect();
    let mut graph = differentiation.builder;
    graph.set_outputs(all);
    Ok(Joint { graph: verified("differentiation", graph)?, gradients, num_outputs })
}

struct Differentiation<'g> {
    graph: &'g Graph,
    builder: Graph,
    /// The value in `builder` for each value of `graph`.
    map: HashMap<ValueId, ValueId>,
    active: Vec<bool>,
    needs: Vec<bool>,
    /// Accumulated cotangents by value of `graph`.
    cotangents: HashMap<ValueId, ValueId>,
}

impl Differentiation<'_> {
    fn run(
        &mut self,
        arguments: &[ValueId],
        seeds: &[Option<ValueId>],
    ) -> Result<(Vec<ValueId>, Vec<Option<ValueId>>), AutodiffError> {
        let graph = self.graph;
        self.map.extend(graph.inputs().iter().copied().zip(arguments.iter().copied()));
        let mut tapes: Vec<(&Node, Tape)> = Vec::new();
        for node in graph.nodes() {
            let wanted: Vec<bool> = node.results.iter().map(|result| self.needs[result.index()]).collect();
            if !wanted.contains(&true) {
                self.builder.copy_node(graph, node, &mut self.map);
                continue;
            }
            self.builder.set_scope(node.scope.clone());
            let operands: Vec<ValueId> = node.operands.iter().map(|operand| self.map[operand]).collect();
            let active: Vec<bool> =
                node.operands.iter().map(|operand| self.active[operand.index()]).collect();
            let tape = match regions::forward(&mut self.builder, node, &operands, &active, &wanted)? {
                Some((results, tape)) => {
                    self.map.extend(node.results.iter().copied().zip(results));
                    tape
                }
                None => {
                    self.builder.copy_node(graph, node, &mut self.map);
                    Tape::Rule
                }
            };
            tapes.push((node, tape));
        }
        for (output, seed) in graph.outputs().iter().zip(seeds) {
            if let Some(seed) = seed.filter(|_| self.active[output.index()]) {
                self.accumulate(*output, seed);
            }
        }
        let producers = graph.producers();
        for (node, tape) in tapes.into_iter().rev() {
            self.backward(node, tape, &producers)?;
        }
        let outputs = graph.outputs().iter().map(|output| self.map[output]).collect();
        let gradients = graph.inputs().iter().map(|input| self.cotangents.get(input).copied()).collect();
        Ok((outputs, gradients))
    }

    fn backward(
        &mut self,
        node: &Node,
        tape: Tape,
        producers: &[Option<usize>],
    ) -> Result<(), AutodiffError> {
        let cotangents: Vec<Option<ValueId>> =
            node.results.iter().map(|result| self.cotangents.get(result).copied()).collect();
        if cotangents.iter().all(Option::is_none) {
            return Ok(());
        }
        let path = format!("gradient/{}", node.scope);
        self.builder.set_scope(path.trim_end_matches('/').into());
        let needs: Vec<bool> = node.operands.iter().map(|operand| self.active[operand.index()]).collect();
        let mut targets = node.operands.clone();
        let gradients = match tape {
            Tape::Rule => {
                let operands: Vec<ValueId> = node.operands.iter().map(|operand| self.map[operand]).collect();
                let results: Vec<ValueId> = node.results.iter().map(|result| self.map[result]).collect();
                if let Op::Dot(dot) = &node.op {
                    let wide = self.wide_source(node.operands[1], producers);
                    let dtypes = [
                        self.graph.ty(node.operands[0]).dtype,
                        self.graph.ty(wide.unwrap_or(node.operands[1])).dtype,
                    ];
                    targets[1] = wide.unwrap_or(node.operands[1]);
                    rules::dot(&mut self.builder, dot, &operands, cotangents[0], &needs, dtypes)
                } else {
                    rules::vector_jacobian_product(
                        &mut self.builder,
                        node,
                        &operands,
                        &results,
                        &cotangents,
                        &needs,
                    )?
                }
            }
            tape => regions::backward(&mut self.builder, node, tape, &cotangents)?,
        };
        for ((target, gradient), needed) in targets.iter().zip(gradients).zip(needs) {
            if let Some(gradient) = gradient.filter(|_| needed) {
                self.accumulate(*target, gradient);
            }
        }
        Ok(())
    }

    /// The original of a weight that was narrowed for a dot. Its gradient then leaves the dot in the weight's own type,
    /// without rounding to the narrow one.
    fn wide_source(&self, operand: ValueId, producers: &[Option<usize>]) -> Option<ValueId> {
        let node = &self.graph.nodes()[producers[operand.index()]?];
        let source = *node.operands.first()?;
        let widens = matches!(node.op, Op::Convert(narrow) if narrow.byte_size() < self.graph.ty(source).dtype.byte_size());
        if !widens || !self.active[source.index()] {
            return None;
        }
        let mut origin = source;
        while let Some(index) = producers[origin.index()] {
            match &self.graph.nodes()[index] {
                Node { op: Op::Constrain(_) | Op::Transfer(_), operands, .. } => origin = operands[0],
                _ => return None,
            }
        }
        Some(source)
    }

    fn accumulate(&mut self, value: ValueId, cotangent: ValueId) {
        debug_assert_eq!(
            self.builder.ty(cotangent),
            self.graph.ty(value),
            "a cotangent has its value's type"
        );
        let sum = match self.cotangents.get(&value) {
            Some(before) => self.builder.emit(Op::Binary(Binary::Add), &[*before, cotangent]),
            None => cotangent,
        };
        self.cotangents.insert(value, sum);
    }
}
