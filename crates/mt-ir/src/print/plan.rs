//! Which products of a graph are not printed each by itself, decided before any of its nodes is printed.

use std::collections::{HashMap, HashSet};

use mt_shape::DType;

use super::{Printer, kernels::Slices};
use crate::{Binary, CpuKernels, Dot, Graph, Node, Op, TensorType, ValueId};

/// How a node is printed that is not printed by itself.
pub(super) enum Step {
    /// By another one's step.
    Elsewhere,
    /// A sum, together with the product that a kernel adds in place, so that it is never held.
    Sum { product: usize },
    /// A product that is written into a slice.
    IntoSlice,
    /// A product, together with others of the same left operand.
    Together(Vec<usize>),
}

/// Steps by the indices of nodes.
pub(super) type Plan = HashMap<usize, Step>;

/// With at most so many rows memory's rate is a product's limit: several in one call cost less than each alone, as threads
/// meet less often.
const MOST_FEW_ROWS: usize = 16;

impl Printer<'_> {
    /// Plans the printing of a graph, some of whose products are written into `slices`.
    pub(super) fn plan(&self, graph: &Graph, slices: &Slices) -> Plan {
        let mut plan: Plan = slices.keys().map(|product| (*product, Step::IntoSlice)).collect();
        if self.kernels() != CpuKernels::NONE {
            let producers = graph.producers();
            self.plan_sums(graph, &producers, &mut plan);
            self.plan_groups(graph, &producers, &mut plan);
        }
        plan
    }

    fn plan_sums(&self, graph: &Graph, producers: &[Option<usize>], plan: &mut Plan) {
        let mut uses = vec![0; graph.num_values()];
        let operands = graph.nodes().iter().flat_map(|node| &node.operands);
        operands.chain(graph.outputs()).for_each(|id| uses[id.index()] += 1);
        for (index, node) in graph.nodes().iter().enumerate() {
            let product = |id: &ValueId| {
                let producer = producers[id.index()].filter(|_| uses[id.index()] == 1)?;
                self.product(graph, producer)?;
                (graph.ty(*id).dtype == DType::F32).then_some(producer)
            };
            if node.op == Op::Binary(Binary::Add)
                && let Some(product) = node.operands.iter().find_map(product)
            {
                plan.insert(index, Step::Sum { product });
                plan.insert(product, Step::Elsewhere);
            }
        }
    }

    /// Products of few rows are printed with the first one of the same left operand, if what they multiply is there by then.
    fn plan_groups(&self, graph: &Graph, producers: &[Option<usize>], plan: &mut Plan) {
        let mut groups: Vec<Vec<usize>> = Vec::new();
        for index in (0..graph.nodes().len()).filter(|index| !plan.contains_key(index)) {
            if !self.product(graph, index).is_some_and(|dot| has_few_rows(graph, &graph.nodes()[index], dot))
            {
                continue;
            }
            let [left, right] = graph.nodes()[index].operands[..] else { continue };
            let fits = |group: &&mut Vec<usize>| {
                let first = &graph.nodes()[group[0]];
                let is_there = producers[right.index()].is_none_or(|producer| producer < group[0]);
                let (Op::Dot(own), Op::Dot(other)) = (&graph.nodes()[index].op, &first.op) else {
                    return false;
                };
                let left_of_first = unchanged(graph, producers, first.operands[0]);
                is_there
                    && unchanged(graph, producers, left) == left_of_first
                    && own.lhs_contract == other.lhs_contract
            };
            match groups.iter_mut().find(fits) {
                Some(group) => group.push(index),
                None => groups.push(vec![index]),
            }
        }
        for group in groups {
            if let [first, others @ ..] = &group[..]
                && !others.is_empty()
            {
                plan.extend(others.iter().map(|other| (*other, Step::Elsewhere)));
                plan.insert(*first, Step::Together(others.to_vec()));
            }
        }
    }

    /// For each output of a scan's body that is stacked, the node of the product that a kernel can write into the stack.
    pub(super) fn stacked_products(&self, body: &Graph, stacked: &[ValueId]) -> Vec<Option<usize>> {
        let producers = body.producers();
        let mut taken = HashSet::new();
        let mut product = |id: &ValueId| {
            let index = producers[unchanged(body, &producers, *id).index()]?;
            let dot = self.product(body, index)?;
            // Few rows are sooner copied than computed by themselves.
            (!has_few_rows(body, &body.nodes()[index], dot) && taken.insert(index)).then_some(index)
        };
        stacked.iter().map(&mut product).collect()
    }

    /// The product that a node is, if a kernel computes it.
    fn product<'a>(&self, graph: &'a Graph, index: usize) -> Option<&'a Dot> {
        let node = &graph.nodes()[index];
        let Op::Dot(dot) = &node.op else { return None };
        let types: Vec<&TensorType> = node.operands.iter().map(|id| graph.ty(*id)).collect();
        self.has_kernel(dot, &types, graph.ty(node.results[0])).then_some(dot)
    }
}

/// Whether a product is not batched, and has few rows.
fn has_few_rows(graph: &Graph, node: &Node, dot: &Dot) -> bool {
    let left = graph.ty(node.operands[0]);
    let contracted: usize = dot.lhs_contract.iter().map(|dim| left.dims[*dim]).product();
    dot.lhs_batch.is_empty() && left.num_elements() <= MOST_FEW_ROWS * contracted
}

/// The value that one is another name of: what prints nothing, as there is one device.
fn unchanged(graph: &Graph, producers: &[Option<usize>], mut id: ValueId) -> ValueId {
    while let Some(producer) = producers[id.index()] {
        let node = &graph.nodes()[producer];
        if !matches!(node.op, Op::Name(_) | Op::StopGradient | Op::Constrain(_)) {
            break;
        }
        id = node.operands[0];
    }
    id
}
