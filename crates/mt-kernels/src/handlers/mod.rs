//! The handlers that programs call.

/// Calls a function for the type of the first argument's elements, which are `f32` or `bf16`.
macro_rules! of_floats {
    ($call:ident, $what:literal, $function:ident($($argument:expr),*)) => {
        match $call.data(0)? {
            Data::F32(_) => $function::<f32>($($argument),*),
            Data::Bf16(_) => $function::<bf16>($($argument),*),
            Data::I32(_) | Data::U64(_) => Err(concat!($what, " are integers").to_owned()),
        }
    };
}

mod cached;
mod grouped;
mod invariant;

use std::ops::Range;

use half::bf16;
use mt_shape::kernels::{self, attributes};

use crate::{
    Arithmetic, Cotangents, Dim, Elements, ElementsMut, Gate, Instructions, Kernels, Operand, RmsNorm, Rows,
    Targets,
    attention::{self, Gradients, Inputs, Mask, Options, Outcome, Residuals, Results, Shape, Strides},
    buffer_element::BufferElement,
    cross_entropy::{cross_entropy, cross_entropy_gradient},
    dot::{Product, dots, invariant_dots},
    ffi::{Call, Data, DataMut, Error, Fault, Frame, Handler, answer},
    gate::{gated, gated_gradient},
    largest::largest,
    normal::{Normal, normal},
    optimizer::{AdamNumbers, AdamState, adam, sum_of_squares},
    rms_norm::{rms_norm, rms_norm_gradient},
    update_slice::replace,
};

/// All handlers, for registration with the CPU plugin.
pub fn handlers() -> &'static [Handler] {
    &[
        Handler { kernel: &kernels::DOT, address: call_dot },
        Handler { kernel: &kernels::ATTENTION_FORWARD, address: call_attention_forward },
        Handler { kernel: &kernels::ATTENTION_BACKWARD, address: call_attention_backward },
        Handler { kernel: &kernels::ATTENTION_TO_CACHE, address: cached::call_attention_to_cache },
        Handler { kernel: &kernels::ATTENTION_TO_PAGES, address: cached::call_attention_to_pages },
        Handler { kernel: &kernels::UPDATE_SLICE, address: call_update_slice },
        Handler { kernel: &kernels::ADAM, address: call_adam },
        Handler { kernel: &kernels::SUM_OF_SQUARES, address: call_sum_of_squares },
        Handler { kernel: &kernels::CROSS_ENTROPY, address: call_cross_entropy },
        Handler { kernel: &kernels::CROSS_ENTROPY_GRADIENT, address: call_cross_entropy_gradient },
        Handler { kernel: &kernels::LARGEST, address: call_largest },
        Handler { kernel: &kernels::GATED, address: call_gated },
        Handler { kernel: &kernels::GATED_GRADIENT, address: call_gated_gradient },
        Handler { kernel: &kernels::RMS_NORM, address: call_rms_norm },
        Handler { kernel: &kernels::RMS_NORM_GRADIENT, address: call_rms_norm_gradient },
        Handler { kernel: &kernels::GROUPED_DOT, address: grouped::call_grouped_dot },
        Handler { kernel: &kernels::GROUPED_OUTER, address: grouped::call_grouped_outer },
        Handler { kernel: &kernels::NORMAL, address: call_normal },
        Handler { kernel: &kernels::UNINITIALIZED, address: call_uninitialized },
    ]
}

