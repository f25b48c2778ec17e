//! Attention of one new token per row to the KV cache and to itself. The cache has slots for each row, or pages that
//! rows share.
//!
//! Each visible cache slot is read once, in memory order. Each thread takes stretches of slots and keeps, for each
//! head, the largest score, the sum of weights and the weighted sum of values. The partial results are combined at the
//! end.

use super::{
    Element, MASKED, Mask, Options,
    operands::{Operand, Outcome, Row, Shape},
};
use crate::{
    Team,
    simd::{Simd, Work, with_simd},
};

/// Slots whose scores are computed before any are exponentiated.
const BLOCK: usize = 32;

/// The fewest slots that are worth a task of their own.
const SHORTEST_TASK: usize = 64;

/// Partial sums of a dot product.
const LANES: usize = 16;

/// One new token per row, and the cache. The cache does not yet hold the token's own key and value.
#[derive(Clone, Copy)]
pub struct CachedInputs<'a, E> {
    /// The token's query, scaled.
    pub query: Operand<'a, E>,
    pub key: Operand<'a, E>,
    pub value: Operand<'a, E>,
    pub cached_key: Operand<'a, E>,
    pub cached_value: Operand<'a, E>,
    pub cache: Cache<'a>,
    /// `[kv_heads, group]`: for each query head, the score of an additional key whose value is zero.
    pub sinks: &'a [f32],
}

/// The place of each row's earlier tokens.
#[derive(Clone, Copy)]
pub enum Cache<'a> {
    /// Each row has slots of its own.
    Slots {
        /// The cache slot of the token.
        slot: usize,
        /// `[batch]`: the token's segment number.
        segments: &'a [i32],
        /// `[batch, slots]`: the segment number of each slot, including the token's own; 0 marks an empty slot.
        cached_segments: &'a [i32],
    },
    /// The batch of the cached keys and values are pages, whose positions are slots.
    Pages {
        page_size: usize,
        /// `[batch]`: the number of tokens before each row's own.
        before: &'a [i32],
        /// `[batch, pages]`: the pages of each row in order.
        table: &'a [i32],
    },
}

impl Cache<'_> {
    /// The number of the row's own token among its slots, which the cache does not hold.
    #[inline(always)]
    fn own(&self, batch: usize) -> usize {
        match *self {
            Self::Slots { slot, .. } => slot,
            Self::Pages { before, .. } => before[batch].max(0) as usize,
        }
    }

    /// The index of a slot in the arrays of keys and values: that of the batch, and that of the position.
    #[inline(always)]
    fn location(&self, batch: usize, slot: usize) -> [usize; 2] {
        match *self {
            Self::Slots { .. } => [batch, slot],
            Self::Pages { page_size, before, table } => {
                let width = table.len() / before.len();
                [table[batch * width + slot / page_size].max(0) as usize, slot % page_size]
            }
        }
    }

    /// The slots that each row's token sees, in ascending order.
    fn visible(&self, mask: Mask) -> Vec<Vec<usize>> {
        match *self {
            Self::Slots { slot, segments, cached_segments } => {
                let num_slots = cached_segments.len() / segments.len().max(1);
                let rows = cached_segments.chunks_exact(num_slots).zip(segments);
                rows.map(|(cached, segment)| visible(mask, slot, *segment, cached)).collect()
            }
            Self::Pages { before, .. } => (0..before.len())
                .map(|row| {
                    let own = self.own(row);
                    let window = mask.window.map_or(0, |window| (own + 1).saturating_sub(window));
                    let chunk = mask.chunk.map_or(0, |chunk| own / chunk * chunk);
                    (window.max(chunk)..=own).collect()
                })
                .collect(),
        }
    }
}

/// Computes the context of one token per row from the cache and the token's own value. The shape's length is 1.
pub fn attend_to_cache<E: Element>(
    team: &dyn Team,
    options: &Options,
    inputs: &CachedInputs<'_, E>,
    context: &Outcome<'_, E>,
) {
    with_simd!(options.instructions, simd => run(team, simd, options, inputs, context));
}

