//! Mixtures of block attention (Lu et al., 2025: MoBA): queries that see only the chunks of keys that match them best.

use mt_shape::{Axis, DType, axis};
use mt_trace::Tensor;

use super::Segments;
use crate::axes::{CHOICE, HEAD_DIM, KV_POSITION};

/// The chunks that a query sees: its own, and earlier ones of its document with the largest products of the query and
/// the mean key of the chunk. Chunks are counted from the beginning of a row, and the mean is over the keys of the
/// query's document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChosenChunks {
    /// The number of places in a chunk.
    pub size: usize,
    /// The maximum number of chunks that a query sees.
    pub count: usize,
}

const CHUNK: &str = "chunk";

impl ChosenChunks {
    /// Whether each query sees each key, regardless of other masks. The choice has no gradient. Documents of a row are
    /// numbered in order.
    ///
    /// # Shapes
    /// `[batch, position, kv_heads, group, head_dim], [batch, kv_position, kv_heads, head_dim] -> bool[batch, position,
    /// kv_heads, group, kv_position]`
    #[track_caller]
    pub(super) fn mask<'t>(self, query: Tensor<'t>, key: Tensor<'t>, segments: Segments<'t>) -> Tensor<'t> {
        let region = query.region();
        let keys = key.axis(KV_POSITION);
        let chunks = axis(CHUNK, keys.size.div_ceil(self.size));
        let (query_place, key_place) = segments.places(true);
        let numbers = region.iota(DType::I32, chunks);
        let with = |tensor: Tensor<'t>, last: Axis| [&*tensor.axes(), &[last]].concat();
        let of_rows =
            |places: Tensor<'t>, like: Tensor<'t>| (places / self.size as f64).broadcast(&like.axes());

        let key_chunk = of_rows(key_place, segments.key);
        let pair = with(segments.key, chunks);
        let is_token = segments.key.differs(0.0).broadcast(&pair);
        let is_member = numbers.broadcast(&pair).equals(key_chunk).logical_and(is_token);
        let none = region.full(DType::I32, &pair, 0.0);
        // Later chunks belong to the last document of a chunk, if they belong to any of its documents.
        let document = is_member.select(segments.key.broadcast(&pair), none).max(&[KV_POSITION]);
        let is_counted =
            segments.key.broadcast(&pair).equals(document).logical_and(is_member).cast(DType::F32);
        let sums = is_counted.contract(key.stop_gradient().cast(DType::F32), &[KV_POSITION]);
        let means = sums / is_counted.sum(&[KV_POSITION]).maximum(1.0);

        let query_chunk = of_rows(query_place, segments.query);
        let pair = with(segments.query, chunks);
        let numbers = numbers.broadcast(&pair);
        let is_own = numbers.equals(query_chunk);
        let is_earlier =
            numbers.less(query_chunk).logical_and(document.broadcast(&pair).equals(segments.query));
        let products = query.stop_gradient().cast(DType::F32).contract(means, &[HEAD_DIM]);
        let mut order: Vec<&'static str> = query.axes().iter().map(|own| own.name).collect();
        order.retain(|name| *name != HEAD_DIM);
        order.push(CHUNK);
        let products = products.order(&order);
        let all = products.axes();
        let constant = |value: f64| region.full(DType::F32, &all, value);
        let others = is_earlier.broadcast(&all).select(products, constant(f64::NEG_INFINITY));
        let scores = is_own.broadcast(&all).select(constant(f64::INFINITY), others);
        let (_, best) = scores.top_k(self.count.min(chunks.size), CHOICE);
        let choices = [&*best.axes(), &[chunks]].concat();
        let is_best =
            region.iota(DType::I32, chunks).broadcast(&choices).equals(best).any(&[CHOICE]).order(&order);
        let is_allowed = is_own.logical_or(is_earlier).broadcast(&all);
        let is_chosen = is_best.logical_and(is_allowed).cast(DType::F32);
        is_chosen.contract(is_member.cast(DType::F32), &[CHUNK]).greater(0.5)
    }
}