/// General dot products of one left side with several right sides.
/// Arguments: the arrays of the left and the right sides; if the only product is added to an array or written into a
/// slice of one, that array, whose memory the result shares; then the positions of slices, for each side that is a
/// slice of its array and for the result.
/// Attributes:
/// - `operands`: for each side, the number of elements between two positions of a slice, or 0 if the side is a whole
///   array; then three lists of dimensions (batch, free, contracted): each is the number of dimensions, followed by
///   their sizes and strides in elements;
/// - `adds`: 1 if the product is added to an argument;
/// - `into`: the number of elements between two positions of the result's slices, or 0 if the product is the whole
///   result;
/// - `arithmetic`: 0 multiplies in `f32`; 1 rounds elements to `bf16`; 2 splits each element of `f32` into two of
///   `bf16` and computes three products of these ([`Arithmetic::Bf16X3`]);
/// - `invariant`, if it is given: 1 sums in an order that does not depend on the number of rows.
unsafe extern "C" fn call_dot(frame: *mut Frame) -> *mut Error {
    // SAFETY: XLA calls a handler with a frame of its own.
    unsafe {
        answer(frame, &kernels::DOT, |call| {
            let (adds, into) =
                (call.integer(attributes::ADDS)? == 1, call.integer(attributes::INTO)? as usize);
            let count = call.num_results();
            let has_place = adds || into != 0;
            if has_place && count != 1 {
                return Err("only a single product can be added to or written into an array".to_owned());
            }
            let place = 1 + count;
            let mut positions = place + usize::from(has_place);
            let mut numbers = call.integers(attributes::OPERANDS)?.iter().map(|number| *number as usize);
            let sides = (0..=count).map(|argument| operand(call, argument, &mut numbers, &mut positions));
            let sides = sides.collect::<Result<Vec<Operand>, Fault>>()?;
            let number = call.integer(attributes::ARITHMETIC)?;
            let arithmetic = match kernels::Arithmetic::numbered(number) {
                Some(kernels::Arithmetic::F32) => Arithmetic::F32,
                Some(kernels::Arithmetic::Bf16) => Arithmetic::Bf16,
                Some(kernels::Arithmetic::Bf16X3) => Arithmetic::Bf16X3,
                None => return Err(format!("unknown arithmetic `{number}`")),
            };
            let range = if into == 0 {
                None
            } else {
                let start = into * slice_position(call, place, positions)?;
                Some(start..start + into)
            };
            let outside = "the product does not fit the result";
            let mut products = Vec::with_capacity(count);
            for (index, rhs) in sides[1..].iter().enumerate() {
                // The result shares its memory with the argument at `place`, which is not read otherwise, or with no
                // argument.
                let result = match call.data_mut(index)? {
                    DataMut::F32(elements) if adds => ElementsMut::Added(elements),
                    DataMut::F32(elements) => {
                        ElementsMut::F32(in_range(elements, range.clone()).ok_or(outside)?)
                    }
                    DataMut::Bf16(elements) => {
                        ElementsMut::Bf16(in_range(elements, range.clone()).ok_or(outside)?)
                    }
                    DataMut::I32(_) => return Err("the result has integers".to_owned()),
                };
                products.push(Product { lhs: &sides[0], rhs, result });
            }
            match is_invariant(call)? {
                true => invariant_dots(&call.team(), arithmetic, products),
                false => dots(&call.team(), arithmetic, products),
            }
            Ok(())
        })
    }
}

/// Whether the sums of a row must not depend on other rows.
fn is_invariant(call: &Call<'_>) -> Result<bool, Fault> {
    Ok(call.integer_if_given(attributes::INVARIANT)? == Some(1))
}

/// All elements, or those of a range.
fn in_range<T>(elements: &mut [T], range: Option<Range<usize>>) -> Option<&mut [T]> {
    match range {
        None => Some(elements),
        Some(range) => elements.get_mut(range),
    }
}

fn operand<'a>(
    call: &Call<'a>,
    argument: usize,
    numbers: &mut impl Iterator<Item = usize>,
    positions: &mut usize,
) -> Result<Operand<'a>, Fault> {
    let between = numbers.next().ok_or_else(|| format!("`operands` omits argument {argument}"))?;
    let mut lists: [Vec<Dim>; 3] = Default::default();
    for list in &mut lists {
        *list = next_dims(numbers)?;
    }
    let [batch, free, contract] = lists;
    let dims = || batch.iter().chain(&free).chain(&contract);
    // The index of the last element that is read, plus one.
    let end = match dims().any(|dim| dim.size == 0) {
        true => 0,
        false => dims().map(|dim| (dim.size - 1) * dim.stride).sum::<usize>() + 1,
    };
    let mut start = 0;
    if between != 0 {
        start = between * slice_position(call, argument, *positions)?;
        *positions += 1;
    }
    let outside = || format!("argument {argument} is smaller than `operands` states");
    let elements = match call.data(argument)? {
        Data::F32(elements) => Elements::F32(elements.get(start..start + end).ok_or_else(outside)?),
        Data::Bf16(elements) => Elements::Bf16(elements.get(start..start + end).ok_or_else(outside)?),
        Data::I32(_) | Data::U64(_) => return Err(format!("argument {argument} has integers")),
    };
    Ok(Operand { elements, batch, free, contract })
}

