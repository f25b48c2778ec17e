//! The largest intermediate values of a program.

use std::cmp::Reverse;

use crate::{Graph, Memory, Op, ProgramTemporary, ValueId};

/// The number of values to report, which is enough for a message.
const NUM_KEPT: usize = 12;

/// The largest values in device memory of `graph` and its regions that are neither arguments nor results, in descending
/// order. Values of one name and type count once.
pub(crate) fn largest_temporaries(graph: &Graph) -> Vec<ProgramTemporary> {
    let mut graphs = Vec::new();
    let mut values = Vec::new();
    collect(graph, true, &mut graphs, &mut values);
    values.sort_by_key(|(graph, value)| Reverse(graphs[*graph].graph.ty(*value).byte_size()));
    let mut kept: Vec<ProgramTemporary> = Vec::new();
    for (graph, value) in values {
        let graph = &graphs[graph];
        let temporary = ProgramTemporary { name: graph.label(value), ty: graph.graph.ty(value).clone() };
        if !kept.contains(&temporary) {
            kept.push(temporary);
        }
        if kept.len() == NUM_KEPT {
            break;
        }
    }
    kept
}

/// Adds the graph and its regions to `graphs`, and their intermediate values to `values`, keyed by the graph's index.
fn collect<'g>(
    graph: &'g Graph,
    is_outermost: bool,
    graphs: &mut Vec<Labelled<'g>>,
    values: &mut Vec<(usize, ValueId)>,
) {
    let (index, labelled) = (graphs.len(), Labelled::new(graph));
    let mut is_result = vec![false; graph.num_values()];
    if is_outermost {
        for output in graph.outputs() {
            is_result[labelled.origin(*output).index()] = true;
        }
    }
    graphs.push(labelled);
    for node in graph.nodes() {
        match &node.op {
            // Remat bodies are printed inline, so their results are temporaries as well.
            Op::Remat(op) => collect(&op.body, false, graphs, values),
            Op::CustomVjp(op) => collect(&op.primal, false, graphs, values),
            // If the kernel is called, it needs less memory than its body.
            Op::Kernel(op) => collect(&op.body, false, graphs, values),
            op if takes_no_memory(op) => {}
            op => {
                let on_device =
                    |id: &&ValueId| !is_result[id.index()] && !graphs[index].is_in_host_memory(**id);
                let results: Vec<ValueId> = node.results.iter().filter(on_device).copied().collect();
                values.extend(results.into_iter().map(|result| (index, result)));
                op.regions().into_iter().for_each(|region| collect(region, false, graphs, values));
            }
        }
    }
}

/// Whether the compiler needs no memory for an operation's result.
fn takes_no_memory(op: &Op) -> bool {
    let is_view = matches!(
        op,
        Op::Constant(_) | Op::Iota { .. } | Op::Broadcast { .. } | Op::Reshape { .. } | Op::Transpose { .. }
    );
    is_view || is_identity(op)
}

fn is_identity(op: &Op) -> bool {
    matches!(
        op,
        Op::StopGradient | Op::Name(_) | Op::Constrain(_) | Op::Transfer(_) | Op::OptimizationBarrier
    )
}

/// A graph with the data that labels its values.
struct Labelled<'g> {
    graph: &'g Graph,
    producers: Vec<Option<usize>>,
    /// The names from [`Op::Name`], by value.
    names: Vec<Option<&'g str>>,
}

impl<'g> Labelled<'g> {
    fn new(graph: &'g Graph) -> Self {
        let mut labelled =
            Self { graph, producers: graph.producers(), names: vec![None; graph.num_values()] };
        for node in graph.nodes() {
            if let Op::Name(name) = &node.op {
                let origin = labelled.origin(node.operands[0]);
                labelled.names[origin.index()] = Some(name);
            }
        }
        labelled
    }

    /// The value behind names and sharding constraints.
    fn origin(&self, mut value: ValueId) -> ValueId {
        while let Some(index) = self.producers[value.index()] {
            let node = &self.graph.nodes()[index];
            let result = node.results.iter().position(|result| *result == value);
            match result {
                Some(result) if is_identity(&node.op) => value = node.operands[result],
                _ => break,
            }
        }
        value
    }

    /// Whether a value was moved to host memory, or is a stack of values that a scan's body moves there.
    fn is_in_host_memory(&self, mut value: ValueId) -> bool {
        while let Some(index) = self.producers[value.index()] {
            let node = &self.graph.nodes()[index];
            let result = node.results.iter().position(|result| *result == value).unwrap_or(0);
            let within = |region: &Graph| Labelled::new(region).is_in_host_memory(region.outputs()[result]);
            match &node.op {
                Op::Transfer(memory) => return *memory == Memory::Host,
                Op::Scan(scan) => return result >= scan.num_carry && within(&scan.body),
                Op::Remat(remat) => return within(&remat.body),
                Op::CustomVjp(op) => return within(&op.primal),
                Op::Kernel(op) => return within(&op.body),
                op if is_identity(op) => value = node.operands[result],
                _ => return false,
            }
        }
        false
    }

    /// A value's label: its scope, and its own name or its operation's.
    fn label(&self, value: ValueId) -> String {
        let value = self.origin(value);
        let Some(index) = self.producers[value.index()] else { return "a loop's state".to_owned() };
        let node = &self.graph.nodes()[index];
        let result = node.results.iter().position(|result| *result == value).unwrap_or(0);
        let inner = |region: &Graph| Labelled::new(region).label(region.outputs()[result]);
        match (self.names[value.index()], &node.op) {
            (Some(name), _) => format!("{}{name}", prefix(&node.scope)),
            (None, Op::Scan(scan)) if result >= scan.num_carry => {
                format!("{} of all {} steps", inner(&scan.body), scan.length)
            }
            (None, Op::Remat(remat)) => inner(&remat.body),
            (None, Op::CustomVjp(op)) => inner(&op.primal),
            (None, Op::Kernel(op)) => inner(&op.body),
            (None, op) => {
                let name = op.name();
                format!("{}{}", prefix(&node.scope), name.split_once('.').map_or(name, |(_, name)| name))
            }
        }
    }
}

fn prefix(scope: &str) -> String {
    if scope.is_empty() { String::new() } else { format!("{scope}/") }
}
