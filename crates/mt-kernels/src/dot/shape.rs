//! Products reduced to as few dimensions as their strides allow.

use super::pack::Source;
use super::{Dim, Elements, Operand};

/// A general dot product. Each dimension has at least two elements, and none can be merged further.
pub(super) struct Problem<'a> {
    pub batch: Vec<BatchDim>,
    pub rows: usize,
    pub columns: usize,
    pub depth: usize,
    pub lhs: Side<'a>,
    pub rhs: Side<'a>,
}

pub(super) struct BatchDim {
    pub size: usize,
    pub lhs_stride: usize,
    pub rhs_stride: usize,
}

pub(super) struct Side<'a> {
    pub elements: Elements<'a>,
    pub free: Vec<Dim>,
    pub contract: Vec<Dim>,
}

/// The order of a product's sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Summation {
    /// The order that reads memory fastest. It may depend on the number of rows and on strides.
    Fastest,
    /// The order of the contracted dimensions, whatever the number of rows and the strides.
    AsGiven,
}

impl<'a> Problem<'a> {
    pub fn new(lhs: &Operand<'a>, rhs: &Operand<'a>, summation: Summation) -> Self {
        check_bounds(lhs);
        check_bounds(rhs);
        let batch = merge(pair(&lhs.batch, &rhs.batch));
        let mut contract = pair(&lhs.contract, &rhs.contract);
        if summation == Summation::Fastest {
            // Contiguous memory comes innermost.
            contract.sort_by_key(|dim| std::cmp::Reverse(dim.strides[0].saturating_add(dim.strides[1])));
        }
        let contract = merge(contract);
        let side = |operand: &Operand<'a>, index: usize| Side {
            elements: operand.elements,
            free: merge(
                operand.free.iter().map(|dim| Joint { size: dim.size, strides: [dim.stride] }).collect(),
            )
            .iter()
            .map(|dim| Dim { size: dim.size, stride: dim.strides[0] })
            .collect(),
            contract: contract.iter().map(|dim| Dim { size: dim.size, stride: dim.strides[index] }).collect(),
        };
        Self {
            batch: batch
                .iter()
                .map(|dim| BatchDim {
                    size: dim.size,
                    lhs_stride: dim.strides[0],
                    rhs_stride: dim.strides[1],
                })
                .collect(),
            rows: count(&lhs.free),
            columns: count(&rhs.free),
            depth: count(&lhs.contract),
            lhs: side(lhs, 0),
            rhs: side(rhs, 1),
        }
    }

    pub fn batch_len(&self) -> usize {
        self.batch.iter().map(|dim| dim.size).product()
    }

    /// The offsets of a batch element in both operands.
    pub fn batch_offsets(&self, mut index: usize) -> (usize, usize) {
        let mut offsets = (0, 0);
        for dim in self.batch.iter().rev() {
            let position = index % dim.size;
            index /= dim.size;
            offsets.0 += position * dim.lhs_stride;
            offsets.1 += position * dim.rhs_stride;
        }
        offsets
    }
}

impl Side<'_> {
    pub fn source(&self) -> Source {
        match self.elements {
            Elements::F32(elements) => Source::F32(elements.as_ptr()),
            Elements::Bf16(elements) => Source::Bf16(elements.as_ptr()),
            Elements::I8(elements) => Source::I8(elements.as_ptr()),
        }
    }
}

/// Writes the offsets of the elements from `start` on, plus `base`, in the order of `dims`.
pub(super) fn offsets(dims: &[Dim], base: usize, start: usize, out: &mut [usize]) {
    let Some((inner, outer)) = dims.split_last() else {
        out.fill(base);
        return;
    };
    let mut block = start / inner.size;
    let mut position = start % inner.size;
    let mut rest = out;
    while !rest.is_empty() {
        let mut first = base;
        let mut index = block;
        for dim in outer.iter().rev() {
            first += index % dim.size * dim.stride;
            index /= dim.size;
        }
        let len = rest.len().min(inner.size - position);
        let (now, later) = rest.split_at_mut(len);
        let mut next = first + position * inner.stride;
        for offset in now {
            *offset = next;
            next += inner.stride;
        }
        rest = later;
        position = 0;
        block += 1;
    }
}

#[derive(Clone, Copy)]
struct Joint<const N: usize> {
    size: usize,
    strides: [usize; N],
}

fn pair(lhs: &[Dim], rhs: &[Dim]) -> Vec<Joint<2>> {
    assert_eq!(lhs.len(), rhs.len(), "batch and contracted dimensions correspond");
    let joint = |(lhs, rhs): (&Dim, &Dim)| {
        assert_eq!(lhs.size, rhs.size, "batch and contracted dimensions correspond");
        Joint { size: lhs.size, strides: [lhs.stride, rhs.stride] }
    };
    lhs.iter().zip(rhs).map(joint).collect()
}

/// Drops dimensions of one element, and merges each dimension with the next one if their strides form one sequence.
fn merge<const N: usize>(dims: Vec<Joint<N>>) -> Vec<Joint<N>> {
    let mut merged: Vec<Joint<N>> = Vec::with_capacity(dims.len());
    for dim in dims {
        if dim.size == 1 {
            continue;
        }
        match merged.last_mut() {
            Some(last) if (0..N).all(|side| last.strides[side] == dim.strides[side] * dim.size) => {
                last.size *= dim.size;
                last.strides = dim.strides;
            }
            _ => merged.push(dim),
        }
    }
    merged
}

fn count(dims: &[Dim]) -> usize {
    dims.iter().map(|dim| dim.size).product()
}

/// Checks that all elements lie in the slice. Unsafe reads in other modules rely on this.
fn check_bounds(operand: &Operand) {
    let dims = || operand.batch.iter().chain(&operand.free).chain(&operand.contract);
    if dims().any(|dim| dim.size == 0) {
        return;
    }
    let last = dims().try_fold(0usize, |last, dim| last.checked_add((dim.size - 1).checked_mul(dim.stride)?));
    assert!(
        last.is_some_and(|last| last < operand.elements.len()),
        "an operand's dimensions lie within its elements"
    );
}