/// Attention of a sequence to itself.
///
/// Arguments: queries `[batch, kv_heads, position, group, head_dim]`, keys and values
/// `[batch, kv_heads, position, head_dim]`, segments `[batch, position]`, sinks `[kv_heads, group]`; then the positions
/// of slices.
///
/// Results, dense: the context, shaped like the queries; the logarithms of the sums of exponentiated scores, shaped
/// like the queries without `head_dim`; if `with_scores` is 1, the largest scores in the same shape.
///
/// Attributes:
/// - `operands`: for each argument, the number of elements between two positions of a slice, or 0 if the argument is a
///   whole array; then the number of dimensions, their sizes and strides;
/// - `causal`: 1 if queries do not see later keys; `window` and `chunk`: their sizes, or 0;
/// - `soft_cap`: the bits of the cap as `f32`, or 0;
/// - `invariant`, if it is given: 1 computes each query in an order that does not depend on the others. Values may then
///   have another width than keys.
unsafe extern "C" fn call_attention_forward(frame: *mut Frame) -> *mut Error {
    // SAFETY: XLA calls a handler with a frame of its own.
    unsafe {
        answer(frame, &kernels::ATTENTION_FORWARD, |call| {
            let operands = views(call)?;
            of_floats!(call, "queries", attention_forward(call, &operands))
        })
    }
}

/// Gradients of queries, keys, values and sinks, dense and in the shapes of these.
///
/// Arguments: the arguments of the forward pass, its context and logarithms of sums, and the context's cotangent.
/// Attributes: those of the forward pass.
unsafe extern "C" fn call_attention_backward(frame: *mut Frame) -> *mut Error {
    // SAFETY: XLA calls a handler with a frame of its own.
    unsafe {
        answer(frame, &kernels::ATTENTION_BACKWARD, |call| {
            let operands = views(call)?;
            of_floats!(call, "queries", attention_backward(call, &operands))
        })
    }
}

/// Replaces a block of an array. Arguments: the array, whose memory the result shares; the block; and the block's first
/// index in each dimension.
unsafe extern "C" fn call_update_slice(frame: *mut Frame) -> *mut Error {
    // SAFETY: XLA calls a handler with a frame of its own.
    unsafe {
        answer(frame, &kernels::UPDATE_SLICE, |call| {
            let (dims, slice) = (call.dims(0)?, call.dims(1)?);
            let mut starts = Vec::with_capacity(dims.len());
            for (dim, (size, own)) in dims.iter().zip(&slice).enumerate() {
                let Data::I32(&[start]) = call.data(2 + dim)? else {
                    return Err("the block has no position".to_owned());
                };
                starts.push((start.max(0) as usize).min(size - own));
            }
            // The first argument shares its memory with the result and is accessed only as the result.
            match (call.updated(0)?, call.data(1)?) {
                (DataMut::F32(all), Data::F32(own)) => replace(all, &dims, own, &slice, &starts),
                (DataMut::Bf16(all), Data::Bf16(own)) => replace(all, &dims, own, &slice, &starts),
                _ => return Err("the block has another type".to_owned()),
            }
            Ok(())
        })
    }
}

/// The layout of an argument.
struct View {
    argument: usize,
    /// The index of the first element.
    start: usize,
    dims: Vec<Dim>,
}

fn views(call: &Call<'_>) -> Result<Vec<View>, Fault> {
    let mut numbers = call.integers(attributes::OPERANDS)?.iter().map(|number| *number as usize);
    let mut views = Vec::new();
    let mut between = Vec::new();
    while let Some(slice) = numbers.next() {
        views.push(View { argument: views.len(), start: 0, dims: next_dims(&mut numbers)? });
        between.push(slice);
    }
    let num_operands = views.len();
    let slices = views.iter_mut().zip(between).filter(|(_, between)| *between != 0);
    for (index, (view, between)) in slices.enumerate() {
        view.start = between * slice_position(call, view.argument, num_operands + index)?;
    }
    Ok(views)
}

/// Reads a number of dimensions, and then their sizes and strides.
fn next_dims(numbers: &mut impl Iterator<Item = usize>) -> Result<Vec<Dim>, Fault> {
    let count = numbers.next();
    let dims: Option<Vec<Dim>> = count.and_then(|count| {
        (0..count).map(|_| Some(Dim { size: numbers.next()?, stride: numbers.next()? })).collect()
    });
    dims.ok_or_else(|| "a list of dimensions ends early".to_owned())
}

/// The position of an argument's slice, read from another argument.
fn slice_position(call: &Call<'_>, argument: usize, position: usize) -> Result<usize, Fault> {
    let Data::I32(&[position]) = call.data(position)? else {
        return Err("a slice has no position".to_owned());
    };
    // Positions are clamped, as for slices in StableHLO.
    let last = call.dims(argument)?.first().map_or(0, |count| count.saturating_sub(1));
    Ok((position.max(0) as usize).min(last))
}

