//! Attention with the whole matrix of scores.

use mt_shape::DType;
use mt_trace::Tensor;

use super::{AttentionOptions, MASKED};
use crate::axes::{HEAD_DIM, KV_POSITION};

/// Softmax of masked scores, times values. Queries are already scaled.
///
/// # Shapes
/// `[batch, position, kv_heads, group, head_dim], [batch, kv_position, kv_heads, head_dim] (twice),
/// bool[batch, position, kv_position] -> [batch, kv_heads, position, group, head_dim]`
#[track_caller]
pub fn dense<'t>(
    query: Tensor<'t>,
    key: Tensor<'t>,
    value: Tensor<'t>,
    mask: Tensor<'t>,
    options: &AttentionOptions,
) -> Tensor<'t> {
    let dtype = query.dtype();
    let (query, key) =
        if options.float32_product { (query.cast(DType::F32), key.cast(DType::F32)) } else { (query, key) };
    let score_type = if options.float32_scores { DType::F32 } else { query.dtype() };
    let scores = query.contract_into(key, &[HEAD_DIM], score_type);
    let masked = scores.region().full(score_type, &[], MASKED).broadcast(&scores.axes());
    let scores = mask.select(scores, masked);
    scores.softmax(KV_POSITION).cast(dtype).contract(value, &[KV_POSITION])
}
