//! Counts the work of a graph.

use std::collections::BTreeMap;

use mt_shape::DType;

use crate::{Dot, Graph, Op, ScatterKind, TensorType};

/// The work of one run of a program on all devices together. The body of a loop counts once per iteration, unlike in
/// the compiler's own analysis.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Counts {
    /// FLOPs of matrix products, by the type of the operands.
    pub products: BTreeMap<DType, f64>,
    /// Elementwise operations: arithmetic, comparisons, conversions and transcendental functions count one per element,
    /// and so does each step of reductions, running sums, sorts and scatters.
    pub others: f64,
    /// Bytes of all arguments.
    pub argument_bytes: f64,
    /// Bytes of all results.
    pub result_bytes: f64,
    /// Whether a loop with an unknown trip count was counted once, which makes the counts a lower bound.
    pub is_at_least: bool,
}

impl Counts {
    /// Counts the work of `graph`. Among branches the most expensive one counts.
    pub fn of(graph: &Graph) -> Self {
        let bytes = |types: &[TensorType]| types.iter().map(|ty| ty.byte_size() as f64).sum();
        let mut counts = Self {
            argument_bytes: bytes(&graph.input_types()),
            result_bytes: bytes(&graph.output_types()),
            ..Self::default()
        };
        counts.add_graph(graph, 1.0);
        counts
    }

    /// FLOPs of matrix products of all types.
    pub fn all_products(&self) -> f64 {
        self.products.values().sum()
    }

    fn add_graph(&mut self, graph: &Graph, times: f64) {
        for node in graph.nodes() {
            let operand = |index: usize| graph.ty(node.operands[index]);
            let elements = |ty: &TensorType| ty.num_elements() as f64;
            let made = || elements(graph.ty(node.results[0]));
            match &node.op {
                Op::Dot(dot) => {
                    let (dtype, flops) = product(dot, operand(0), operand(1));
                    *self.products.entry(dtype).or_default() += times * flops;
                }
                Op::Scan(scan) => self.add_graph(&scan.body, times * scan.length as f64),
                Op::While(op) => {
                    let trips = op.trips.unwrap_or_else(|| {
                        self.is_at_least = true;
                        1.0
                    });
                    // The condition is evaluated once more than the body.
                    self.add_graph(&op.condition, times * (trips + 1.0));
                    self.add_graph(&op.body, times * trips);
                }
                Op::Remat(remat) => self.add_graph(&remat.body, times),
                Op::CustomVjp(op) => self.add_graph(&op.primal, times),
                Op::Kernel(op) => self.add_graph(&op.body, times),
                Op::ManualComputation(op) => {
                    let devices: usize = op.manual_axes.iter().map(|(_, size)| size).product();
                    self.add_graph(&op.body, times * devices as f64);
                }
                Op::Case { branches } => {
                    let each = branches.iter().map(|branch| {
                        let mut counts = Self::default();
                        counts.add_graph(branch, times);
                        counts
                    });
                    let most = each
                        .max_by(|one, other| one.operations().total_cmp(&other.operations()))
                        .unwrap_or_default();
                    self.add(&most);
                }
                Op::Unary(_)
                | Op::Binary(_)
                | Op::Compare(_)
                | Op::Select
                | Op::Clamp
                | Op::Convert(_)
                | Op::RandomBits { .. } => {
                    let result = node.results.last().expect("an operation on elements has a result");
                    self.others += times * elements(graph.ty(*result));
                }
                Op::CumulativeSum { .. } => self.others += times * made(),
                Op::Reduce { .. } => self.others += times * (elements(operand(0)) - made()),
                Op::Scatter { kind: ScatterKind::Add, .. } => self.others += times * elements(operand(2)),
                Op::Sort { dimension, .. } => self.others += times * comparisons(operand(0), *dimension),
                Op::TopK { .. } => self.others += times * comparisons(operand(0), operand(0).rank() - 1),
                // These only move, place or name values; sums of collectives belong to the network.
                Op::Constant(_)
                | Op::Iota { .. }
                | Op::Bitcast(_)
                | Op::Broadcast { .. }
                | Op::Reshape { .. }
                | Op::Transpose { .. }
                | Op::Slice { .. }
                | Op::Pad { .. }
                | Op::Concatenate { .. }
                | Op::Reverse { .. }
                | Op::DynamicSlice { .. }
                | Op::DynamicUpdateSlice
                | Op::Gather(_)
                | Op::Scatter { kind: ScatterKind::Replace, .. }
                | Op::StopGradient
                | Op::Name(_)
                | Op::Constrain(_)
                | Op::Transfer(_)
                | Op::OptimizationBarrier
                | Op::Collective(_) => {}
            }
        }
    }

    fn add(&mut self, other: &Self) {
        for (dtype, flops) in &other.products {
            *self.products.entry(*dtype).or_default() += flops;
        }
        self.others += other.others;
        self.is_at_least |= other.is_at_least;
    }

    fn operations(&self) -> f64 {
        self.all_products() + self.others
    }
}

/// The wider operand type, and two FLOPs per pair of elements.
fn product(dot: &Dot, lhs: &TensorType, rhs: &TensorType) -> (DType, f64) {
    let dtype = if lhs.dtype.byte_size() >= rhs.dtype.byte_size() { lhs.dtype } else { rhs.dtype };
    let shared: usize =
        dot.rhs_batch.iter().chain(&dot.rhs_contract).map(|dimension| rhs.dims[*dimension]).product();
    let free = rhs.num_elements().checked_div(shared).unwrap_or(0);
    (dtype, 2.0 * lhs.num_elements() as f64 * free as f64)
}

/// The approximate number of comparisons of a sort along a dimension.
fn comparisons(ty: &TensorType, dimension: usize) -> f64 {
    ty.num_elements() as f64 * (ty.dims[dimension].max(1) as f64).log2().ceil()
}