impl View {
    fn elements<'a, E: BufferElement>(&self, call: &Call<'a>) -> Result<&'a [E], Fault> {
        let other = || format!("argument {} has another type", self.argument);
        let elements = E::of(call.data(self.argument)?).ok_or_else(other)?;
        elements.get(self.start..).ok_or_else(|| format!("argument {} ends early", self.argument))
    }

    fn rows<'a, E: BufferElement>(&'a self, call: &Call<'a>) -> Result<Rows<'a, E>, Fault> {
        Ok(Rows { elements: self.elements(call)?, dims: &self.dims })
    }

    /// The sizes of the `N` dimensions.
    fn sizes<const N: usize>(&self) -> Result<[usize; N], Fault> {
        let sizes: Vec<usize> = self.dims.iter().map(|dim| dim.size).collect();
        sizes.try_into().map_err(|_| format!("argument {} does not have {N} dimensions", self.argument))
    }

    /// The strides of queries, keys or rows with dimensions in the order batch, heads, positions and, for queries,
    /// groups.
    fn strides(&self, has_group: bool) -> Strides {
        let stride = |index: usize| self.dims.get(index).map_or(0, |dim| dim.stride);
        Strides {
            batch: stride(0),
            kv_head: stride(1),
            position: stride(2),
            group: if has_group { stride(3) } else { 0 },
        }
    }

    /// The strides of queries or keys with dimensions in the order batch, positions, heads and, for queries, groups.
    fn positions_first(&self) -> Strides {
        let stride = |index: usize| self.dims.get(index).map_or(0, |dim| dim.stride);
        let group = if self.dims.len() == 5 { stride(3) } else { 0 };
        Strides { batch: stride(0), position: stride(1), kv_head: stride(2), group }
    }

    /// The elements of a matrix in row-major order.
    fn gathered<T: Copy>(&self, elements: &[T]) -> Result<Vec<T>, Fault> {
        let [rows, columns] = self.dims[..] else {
            return Err(format!("argument {} is not a matrix", self.argument));
        };
        let index = |row: usize, column: usize| self.start + row * rows.stride + column * columns.stride;
        let indices = (0..rows.size).flat_map(|row| (0..columns.size).map(move |column| index(row, column)));
        let elements: Option<Vec<T>> = indices.map(|index| elements.get(index).copied()).collect();
        elements.ok_or_else(|| format!("argument {} ends early", self.argument))
    }
}

/// The inputs that both passes share.
struct AttentionCall {
    options: Options,
    segments: Vec<i32>,
    sinks: Vec<f32>,
}

impl AttentionCall {
    /// Reads the inputs of attention with products in the given arithmetic.
    fn new(call: &Call<'_>, operands: &[View], arithmetic: Arithmetic) -> Result<Self, Fault> {
        let [query, _, _, segments, sinks, ..] = operands else {
            return Err("arguments are missing".to_owned());
        };
        let [batch, kv_heads, length, group, head_dim] = query.sizes()?;
        let (mask, soft_cap) = mask_and_cap(call)?;
        let options = Options {
            shape: Shape { batch, length, kv_heads, group, head_dim },
            mask,
            soft_cap,
            instructions: Kernels::in_use().attention(arithmetic),
        };
        let (Data::I32(segment_data), Data::F32(sink_data)) =
            (call.data(segments.argument)?, call.data(sinks.argument)?)
        else {
            return Err("segments or sinks have another type".to_owned());
        };
        let (segments, sinks) = (segments.gathered(segment_data)?, sinks.gathered(sink_data)?);
        Ok(Self { options, segments, sinks })
    }

    fn inputs<'a, E: BufferElement>(
        &'a self,
        call: &Call<'a>,
        operands: &[View],
    ) -> Result<Inputs<'a, E>, Fault> {
        let shape = self.options.shape;
        let [query, key, value] = [0, 1, 2].map(|index: usize| &operands[index]);
        let queries = query.elements(call)?;
        Ok(Inputs {
            query: attention::Operand::queries(queries, query.strides(true), shape),
            key: attention::Operand::keys(key.elements(call)?, key.strides(false), shape),
            value: attention::Operand::keys(value.elements(call)?, value.strides(false), shape),
            segments: &self.segments,
            sinks: Some(&self.sinks),
        })
    }
}

/// The mask and the soft cap of a call.
fn mask_and_cap(call: &Call<'_>) -> Result<(Mask, Option<f32>), Fault> {
    let size = |name: &str| -> Result<Option<usize>, Fault> {
        Ok(Some(call.integer(name)? as usize).filter(|size| *size != 0))
    };
    let soft_cap = f32::from_bits(call.integer(attributes::SOFT_CAP)? as u32);
    let mask = Mask {
        causal: call.integer(attributes::CAUSAL)? == 1,
        window: size(attributes::WINDOW)?,
        chunk: size(attributes::CHUNK)?,
    };
    Ok((mask, Some(soft_cap).filter(|cap| *cap != 0.0)))
}

