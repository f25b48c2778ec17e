//! Gathers, scatters and sorts. Indices must be in range: out-of-range indices are clamped by a gather and dropped by a
//! scatter.

use mt_ir::{Comparison, GatherDims, Op, Reduction, ScatterDims, ScatterKind, TensorType, ValueId};
use mt_shape::DType;

use super::Context;

pub(super) fn gather(c: &mut Context<'_>, dims: &GatherDims) -> Vec<Option<ValueId>> {
    let g = c.cotangent();
    let zeros = c.builder.splat_like(c.operands[0], 0.0);
    let dims = ScatterDims {
        update_window_dims: dims.offset_dims.clone(),
        inserted_window_dims: dims.collapsed_slice_dims.clone(),
        scatter_dims_to_operand_dims: dims.start_index_map.clone(),
        index_vector_dim: dims.index_vector_dim,
    };
    let op = Op::Scatter { dims, kind: ScatterKind::Add };
    vec![Some(c.builder.emit(op, &[zeros, c.operands[1], g])), None]
}

pub(super) fn scatter(c: &mut Context<'_>, dims: &ScatterDims, kind: ScatterKind) -> Vec<Option<ValueId>> {
    let (indices, updates, g) = (c.operands[1], c.operands[2], c.cotangent());
    let operand = c.ty(c.operands[0]);
    let update_dims = c.ty(updates).dims;
    let operand_gradient = c.needs[0].then(|| match kind {
        ScatterKind::Add => g,
        ScatterKind::Replace => {
            let zeros = c.builder.splat_like(updates, 0.0);
            c.builder.emit(Op::Scatter { dims: dims.clone(), kind }, &[g, indices, zeros])
        }
    });
    let update_gradient = c.needs[2].then(|| {
        let mut windows = dims.update_window_dims.iter().map(|dimension| update_dims[*dimension]);
        let slice_sizes =
            (0..operand.rank())
                .map(|dimension| {
                    if dims.inserted_window_dims.contains(&dimension) {
                        1
                    } else {
                        windows.next().unwrap_or(1)
                    }
                })
                .collect();
        let gather = GatherDims {
            offset_dims: dims.update_window_dims.clone(),
            collapsed_slice_dims: dims.inserted_window_dims.clone(),
            start_index_map: dims.scatter_dims_to_operand_dims.clone(),
            index_vector_dim: dims.index_vector_dim,
            slice_sizes,
        };
        c.builder.emit(Op::Gather(gather), &[g, indices])
    });
    vec![operand_gradient, None, update_gradient]
}

/// A sort is a permutation. Sorting the positions along with the keys yields its inverse.
pub(super) fn sort(c: &mut Context<'_>, dimension: usize, descending: bool) -> Vec<Option<ValueId>> {
    let dims = c.ty(c.operands[0]).dims;
    let positions = c.builder.emit(Op::Iota { ty: TensorType::new(DType::I32, dims), dimension }, &[]);
    let sorted = c.builder.emit_all(Op::Sort { dimension, descending }, &[c.operands[0], positions]);
    let cotangents: Vec<ValueId> = c.cotangents.iter().flatten().copied().collect();
    let operands = [&[sorted[1]], cotangents.as_slice()].concat();
    let mut restored =
        c.builder.emit_all(Op::Sort { dimension, descending: false }, &operands).into_iter().skip(1);
    c.cotangents.iter().map(|cotangent| cotangent.and_then(|_| restored.next())).collect()
}

/// Each of the `k` cotangents goes to the position of its value in the operand.
pub(super) fn top_k(c: &mut Context<'_>, k: usize) -> Option<ValueId> {
    let g = c.cotangents[0]?;
    let operand = c.ty(c.operands[0]);
    let last = operand.rank() - 1;
    let size = operand.dims[last];
    // Dimensions: those of the result, then the operand's last one.
    let dims = [&operand.dims[..last], &[k, size]].concat();
    let mapping: Vec<usize> = (0..=last).collect();
    let positions =
        c.builder.emit(Op::Iota { ty: TensorType::new(DType::I32, dims.clone()), dimension: last + 1 }, &[]);
    let chosen =
        c.builder.emit(Op::Broadcast { dims: dims.clone(), mapping: mapping.clone() }, &[c.results[1]]);
    let hit = c.builder.emit(Op::Compare(Comparison::Equal), &[positions, chosen]);
    let spread = c.builder.emit(Op::Broadcast { dims, mapping }, &[g]);
    let zero = c.builder.splat_like(spread, 0.0);
    let placed = c.builder.emit(Op::Select, &[hit, spread, zero]);
    Some(c.builder.emit(Op::Reduce { kind: Reduction::Sum, dimensions: vec![last] }, &[placed]))
}
