//! Attention of one new token per row to a cache.

use half::bf16;
use mt_shape::kernels;

use super::{View, invariant, is_invariant, mask_and_cap, result, views};
use crate::{
    Instructions,
    attention::{self, Cache, CachedInputs, Operand, Options, Outcome, Shape, Strides},
    buffer_element::BufferElement,
    ffi::{Call, Data, Error, Fault, Frame, answer},
};

/// Attention of one new token per row to the KV cache.
///
/// Arguments: queries `[batch, 1, kv_heads, group, head_dim]`, the tokens' keys and values
/// `[batch, 1, kv_heads, head_dim]`, the cached ones `[batch, slots, kv_heads, head_dim]`, the tokens' segments
/// `[batch, 1]`, the cached ones `[batch, slots]`, the tokens' slot, sinks `[kv_heads, group]`; then the positions of
/// slices. Result, dense: context `[batch, kv_heads, 1, group, value_dim]`. Attributes: those of self-attention.
pub(super) unsafe extern "C" fn call_attention_to_cache(frame: *mut Frame) -> *mut Error {
    // SAFETY: XLA calls a handler with a frame of its own.
    unsafe {
        answer(frame, &kernels::ATTENTION_TO_CACHE, |call| {
            of_floats!(call, "queries", attention_to_cache(call))
        })
    }
}

/// Attention of one new token per row to the pages of a KV cache.
///
/// Arguments: queries `[batch, 1, kv_heads, group, head_dim]`, the tokens' keys and values
/// `[batch, 1, kv_heads, head_dim]`, the cached ones `[pages, page_size, kv_heads, head_dim]`, the pages of each row
/// `[batch, pages_of_row]`, the number of tokens before `[batch]`, the tokens' segments, which are not read, sinks
/// `[kv_heads, group]`; then the positions of slices. Result, dense: context `[batch, kv_heads, 1, group, head_dim]`.
/// Attributes: those of self-attention. If the call is invariant, rows may have several tokens.
pub(super) unsafe extern "C" fn call_attention_to_pages(frame: *mut Frame) -> *mut Error {
    // SAFETY: XLA calls a handler with a frame of its own.
    unsafe {
        answer(frame, &kernels::ATTENTION_TO_PAGES, |call| {
            of_floats!(call, "queries", attention_to_pages(call))
        })
    }
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
    let kept = Cache::Slots {
        slot: (slot.max(0) as usize).min(slots.saturating_sub(1)),
        segments: &segments,
        cached_segments: &cached_segments,
    };
    attend::<E>(call, [query, key, value, cached_key, cached_value], [shape, cache], kept, &sinks)
}

fn attention_to_pages<E: BufferElement>(call: &Call<'_>) -> Result<(), Fault> {
    let operands = views(call)?;
    let [query, key, value, cached_key, cached_value, table, before, _, sinks] = &operands[..] else {
        return Err("arguments are missing".to_owned());
    };
    let [batch, length, kv_heads, group, head_dim] = query.sizes()?;
    let [num_pages, page_size, _, _] = cached_key.sizes()?;
    let shape = Shape { batch, length, kv_heads, group, head_dim };
    let cache = Shape { batch: num_pages, length: page_size, ..shape };
    let (Data::I32(table_data), Data::I32(before_data), Data::F32(sink_data)) =
        (call.data(table.argument)?, call.data(before.argument)?, call.data(sinks.argument)?)
    else {
        return Err("tables, numbers of tokens or sinks have another type".to_owned());
    };
    let (table, sinks) = (table.gathered(table_data)?, sinks.gathered(sink_data)?);
    let [before] = &before.dims[..] else { return Err("there is no number of tokens".to_owned()) };
    let numbers: Option<Vec<i32>> =
        (0..before.size).map(|row| before_data.get(row * before.stride).copied()).collect();
    let numbers = numbers.ok_or("the numbers of tokens end early")?;
    let width = table.len() / batch.max(1);
    let is_in_range = |page: &i32| (0..num_pages as i32).contains(page);
    let fits = |before: &i32| (0..=(width * page_size) as i32).contains(before);
    if !table.iter().all(is_in_range) || numbers.len() != batch || !numbers.iter().all(fits) {
        return Err("a table names a page that does not exist, or has too few pages".to_owned());
    }
    let kept = Cache::Pages { page_size, before: &numbers, table: &table };
    attend::<E>(call, [query, key, value, cached_key, cached_value], [shape, cache], kept, &sinks)
}

/// Attends from queries to the keys of the call and to kept ones, with the shapes of both.
fn attend<E: BufferElement>(
    call: &Call<'_>,
    [query, key, value, cached_key, cached_value]: [&View; 5],
    [shape, cached]: [Shape; 2],
    cache: Cache<'_>,
    sinks: &[f32],
) -> Result<(), Fault> {
    if is_invariant(call)? {
        let operands = [query, key, value, cached_key, cached_value];
        return invariant::attention_to_cache::<E>(call, operands, [shape, cached], cache, sinks);
    }
    let keys = |view: &View, shape: Shape| -> Result<Operand<'_, E>, Fault> {
        Ok(Operand::keys(view.elements(call)?, view.positions_first(), shape))
    };
    let inputs = CachedInputs {
        query: Operand::queries(query.elements(call)?, query.positions_first(), shape),
        key: keys(key, shape)?,
        value: keys(value, shape)?,
        cached_key: keys(cached_key, cached)?,
        cached_value: keys(cached_value, cached)?,
        cache,
        sinks,
    };
    let (mask, soft_cap) = mask_and_cap(call)?;
    let options = Options { shape, mask, soft_cap, instructions: Instructions::best() };
    let context = Outcome::queries(result::<E>(call, 0)?, Strides::heads_first(shape), shape);
    attention::attend_to_cache(&call.team(), &options, &inputs, &context);
    Ok(())
}