/// A result of a call whose results share no argument's memory. Callers take each result once.
fn result<'a, E: BufferElement>(call: &Call<'a>, index: usize) -> Result<&'a mut [E], Fault> {
    // SAFETY: all callers keep to the conditions above.
    let data = unsafe { call.data_mut(index)? };
    E::of_mut(data).ok_or_else(|| format!("result {index} has another type"))
}

fn attention_forward<E: BufferElement>(call: &Call<'_>, operands: &[View]) -> Result<(), Fault> {
    if is_invariant(call)? {
        return invariant::attention_forward::<E>(call, operands);
    }
    let attention = AttentionCall::new(call, operands, E::ARITHMETIC)?;
    let shape = attention.options.shape;
    let inputs = attention.inputs::<E>(call, operands)?;
    let dense = Strides::heads_first(shape);
    let rows = Strides::heads_first(Shape { head_dim: 1, ..shape });
    let largest_scores = match call.integer(attributes::WITH_SCORES)? {
        1 => Some(Outcome::rows(result(call, 2)?, rows, shape)),
        _ => None,
    };
    let results = Results {
        context: Outcome::queries(result::<E>(call, 0)?, dense, shape),
        log_sums: Outcome::rows(result(call, 1)?, rows, shape),
        largest_scores,
    };
    E::forward(&call.team(), &attention.options, &inputs, &results);
    Ok(())
}

fn attention_backward<E: BufferElement>(call: &Call<'_>, operands: &[View]) -> Result<(), Fault> {
    let attention = AttentionCall::new(call, operands, E::ARITHMETIC)?;
    let shape = attention.options.shape;
    let inputs = attention.inputs::<E>(call, operands)?;
    let [context, log_sums, cotangent] = &operands[5..] else {
        return Err("arguments are missing".to_owned());
    };
    let residuals = Residuals {
        context: attention::Operand::queries(context.elements(call)?, context.strides(true), shape),
        log_sums: attention::Operand::rows(log_sums.elements(call)?, log_sums.strides(true), shape),
        cotangent: attention::Operand::queries(cotangent.elements(call)?, cotangent.strides(true), shape),
    };
    let dense = Strides::heads_first(shape);
    let keys = Strides { group: 0, ..Strides::heads_first(Shape { group: 1, ..shape }) };
    let gradients = Gradients {
        query: Outcome::queries(result::<E>(call, 0)?, dense, shape),
        key: Outcome::keys(result::<E>(call, 1)?, keys, shape),
        value: Outcome::keys(result::<E>(call, 2)?, keys, shape),
        sinks: Some(result(call, 3)?),
    };
    E::backward(&call.team(), &attention.options, &inputs, &residuals, gradients);
    Ok(())
}

/// A step of Adam.
/// Arguments: the parameter and both moments, whose memory the first three results share; the gradient; then scalars:
/// the factor of gradients, the learning rate, the divisors of the first and of the second moment and, if `nesterov` is
/// 1, the divisor of the gradient that is added to the first moment. If `pax` is 1, the third and the fourth scalar are
/// instead the shares of the old moments in the new ones. The last result is the sum of squares of the new parameter.
///
/// Attributes, each the bits of an `f32`: `b1`, `b2`, `epsilon`, `epsilon_root`, `weight_decay`, and `new_share_1` and
/// `new_share_2`, which are `1 - b1` and `1 - b2`. If the optimizer steps another form of the parameter, also
/// `update_scale`, which multiplies the update before weight decay, and `constant_decay`, which is added to the update.
unsafe extern "C" fn call_adam(frame: *mut Frame) -> *mut Error {
    // SAFETY: XLA calls a handler with a frame of its own.
    unsafe {
        answer(frame, &kernels::ADAM, |call| {
            let of_bits = |bits: i64| f32::from_bits(bits as u32);
            let number = |name: &str| call.integer(name).map(of_bits);
            let optional = |name: &str| Ok::<_, Fault>(call.integer_if_given(name)?.map(of_bits));
            let scalar = |argument: usize| match call.data(argument)? {
                Data::F32(&[number]) => Ok(number),
                _ => Err(format!("argument {argument} is not a number")),
            };
            let shares = [
                [number(attributes::B1)?, number(attributes::NEW_SHARE_1)?],
                [number(attributes::B2)?, number(attributes::NEW_SHARE_2)?],
            ];
            let (first, second) = (scalar(6)?, scalar(7)?);
            let mut numbers = AdamNumbers {
                gradient_factor: scalar(4)?,
                learning_rate: scalar(5)?,
                first_shares: shares[0],
                second_shares: shares[1],
                update_shares: [1.0 / first, 0.0],
                second_factor: 1.0 / second,
                epsilon: number(attributes::EPSILON)?,
                epsilon_root: number(attributes::EPSILON_ROOT)?,
                weight_decay: number(attributes::WEIGHT_DECAY)?,
                constant_decay: optional(attributes::CONSTANT_DECAY)?.unwrap_or(-0.0),
            };
            if call.integer(attributes::NESTEROV)? == 1 {
                numbers.update_shares = [shares[0][0] / first, shares[0][1] / scalar(8)?];
            }
            if call.integer(attributes::PAX)? == 1 {
                numbers.first_shares = [first, 1.0 - first];
                numbers.second_shares = [second, 1.0 - second];
                numbers.update_shares = [1.0, 0.0];
                numbers.second_factor = 1.0;
            }
            let update_scale = optional(attributes::UPDATE_SCALE)?.unwrap_or(1.0);
            numbers.update_shares = numbers.update_shares.map(|share| share * update_scale);
            let Data::F32(gradient) = call.data(3)? else {
                return Err("the gradient has another type".to_owned());
            };
            let DataMut::F32([squares]) = call.data_mut(3)? else {
                return Err("the sum of squares is not a number".to_owned());
            };
            // The first three arguments share their memory with these results and are accessed only as results.
            let [DataMut::F32(parameter), DataMut::F32(first), DataMut::F32(second)] =
                [call.updated(0)?, call.updated(1)?, call.updated(2)?]
            else {
                return Err("an array has another type".to_owned());
            };
            let state = AdamState { parameter, first, second };
            *squares = adam(&call.team(), Instructions::best(), &numbers, gradient, state);
            Ok(())
        })
    }
}

