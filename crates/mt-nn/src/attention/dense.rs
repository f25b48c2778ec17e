//! Attention with the whole matrix of attention logits.

use mt_shape::DType;
use mt_trace::Tensor;

use super::{AttentionOptions, Context, KeysValues, MASKED};
use crate::{
    Dropout,
    axes::{HEAD_DIM, KV_POSITION},
};

/// The terms of attention weights besides the products of queries and keys.
#[derive(Clone, Copy, Default)]
pub struct Additions<'t> {
    /// Numbers that are added to the logits, with the axes `kv_heads`, `group`, `position`, `kv_position`, or some of these
    /// and `batch`.
    pub biases: Option<Tensor<'t>>,
    /// A further logit for each head: `[kv_heads, group]`.
    pub sinks: Option<Tensor<'t>>,
    /// The dropout of the softmax.
    pub dropout: Dropout<'t>,
}

/// The softmax of masked attention logits, times values. Queries are already scaled.
///
/// # Shapes
/// `[batch, position, kv_heads, group, head_dim], [batch, kv_position, kv_heads, head_dim],
/// [batch, kv_position, kv_heads, value_dim], bool[batch, position, kv_position]`
#[track_caller]
pub fn dense<'t>(
    query: Tensor<'t>,
    KeysValues { key, value }: KeysValues<Tensor<'t>>,
    mask: Tensor<'t>,
    additions: Additions<'t>,
    options: &AttentionOptions,
    with_scores: bool,
) -> Context<'t> {
    let (weights, largest_scores) = weigh(query, key, mask, additions, options, with_scores);
    Context { context: weights.cast(query.dtype()).contract(value, &[KV_POSITION]), largest_scores }
}

/// The softmax of masked attention logits, and each query's largest logit if requested.
///
/// # Shapes
/// As those of [`dense`]; the weights are `[batch, kv_heads, position, group, kv_position]`.
#[track_caller]
pub(super) fn weigh<'t>(
    query: Tensor<'t>,
    key: Tensor<'t>,
    mask: Tensor<'t>,
    additions: Additions<'t>,
    options: &AttentionOptions,
    with_scores: bool,
) -> (Tensor<'t>, Option<Tensor<'t>>) {
    let (query, key) =
        if options.float32_product { (query.cast(DType::F32), key.cast(DType::F32)) } else { (query, key) };
    let score_type = if options.float32_scores { DType::F32 } else { query.dtype() };
    let uncapped = query.contract_into(key, &[HEAD_DIM], score_type);
    let scores = match options.soft_cap {
        Some(cap) => (uncapped / cap).tanh() * cap,
        None => uncapped,
    };
    let masked = scores.region().full(score_type, &[], MASKED).broadcast(&scores.axes());
    let scores = match additions.biases {
        Some(biases) => scores + biases.cast(score_type).broadcast(&scores.axes()),
        None => scores,
    };
    let scores = mask.select(scores, masked);
    let largest_scores = with_scores
        .then(|| mask.select(uncapped.stop_gradient(), masked).max(&[KV_POSITION]).cast(DType::F32));
    let weights = match additions.sinks {
        Some(sinks) => softmax_with_sinks(scores, sinks.cast(score_type)),
        None => scores.softmax(KV_POSITION),
    };
    (additions.dropout.apply("attention_weights", weights), largest_scores)
}

/// The softmax over the keys and one sink logit, whose weight is dropped.
#[track_caller]
pub(super) fn softmax_with_sinks<'t>(scores: Tensor<'t>, sinks: Tensor<'t>) -> Tensor<'t> {
    let largest = scores.max(&[KV_POSITION]);
    let sinks = sinks.broadcast(&largest.axes());
    let largest = largest.maximum(sinks).stop_gradient();
    let shifted = (scores - largest).exp();
    shifted / (shifted.sum(&[KV_POSITION]) + (sinks - largest).exp())
}
