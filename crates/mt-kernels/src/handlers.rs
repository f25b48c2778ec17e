//! What programs can call.

use std::ops::Range;

use half::bf16;

use crate::{
    Arithmetic, Cotangents, Dim, Elements, ElementsMut, Gate, Instructions, Kernels, Operand, RmsNorm, Rows,
    Targets,
    attention::{
        self, CachedInputs, Gradients, Inputs, Mask, Options, Outcome, Residuals, Results, Shape, Strides,
    },
    cross_entropy::{cross_entropy, cross_entropy_gradient},
    dot::{Product, dots},
    ffi::{Call, Data, DataMut, Error, Fault, Frame, Handler, answer},
    gate::{gated, gated_gradient},
    largest::largest,
    normal::{Normal, normal},
    optimizer::{AdamNumbers, AdamState, adam, sum_of_squares},
    rms_norm::{rms_norm, rms_norm_gradient},
};

/// All handlers, for registration with the plugin for CPUs.
pub fn handlers() -> &'static [Handler] {
    &[
        Handler { name: "maxtext.dot", address: call_dot },
        Handler { name: "maxtext.attention_forward", address: call_attention_forward },
        Handler { name: "maxtext.attention_backward", address: call_attention_backward },
        Handler { name: "maxtext.attention_to_cache", address: call_attention_to_cache },
        Handler { name: "maxtext.update_slice", address: call_update_slice },
        Handler { name: "maxtext.adam", address: call_adam },
        Handler { name: "maxtext.sum_of_squares", address: call_sum_of_squares },
        Handler { name: "maxtext.cross_entropy", address: call_cross_entropy },
        Handler { name: "maxtext.cross_entropy_gradient", address: call_cross_entropy_gradient },
        Handler { name: "maxtext.largest", address: call_largest },
        Handler { name: "maxtext.gated", address: call_gated },
        Handler { name: "maxtext.gated_gradient", address: call_gated_gradient },
        Handler { name: "maxtext.rms_norm", address: call_rms_norm },
        Handler { name: "maxtext.rms_norm_gradient", address: call_rms_norm_gradient },
        Handler { name: "maxtext.normal", address: call_normal },
    ]
}

/// Calls a function for the type of the first argument's numbers, which are `f32` or `bf16`.
macro_rules! of_floats {
    ($call:ident, $what:literal, $function:ident($($argument:expr),*)) => {
        match $call.data(0)? {
            Data::F32(_) => $function::<f32>($($argument),*),
            Data::Bf16(_) => $function::<bf16>($($argument),*),
            Data::I32(_) | Data::U64(_) => Err(concat!($what, " are integers").to_owned()),
        }
    };
}