/// The sum of squares of the only argument's elements.
unsafe extern "C" fn call_sum_of_squares(frame: *mut Frame) -> *mut Error {
    // SAFETY: XLA calls a handler with a frame of its own.
    unsafe {
        answer(frame, &kernels::SUM_OF_SQUARES, |call| {
            let DataMut::F32([sum]) = call.data_mut(0)? else {
                return Err("the result is not a number".to_owned());
            };
            let (team, instructions) = (call.team(), Instructions::best());
            *sum = match call.data(0)? {
                Data::F32(elements) => sum_of_squares(&team, instructions, elements),
                Data::Bf16(elements) => sum_of_squares(&team, instructions, elements),
                Data::I32(_) | Data::U64(_) => return Err("the argument has integers".to_owned()),
            };
            Ok(())
        })
    }
}

/// Cross-entropy of tokens. Arguments: logits `[…, vocab]`, targets `[…]`. Results, as `f32`: cross-entropies `[…]`,
/// and the logarithms of the sums of exponentiated logits `[…]`.
unsafe extern "C" fn call_cross_entropy(frame: *mut Frame) -> *mut Error {
    // SAFETY: XLA calls a handler with a frame of its own.
    unsafe {
        answer(frame, &kernels::CROSS_ENTROPY, |call| {
            let rows = rows(call)?;
            let results = [result::<f32>(call, 0)?, result::<f32>(call, 1)?];
            let (team, instructions) = (call.team(), Instructions::best());
            match call.data(0)? {
                Data::F32(logits) => cross_entropy(&team, instructions, rows, logits, results),
                Data::Bf16(logits) => cross_entropy(&team, instructions, rows, logits, results),
                Data::I32(_) | Data::U64(_) => return Err("logits are integers".to_owned()),
            }
            Ok(())
        })
    }
}

/// The gradients of logits. Arguments: those of [`call_cross_entropy`], where the logits share the memory of the only
/// result; its second result; and the cotangents of both results.
unsafe extern "C" fn call_cross_entropy_gradient(frame: *mut Frame) -> *mut Error {
    // SAFETY: XLA calls a handler with a frame of its own.
    unsafe {
        answer(frame, &kernels::CROSS_ENTROPY_GRADIENT, |call| {
            let rows = rows(call)?;
            let floats = |argument: usize| match call.data(argument)? {
                Data::F32(elements) => Ok(elements),
                _ => Err(format!("argument {argument} has another type")),
            };
            let log_z = floats(2)?;
            let cotangents = Cotangents { cross_entropy: floats(3)?, log_z: floats(4)? };
            let (team, instructions) = (call.team(), Instructions::best());
            // The first argument shares its memory with this result and is accessed only as the result.
            match call.updated(0)? {
                DataMut::F32(logits) => {
                    cross_entropy_gradient(&team, instructions, rows, logits, log_z, cotangents);
                }
                DataMut::Bf16(logits) => {
                    cross_entropy_gradient(&team, instructions, rows, logits, log_z, cotangents);
                }
                DataMut::I32(_) => return Err("logits are integers".to_owned()),
            }
            Ok(())
        })
    }
}

