//! Attention block by block, in memory linear in the length (Rabe and Staats, 2021; Dao et al., 2022).
//!
//! Queries are taken block by block; for each, a loop visits the blocks of keys that the causal mask lets it see and
//! keeps a running maximum and sum. Nothing of the size of the matrix of scores is ever held. The derivative is
//! given: it computes scores again from the logarithms of the sums.

use mt_shape::{Axis, DType, axis};
use mt_trace::{Region, ScanOptions, Tensor};

use super::{AttentionOptions, MASKED, resized};
use crate::axes::{GROUP, HEAD_DIM, KV_HEADS, KV_POSITION, POSITION};

/// Positions in a block. Of 64, 128, 256 and 512, measured on 2 cores by `examples/attention.rs`, 64 and 128 take about
/// the same processor time and larger ones more: they compute more scores that the mask hides, and leave the cache.
pub const BLOCK_SIZE: usize = 128;

const BLOCKS: &str = "blocks";
/// The segment of positions that fill up the last block: no token has it.
const FILLER: f64 = -1.0;

/// Causal attention within segments. Queries are already scaled.
///
/// # Shapes
/// `[batch, position, kv_heads, group, head_dim], [batch, kv_position, kv_heads, head_dim] (twice),
/// i32[batch, position] -> [batch, kv_heads, position, group, head_dim]`
#[track_caller]
pub fn blockwise<'t>(
    query: Tensor<'t>,
    key: Tensor<'t>,
    value: Tensor<'t>,
    segmentation: Tensor<'t>,
    sinks: Option<Tensor<'t>>,
    options: &AttentionOptions,
    block: usize,
) -> Tensor<'t> {
    let length = query.axis(POSITION).size;
    let filler = length.next_multiple_of(block) - length;
    let fill = |tensor: Tensor<'t>, along: &'static str, value: f64| {
        if filler == 0 { tensor } else { tensor.pad(along, 0, filler, value) }
    };
    let axes = query.axes();
    let batch: Vec<&'static str> = axes
        .iter()
        .map(|axis| axis.name)
        .filter(|name| ![POSITION, KV_HEADS, GROUP, HEAD_DIM].contains(name))
        .collect();
    let order = [batch[0], KV_HEADS, POSITION, GROUP, HEAD_DIM];
    let query = fill(query.order(&order), POSITION, 0.0);
    let key = fill(key.order(&[batch[0], KV_HEADS, KV_POSITION, HEAD_DIM]), KV_POSITION, 0.0);
    let value = fill(value.order(&[batch[0], KV_HEADS, KV_POSITION, HEAD_DIM]), KV_POSITION, 0.0);
    let segmentation = fill(segmentation, POSITION, FILLER);
    let kernel = Kernel { block, float32_product: options.float32_product };
    let [context] = query.region().custom_vjp(
        "blockwise_attention",
        [query, key, value, segmentation],
        [true, true, true, false],
        |_, [query, key, value, segments]| [kernel.forward(query, key, value, segments).0],
        |_, [query, key, value, segments]| {
            let (context, log_sums) = kernel.forward(query, key, value, segments);
            let (context, log_sums) = (context.named("context"), log_sums.named("context"));
            ([context], vec![query, key, value, segments, context, log_sums])
        },
        |_, residuals, [cotangent]| kernel.backward(&residuals, cotangent),
    );
    if filler == 0 { context } else { context.slice(POSITION, 0, length) }
}

#[derive(Clone, Copy)]
struct Kernel {
    block: usize,
    float32_product: bool,
}

/// The blocks of a tensor along an axis, for a scan.
#[derive(mt_derive::Tree)]
struct QueryBlock<L> {
    index: L,
    query: L,
    segments: L,
}

#[derive(mt_derive::Tree)]
struct BackwardBlock<L> {
    index: L,
    query: L,
    segments: L,
    cotangent: L,
    log_sums: L,
    correction: L,
}

impl Kernel {
    fn product_type(self, query: Tensor<'_>) -> DType {
        if self.float32_product { DType::F32 } else { query.dtype() }
    }