fn run<S: Simd, E: Element>(
    team: &dyn Team,
    simd: S,
    options: &Options,
    inputs: &CachedInputs<'_, E>,
    context: &Outcome<'_, E>,
) {
    let Shape { batch, length, kv_heads, group, head_dim } = options.shape;
    let is_right = match inputs.cache {
        Cache::Slots { slot, segments, cached_segments } => {
            segments.len() == batch && slot < cached_segments.len() / batch.max(1)
        }
        Cache::Pages { page_size, before, table } => {
            let width = table.len() / batch.max(1);
            let fits = |before: &i32| *before as usize <= width * page_size;
            before.len() == batch && before.iter().all(fits)
        }
    };
    assert!(length == 1 && is_right, "each row has one token, and slots for those before");
    assert!(inputs.sinks.len() == kv_heads * group, "there is a sink of each head");
    let rows = inputs.cache.visible(options.mask);
    let all: usize = rows.iter().map(Vec::len).sum();
    let stretch = all.div_ceil(2 * team.num_threads()).next_multiple_of(BLOCK).max(SHORTEST_TASK);
    let tasks: Vec<(usize, &[usize])> = rows
        .iter()
        .enumerate()
        .flat_map(|(row, slots)| slots.chunks(stretch).map(move |slots| (row, slots)))
        .collect();
    let heads = kv_heads * group;
    let mut states = vec![0.0; tasks.len() * heads * (2 + head_dim)];
    let partials: Vec<_> =
        states.chunks_exact_mut(heads * (2 + head_dim)).map(std::sync::Mutex::new).collect();
    team.for_each(tasks.len(), &|index| {
        let (batch, slots) = tasks[index];
        let mut state = partials[index].try_lock().expect("a task runs once");
        simd.run(Stretch { simd, options, inputs, batch, slots, state: State::of(&mut state, heads) });
    });
    drop(partials);
    let mut total = vec![0.0; head_dim];
    for row in 0..batch {
        let all = tasks.iter().zip(states.chunks_exact_mut(heads * (2 + head_dim)));
        let own = all.filter(|((batch, _), _)| *batch == row);
        let own: Vec<State> = own.map(|(_, state)| State::of(state, heads)).collect();
        for head in 0..heads {
            let sink = inputs.sinks[head];
            let largest = own.iter().map(|state| state.largest[head]).fold(sink, f32::max);
            let mut sum = (sink - largest).exp();
            total.fill(0.0);
            for state in &own {
                let factor = (state.largest[head] - largest).exp();
                sum += state.sums[head] * factor;
                let values = &state.totals[head * head_dim..][..head_dim];
                total.iter_mut().zip(values).for_each(|(total, value)| *total += value * factor);
            }
            total.iter_mut().for_each(|total| *total /= sum);
            let row = Row { batch: row, position: 0, kv_head: head / group, group: head % group };
            // SAFETY: all tasks have ended, and this loop runs on one thread.
            unsafe { context.write(row, &total) };
        }
    }
}

/// The slots that a token sees, in ascending order.
fn visible(mask: Mask, own: usize, segment: i32, cached: &[i32]) -> Vec<usize> {
    let end = if mask.causal { own + 1 } else { cached.len() };
    let is_segment = |slot: &usize| cached[*slot] == segment;
    if mask.window.is_none() && mask.chunk.is_none() {
        return (0..end).filter(is_segment).collect();
    }
    // Slots that a shorter prompt leaves empty do not count as positions.
    let mut count = 0_isize;
    let places: Vec<isize> = cached
        .iter()
        .map(|segment| {
            count += isize::from(*segment != 0);
            count - 1
        })
        .collect();
    let sees = |slot: &usize| {
        let [query, key] = [own, *slot].map(|slot| places[slot]);
        mask.window.is_none_or(|window| query - key < window as isize)
            && mask.chunk.is_none_or(|chunk| query / chunk as isize == key / chunk as isize)
            && (!mask.causal || key <= query)
    };
    (0..cached.len()).filter(is_segment).filter(sees).collect()
}

/// The running softmax of each head.
struct State<'a> {
    largest: &'a mut [f32],
    sums: &'a mut [f32],
    /// `[heads, head_dim]`
    totals: &'a mut [f32],
}

impl<'a> State<'a> {
    fn of(numbers: &'a mut [f32], heads: usize) -> Self {
        let (largest, rest) = numbers.split_at_mut(heads);
        let (sums, totals) = rest.split_at_mut(heads);
        Self { largest, sums, totals }
    }
}

/// A task: some slots of one row.
struct Stretch<'a, S, E> {
    simd: S,
    options: &'a Options,
    inputs: &'a CachedInputs<'a, E>,
    batch: usize,
    slots: &'a [usize],
    state: State<'a>,
}

