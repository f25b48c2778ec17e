//! Chooses, before printing, which products of a graph are printed together with other nodes.

use std::collections::{HashMap, HashSet};

use mt_shape::{DType, kernels::thresholds};

use super::Printer;
use crate::{Binary, CpuKernels, Dot, Graph, Node, Op, Precision, TensorType, ValueId};

/// How to print a node that is not printed alone.
pub(super) enum Step {
    /// Printed by another node's step.
    Elsewhere,
    /// A sum, together with the product that a kernel adds in place, so the product itself is never stored.
    Sum { product: usize },
    /// A product, together with `others` that share its left operand. `before` are nodes that compute their right
    /// operands.
    Together { others: Vec<usize>, before: Vec<usize> },
}

/// Steps by node index.
pub(super) type Steps = HashMap<usize, Step>;

/// Products with the same left operand, contraction and precision, by node index.
struct Group<'a> {
    left: ValueId,
    contract: &'a [usize],
    precision: Precision,
    products: Vec<usize>,
    before: Vec<usize>,
}

impl Printer<'_> {
    /// The steps that print a graph, except those of products that are written into slices.
    pub(super) fn steps(&self, graph: &Graph) -> Steps {
        let mut steps = Steps::new();
        // Which products share a call depends on the number of rows, and an added product is summed in another order.
        if self.kernels() != CpuKernels::NONE && !self.is_invariant() {
            let producers = graph.producers();
            self.add_sums(graph, &producers, &mut steps);
            self.add_groups(graph, &producers, &mut steps);
        }
        steps
    }

    fn add_sums(&self, graph: &Graph, producers: &[Option<usize>], steps: &mut Steps) {
        let mut uses = vec![0; graph.num_values()];
        let operands = graph.nodes().iter().flat_map(|node| &node.operands);
        operands.chain(graph.outputs()).for_each(|id| uses[id.index()] += 1);
        for (index, node) in graph.nodes().iter().enumerate() {
            let product = |id: &ValueId| {
                let producer = producers[id.index()].filter(|_| uses[id.index()] == 1)?;
                let dot = self.product(graph, producer)?;
                // A sum with few rows is cheap, and its product is fastest in a group.
                let is_planned =
                    graph.ty(*id).dtype == DType::F32 && !has_few_rows(graph, &graph.nodes()[producer], dot);
                is_planned.then_some(producer)
            };
            if node.op == Op::Binary(Binary::Add)
                && let Some(product) = node.operands.iter().find_map(product)
            {
                steps.insert(index, Step::Sum { product });
                steps.insert(product, Step::Elsewhere);
            }
        }
    }

    /// Groups products of few rows at the first product with the same left operand, if their right operands are
    /// available by then. Products that are already grouped or written into a slice stay out.
    fn add_groups(&self, graph: &Graph, producers: &[Option<usize>], steps: &mut Steps) {
        let mut groups: Vec<Group> = Vec::new();
        let mut taken: HashSet<usize> = HashSet::new();
        for (index, node) in graph.nodes().iter().enumerate() {
            let Some(dot) = self.product(graph, index).filter(|dot| has_few_rows(graph, node, dot)) else {
                continue;
            };
            let (left, contract) = (unchanged(graph, producers, node.operands[0]), &*dot.lhs_contract);
            let precision = self.precision(dot, graph.ty(left).dtype);
            let alike = groups
                .iter_mut()
                .find(|group| (group.left, group.contract, group.precision) == (left, contract, precision));
            let before = alike.as_ref().and_then(|group| {
                views_from(graph, producers, node.operands[1], group.products[0])
                    .filter(|views| views.iter().all(|view| !taken.contains(view)))
            });
            match (alike, before) {
                (Some(group), Some(before)) => {
                    taken.extend(&before);
                    group.before.extend(before);
                    group.products.push(index);
                }
                _ => groups.push(Group {
                    left,
                    contract,
                    precision,
                    products: vec![index],
                    before: Vec::new(),
                }),
            }
        }
        for Group { products, before, .. } in groups {
            if let [first, others @ ..] = &products[..]
                && !others.is_empty()
            {
                let elsewhere = others.iter().chain(&before);
                steps.extend(elsewhere.map(|index| (*index, Step::Elsewhere)));
                steps.insert(*first, Step::Together { others: others.to_vec(), before });
            }
        }
    }

    /// For each stacked output of a scan's body, the node of the product that a kernel can write into the stack.
    pub(super) fn stacked_products(&self, body: &Graph, stacked: &[ValueId]) -> Vec<Option<usize>> {
        let producers = body.producers();
        let mut taken = HashSet::new();
        let mut product = |id: &ValueId| {
            let index = producers[unchanged(body, &producers, *id).index()]?;
            let dot = self.product(body, index)?;
            // A few rows are cheaper to copy than to compute in a separate call.
            (!has_few_rows(body, &body.nodes()[index], dot) && taken.insert(index)).then_some(index)
        };
        stacked.iter().map(&mut product).collect()
    }

    /// The product of a node, if a kernel computes it.
    fn product<'a>(&self, graph: &'a Graph, index: usize) -> Option<&'a Dot> {
        let node = &graph.nodes()[index];
        let Op::Dot(dot) = &node.op else { return None };
        let types: Vec<&TensorType> = node.operands.iter().map(|id| graph.ty(*id)).collect();
        self.applies_to_product(dot, &types, graph.ty(node.results[0])).then_some(dot)
    }
}

/// Whether a product has no batch dimension and few rows.
fn has_few_rows(graph: &Graph, node: &Node, dot: &Dot) -> bool {
    let left = graph.ty(node.operands[0]);
    let contracted: usize = dot.lhs_contract.iter().map(|dim| left.dims[*dim]).product();
    dot.lhs_batch.is_empty() && left.num_elements() <= thresholds::MOST_FEW_ROWS * contracted
}

/// The nodes from `first` on that compute a value, in order, if each only changes the view of another value.
fn views_from(
    graph: &Graph,
    producers: &[Option<usize>],
    mut id: ValueId,
    first: usize,
) -> Option<Vec<usize>> {
    let mut views = Vec::new();
    while let Some(producer) = producers[id.index()].filter(|producer| *producer >= first) {
        let node = &graph.nodes()[producer];
        let is_view = matches!(node.op, Op::Convert(_) | Op::Reshape { .. } | Op::Transpose { .. });
        if !is_view && !is_name(&node.op) {
            return None;
        }
        views.push(producer);
        id = node.operands[0];
    }
    views.reverse();
    Some(views)
}

/// Whether an operation prints no text on one device.
fn is_name(op: &Op) -> bool {
    matches!(op, Op::Name(_) | Op::StopGradient | Op::Constrain(_))
}

/// The value behind names and other operations that change nothing.
fn unchanged(graph: &Graph, producers: &[Option<usize>], mut id: ValueId) -> ValueId {
    while let Some(producer) = producers[id.index()] {
        let node = &graph.nodes()[producer];
        if !is_name(&node.op) {
            break;
        }
        id = node.operands[0];
    }
    id
}
