//! Which products of a graph are not printed each by itself, decided before any of its nodes is printed.

use std::collections::{HashMap, HashSet};

use mt_shape::DType;

use super::Printer;
use crate::{Binary, CpuKernels, Dot, Graph, Node, Op, TensorType, ValueId};

/// How a node is printed that is not printed by itself and in its place.
pub(super) enum Step {
    /// By another one's step.
    Elsewhere,
    /// A sum, together with the product that a kernel adds in place, so that it is never held.
    Sum { product: usize },
    /// A product, together with others of the same left operand. What they multiply is printed before.
    Together { others: Vec<usize>, before: Vec<usize> },
}

/// Steps by the indices of nodes.
pub(super) type Plan = HashMap<usize, Step>;

/// With at most so many rows memory's rate is a product's limit, and `mt-kernels` computes it as what its `dot::stream` calls
/// few lines. Several in one call cost less than each alone, as threads meet less often.
const MOST_FEW_ROWS: usize = 16;

/// Products with one left operand and one contraction of it, by the indices of their nodes.
struct Group<'a> {
    left: ValueId,
    contract: &'a [usize],
    products: Vec<usize>,
    before: Vec<usize>,
}

impl Printer<'_> {
    /// Plans the printing of a graph, but for the products that are written into slices.
    pub(super) fn plan(&self, graph: &Graph) -> Plan {
        let mut plan = Plan::new();
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
                let dot = self.product(graph, producer)?;
                // Few rows are added quickly, and computed fastest together.
                let is_planned =
                    graph.ty(*id).dtype == DType::F32 && !has_few_rows(graph, &graph.nodes()[producer], dot);
                is_planned.then_some(producer)
            };
            if node.op == Op::Binary(Binary::Add)
                && let Some(product) = node.operands.iter().find_map(product)
            {
                plan.insert(index, Step::Sum { product });
                plan.insert(product, Step::Elsewhere);
            }
        }
    }

    /// Products of few rows are printed with the first one of the same left operand, if what they multiply can be there by
    /// then. None of them is planned otherwise, or written into a slice.
    fn plan_groups(&self, graph: &Graph, producers: &[Option<usize>], plan: &mut Plan) {
        let mut groups: Vec<Group> = Vec::new();
        let mut taken: HashSet<usize> = HashSet::new();
        for (index, node) in graph.nodes().iter().enumerate() {
            let Some(dot) = self.product(graph, index).filter(|dot| has_few_rows(graph, node, dot)) else {
                continue;
            };
            let (left, contract) = (unchanged(graph, producers, node.operands[0]), &*dot.lhs_contract);
            let alike = groups.iter_mut().find(|group| (group.left, group.contract) == (left, contract));
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
                _ => groups.push(Group { left, contract, products: vec![index], before: Vec::new() }),
            }
        }
        for Group { products, before, .. } in groups {
            if let [first, others @ ..] = &products[..]
                && !others.is_empty()
            {
                let elsewhere = others.iter().chain(&before);
                plan.extend(elsewhere.map(|index| (*index, Step::Elsewhere)));
                plan.insert(*first, Step::Together { others: others.to_vec(), before });
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

/// The nodes from `first` on that a value takes, in their order, if each of them only changes how another value is seen.
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

/// Whether an operation prints nothing, as there is one device.
fn is_name(op: &Op) -> bool {
    matches!(op, Op::Name(_) | Op::StopGradient | Op::Constrain(_))
}

/// The value that one is another name of.
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
