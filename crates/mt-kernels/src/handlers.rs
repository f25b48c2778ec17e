//! What programs can call.

use crate::{
    Arithmetic, Dim, Elements, ElementsMut, Operand, dot,
    ffi::{Call, Data, DataMut, Error, Fault, Frame, Handler, answer},
};

/// All handlers, for registration with the plugin for CPUs.
pub fn handlers() -> &'static [Handler] {
    &[Handler { name: "maxtext.dot", address: call_dot }]
}

/// A general dot product. Arguments: the arrays that the left and the right side are read from; if the product is added to
/// something, this, whose memory the result has; then, for each side that is a slice of its array, the slice's position.
/// Attributes:
/// - `lhs`, `rhs`: three lists of dimensions, over which products are batched, which are free, and which are summed over:
///   each a number of dimensions, then their sizes and strides in elements;
/// - `lhs_slice`, `rhs_slice`: the number of elements between two positions of a slice, or 0 where there is none;
/// - `adds`: 1 if the product is added to an argument;
/// - `narrow`: 1 if products are of `bf16`, to which elements are rounded; 0 for `f32`.
unsafe extern "C" fn call_dot(frame: *mut Frame) -> *mut Error {
    // SAFETY: XLA calls a handler with a frame of its own.
    unsafe {
        answer(frame, |call| {
            let adds = call.integer("adds")? == 1;
            let mut positions = if adds { 3 } else { 2 };
            let lhs = operand(call, 0, "lhs", "lhs_slice", &mut positions)?;
            let rhs = operand(call, 1, "rhs", "rhs_slice", &mut positions)?;
            let arithmetic = if call.integer("narrow")? == 1 { Arithmetic::Bf16 } else { Arithmetic::F32 };
            // The result shares its memory with the argument that it is added to, which is not read otherwise, or with none.
            let result = match call.data_mut(0)? {
                DataMut::F32(elements) if adds => ElementsMut::Added(elements),
                DataMut::F32(elements) => ElementsMut::F32(elements),
                DataMut::Bf16(elements) => ElementsMut::Bf16(elements),
            };
            dot(&call.team(), &lhs, &rhs, arithmetic, result);
            Ok(())
        })
    }
}

fn operand<'a>(
    call: &Call<'a>,
    argument: usize,
    dims: &str,
    slice: &str,
    positions: &mut usize,
) -> Result<Operand<'a>, Fault> {
    let mut numbers = call.integers(dims)?.iter().map(|number| *number as usize);
    let mut lists: [Vec<Dim>; 3] = Default::default();
    for list in &mut lists {
        let count = numbers.next().unwrap_or(0);
        for _ in 0..count {
            let (size, stride) =
                numbers.next().zip(numbers.next()).ok_or("a list of dimensions ends early")?;
            list.push(Dim { size, stride });
        }
    }
    let [batch, free, contract] = lists;
    let dims = || batch.iter().chain(&free).chain(&contract);
    // One more than the last element that is read.
    let end = match dims().any(|dim| dim.size == 0) {
        true => 0,
        false => dims().map(|dim| (dim.size - 1) * dim.stride).sum::<usize>() + 1,
    };
    let between = call.integer(slice)? as usize;
    let mut start = 0;
    if between != 0 {
        let Data::I32(&[position]) = call.data(*positions)? else {
            return Err("a slice has no position".to_owned());
        };
        // As slices elsewhere in programs, those that would not fit are moved.
        let last = call.dims(argument)?.first().map_or(0, |count| count.saturating_sub(1));
        start = between * (position.max(0) as usize).min(last);
        *positions += 1;
    }
    let outside = || format!("argument {argument} is smaller than what is read of it");
    let elements = match call.data(argument)? {
        Data::F32(elements) => Elements::F32(elements.get(start..start + end).ok_or_else(outside)?),
        Data::Bf16(elements) => Elements::Bf16(elements.get(start..start + end).ok_or_else(outside)?),
        Data::I32(_) => return Err(format!("argument {argument} has integers")),
    };
    Ok(Operand { elements, batch, free, contract })
}