/// General dot products of one left side with several right sides. Arguments: the arrays that the left and the right sides are
/// read from; if the only product is added to something, or written into a slice of something, this, whose memory the
/// result has; then the positions of slices: for each side that is a slice of its array, and for the result.
/// Attributes:
/// - `operands`: for each side the number of elements between two positions of a slice, or 0 if it is none; then three lists
///   of dimensions, over which products are batched, which are free, and which are summed over: each a number of
///   dimensions, then their sizes and strides in elements;
/// - `adds`: 1 if the product is added to an argument;
/// - `into`: the number of elements between two positions of slices of the result, or 0 if the product is all of it;
/// - `arithmetic`: 0 multiplies in `f32`; 1 rounds elements to `bf16`; 2 splits each element of `f32` into two of `bf16`
///   and computes three products of these ([`Arithmetic::Bf16X3`]).
unsafe extern "C" fn call_dot(frame: *mut Frame) -> *mut Error {
    // SAFETY: XLA calls a handler with a frame of its own.
    unsafe {
        answer(frame, |call| {
            let (adds, into) = (call.integer("adds")? == 1, call.integer("into")? as usize);
            let count = call.num_results();
            let has_place = adds || into != 0;
            if has_place && count != 1 {
                return Err("only a single product is added to something or written into it".to_owned());
            }
            let place = 1 + count;
            let mut positions = place + usize::from(has_place);
            let mut numbers = call.integers("operands")?.iter().map(|number| *number as usize);
            let sides = (0..=count).map(|argument| operand(call, argument, &mut numbers, &mut positions));
            let sides = sides.collect::<Result<Vec<Operand>, Fault>>()?;
            let arithmetic = match call.integer("arithmetic")? {
                0 => Arithmetic::F32,
                1 => Arithmetic::Bf16,
                2 => Arithmetic::Bf16X3,
                other => return Err(format!("there is no arithmetic `{other}`")),
            };
            let range = if into == 0 {
                None
            } else {
                let start = into * slice_position(call, place, positions)?;
                Some(start..start + into)
            };
            let outside = "the result is smaller than what is written to it";
            let mut products = Vec::with_capacity(count);
            for (index, rhs) in sides[1..].iter().enumerate() {
                // A result shares its memory with the argument at `place`, which is not read otherwise, or with none.
                let result = match call.data_mut(index)? {
                    DataMut::F32(elements) if adds => ElementsMut::Added(elements),
                    DataMut::F32(elements) => ElementsMut::F32(part(elements, range.clone()).ok_or(outside)?),
                    DataMut::Bf16(elements) => {
                        ElementsMut::Bf16(part(elements, range.clone()).ok_or(outside)?)
                    }
                    DataMut::I32(_) => return Err("the result has integers".to_owned()),
                };
                products.push(Product { lhs: &sides[0], rhs, result });
            }
            dots(&call.team(), arithmetic, products);
            Ok(())
        })
    }
}

/// All elements, or those of a range.
fn part<T>(elements: &mut [T], range: Option<Range<usize>>) -> Option<&mut [T]> {
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
    let between = numbers.next().ok_or_else(|| format!("nothing says how argument {argument} is read"))?;
    let mut lists: [Vec<Dim>; 3] = Default::default();
    for list in &mut lists {
        *list = next_dims(numbers)?;
    }
    let [batch, free, contract] = lists;
    let dims = || batch.iter().chain(&free).chain(&contract);
    // One more than the last element that is read.
    let end = match dims().any(|dim| dim.size == 0) {
        true => 0,
        false => dims().map(|dim| (dim.size - 1) * dim.stride).sum::<usize>() + 1,
    };
    let mut start = 0;
    if between != 0 {
        start = between * slice_position(call, argument, *positions)?;
        *positions += 1;
    }
    let outside = || format!("argument {argument} is smaller than what is read of it");
    let elements = match call.data(argument)? {
        Data::F32(elements) => Elements::F32(elements.get(start..start + end).ok_or_else(outside)?),
        Data::Bf16(elements) => Elements::Bf16(elements.get(start..start + end).ok_or_else(outside)?),
        Data::I32(_) | Data::U64(_) => return Err(format!("argument {argument} has integers")),
    };
    Ok(Operand { elements, batch, free, contract })
}

/// What queries make of values. Arguments: queries `[batch, kv_heads, position, group, head_dim]`, keys and values
/// `[batch, kv_heads, position, head_dim]`, segments `[batch, position]`, sinks `[kv_heads, group]`; then positions of
/// slices. Results, dense: context, shaped as queries; logarithms of sums, without `head_dim`; and largest scores, shaped
/// as these, if `with_scores` is 1. Attributes:
/// - `operands`: how each argument is read: the number of elements between two positions of a slice, or 0 if it is none,
///   the number of dimensions, and their sizes and strides;
/// - `causal`: 1 if queries see no later keys; `window` and `chunk`: their sizes, or 0;
/// - `soft_cap`: the bits of the cap as `f32`, or 0.
unsafe extern "C" fn call_attention_forward(frame: *mut Frame) -> *mut Error {
    // SAFETY: XLA calls a handler with a frame of its own.
    unsafe {
        answer(frame, |call| {
            let operands = views(call)?;
            of_floats!(call, "queries", attention_forward(call, &operands))
        })
    }
}

