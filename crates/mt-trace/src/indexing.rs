//! Lookups, sorts and top-k.

use mt_ir::{GatherDims, Op, ScatterDims, ScatterKind};
use mt_shape::Axis;

use crate::Tensor;

/// The numbers of an index: that of a row, and that of an element in the row.
const COMPONENT: &str = "index_component";

impl<'t> Tensor<'t> {
    /// The elements of the axis `along` at `indices`: the result has the indices' axes, then the remaining ones.
    ///
    /// Indices must be in range.
    #[track_caller]
    pub fn take(self, along: &'static str, indices: Self) -> Self {
        let position = self.position(along);
        let own = self.axes();
        let rest: Vec<Axis> = own.iter().filter(|axis| axis.name != along).copied().collect();
        let index_axes = indices.axes();
        let axes = [&*index_axes, &rest].concat();
        let slice_sizes = own.iter().map(|axis| if axis.name == along { 1 } else { axis.size }).collect();
        let dims = GatherDims {
            offset_dims: (index_axes.len()..axes.len()).collect(),
            collapsed_slice_dims: vec![position],
            start_index_map: vec![position],
            index_vector_dim: index_axes.len(),
            slice_sizes,
        };
        self.apply_one(Op::Gather(dims), &[indices], &axes)
    }

    /// The tensor with `values` at `indices` of the axis `along`, which is the inverse of [`Tensor::take`]: values have the
    /// indices' axes and the remaining ones.
    ///
    /// Indices must be in range and distinct. If some are equal, the elements there are undefined.
    #[track_caller]
    pub fn put(self, along: &'static str, indices: Self, values: Self) -> Self {
        self.scattered(&[along], indices, &indices.axes(), values)
    }

    /// As [`Tensor::put`], at pairs of indices of two axes. Both lists of indices have the same axes.
    #[track_caller]
    pub fn put_pairs(self, along: [&'static str; 2], indices: [Self; 2], values: Self) -> Self {
        let index_axes = indices[0].axes();
        let names: Vec<&'static str> = index_axes.iter().map(|axis| axis.name).chain([COMPONENT]).collect();
        let [first, second] = indices.map(|index| index.unsqueeze(COMPONENT).order(&names));
        self.scattered(&along, first.concatenate(&[second], COMPONENT), &index_axes, values)
    }

    #[track_caller]
    fn scattered(self, along: &[&'static str], indices: Self, index_axes: &[Axis], values: Self) -> Self {
        let positions: Vec<usize> = along.iter().map(|name| self.position(name)).collect();
        let own = self.axes();
        let rest = own.iter().filter(|axis| !along.contains(&axis.name)).map(|axis| axis.name);
        let order: Vec<&'static str> = index_axes.iter().map(|axis| axis.name).chain(rest).collect();
        let mut inserted = positions.clone();
        inserted.sort_unstable();
        let dims = ScatterDims {
            update_window_dims: (index_axes.len()..order.len()).collect(),
            inserted_window_dims: inserted,
            scatter_dims_to_operand_dims: positions,
            index_vector_dim: index_axes.len(),
        };
        let op = Op::Scatter { dims, kind: ScatterKind::Replace };
        self.apply_one(op, &[indices, values.order(&order)], &own)
    }

    /// Runs of consecutive elements along the axis `along`, as long as `run`: those from the indices `first` on, which
    /// has the axis `rows` of this tensor and others. The result has the indices' axes, then `run`, then the remaining
    /// ones.
    ///
    /// Runs must lie within the axis.
    #[track_caller]
    pub fn take_runs(self, rows: &'static str, along: &'static str, first: Self, run: Axis) -> Self {
        let rest: Vec<Axis> =
            self.axes().iter().filter(|axis| ![rows, along].contains(&axis.name)).copied().collect();
        let names: Vec<&'static str> =
            [rows, along].into_iter().chain(rest.iter().map(|axis| axis.name)).collect();
        let (values, index_axes) = (self.order(&names), first.axes());
        let row = first.region().iota(first.dtype(), self.axis(rows)).broadcast(&index_axes);
        let with_component: Vec<&'static str> =
            index_axes.iter().map(|axis| axis.name).chain([COMPONENT]).collect();
        let component = |index: Self| index.unsqueeze(COMPONENT).order(&with_component);
        let indices = component(row).concatenate(&[component(first)], COMPONENT);
        let dims = GatherDims {
            offset_dims: (index_axes.len()..=index_axes.len() + rest.len()).collect(),
            collapsed_slice_dims: vec![0],
            start_index_map: vec![0, 1],
            index_vector_dim: index_axes.len(),
            slice_sizes: [1, run.size].into_iter().chain(rest.iter().map(|axis| axis.size)).collect(),
        };
        let axes = [&*index_axes, &[run], &rest].concat();
        values.apply_one(Op::Gather(dims), &[indices], &axes)
    }

    /// The `k` largest elements of the last axis in descending order, along an axis `into`, and their `i32`
    /// positions.
    #[track_caller]
    pub fn top_k(self, k: usize, into: &'static str) -> (Self, Self) {
        self.searched(k, None, into)
    }

    /// As [`Tensor::top_k`]. On TPUs the results are `k` elements that are expected to contain the share `recall` of the
    /// largest ones; elsewhere they are the largest ones.
    #[track_caller]
    pub fn approximate_top_k(self, k: usize, recall: f64, into: &'static str) -> (Self, Self) {
        self.searched(k, Some(recall), into)
    }

    #[track_caller]
    fn searched(self, k: usize, recall: Option<f64>, into: &'static str) -> (Self, Self) {
        let own = self.axes();
        let axes = [&own[..own.len().saturating_sub(1)], &[Axis { name: into, size: k }]].concat();
        let results = self.apply(Op::TopK { k, recall }, &[], &[&axes, &axes]);
        (results[0], results[1])
    }

    /// Sorts along an axis and applies the same permutation to `others`, which have the same axes.
    #[track_caller]
    pub fn sort_with(self, others: &[Self], along: &'static str, descending: bool) -> Vec<Self> {
        let axes = self.axes();
        let mut aligned = Vec::with_capacity(others.len());
        for other in others {
            aligned.push(other.broadcast(&axes));
        }
        let op = Op::Sort { dimension: self.position(along), descending };
        let result_axes: Vec<&[Axis]> = vec![&axes; aligned.len() + 1];
        self.apply(op, &aligned, &result_axes)
    }
}
