//! Lookups, sorts and top-k.

use mt_ir::{GatherDims, Op};
use mt_shape::Axis;

use crate::Tensor;

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

    /// The `k` largest elements of the last axis in descending order, along an axis `into`, and their `i32`
    /// positions.
    #[track_caller]
    pub fn top_k(self, k: usize, into: &'static str) -> (Self, Self) {
        let own = self.axes();
        let axes = [&own[..own.len().saturating_sub(1)], &[Axis { name: into, size: k }]].concat();
        let results = self.apply(Op::TopK { k }, &[], &[&axes, &axes]);
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
