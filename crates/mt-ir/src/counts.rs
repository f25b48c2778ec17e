//! Counting what a graph does.

use std::collections::BTreeMap;

use mt_shape::DType;

use crate::{Dot, Graph, Op, ScatterKind, TensorType};

/// What one run of a program does, on all devices together. Bodies of loops count as often as they run, which the
/// compiler's own analysis leaves out.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Counts {
    /// Multiplications and additions of matrix products, by the type of what is multiplied.
    pub products: BTreeMap<DType, f64>,
    /// Operations on single elements: arithmetic, comparisons and conversions of one element each, exponentials and
    /// the like counted as one, and the steps of reductions, running sums, sorts and scatters.
    pub others: f64,
    /// Bytes of all arguments.
    pub argument_bytes: f64,
    /// Bytes of all results.
    pub result_bytes: f64,
    /// A loop whose number of turns nobody knows was counted once, so that this is the least there is to do.
    pub is_at_least: bool,
}

impl Counts {
    /// Counts what `graph` does. Of branches the one that does most counts.
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

    /// Multiplications and additions of matrix products of all types.
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
                    // It is asked once more than it is answered with yes.
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
                // These move, place or name what there is; sums of collectives are the network's.
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

/// The wider type of what is multiplied, and two operations for each pair of elements.
fn product(dot: &Dot, lhs: &TensorType, rhs: &TensorType) -> (DType, f64) {
    let dtype = if lhs.dtype.byte_size() >= rhs.dtype.byte_size() { lhs.dtype } else { rhs.dtype };
    let shared: usize =
        dot.rhs_batch.iter().chain(&dot.rhs_contract).map(|dimension| rhs.dims[*dimension]).product();
    let free = rhs.num_elements().checked_div(shared).unwrap_or(0);
    (dtype, 2.0 * lhs.num_elements() as f64 * free as f64)
}

/// About how many comparisons sorting takes along a dimension.
fn comparisons(ty: &TensorType, dimension: usize) -> f64 {
    ty.num_elements() as f64 * (ty.dims[dimension].max(1) as f64).log2().ceil()
}
