//! Attention to the keys of a window and to pooled blocks, by one softmax.

use mt_shape::{Axis, DType, axis};
use mt_trace::Tensor;

use crate::{
    attention::{AttentionOptions, MASKED, dense::softmax_with_sinks, indexer::best_keys},
    axes::{BATCH, HEAD_DIM, KV_POSITION, POSITION, QUERY_HEADS},
};

/// The keys of tokens, which queries see within a window.
pub(super) struct Local<'t> {
    /// `[batch, kv_position, head_dim]`: as many earlier keys as the window has, then those of the queries' tokens.
    pub key: Tensor<'t>,
    /// `i32[batch, kv_position]`
    pub segments: Tensor<'t>,
    pub window: usize,
}

/// Pooled keys.
pub(super) struct Pooled<'t> {
    /// `[batch, kv_position, head_dim]`
    pub key: Tensor<'t>,
    /// `bool[batch, position, kv_position]`
    pub visible: Tensor<'t>,
}

/// Consecutive queries that are processed together, with the keys of their windows.
const CHUNK: &str = "query_chunk";

/// The sums of values, which equal the keys, weighted by the softmax of both kinds of scores and a sink.
///
/// # Shapes
/// `[batch, position, q_heads, head_dim], i32[batch, position], [q_heads] -> [batch, position, q_heads, head_dim]`
#[track_caller]
pub(super) fn attend<'t>(
    query: Tensor<'t>,
    segments: Tensor<'t>,
    local: &Local<'t>,
    pooled: Option<Pooled<'t>>,
    sinks: Tensor<'t>,
    options: &AttentionOptions,
) -> Tensor<'t> {
    let (length, window) = (query.axis(POSITION).size, local.window);
    // No query sees more keys than the chunk before its own and its own chunk have.
    let chunk = if length <= window { length } else { window };
    let chunks = axis(CHUNK, length.div_ceil(chunk));
    let missing = chunks.size * chunk - length;
    let cut = |tensor: Tensor<'t>| {
        let whole = if missing == 0 { tensor } else { tensor.pad(POSITION, 0, missing, 0.0) };
        whole.split(POSITION, &[chunks, axis(POSITION, chunk)])
    };
    let of_chunks = |tensor: Tensor<'t>| {
        if chunks.size == 1 {
            return tensor.split(KV_POSITION, &[chunks, tensor.axis(KV_POSITION)]);
        }
        let whole = if missing == 0 { tensor } else { tensor.pad(KV_POSITION, 0, missing, 0.0) };
        let pieces = whole.split(KV_POSITION, &[axis(CHUNK, chunks.size + 1), axis(KV_POSITION, chunk)]);
        let piece = |first: usize| pieces.slice(CHUNK, first, first + chunks.size);
        piece(0).concatenate(&[piece(1)], KV_POSITION)
    };
    let (query, query_segments) = (cut(query), cut(segments));
    let (key, key_segments) = (of_chunks(local.key), of_chunks(local.segments));
    let sees = {
        let (queries, keys) = (query_segments.axis(POSITION), key_segments.axis(KV_POSITION));
        let pair = [&*query_segments.axes(), &[keys]].concat();
        let region = query.region();
        let place = region.iota(DType::I32, queries).broadcast(&pair) + window as f64;
        let before = place - region.iota(DType::I32, keys).broadcast(&pair);
        let within = before.greater_equal(0.0).logical_and(before.less(window as f64));
        query_segments.broadcast(&pair).equals(key_segments).logical_and(within)
    };
    let score_type = if options.float32_scores { DType::F32 } else { query.dtype() };
    let scores_of = |key: Tensor<'t>, sees: Tensor<'t>| {
        let (query, key) = match options.float32_product {
            true => (query.cast(DType::F32), key.cast(DType::F32)),
            false => (query, key),
        };
        let axes = [BATCH, CHUNK, POSITION, QUERY_HEADS, KV_POSITION];
        let scores = query.contract_into(key, &[HEAD_DIM], score_type).order(&axes);
        let masked = scores.region().full(score_type, &[], MASKED).broadcast(&scores.axes());
        sees.select(scores, masked)
    };
    let of_local = scores_of(key, sees);
    // Truth values cannot be padded.
    let of_pooled = pooled
        .as_ref()
        .map(|pooled| scores_of(pooled.key, cut(pooled.visible.cast(DType::I32)).differs(0.0)));
    let scores = match of_pooled {
        Some(of_pooled) => of_local.concatenate(&[of_pooled], KV_POSITION),
        None => of_local,
    };
    let weights = softmax_with_sinks(scores, sinks.cast(score_type)).cast(query.dtype());
    let (num_local, num_keys) = (key.axis(KV_POSITION).size, weights.axis(KV_POSITION).size);
    let sum = |first: usize, end: usize, key: Tensor<'t>| {
        let weights = if end - first == num_keys { weights } else { weights.slice(KV_POSITION, first, end) };
        weights.contract(key, &[KV_POSITION]).order(&[BATCH, CHUNK, POSITION, QUERY_HEADS, HEAD_DIM])
    };
    let mut context = sum(0, num_local, key);
    if let Some(pooled) = pooled {
        context = context + sum(num_local, num_keys, pooled.key);
    }
    let whole = context.merge(&[CHUNK, POSITION], POSITION);
    if missing == 0 { whole } else { whole.slice(POSITION, 0, length) }
}

/// The blocks with the largest scores among those that are visible: at most `count` for each query. The first
/// of equal scores count.
///
/// # Shapes
/// `f32[batch, position, kv_position], bool[…] -> bool[…]`
#[track_caller]
pub(super) fn best<'t>(scores: Tensor<'t>, visible: Tensor<'t>, count: usize) -> Tensor<'t> {
    let axes: Vec<Axis> = scores.axes().to_vec();
    let scores = visible.select(scores, scores.region().full(DType::F32, &axes, MASKED));
    best_keys(scores, count, true, |cutoff| cutoff).logical_and(visible)
}