    fn num_blocks(self, query: Tensor<'_>) -> Axis {
        axis(BLOCKS, query.axis(POSITION).size / self.block)
    }

    /// Cuts an axis into blocks and makes the blocks the leading axis.
    fn blocks<'b>(self, tensor: Tensor<'b>, along: &'static str) -> Tensor<'b> {
        let count = axis(BLOCKS, tensor.axis(along).size / self.block);
        let cut = tensor.split(along, &[count, axis(along, self.block)]);
        let rest: Vec<Axis> = cut.axes().iter().filter(|axis| axis.name != BLOCKS).copied().collect();
        cut.broadcast(&[&[count], rest.as_slice()].concat())
    }

    /// Puts blocks along a leading axis back into their place.
    fn join<'b>(self, blocks: Tensor<'b>, axes: &[Axis], along: &'static str) -> Tensor<'b> {
        let count = blocks.axis(BLOCKS);
        let order: Vec<Axis> = axes
            .iter()
            .flat_map(
                |axis| if axis.name == along { vec![count, axis.with_size(self.block)] } else { vec![*axis] },
            )
            .collect();
        blocks.broadcast(&order).merge(&[BLOCKS, along], along)
    }

    /// Scores of a block of queries with a block of keys, masked, and the keys themselves.
    fn scores<'b>(
        self,
        query: Tensor<'b>,
        query_segments: Tensor<'b>,
        query_block: Tensor<'b>,
        key: Tensor<'b>,
        key_segments: Tensor<'b>,
        key_block: Tensor<'b>,
    ) -> Tensor<'b> {
        let product = self.product_type(query);
        let scores = query.cast(product).contract_into(key.cast(product), &[HEAD_DIM], DType::F32);
        let region = scores.region();
        let place = |block: Tensor<'b>, axis: Axis| region.iota(DType::I32, axis) + block * self.block as f64;
        let (queries, keys) = (scores.axis(POSITION), scores.axis(KV_POSITION));
        let causal =
            place(query_block, queries).broadcast(&[queries, keys]).greater_equal(place(key_block, keys));
        let pair = [&*query_segments.axes(), &[keys]].concat();
        let mask = query_segments.broadcast(&pair).equals(key_segments).logical_and(causal);
        mask.select(scores, region.full(DType::F32, &[], MASKED).broadcast(&scores.axes()))
    }

    /// The context, and for each query the logarithm of the sum of its exponentiated scores.
    fn forward<'b>(
        self,
        query: Tensor<'b>,
        key: Tensor<'b>,
        value: Tensor<'b>,
        segments: Tensor<'b>,
    ) -> (Tensor<'b>, Tensor<'b>) {
        let blocks = self.num_blocks(query);
        let region = query.region();
        let key_segments = segments.rename(POSITION, KV_POSITION);
        let inputs = QueryBlock {
            index: region.iota(DType::I32, blocks),
            query: self.blocks(query, POSITION),
            segments: self.blocks(segments, POSITION),
        };
        let query_axes = query.axes();
        let row_axes: Vec<Axis> = query_axes.iter().filter(|axis| axis.name != HEAD_DIM).copied().collect();
        let ([], [context, log_sums]) =
            region.scan(ScanOptions::over(blocks), [], &inputs, |region, [], q| {
                let rows = resized(&row_axes, POSITION, self.block);
                let wide = resized(&query_axes, POSITION, self.block);
                let start = [
                    region.integer(DType::I32, 0),
                    region.full(DType::F32, &rows, MASKED),
                    region.full(DType::F32, &rows, 0.0),
                    region.full(DType::F32, &wide, 0.0),
                ];
                let [_, largest, sum, total] = region.while_loop(
                    start,
                    |_, [block, _, _, _]| block.less_equal(q.index),
                    |_, [block, largest, sum, total]| {
                        let (k, v, k_segments) = self.key_block(key, value, key_segments, block);
                        let scores = self.scores(q.query, q.segments, q.index, k, k_segments, block);
                        let next = largest.maximum(scores.max(&[KV_POSITION]).broadcast(&largest.axes()));
                        let weights = (scores - next).exp();
                        let fade = (largest - next).exp();
                        let product = weights.cast(v.dtype()).contract_into(v, &[KV_POSITION], DType::F32);
                        [block + 1.0, next, sum * fade + weights.sum(&[KV_POSITION]), total * fade + product]
                    },
                );
                ([], [(total / sum).cast(q.query.dtype()), largest + sum.log()])
            });
        (self.join(context, &query_axes, POSITION), self.join(log_sums, &row_axes, POSITION))
    }

    fn key_block<'b>(
        self,
        key: Tensor<'b>,
        value: Tensor<'b>,
        segments: Tensor<'b>,
        block: Tensor<'b>,
    ) -> (Tensor<'b>, Tensor<'b>, Tensor<'b>) {
        let start = block * self.block as f64;
        let cut = |tensor: Tensor<'b>| tensor.dynamic_slice(KV_POSITION, start, self.block);
        (cut(key), cut(value), cut(segments))
    }

    fn backward<'b>(self, residuals: &[Tensor<'b>], cotangent: Tensor<'b>) -> Vec<Tensor<'b>> {
        let [query, key, value, segments, context, log_sums] = residuals else {
            unreachable!("the forward function returns six residuals")
        };
        let (query, key, value, segments) = (*query, *key, *value, *segments);
        let region: Region<'b> = query.region();
        let blocks = self.num_blocks(query);
        let key_segments = segments.rename(POSITION, KV_POSITION);
        // Softmax's derivative subtracts from each score's cotangent their weighted mean.
        let correction = (context.cast(DType::F32) * cotangent.cast(DType::F32)).sum(&[HEAD_DIM]);
        let inputs = BackwardBlock {
            index: region.iota(DType::I32, blocks),
            query: self.blocks(query, POSITION),
            segments: self.blocks(segments, POSITION),
            cotangent: self.blocks(cotangent, POSITION),
            log_sums: self.blocks(*log_sums, POSITION),
            correction: self.blocks(correction, POSITION),
        };
        let query_axes = query.axes();
        let zeros = |like: Tensor<'b>| region.full(DType::F32, &like.axes(), 0.0);
        let ([key_gradient, value_gradient], [query_gradient]) = region.scan(
            ScanOptions::over(blocks),
            [zeros(key), zeros(value)],
            &inputs,
            |region, [dk, dv], q| {
                let wide = resized(&query_axes, POSITION, self.block);
                let start = [region.integer(DType::I32, 0), region.full(DType::F32, &wide, 0.0), dk, dv];
                let [_, dq, dk, dv] = region.while_loop(
                    start,
                    |_, [block, _, _, _]| block.less_equal(q.index),
                    |_, [block, dq, dk, dv]| {
                        let (k, v, k_segments) = self.key_block(key, value, key_segments, block);
                        let dtype = k.dtype();
                        let scores = self.scores(q.query, q.segments, q.index, k, k_segments, block);
                        let weights = (scores - q.log_sums).exp();
                        let from_value = q.cotangent.contract_into(v, &[HEAD_DIM], DType::F32);
                        let scores_gradient = (weights * (from_value - q.correction)).cast(dtype);
                        let start = block * self.block as f64;
                        let dv_block =
                            weights.cast(dtype).contract_into(q.cotangent, &[POSITION, GROUP], DType::F32);
                        let dk_block = scores_gradient.contract_into(q.query, &[POSITION, GROUP], DType::F32);
                        let dq_block = scores_gradient.contract_into(k, &[KV_POSITION], DType::F32);
                        let old_dk = dk.dynamic_slice(KV_POSITION, start, self.block);
                        let old_dv = dv.dynamic_slice(KV_POSITION, start, self.block);
                        [
                            block + 1.0,
                            dq + dq_block,
                            dk.dynamic_update(KV_POSITION, start, old_dk + dk_block),
                            dv.dynamic_update(KV_POSITION, start, old_dv + dv_block),
                        ]
                    },
                );
                ([dk, dv], [dq])
            },
        );
        let query_gradient = self.join(query_gradient, &query_axes, POSITION);
        vec![
            query_gradient.cast(query.dtype()),
            key_gradient.cast(key.dtype()),
            value_gradient.cast(value.dtype()),
        ]
    }
}