/// The index of each row's largest element, the first of equal ones. Argument: `[…, elements]`. Result: `[…]`.
unsafe extern "C" fn call_largest(frame: *mut Frame) -> *mut Error {
    // SAFETY: XLA calls a handler with a frame of its own.
    unsafe {
        answer(frame, &kernels::LARGEST, |call| {
            let DataMut::I32(indices) = call.data_mut(0)? else {
                return Err("indices have another type".to_owned());
            };
            let (team, instructions) = (call.team(), Instructions::best());
            match call.data(0)? {
                Data::F32(elements) => largest(&team, instructions, elements, indices),
                Data::Bf16(elements) => largest(&team, instructions, elements, indices),
                Data::I32(_) | Data::U64(_) => return Err("elements are integers".to_owned()),
            }
            Ok(())
        })
    }
}

/// The targets of a call and the length of its rows.
fn rows<'a>(call: &Call<'a>) -> Result<Targets<'a>, Fault> {
    let Data::I32(targets) = call.data(1)? else {
        return Err("targets are not integers".to_owned());
    };
    let vocab = call.dims(0)?.last().copied().ok_or("logits have no dimensions")?;
    Ok(Targets { targets, vocab })
}

/// The product of activated gates and another projection. Arguments: both, in the same shape; then the positions of
/// slices. Result, dense: the product. Attributes: `operands`, as for attention, and `gelu`: 1 for GELU, 0 for SiLU.
unsafe extern "C" fn call_gated(frame: *mut Frame) -> *mut Error {
    // SAFETY: XLA calls a handler with a frame of its own.
    unsafe { answer(frame, &kernels::GATED, |call| of_floats!(call, "gates", gated_rows(call))) }
}

/// Gradients of both arguments of [`call_gated`], dense. Arguments: these, and the cotangent of their product; then the
/// positions of slices. Attributes: those of [`call_gated`].
unsafe extern "C" fn call_gated_gradient(frame: *mut Frame) -> *mut Error {
    // SAFETY: XLA calls a handler with a frame of its own.
    unsafe {
        answer(frame, &kernels::GATED_GRADIENT, |call| of_floats!(call, "gates", gated_row_gradients(call)))
    }
}

fn gated_rows<E: BufferElement>(call: &Call<'_>) -> Result<(), Fault> {
    let views = views(call)?;
    let [gates, up] = &views[..] else { return Err("arguments are missing".to_owned()) };
    let operands = [gates.rows::<E>(call)?, up.rows(call)?];
    gated(&call.team(), Instructions::best(), gate(call)?, operands, result(call, 0)?);
    Ok(())
}

fn gated_row_gradients<E: BufferElement>(call: &Call<'_>) -> Result<(), Fault> {
    let views = views(call)?;
    let [gates, up, of_hidden] = &views[..] else { return Err("arguments are missing".to_owned()) };
    let operands = [gates.rows::<E>(call)?, up.rows(call)?, of_hidden.rows(call)?];
    let results = [result(call, 0)?, result(call, 1)?];
    gated_gradient(&call.team(), Instructions::best(), gate(call)?, operands, results);
    Ok(())
}

fn gate(call: &Call<'_>) -> Result<Gate, Fault> {
    Ok(if call.integer(attributes::GELU)? == 1 { Gate::Gelu } else { Gate::Silu })
}

/// Rows divided by their root mean square and multiplied by a scale.
///
/// Arguments: an array, whose last dimension is the row; the scale as `f32`, if the norm has one; then the positions of
/// slices. Results, dense: normalized rows and, as `f32`, the reciprocal of each row's root mean square. Attributes:
/// `operands`, as for attention; and, each the bits of an `f32`, `offset`, which is added to the scale, and `epsilon`,
/// which is added to mean squares.
unsafe extern "C" fn call_rms_norm(frame: *mut Frame) -> *mut Error {
    // SAFETY: XLA calls a handler with a frame of its own.
    unsafe { answer(frame, &kernels::RMS_NORM, |call| of_floats!(call, "rows", normalized_rows(call))) }
}

/// Gradients of the arguments of [`call_rms_norm`], dense. Arguments: the cotangent of the normalized rows; the
/// arguments of [`call_rms_norm`]; its second result; then the positions of slices. Attributes: those of
/// [`call_rms_norm`].
unsafe extern "C" fn call_rms_norm_gradient(frame: *mut Frame) -> *mut Error {
    // SAFETY: XLA calls a handler with a frame of its own.
    unsafe {
        answer(frame, &kernels::RMS_NORM_GRADIENT, |call| {
            of_floats!(call, "rows", normalized_row_gradients(call))
        })
    }
}

