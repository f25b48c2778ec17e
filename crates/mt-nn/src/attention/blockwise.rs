//! Attention block by block, in memory linear in the length (Rabe and Staats, 2021; Dao et al., 2022).
//!
//! Queries are taken block by block; for each, a loop visits the blocks of keys that the mask does not exclude and
//! keeps a running maximum and sum. Nothing of the size of the matrix of scores is ever held. The derivative is
//! given: it computes scores again from the logarithms of the sums.

use mt_shape::{Axis, DType, HostArray, axis};
use mt_trace::{Region, ScanOptions, Tensor};

use super::{AttentionOptions, CONTEXT, MASKED, resized};
use crate::axes::{GROUP, HEAD_DIM, KV_HEADS, KV_POSITION, POSITION};

/// Positions in a block. Of 64, 128, 256 and 512, measured on 2 cores by `examples/attention.rs`, 64 and 128 take about
/// the same processor time and larger ones more: they compute more scores that the mask hides, and leave the cache.
pub const BLOCK_SIZE: usize = 128;

const BLOCKS: &str = "blocks";
/// The segment of positions that fill up the last block: no token has it.
const FILLER: f64 = -1.0;

/// Attention within segments. Queries are already scaled.
///
/// # Shapes
/// `[batch, position, kv_heads, group, head_dim], [batch, kv_position, kv_heads, head_dim] (twice),
/// i32[batch, position], [kv_heads, group] -> [batch, kv_heads, position, group, head_dim]`
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
    let kernel = Kernel { block, options: *options };
    let has_sinks = sinks.is_some();
    let in_groups = [query.axis(KV_HEADS), query.axis(GROUP)];
    let sinks = match sinks {
        Some(sinks) => sinks.cast(DType::F32).broadcast(&in_groups),
        None => query.region().full(DType::F32, &in_groups, MASKED),
    };
    let [context] = query.region().custom_vjp(
        "blockwise_attention",
        [query, key, value, segmentation, sinks],
        [true, true, true, false, has_sinks],
        |_, [query, key, value, segments, sinks]| [kernel.forward(query, key, value, segments, sinks).0],
        |_, [query, key, value, segments, sinks]| {
            let (context, log_sums) = kernel.forward(query, key, value, segments, sinks);
            let context = context.constrain(&CONTEXT).named("context");
            let log_sums = log_sums.constrain(&CONTEXT[..4]).named("context");
            ([context], vec![query, key, value, segments, sinks, context, log_sums])
        },
        |_, residuals, [cotangent]| {
            let mut gradients = kernel.backward(&residuals, cotangent);
            gradients.truncate(if has_sinks { 4 } else { 3 });
            gradients
        },
    );
    if filler == 0 { context } else { context.slice(POSITION, 0, length) }
}

#[derive(Clone, Copy)]
struct Kernel {
    block: usize,
    options: AttentionOptions,
}

/// What a scan over blocks of queries slices.
#[derive(Clone, Copy, mt_derive::Tree)]
struct QueryBlock<L> {
    index: L,
    /// The first block of keys to visit.
    first: L,
    /// The first block of keys after `first` not to visit.
    end: L,
    query: L,
    segments: L,
}

#[derive(mt_derive::Tree)]
struct BackwardBlock<L> {
    block: QueryBlock<L>,
    cotangent: L,
    log_sums: L,
    correction: L,
}