/// Gradients of queries, keys, values and sinks, dense and shaped as these. Arguments: those of the forward pass, its
/// context and logarithms of sums, and the context's cotangent. Attributes are the same.
unsafe extern "C" fn call_attention_backward(frame: *mut Frame) -> *mut Error {
    // SAFETY: XLA calls a handler with a frame of its own.
    unsafe {
        answer(frame, |call| {
            let operands = views(call)?;
            of_floats!(call, "queries", attention_backward(call, &operands))
        })
    }
}

/// What one token of each row makes of a cache. Arguments: queries `[batch, 1, kv_heads, group, head_dim]`, the tokens' keys
/// and values `[batch, 1, kv_heads, head_dim]`, those of the cache `[batch, slots, kv_heads, head_dim]`, the tokens'
/// segments `[batch, 1]` and those of the cache `[batch, slots]`, the tokens' slot, sinks `[kv_heads, group]`; then
/// positions of slices. Result, dense: context `[batch, kv_heads, 1, group, head_dim]`. Attributes are those of attention
/// within sequences.
unsafe extern "C" fn call_attention_to_cache(frame: *mut Frame) -> *mut Error {
    // SAFETY: XLA calls a handler with a frame of its own.
    unsafe { answer(frame, |call| of_floats!(call, "queries", attention_to_cache(call))) }
}

/// An array, part of which is replaced. Arguments: the array, whose memory the result has, the part, and where it begins
/// in each dimension.
unsafe extern "C" fn call_update_slice(frame: *mut Frame) -> *mut Error {
    // SAFETY: XLA calls a handler with a frame of its own.
    unsafe {
        answer(frame, |call| {
            let (dims, part) = (call.dims(0)?, call.dims(1)?);
            let mut starts = Vec::with_capacity(dims.len());
            for (dim, (size, part)) in dims.iter().zip(&part).enumerate() {
                let Data::I32(&[start]) = call.data(2 + dim)? else {
                    return Err("a part has no position".to_owned());
                };
                starts.push((start.max(0) as usize).min(size - part));
            }
            // The argument that shares its memory with the result is reached only as that.
            match (call.updated(0)?, call.data(1)?) {
                (DataMut::F32(all), Data::F32(own)) => replace(all, &dims, own, &part, &starts),
                (DataMut::Bf16(all), Data::Bf16(own)) => replace(all, &dims, own, &part, &starts),
                _ => return Err("a part has another type".to_owned()),
            }
            Ok(())
        })
    }
}

/// Copies a part to where it belongs, in runs that lie together in both.
fn replace<T: Copy>(all: &mut [T], dims: &[usize], part: &[T], part_dims: &[usize], starts: &[usize]) {
    let Some((rank, _)) = dims.iter().zip(part_dims).enumerate().rfind(|(_, (size, part))| size != part)
    else {
        return all.copy_from_slice(part);
    };
    let within: usize = dims[rank + 1..].iter().product();
    let run = part_dims[rank] * within;
    for (index, from) in part.chunks_exact(run.max(1)).enumerate() {
        let (mut rest, mut stride) = (index, dims[rank] * within);
        let mut start = starts[rank] * within;
        for dim in (0..rank).rev() {
            start += (rest % part_dims[dim] + starts[dim]) * stride;
            rest /= part_dims[dim];
            stride *= dims[dim];
        }
        all[start..start + run].copy_from_slice(from);
    }
}

/// How an argument is read.
struct View {
    argument: usize,
    /// The first element.
    start: usize,
    dims: Vec<Dim>,
}

