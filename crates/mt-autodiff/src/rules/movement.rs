//! Operations that move elements.

use mt_ir::{Binary, Op, Reduction, TensorType, ValueId};

use super::Context;

pub(super) fn broadcast(c: &mut Context<'_>, dims: &[usize], mapping: &[usize]) -> ValueId {
    let (operand, g) = (c.ty(c.operands[0]), c.cotangent());
    // Summed over: new dimensions, and dimensions of size 1 that were stretched.
    let stretched = |dimension: &usize| {
        mapping
            .iter()
            .position(|target| target == dimension)
            .is_none_or(|source| operand.dims[source] != dims[*dimension])
    };
    let dimensions: Vec<usize> = (0..dims.len()).filter(stretched).collect();
    let kept: Vec<usize> = (0..dims.len()).filter(|dimension| !dimensions.contains(dimension)).collect();
    let sum = if dimensions.is_empty() {
        g
    } else {
        c.builder.emit(Op::Reduce { kind: Reduction::Sum, dimensions }, &[g])
    };
    // The kept dimensions, in the operand's order.
    let order: Vec<usize> =
        mapping.iter().filter_map(|target| kept.iter().position(|dimension| dimension == target)).collect();
    let ordered =
        if order.is_sorted() { sum } else { c.builder.emit(Op::Transpose { permutation: order }, &[sum]) };
    c.builder.reshape(ordered, &operand.dims)
}

fn pad_with_zeros(
    c: &mut Context<'_>,
    value: ValueId,
    low: Vec<i64>,
    high: Vec<i64>,
    interior: Vec<usize>,
) -> ValueId {
    let zero = c.builder.splat(TensorType::scalar(c.builder.ty(value).dtype), 0.0);
    c.builder.emit(Op::Pad { low, high, interior }, &[value, zero])
}

pub(super) fn slice(c: &mut Context<'_>, start: &[usize], stride: &[usize]) -> ValueId {
    let (operand, g) = (c.ty(c.operands[0]), c.cotangent());
    let sliced = c.ty(g);
    let low: Vec<i64> = start.iter().map(|start| *start as i64).collect();
    let interior: Vec<usize> = stride.iter().map(|stride| stride - 1).collect();
    let high = (0..operand.rank())
        .map(|i| {
            let spread = (sliced.dims[i].max(1) - 1) * stride[i] + sliced.dims[i].min(1);
            operand.dims[i] as i64 - start[i] as i64 - spread as i64
        })
        .collect();
    pad_with_zeros(c, g, low, high, interior)
}

pub(super) fn pad(
    c: &mut Context<'_>,
    low: &[i64],
    high: &[i64],
    interior: &[usize],
) -> Vec<Option<ValueId>> {
    let g = c.cotangent();
    let negative = |amounts: &[i64]| amounts.iter().map(|amount| -amount).collect::<Vec<i64>>();
    let mut inner = pad_with_zeros(c, g, negative(low), negative(high), vec![0; interior.len()]);
    if interior.iter().any(|amount| *amount > 0) {
        let limit = c.ty(inner).dims;
        let stride = interior.iter().map(|amount| amount + 1).collect();
        inner = c.builder.emit(Op::Slice { start: vec![0; limit.len()], limit, stride }, &[inner]);
    }
    let padding = c.needs[1].then(|| {
        // Every element of the result comes either from the operand or from the padding.
        let total = |c: &mut Context<'_>, value: ValueId| {
            let dimensions = (0..c.ty(value).rank()).collect();
            c.builder.emit(Op::Reduce { kind: Reduction::Sum, dimensions }, &[value])
        };
        let all = total(c, g);
        let own = total(c, inner);
        c.builder.binary(Binary::Subtract, all, own)
    });
    vec![Some(inner), padding]
}

pub(super) fn concatenate(c: &mut Context<'_>, dimension: usize) -> Vec<Option<ValueId>> {
    let g = c.cotangent();
    let total = c.ty(g);
    let mut offset = 0;
    let mut gradients = Vec::new();
    for (index, operand) in c.operands.iter().enumerate() {
        let size = c.builder.ty(*operand).dims[dimension];
        let (mut start, mut limit) = (vec![0; total.rank()], total.dims.clone());
        (start[dimension], limit[dimension]) = (offset, offset + size);
        offset += size;
        let stride = vec![1; total.rank()];
        gradients.push(c.needs[index].then(|| c.builder.emit(Op::Slice { start, limit, stride }, &[g])));
    }
    gradients
}

pub(super) fn dynamic_slice(c: &mut Context<'_>) -> Vec<Option<ValueId>> {
    let g = c.cotangent();
    let zeros = c.builder.splat_like(c.operands[0], 0.0);
    let operands = [&[zeros, g], &c.operands[1..]].concat();
    let mut gradients = vec![None; c.operands.len()];
    gradients[0] = Some(c.builder.emit(Op::DynamicUpdateSlice, &operands));
    gradients
}

pub(super) fn dynamic_update_slice(c: &mut Context<'_>) -> Vec<Option<ValueId>> {
    let g = c.cotangent();
    let starts = &c.operands[2..];
    let mut gradients = vec![None; c.operands.len()];
    if c.needs[0] {
        let zeros = c.builder.splat_like(c.operands[1], 0.0);
        gradients[0] = Some(c.builder.emit(Op::DynamicUpdateSlice, &[&[g, zeros], starts].concat()));
    }
    if c.needs[1] {
        let sizes = c.ty(c.operands[1]).dims;
        gradients[1] = Some(c.builder.emit(Op::DynamicSlice { sizes }, &[&[g], starts].concat()));
    }
    gradients
}