fn normalized_rows<E: BufferElement>(call: &Call<'_>) -> Result<(), Fault> {
    let views = views(call)?;
    let (x, scale) = views.split_first().ok_or("arguments are missing")?;
    let norm = norm(call, scale.first())?;
    let (team, instructions) = (call.team(), Instructions::best());
    rms_norm(&team, instructions, norm, x.rows::<E>(call)?, result(call, 0)?, result(call, 1)?);
    Ok(())
}

fn normalized_row_gradients<E: BufferElement>(call: &Call<'_>) -> Result<(), Fault> {
    let mut views = views(call)?;
    let inverses = views.pop().ok_or("arguments are missing")?;
    let [of_normalized, x, scale @ ..] = &views[..] else { return Err("arguments are missing".to_owned()) };
    let norm = norm(call, scale.first())?;
    let operands = [x.rows::<E>(call)?, of_normalized.rows(call)?];
    // The reciprocals become rows of one element each.
    let dims = [&inverses.dims[..], &[Dim { size: 1, stride: 1 }]].concat();
    let inverses = Rows { elements: inverses.elements(call)?, dims: &dims };
    let of_scale = norm.scale.is_some().then(|| result(call, 1)).transpose()?;
    let (team, instructions) = (call.team(), Instructions::best());
    rms_norm_gradient(&team, instructions, norm, operands, inverses, result(call, 0)?, of_scale);
    Ok(())
}

fn norm<'a>(call: &Call<'a>, scale: Option<&View>) -> Result<RmsNorm<'a>, Fault> {
    let number = |name: &str| call.integer(name).map(|bits| f32::from_bits(bits as u32));
    let scale = match scale {
        Some(view) => {
            let length = view.dims.first().map_or(0, |dim| dim.size);
            Some(view.elements(call)?.get(..length).ok_or("the scale ends early")?)
        }
        None => None,
    };
    Ok(RmsNorm { scale, offset: number(attributes::OFFSET)?, epsilon: number(attributes::EPSILON)? })
}

/// Random numbers of a normal distribution.
/// Arguments: the factor of deviations, a key, and the numbers of streams `[count]`. Result: `[count, …]`; the
/// generator derives each array's key from the key and the stream's number. Attributes, each the bits of an `f32`:
/// `bound`, the largest deviation, and `edge`, `erf(bound / √2)`.
unsafe extern "C" fn call_normal(frame: *mut Frame) -> *mut Error {
    // SAFETY: XLA calls a handler with a frame of its own.
    unsafe {
        answer(frame, &kernels::NORMAL, |call| {
            let number = |name: &str| call.integer(name).map(|bits| f32::from_bits(bits as u32));
            let (Data::F32(&[scale]), Data::U64(&[key]), Data::U64(streams)) =
                (call.data(0)?, call.data(1)?, call.data(2)?)
            else {
                return Err("an argument has another type".to_owned());
            };
            let distribution =
                Normal { scale, bound: number(attributes::BOUND)?, edge: number(attributes::EDGE)? };
            let dims = call.result_dims(0)?;
            let out = result(call, 0)?;
            match dims.split_first() {
                Some((count, dims)) if *count == streams.len() => {
                    normal(&call.team(), Instructions::best(), distribution, key, streams, dims, out);
                    Ok(())
                }
                _ => Err("the result does not have one array for each stream".to_owned()),
            }
        })
    }
}

/// Leaves its result as it is. The attribute `index` has no meaning. Builds with checks fill results of floating-point
/// numbers with NaN, so that a program that reads one too early is noticed.
unsafe extern "C" fn call_uninitialized(frame: *mut Frame) -> *mut Error {
    // SAFETY: XLA calls a handler with a frame of its own.
    unsafe {
        answer(frame, &kernels::UNINITIALIZED, |call| {
            call.integer(attributes::INDEX)?;
            if cfg!(debug_assertions) {
                match call.data_mut(0) {
                    Ok(DataMut::F32(elements)) => elements.fill(f32::NAN),
                    Ok(DataMut::Bf16(elements)) => elements.fill(bf16::NAN),
                    Ok(DataMut::I32(elements)) => elements.fill(i32::MIN),
                    // Other types have no kernels that could read them.
                    Err(_) => {}
                }
            }
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_has_a_handler() {
        assert!(handlers().iter().map(|handler| handler.kernel).eq(kernels::ALL.iter().copied()));
    }
}
