//! Products of rows with the matrices of their groups, as in mixtures of experts.

use std::ops::Range;

use half::bf16;
use mt_shape::kernels::{self, attributes};

use super::{View, is_invariant, views};
use crate::{
    Arithmetic, Dim, Elements, ElementsMut, Operand,
    dot::{Product, dot, invariant_dots},
    ffi::{Call, Data, DataMut, Error, Fault, Frame, answer},
};

/// Multiplies each row by the matrix of its group, in the type of the rows.
///
/// Arguments: rows `[row, depth]`; matrices `[group, depth, width]`, or `[group, width, depth]` if `transposed` is 1; the
/// sizes of the groups, `i32[group]`; then the positions of slices. Consecutive rows form the groups. The result is
/// `[row, width]`, where rows after the last group are 0.
pub(super) unsafe extern "C" fn call_grouped_dot(frame: *mut Frame) -> *mut Error {
    // SAFETY: XLA calls a handler with a frame of its own.
    unsafe {
        answer(frame, &kernels::GROUPED_DOT, |call| {
            let views = views(call)?;
            let [rows, matrices, sizes] = &views[..] else { return Err("arguments are missing".to_owned()) };
            let [_, first, second] = matrices.sizes()?;
            let is_transposed = call.integer(attributes::TRANSPOSED)? == 1;
            let (depth, width) = if is_transposed { (second, first) } else { (first, second) };
            let [count, own_depth] = rows.sizes()?;
            if depth != own_depth {
                return Err(format!("rows of {own_depth} elements meet matrices of depth {depth}"));
            }
            let (arithmetic, is_invariant) = (arithmetic(call)?, is_invariant(call)?);
            let mut results = Unwritten::of(call)?;
            for (group, range) in groups(call, sizes, count)?.into_iter().enumerate() {
                let lhs =
                    matrix(call, rows, range.start * rows.dims[0].stride, [range.len(), depth], &rows.dims)?;
                let start = group * matrices.dims[0].stride;
                let mut rhs = matrix(call, matrices, start, [first, second], &matrices.dims[1..])?;
                // The dimensions are those of `[free, contracted]` sides.
                if !is_transposed {
                    std::mem::swap(&mut rhs.free, &mut rhs.contract);
                }
                let result = results.next(range.len() * width)?;
                match is_invariant {
                    true => {
                        let product = Product { lhs: &lhs, rhs: &rhs, result };
                        invariant_dots(&call.team(), arithmetic, vec![product]);
                    }
                    false => dot(&call.team(), &lhs, &rhs, arithmetic, result),
                }
            }
            results.clear();
            Ok(())
        })
    }
}

/// The sum over each group's rows of the products of two vectors per row.
///
/// Arguments: `[row, a]` and `[row, b]`; the sizes of the groups, `i32[group]`; then the positions of slices. The result is
/// `f32[group, a, b]`.
pub(super) unsafe extern "C" fn call_grouped_outer(frame: *mut Frame) -> *mut Error {
    // SAFETY: XLA calls a handler with a frame of its own.
    unsafe {
        answer(frame, &kernels::GROUPED_OUTER, |call| {
            let views = views(call)?;
            let [left, right, sizes] = &views[..] else { return Err("arguments are missing".to_owned()) };
            let ([count, a], [_, b]) = (left.sizes()?, right.sizes()?);
            let arithmetic = arithmetic(call)?;
            let mut results = Unwritten::of(call)?;
            for range in groups(call, sizes, count)? {
                let side = |view: &View, width: usize| {
                    let start = range.start * view.dims[0].stride;
                    let mut side = matrix(call, view, start, [range.len(), width], &view.dims)?;
                    std::mem::swap(&mut side.free, &mut side.contract);
                    Ok::<_, Fault>(side)
                };
                dot(&call.team(), &side(left, a)?, &side(right, b)?, arithmetic, results.next(a * b)?);
            }
            Ok(())
        })
    }
}

/// The arithmetic of products of the first argument's type.
fn arithmetic(call: &Call<'_>) -> Result<Arithmetic, Fault> {
    Ok(match call.data(0)? {
        Data::F32(_) => Arithmetic::F32,
        Data::Bf16(_) => Arithmetic::Bf16,
        Data::I32(_) | Data::U64(_) => return Err("rows are integers".to_owned()),
    })
}

/// The rows of each group.
fn groups(call: &Call<'_>, sizes: &View, count: usize) -> Result<Vec<Range<usize>>, Fault> {
    let Data::I32(all) = call.data(sizes.argument)? else { return Err("sizes are no integers".to_owned()) };
    let [num_groups] = sizes.sizes()?;
    // The sizes may be a slice of an array.
    let sizes = (0..num_groups).map(|group| all.get(sizes.start + group * sizes.dims[0].stride));
    let mut ranges = Vec::with_capacity(num_groups);
    let mut start = 0;
    for size in sizes {
        let size = size.ok_or("there are fewer sizes than groups")?;
        let end = start + usize::try_from(*size).map_err(|_| format!("a group has {size} rows"))?;
        if end > count {
            return Err(format!("groups have {end} rows, but there are {count}"));
        }
        ranges.push(start..end);
        start = end;
    }
    Ok(ranges)
}

/// A matrix within an argument, whose second dimension is contracted.
fn matrix<'a>(
    call: &Call<'a>,
    view: &View,
    start: usize,
    [free, contract]: [usize; 2],
    dims: &[Dim],
) -> Result<Operand<'a>, Fault> {
    let strides = [dims[0].stride, dims[1].stride];
    let start = view.start + start;
    let end = match free == 0 || contract == 0 {
        true => start,
        false => start + (free - 1) * strides[0] + (contract - 1) * strides[1] + 1,
    };
    let outside = || format!("argument {} is smaller than `operands` states", view.argument);
    let elements = match call.data(view.argument)? {
        Data::F32(elements) => Elements::F32(elements.get(start..end).ok_or_else(outside)?),
        Data::Bf16(elements) => Elements::Bf16(elements.get(start..end).ok_or_else(outside)?),
        Data::I32(_) | Data::U64(_) => return Err(format!("argument {} has integers", view.argument)),
    };
    Ok(Operand {
        elements,
        batch: Vec::new(),
        free: vec![Dim { size: free, stride: strides[0] }],
        contract: vec![Dim { size: contract, stride: strides[1] }],
    })
}

/// The elements of the result that are not written yet.
struct Unwritten<'a>(DataMut<'a>);

impl<'a> Unwritten<'a> {
    fn of(call: &Call<'a>) -> Result<Self, Fault> {
        // SAFETY: handlers of this file take their only result once, and no argument shares its memory.
        Ok(Self(unsafe { call.data_mut(0)? }))
    }

    /// The next elements.
    fn next(&mut self, count: usize) -> Result<ElementsMut<'a>, Fault> {
        let outside = "the product does not fit the result";
        match &mut self.0 {
            DataMut::F32(rest) => Ok(ElementsMut::F32(rest.split_off_mut(..count).ok_or(outside)?)),
            DataMut::Bf16(rest) => Ok(ElementsMut::Bf16(rest.split_off_mut(..count).ok_or(outside)?)),
            DataMut::I32(_) => Err("the result has integers".to_owned()),
        }
    }

    /// Fills the rest.
    fn clear(self) {
        match self.0 {
            DataMut::F32(rest) => rest.fill(0.0),
            DataMut::Bf16(rest) => rest.fill(bf16::ZERO),
            DataMut::I32(rest) => rest.fill(0),
        }
    }
}