impl<S: Simd, E: Element> Work for Stretch<'_, S, E> {
    #[inline(always)]
    fn run(self) {
        let Self { simd, options, inputs, batch, slots, state } = self;
        let Shape { kv_heads, group, head_dim, .. } = options.shape;
        let heads = kv_heads * group;
        let mut queries = vec![0.0; heads * head_dim];
        for (head, query) in queries.chunks_exact_mut(head_dim).enumerate() {
            let row = Row { batch, position: 0, kv_head: head / group, group: head % group };
            for (wide, number) in query.iter_mut().zip(inputs.query.row(row)) {
                *wide = number.to_f32();
            }
        }
        let mut scores = vec![0.0; heads * BLOCK];
        state.largest.fill(MASKED);
        for slots in slots.chunks(BLOCK) {
            for (index, slot) in slots.iter().enumerate() {
                for kv_head in 0..kv_heads {
                    let key = row(&inputs.key, &inputs.cached_key, inputs.cache, batch, *slot, kv_head);
                    for head in kv_head * group..(kv_head + 1) * group {
                        scores[head * BLOCK + index] = product(&queries[head * head_dim..][..head_dim], key);
                    }
                }
            }
            for (head, scores) in scores.chunks_exact_mut(BLOCK).enumerate() {
                let totals = &mut state.totals[head * head_dim..][..head_dim];
                if let Some(cap) = options.soft_cap {
                    for scores in scores[..slots.len().next_multiple_of(S::WIDTH)].chunks_exact_mut(S::WIDTH)
                    {
                        let capped = simd.tanh(simd.div(simd.load(scores), simd.splat(cap)));
                        simd.store(simd.mul(capped, simd.splat(cap)), scores);
                    }
                }
                scores[slots.len()..].fill(MASKED);
                let before = state.largest[head];
                let largest = scores.iter().fold(before, |largest, score| largest.max(*score));
                for scores in scores.chunks_exact_mut(S::WIDTH) {
                    simd.store(simd.exp(simd.sub(simd.load(scores), simd.splat(largest))), scores);
                }
                let factor = (before - largest).exp();
                state.largest[head] = largest;
                state.sums[head] = state.sums[head] * factor + scores[..slots.len()].iter().sum::<f32>();
                if factor != 1.0 {
                    totals.iter_mut().for_each(|total| *total *= factor);
                }
            }
            for (index, slot) in slots.iter().enumerate() {
                for kv_head in 0..kv_heads {
                    let value = row(&inputs.value, &inputs.cached_value, inputs.cache, batch, *slot, kv_head);
                    for head in kv_head * group..(kv_head + 1) * group {
                        let weight = scores[head * BLOCK + index];
                        let totals = &mut state.totals[head * head_dim..][..head_dim];
                        for (total, value) in totals.iter_mut().zip(value) {
                            *total += weight * value.to_f32();
                        }
                    }
                }
            }
        }
    }
}

/// A key or value: the token's own, or one from the cache.
#[inline(always)]
fn row<'a, E: Element>(
    own: &Operand<'a, E>,
    cached: &Operand<'a, E>,
    cache: Cache<'_>,
    batch: usize,
    slot: usize,
    kv_head: usize,
) -> &'a [E] {
    if slot == cache.own(batch) {
        own.row(Row { batch, position: 0, kv_head, group: 0 })
    } else {
        let [batch, position] = cache.location(batch, slot);
        cached.row(Row { batch, position, kv_head, group: 0 })
    }
}

#[inline(always)]
fn product<E: Element>(query: &[f32], key: &[E]) -> f32 {
    let mut sums = [0.0; LANES];
    let (queries, last_queries) = query.as_chunks::<LANES>();
    let (keys, last_keys) = key.as_chunks::<LANES>();
    for (query, key) in queries.iter().zip(keys) {
        for lane in 0..LANES {
            sums[lane] += query[lane] * key[lane].to_f32();
        }
    }
    let mut lanes = LANES;
    while lanes > 1 {
        lanes /= 2;
        for lane in 0..lanes {
            sums[lane] += sums[lane + lanes];
        }
    }
    let last = last_queries.iter().zip(last_keys).map(|(query, key)| query * key.to_f32());
    sums[0] + last.sum::<f32>()
}