impl Kernel {
    fn query_blocks<'b>(self, query: Tensor<'b>, segments: Tensor<'b>) -> QueryBlock<Tensor<'b>> {
        let (region, count) = (query.region(), query.axis(POSITION).size / self.block);
        let visible = (0..count).map(|index| self.options.mask.visible_blocks(index, self.block, count));
        let (first, end): (Vec<i32>, Vec<i32>) =
            visible.map(|blocks| (blocks.start as i32, blocks.end as i32)).unzip();
        let table = |numbers: &[i32]| {
            let table =
                HostArray::from_slice(DType::I32, &[count], numbers).expect("one number for each block");
            region.table(table, &[axis(BLOCKS, count)])
        };
        QueryBlock {
            index: region.iota(DType::I32, axis(BLOCKS, count)),
            first: table(&first),
            end: table(&end),
            query: self.blocks(query, POSITION),
            segments: self.blocks(segments, POSITION),
        }
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

    /// Scores of a block of queries with a block of keys.
    fn scores<'b>(self, query: Tensor<'b>, key: Tensor<'b>) -> Tensor<'b> {
        let product = if self.options.float32_product { DType::F32 } else { query.dtype() };
        let scores = query.cast(product).contract_into(key.cast(product), &[HEAD_DIM], DType::F32);
        match self.options.soft_cap {
            Some(cap) => (scores / cap).tanh() * cap,
            None => scores,
        }
    }

    fn masked<'b>(
        self,
        scores: Tensor<'b>,
        queries: QueryBlock<Tensor<'b>>,
        key_segments: Tensor<'b>,
        key_block: Tensor<'b>,
    ) -> Tensor<'b> {
        let region = scores.region();
        let place = |block: Tensor<'b>, axis: Axis| region.iota(DType::I32, axis) + block * self.block as f64;
        let keys = scores.axis(KV_POSITION);
        let pair = [&*queries.segments.axes(), &[keys]].concat();
        let same = queries.segments.broadcast(&pair).equals(key_segments);
        let allowed =
            self.options.mask.allows(place(queries.index, scores.axis(POSITION)), place(key_block, keys));
        let mask = allowed.map_or(same, |allowed| same.logical_and(allowed));
        mask.select(scores, region.full(DType::F32, &[], MASKED).broadcast(&scores.axes()))
    }

    /// The context, and for each query the logarithm of the sum of its exponentiated scores.
    fn forward<'b>(
        self,
        query: Tensor<'b>,
        key: Tensor<'b>,
        value: Tensor<'b>,
        segments: Tensor<'b>,
        sinks: Tensor<'b>,
    ) -> (Tensor<'b>, Tensor<'b>) {
        let region = query.region();
        let key_segments = segments.rename(POSITION, KV_POSITION);
        let inputs = self.query_blocks(query, segments);
        let blocks = inputs.index.axis(BLOCKS);
        let query_axes = query.axes();
        let row_axes: Vec<Axis> = query_axes.iter().filter(|axis| axis.name != HEAD_DIM).copied().collect();
        let ([], [context, log_sums]) =
            region.scan(ScanOptions::over(blocks), [], &inputs, |region, [], q| {
                let rows = resized(&row_axes, POSITION, self.block);
                let wide = resized(&query_axes, POSITION, self.block);
                // The sinks come first: their exponential, taken relative to themselves, is 1, and their value 0.
                let start = [
                    q.first,
                    sinks.broadcast(&rows),
                    region.full(DType::F32, &rows, 1.0),
                    region.full(DType::F32, &wide, 0.0),
                ];
                let [_, largest, sum, total] = region.while_loop(
                    start,
                    |_, [block, _, _, _]| block.less(q.end),
                    |_, [block, largest, sum, total]| {
                        let (k, v, k_segments) = self.key_block(key, value, key_segments, block);
                        let scores = self.masked(self.scores(q.query, k), q, k_segments, block);
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

    /// The gradients of queries, keys, values and sinks.
    fn backward<'b>(self, residuals: &[Tensor<'b>], cotangent: Tensor<'b>) -> Vec<Tensor<'b>> {
        let [query, key, value, segments, sinks, context, log_sums] = residuals else {
            unreachable!("the forward function returns seven residuals")
        };
        let (query, key, value, segments) = (*query, *key, *value, *segments);
        let region: Region<'b> = query.region();
        let key_segments = segments.rename(POSITION, KV_POSITION);
        // Softmax's derivative subtracts from each score's cotangent their weighted mean.
        let correction = (context.cast(DType::F32) * cotangent.cast(DType::F32)).sum(&[HEAD_DIM]);
        let inputs = BackwardBlock {
            block: self.query_blocks(query, segments),
            cotangent: self.blocks(cotangent, POSITION),
            log_sums: self.blocks(*log_sums, POSITION),
            correction: self.blocks(correction, POSITION),
        };
        let blocks = inputs.block.index.axis(BLOCKS);
        let query_axes = query.axes();
        let zeros = |like: Tensor<'b>| region.full(DType::F32, &like.axes(), 0.0);
        let ([key_gradient, value_gradient], [query_gradient]) = region.scan(
            ScanOptions::over(blocks),
            [zeros(key), zeros(value)],
            &inputs,
            |region, [dk, dv], rows| {
                let q = rows.block;
                let wide = resized(&query_axes, POSITION, self.block);
                let start = [q.first, region.full(DType::F32, &wide, 0.0), dk, dv];
                let [_, dq, dk, dv] = region.while_loop(
                    start,
                    |_, [block, _, _, _]| block.less(q.end),
                    |_, [block, dq, dk, dv]| {
                        let (k, v, k_segments) = self.key_block(key, value, key_segments, block);
                        let dtype = k.dtype();
                        let scores = self.scores(q.query, k);
                        let masked = self.masked(scores, q, k_segments, block);
                        let weights = (masked - rows.log_sums).exp();
                        let from_value = rows.cotangent.contract_into(v, &[HEAD_DIM], DType::F32);
                        let gradient = weights * (from_value - rows.correction);
                        let gradient = match self.options.soft_cap {
                            // The derivative of tanh is 1 - tanh².
                            Some(cap) => gradient - gradient * (scores / cap).square(),
                            None => gradient,
                        };
                        let scores_gradient = gradient.cast(dtype);
                        let start = block * self.block as f64;
                        let dv_block =
                            weights.cast(dtype).contract_into(rows.cotangent, &[POSITION, GROUP], DType::F32);
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
        // A sink's own value is 0, so that of the cotangent of its score only the weighted mean is left.
        let sinks_weight = (sinks.broadcast(&log_sums.axes()) - *log_sums).exp();
        let others: Vec<&'static str> =
            log_sums.axes().iter().map(|axis| axis.name).filter(|name| !sinks.has_axis(name)).collect();
        let sinks_gradient = (sinks_weight * correction).sum(&others) * -1.0;
        vec![
            query_gradient.cast(query.dtype()),
            key_gradient.cast(key.dtype()),
            value_gradient.cast(value.dtype()),
            sinks_gradient,
        ]
    }
}