fn views(call: &Call<'_>) -> Result<Vec<View>, Fault> {
    let mut numbers = call.integers("operands")?.iter().map(|number| *number as usize);
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

/// A number of dimensions, and then their sizes and strides.
fn next_dims(numbers: &mut impl Iterator<Item = usize>) -> Result<Vec<Dim>, Fault> {
    let count = numbers.next();
    let dims: Option<Vec<Dim>> = count.and_then(|count| {
        (0..count).map(|_| Some(Dim { size: numbers.next()?, stride: numbers.next()? })).collect()
    });
    dims.ok_or_else(|| "a list of dimensions ends early".to_owned())
}

/// The position of an argument's slice, which another argument holds.
fn slice_position(call: &Call<'_>, argument: usize, position: usize) -> Result<usize, Fault> {
    let Data::I32(&[position]) = call.data(position)? else {
        return Err("a slice has no position".to_owned());
    };
    // As slices elsewhere in programs, those that would not fit are moved.
    let last = call.dims(argument)?.first().map_or(0, |count| count.saturating_sub(1));
    Ok((position.max(0) as usize).min(last))
}

/// An element with its kind of buffers.
trait BufferElement: attention::Attend {
    /// How its products are computed.
    const ARITHMETIC: Arithmetic;

    fn of(data: Data<'_>) -> Option<&[Self]>;
    fn of_mut(data: DataMut<'_>) -> Option<&mut [Self]>;
}

impl BufferElement for f32 {
    const ARITHMETIC: Arithmetic = Arithmetic::F32;

    fn of(data: Data<'_>) -> Option<&[Self]> {
        if let Data::F32(elements) = data { Some(elements) } else { None }
    }

    fn of_mut(data: DataMut<'_>) -> Option<&mut [Self]> {
        if let DataMut::F32(elements) = data { Some(elements) } else { None }
    }
}

impl BufferElement for bf16 {
    const ARITHMETIC: Arithmetic = Arithmetic::Bf16;

    fn of(data: Data<'_>) -> Option<&[Self]> {
        if let Data::Bf16(elements) = data { Some(elements) } else { None }
    }

    fn of_mut(data: DataMut<'_>) -> Option<&mut [Self]> {
        if let DataMut::Bf16(elements) = data { Some(elements) } else { None }
    }
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

    /// The sizes, of which there are `N`.
    fn sizes<const N: usize>(&self) -> Result<[usize; N], Fault> {
        let sizes: Vec<usize> = self.dims.iter().map(|dim| dim.size).collect();
        sizes.try_into().map_err(|_| format!("argument {} has not {N} dimensions", self.argument))
    }

    /// Of queries, keys or rows: their batch, heads and positions come first, and then groups if there are any.
    fn strides(&self, has_group: bool) -> Strides {
        let stride = |index: usize| self.dims.get(index).map_or(0, |dim| dim.stride);
        Strides {
            batch: stride(0),
            kv_head: stride(1),
            position: stride(2),
            group: if has_group { stride(3) } else { 0 },
        }
    }

    /// Of queries, or keys: their batch, positions and heads come first, and then groups if there are any.
    fn positions_first(&self) -> Strides {
        let stride = |index: usize| self.dims.get(index).map_or(0, |dim| dim.stride);
        let group = if self.dims.len() == 5 { stride(3) } else { 0 };
        Strides { batch: stride(0), position: stride(1), kv_head: stride(2), group }
    }

    /// The elements of a matrix one after the other.
    fn gathered<T: Copy>(&self, elements: &[T]) -> Result<Vec<T>, Fault> {
        let [rows, columns] = self.dims[..] else {
            return Err(format!("argument {} is no matrix", self.argument));
        };
        let index = |row: usize, column: usize| self.start + row * rows.stride + column * columns.stride;
        let indices = (0..rows.size).flat_map(|row| (0..columns.size).map(move |column| index(row, column)));
        let elements: Option<Vec<T>> = indices.map(|index| elements.get(index).copied()).collect();
        elements.ok_or_else(|| format!("argument {} ends early", self.argument))
    }
}

/// What both passes are given.
struct AttentionCall {
    options: Options,
    segments: Vec<i32>,
    sinks: Vec<f32>,
}

impl AttentionCall {
    /// Of elements that are multiplied so.
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

/// Which keys are seen, and what scores are capped at.
fn mask_and_cap(call: &Call<'_>) -> Result<(Mask, Option<f32>), Fault> {
    let size = |name: &str| -> Result<Option<usize>, Fault> {
        Ok(Some(call.integer(name)? as usize).filter(|size| *size != 0))
    };
    let soft_cap = f32::from_bits(call.integer("soft_cap")? as u32);
    let mask = Mask { causal: call.integer("causal")? == 1, window: size("window")?, chunk: size("chunk")? };
    Ok((mask, Some(soft_cap).filter(|cap| *cap != 0.0)))
}

fn attention_to_cache<E: BufferElement>(call: &Call<'_>) -> Result<(), Fault> {
    let operands = views(call)?;
    let [query, key, value, cached_key, cached_value, segments, cached_segments, slot, sinks] = &operands[..]
    else {
        return Err("arguments are missing".to_owned());
    };
    let [batch, length, kv_heads, group, head_dim] = query.sizes()?;
    let [_, slots, _, _] = cached_key.sizes()?;
    let shape = Shape { batch, length, kv_heads, group, head_dim };
    let cache = Shape { length: slots, ..shape };
    let (Data::I32(segment_data), Data::I32(cached_data), Data::I32(&[slot]), Data::F32(sink_data)) = (
        call.data(segments.argument)?,
        call.data(cached_segments.argument)?,
        call.data(slot.argument)?,
        call.data(sinks.argument)?,
    ) else {
        return Err("segments, slots or sinks have another type".to_owned());
    };
    let (segments, sinks) = (segments.gathered(segment_data)?, sinks.gathered(sink_data)?);
    let cached_segments = cached_segments.gathered(cached_data)?;
    let keys = |view: &View, shape: Shape| -> Result<attention::Operand<'_, E>, Fault> {
        Ok(attention::Operand::keys(view.elements(call)?, view.positions_first(), shape))
    };
    let inputs = CachedInputs {
        query: attention::Operand::queries(query.elements(call)?, query.positions_first(), shape),
        key: keys(key, shape)?,
        value: keys(value, shape)?,
        cached_key: keys(cached_key, cache)?,
        cached_value: keys(cached_value, cache)?,
        slot: (slot.max(0) as usize).min(slots.saturating_sub(1)),
        segments: &segments,
        cached_segments: &cached_segments,
        sinks: &sinks,
    };
    let (mask, soft_cap) = mask_and_cap(call)?;
    let options = Options { shape, mask, soft_cap, instructions: Instructions::best() };
    let context = Outcome::queries(result::<E>(call, 0)?, Strides::heads_first(shape), shape);
    attention::attend_to_cache(&call.team(), &options, &inputs, &context);
    Ok(())
}

/// A result of a call that is printed without any result in an argument's memory, which is taken once.
fn result<'a, E: BufferElement>(call: &Call<'a>, index: usize) -> Result<&'a mut [E], Fault> {
    // SAFETY: what is said above holds for all callers.
    let data = unsafe { call.data_mut(index)? };
    E::of_mut(data).ok_or_else(|| format!("result {index} has another type"))
}

fn attention_forward<E: BufferElement>(call: &Call<'_>, operands: &[View]) -> Result<(), Fault> {
    let attention = AttentionCall::new(call, operands, E::ARITHMETIC)?;
    let shape = attention.options.shape;
    let inputs = attention.inputs::<E>(call, operands)?;
    let dense = Strides::heads_first(shape);
    let rows = Strides::heads_first(Shape { head_dim: 1, ..shape });
    let largest_scores = match call.integer("with_scores")? {
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

/// A step of Adam. Arguments: the parameter and both moments, whose memory the first three results have; the gradient;
/// then numbers, which are scalars: what gradients are multiplied by, the learning rate, what divides the first moment,
/// what divides the second one and, if `nesterov` is 1, what divides the gradient that is added to the first moment. If
/// `pax` is 1, the third and the fourth are the shares of moments that are kept. The last result is the sum of the new
/// parameter's squares. Attributes, numbers being the bits of an `f32`: `b1`, `b2`, `epsilon`, `epsilon_root`,
/// `weight_decay`, and `new_share_1` and `new_share_2`, which are 1 less `b1` and `b2`. Where another form of the parameter
/// is stepped: `update_scale`, by which the update is multiplied before weight decay, and `constant_decay`, which is added
/// to it.
unsafe extern "C" fn call_adam(frame: *mut Frame) -> *mut Error {
    // SAFETY: XLA calls a handler with a frame of its own.
    unsafe {
        answer(frame, |call| {
            let of_bits = |bits: i64| f32::from_bits(bits as u32);
            let number = |name: &str| call.integer(name).map(of_bits);
            let optional = |name: &str| Ok::<_, Fault>(call.integer_if_given(name)?.map(of_bits));
            let scalar = |argument: usize| match call.data(argument)? {
                Data::F32(&[number]) => Ok(number),
                _ => Err(format!("argument {argument} is no number")),
            };
            let shares = [[number("b1")?, number("new_share_1")?], [number("b2")?, number("new_share_2")?]];
            let (first, second) = (scalar(6)?, scalar(7)?);
            let mut numbers = AdamNumbers {
                gradient_factor: scalar(4)?,
                learning_rate: scalar(5)?,
                first_shares: shares[0],
                second_shares: shares[1],
                update_shares: [1.0 / first, 0.0],
                second_factor: 1.0 / second,
                epsilon: number("epsilon")?,
                epsilon_root: number("epsilon_root")?,
                weight_decay: number("weight_decay")?,
                constant_decay: optional("constant_decay")?.unwrap_or(-0.0),
            };
            if call.integer("nesterov")? == 1 {
                numbers.update_shares = [shares[0][0] / first, shares[0][1] / scalar(8)?];
            }
            if call.integer("pax")? == 1 {
                numbers.first_shares = [first, 1.0 - first];
                numbers.second_shares = [second, 1.0 - second];
                numbers.update_shares = [1.0, 0.0];
                numbers.second_factor = 1.0;
            }
            let update_scale = optional("update_scale")?.unwrap_or(1.0);
            numbers.update_shares = numbers.update_shares.map(|share| share * update_scale);
            let Data::F32(gradient) = call.data(3)? else {
                return Err("the gradient has another type".to_owned());
            };
            let DataMut::F32([squares]) = call.data_mut(3)? else {
                return Err("the sum of squares is no number".to_owned());
            };
            // The first three arguments are reached only as these results.
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

/// The sum of the squares of the only argument's elements.
unsafe extern "C" fn call_sum_of_squares(frame: *mut Frame) -> *mut Error {
    // SAFETY: XLA calls a handler with a frame of its own.
    unsafe {
        answer(frame, |call| {
            let DataMut::F32([sum]) = call.data_mut(0)? else {
                return Err("the result is no number".to_owned());
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

/// Losses of tokens. Arguments: logits `[…, vocab]`, targets `[…]`. Results, as `f32`: cross-entropies `[…]`, and logarithms
/// of the sums of exponentials.
unsafe extern "C" fn call_cross_entropy(frame: *mut Frame) -> *mut Error {
    // SAFETY: XLA calls a handler with a frame of its own.
    unsafe {
        answer(frame, |call| {
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

/// The gradients of logits. Arguments: those of [`call_cross_entropy`], of which the logits have the memory of the only
/// result; its second result; and the cotangents of both.
unsafe extern "C" fn call_cross_entropy_gradient(frame: *mut Frame) -> *mut Error {
    // SAFETY: XLA calls a handler with a frame of its own.
    unsafe {
        answer(frame, |call| {
            let rows = rows(call)?;
            let floats = |argument: usize| match call.data(argument)? {
                Data::F32(elements) => Ok(elements),
                _ => Err(format!("argument {argument} has another type")),
            };
            let log_z = floats(2)?;
            let cotangents = Cotangents { cross_entropy: floats(3)?, log_z: floats(4)? };
            let (team, instructions) = (call.team(), Instructions::best());
            // The first argument is reached only as this result.
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
        answer(frame, |call| {
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

/// What calls know of rows of logits.
fn rows<'a>(call: &Call<'a>) -> Result<Targets<'a>, Fault> {
    let Data::I32(targets) = call.data(1)? else {
        return Err("targets are no integers".to_owned());
    };
    let vocab = call.dims(0)?.last().copied().ok_or("logits have no dimensions")?;
    Ok(Targets { targets, vocab })
}

/// The product of activated gates and another projection. Arguments: both, of the same sizes; then positions of slices.
/// Result, dense: the product. Attributes: `operands`, as for attention, and `gelu`: 1 for this function, 0 for SiLU.
unsafe extern "C" fn call_gated(frame: *mut Frame) -> *mut Error {
    // SAFETY: XLA calls a handler with a frame of its own.
    unsafe { answer(frame, |call| of_floats!(call, "gates", gated_rows(call))) }
}

/// Gradients of both arguments of [`call_gated`], dense. Arguments: these, and the gradient of their product; then positions
/// of slices. Attributes are the same.
unsafe extern "C" fn call_gated_gradient(frame: *mut Frame) -> *mut Error {
    // SAFETY: XLA calls a handler with a frame of its own.
    unsafe { answer(frame, |call| of_floats!(call, "gates", gated_row_gradients(call))) }
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
    Ok(if call.integer("gelu")? == 1 { Gate::Gelu } else { Gate::Silu })
}

/// Rows divided by their root mean square and multiplied by a scale. Arguments: an array, whose last dimension is that of
/// rows; the scale as `f32`, if there is one; then positions of slices. Results, dense: normalized rows, and as `f32` the
/// reciprocal of each row's root mean square. Attributes: `operands`, as for attention; and, the bits of an `f32`,
/// `offset`, which is added to the scale, and `epsilon`, which is added to mean squares.
unsafe extern "C" fn call_rms_norm(frame: *mut Frame) -> *mut Error {
    // SAFETY: XLA calls a handler with a frame of its own.
    unsafe { answer(frame, |call| of_floats!(call, "rows", normalized_rows(call))) }
}

/// Gradients of the arguments of [`call_rms_norm`], dense. Arguments: the gradient of normalized rows; the arguments of the
/// other call; its second result; then positions of slices. Attributes are the same.
unsafe extern "C" fn call_rms_norm_gradient(frame: *mut Frame) -> *mut Error {
    // SAFETY: XLA calls a handler with a frame of its own.
    unsafe { answer(frame, |call| of_floats!(call, "rows", normalized_row_gradients(call))) }
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
    // Rows of one element each.
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
    Ok(RmsNorm { scale, offset: number("offset")?, epsilon: number("epsilon")? })
}

/// Random numbers of a normal distribution. Arguments: what deviations are multiplied by, a key, and the numbers of streams
/// `[count]`. Result: `[count, …]`, each drawn with the key that is derived from the key and the number of the stream.
/// Attributes, the bits of an `f32`: `bound`, the largest deviation, and `edge`, its share.
unsafe extern "C" fn call_normal(frame: *mut Frame) -> *mut Error {
    // SAFETY: XLA calls a handler with a frame of its own.
    unsafe {
        answer(frame, |call| {
            let number = |name: &str| call.integer(name).map(|bits| f32::from_bits(bits as u32));
            let (Data::F32(&[scale]), Data::U64(&[key]), Data::U64(streams)) =
                (call.data(0)?, call.data(1)?, call.data(2)?)
            else {
                return Err("an argument has another type".to_owned());
            };
            let distribution = Normal { scale, bound: number("bound")?, edge: number("edge")? };
            let dims = call.result_dims(0)?;
            let out = result(call, 0)?;
            match dims.split_first() {
                Some((count, dims)) if *count == streams.len() => {
                    normal(&call.team(), Instructions::best(), distribution, key, streams, dims, out);
                    Ok(())
                }
                _ => Err("the result has not one array for each stream".to_owned()),
            }
        })
    }
}
