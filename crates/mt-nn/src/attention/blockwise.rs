//! Blockwise attention with memory linear in the length (Rabe and Staats, 2021; Dao et al., 2022).
//!
//! For each block of queries, a loop visits the blocks of keys that the mask does not exclude and keeps a running
//! maximum and sum. The matrix of attention logits is never materialized. The custom derivative recomputes logits from
//! the logarithms of the sums.

mod flash;

use mt_shape::{
    Axis, DType, HostArray, LogicalAxis, axis,
    kernels::{self, attributes::WITH_SCORES},
    logical,
};
use mt_trace::{DeviceGroup, Region, ScanOptions, Shards, Target, Tensor};

use super::{
    AttentionOptions, BlockSizes, CONTEXT, Context, KeysValues, MASKED, MaskSpec, Segments, resized,
    sinks_of_heads,
};
use crate::{
    SequenceOrder,
    axes::{GROUP, HEAD_DIM, KV_HEADS, KV_POSITION, POSITION, VALUE_DIM},
};

/// Positions per block of sequences of `length`, if no sizes are given. `num_heads` counts the query heads of all rows on a
/// device, which a block has together.
pub fn block_size(target: Target, num_heads: usize, length: usize) -> usize {
    match target {
        // Among 64, 128, 256 and 512, measured on 2 cores by `examples/attention.rs`, 64 and 128 take about the same
        // processor time. Larger blocks take more: they compute more masked logits and exceed the processor's cache.
        Target::Cpu(_) => 128,
        // Cycles of TPUs by their compiler, in `docs/decisions/0058-blocks-of-attention-by-target.md`. Blocks of 512
        // take half of the cycles of blocks of 128, and a tenth of the operations. Blocks whose logits do not fit into
        // the chip's vector memory take several times as long.
        Target::Gpu | Target::Tpu => {
            let fits = |block: &usize| num_heads * block * block * size_of::<f32>() <= LOGITS_OF_BLOCK;
            // Larger blocks run a third of the operations (`docs/decisions/0181-larger-blocks-on-tpus.md`). With few blocks
            // the diagonal, half of which is masked, would be a large share.
            let is_long = |block: &usize| *block <= 512 || (target == Target::Tpu && length >= 8 * block);
            [1024, 512, 256].into_iter().find(|block| fits(block) && is_long(block)).unwrap_or(128)
        }
    }
}

/// The most bytes of a block's attention logits on accelerators: half of the vector memory of a v5p.
const LOGITS_OF_BLOCK: usize = 32 << 20;

/// Positions in a row of a TPU's vector registers.
const LANES: usize = 128;

const BLOCKS: &str = "blocks";
const RUNS: &str = "runs";
/// Logical axes of `[batch, kv_heads, position, group, head_dim]`. The width of a head is not split, because logits sum
/// over it.
const SPLIT: [Option<LogicalAxis>; 5] = [
    Some(logical::ACTIVATION_KV_BATCH),
    Some(logical::ACTIVATION_KV_HEADS),
    Some(logical::ACTIVATION_LENGTH_ATTN),
    None,
    None,
];
/// The segment id of positions that pad the last block. No token has it.
const FILLER: f64 = -1.0;

/// Attention within segments. Queries are already scaled. Without `block`, positions per block follow [`block_size`].
///
/// If positions are split over devices, each device computes its own queries and gathers the keys and values of all
/// devices.
///
/// # Shapes
/// `[batch, position, kv_heads, group, head_dim], [batch, kv_position, kv_heads, head_dim],
/// [batch, kv_position, kv_heads, value_dim],
/// i32[batch, position], [kv_heads, group]`
#[track_caller]
pub fn blockwise<'t>(
    query: Tensor<'t>,
    KeysValues { key, value }: KeysValues<Tensor<'t>>,
    segments: Segments<'t>,
    sinks: Option<Tensor<'t>>,
    options: &AttentionOptions,
    block: Option<usize>,
    with_scores: bool,
) -> Context<'t> {
    let axes = query.axes();
    let batch: Vec<&'static str> = axes
        .iter()
        .map(|axis| axis.name)
        .filter(|name| ![POSITION, KV_HEADS, GROUP, HEAD_DIM].contains(name))
        .collect();
    let segments = segments.coded(options.mask);
    let query = query.order(&[batch[0], KV_HEADS, POSITION, GROUP, HEAD_DIM]);
    let key = key.order(&[batch[0], KV_HEADS, KV_POSITION, HEAD_DIM]);
    let value = value.order(&[batch[0], KV_HEADS, KV_POSITION, VALUE_DIM]);
    let shards = query.shards(&SPLIT).with_axes_like(POSITION, &[KV_POSITION, BLOCKS]);
    let num_shards = shards.along(POSITION).map_or(1, DeviceGroup::size);
    let on_device = |name| query.axis(name).size / shards.along(name).map_or(1, DeviceGroup::size);
    let num_heads = [batch[0], KV_HEADS, GROUP].map(on_device).iter().product();
    let length = query.axis(POSITION).size;
    let block = block.unwrap_or_else(|| block_size(query.region().target(), num_heads, length));
    let sizes = options.block_sizes();
    let kernel = |sizes: BlockSizes| Kernel {
        layout: Layout::new(length, segments.order, num_shards, block, sizes),
        shards: shards.clone(),
        options: *options,
        with_scores,
        is_usual: sizes == BlockSizes::NONE,
    };
    let (forward, backward) = (kernel(sizes.forward), kernel(sizes.backward));
    let has_sinks = sinks.is_some();
    let sinks = sinks_of_heads(query, sinks);
    let results = query.region().custom_vjp_list(
        "blockwise_attention",
        &[query, key, value, segments.query, sinks],
        &[true, true, true, false, has_sinks],
        |region, arguments| {
            let Rows { context, largest_scores, .. } = forward.forward(region, &arguments);
            [context].into_iter().chain(largest_scores).collect()
        },
        |region, arguments| {
            let Rows { context, log_sums, largest_scores } = forward.forward(region, &arguments);
            let context = context.constrain(&CONTEXT).named("context");
            let log_sums = log_sums.constrain(&CONTEXT[..4]).named("context");
            let results = [context].into_iter().chain(largest_scores).collect();
            (results, [arguments.as_slice(), &[context, log_sums]].concat())
        },
        |region, residuals, cotangents| {
            let mut gradients = backward.backward(region, &[residuals.as_slice(), &cotangents[..1]].concat());
            gradients.truncate(if has_sinks { 4 } else { 3 });
            gradients
        },
    );
    Context { context: results[0], largest_scores: results.get(1).map(|scores| scores.stop_gradient()) }
}

/// The division of rows into blocks.
#[derive(Clone, Copy, Debug)]
struct Layout {
    length: usize,
    order: SequenceOrder,
    /// The number of places that are contiguous in the text and on one device. Blocks do not cross the borders of runs.
    run: usize,
    query_block: usize,
    key_block: usize,
}

/// Lookup tables with one entry for each block of queries.
#[derive(Clone, Debug, Default, PartialEq)]
struct BlockTables {
    /// The place of the first query.
    places: Vec<i32>,
    /// The first block of keys to visit.
    firsts: Vec<i32>,
    /// The end of the range of key blocks to visit.
    ends: Vec<i32>,
}

impl Layout {
    /// Blocks of the given sizes, or else of up to `usual` positions.
    fn new(length: usize, order: SequenceOrder, num_shards: usize, usual: usize, sizes: BlockSizes) -> Self {
        // The greatest common divisor of the lengths of chunks and of devices' shards.
        let (mut run, mut shard) = (length / order.num_chunks(), length / num_shards);
        while shard != 0 {
            (run, shard) = (shard, run % shard);
        }
        // As many blocks as with the full size, but evenly sized, which minimizes padding.
        let even = |whole: usize, block: usize| whole.div_ceil(whole.div_ceil(block));
        // Blocks of whole registers, if they need no padding.
        let mut in_lanes = (1..=usual / LANES).rev().map(|rows| rows * LANES);
        let usual = in_lanes.find(|block| run.is_multiple_of(*block)).unwrap_or(even(run, usual));
        let query_block = sizes.queries.map_or(usual, |queries| even(run, queries));
        let key_block = sizes.keys.map_or(usual, |keys| even(length, keys));
        Self { length, order, run, query_block, key_block }
    }

    fn num_key_blocks(self) -> usize {
        self.length.div_ceil(self.key_block)
    }

    /// The tables of all devices' blocks, in storage order of the queries.
    fn tables(self, mask: MaskSpec) -> BlockTables {
        let mut tables = BlockTables::default();
        for stored in (0..self.length).step_by(self.run) {
            let first = self.order.place(stored, self.length);
            for start in (first..first + self.run).step_by(self.query_block) {
                let queries = start..(start + self.query_block).min(first + self.run);
                let visible = mask.visible_blocks(queries, self.key_block, self.num_key_blocks());
                tables.places.push(start as i32);
                tables.firsts.push(visible.start as i32);
                tables.ends.push(visible.end as i32);
            }
        }
        tables
    }

    /// The number of key blocks that a block of queries visits, averaged over the blocks of all devices.
    fn mean_visits(self, mask: MaskSpec) -> f64 {
        let BlockTables { firsts, ends, .. } = self.tables(mask);
        let visits: i32 = ends.iter().zip(&firsts).map(|(end, first)| (end - first).max(0)).sum();
        f64::from(visits) / firsts.len() as f64
    }
}

#[derive(Clone, Debug)]
struct Kernel {
    layout: Layout,
    shards: Shards,
    options: AttentionOptions,
    with_scores: bool,
    /// Whether no sizes of blocks are given, so that a kernel may choose its own.
    is_usual: bool,
}

/// The results of the forward pass for a device's queries.
struct Rows<'b> {
    context: Tensor<'b>,
    /// The logarithm of the sum of each query's exponentiated logits.
    log_sums: Tensor<'b>,
    largest_scores: Option<Tensor<'b>>,
}

/// The arrays that a scan over blocks of queries slices.
#[derive(Clone, Copy, mt_derive::Tree)]
struct QueryBlock<L> {
    place: L,
    first: L,
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
    /// The tables of all blocks, as tensors.
    fn tables<'b>(&self, region: Region<'b>) -> [Tensor<'b>; 3] {
        let BlockTables { places, firsts, ends } = self.layout.tables(self.options.mask);
        [places, firsts, ends].map(|numbers| {
            let count = numbers.len();
            let table =
                HostArray::from_slice(DType::I32, &[count], &numbers).expect("one number for each block");
            region.table(table, &[axis(BLOCKS, count)])
        })
    }

    /// Runs `body` on each device's shard if the sequence is split; otherwise the partitioner places the computation.
    fn on_devices<'b, const A: usize>(
        &self,
        arguments: [Tensor<'b>; A],
        body: impl for<'c> FnOnce([Tensor<'c>; A]) -> Vec<Tensor<'c>>,
    ) -> Vec<Tensor<'b>> {
        match self.shards.along(POSITION) {
            Some(_) => self.shards.run_list(arguments, body),
            None => body(arguments),
        }
    }

    /// Cuts an array of a device's queries into padded blocks along a leading axis.
    fn blocks<'b>(&self, own: Tensor<'b>, filler: f64) -> Tensor<'b> {
        let Layout { run, query_block: block, .. } = self.layout;
        let missing = run.next_multiple_of(block) - run;
        let filled = if missing == 0 {
            own
        } else if own.axis(POSITION).size == run {
            own.pad(POSITION, 0, missing, filler)
        } else {
            let runs = axis(RUNS, own.axis(POSITION).size / run);
            let apart = own.split(POSITION, &[runs, axis(POSITION, run)]);
            apart.pad(POSITION, 0, missing, filler).merge(&[RUNS, POSITION], POSITION)
        };
        let count = axis(BLOCKS, filled.axis(POSITION).size / block);
        let cut = filled.split(POSITION, &[count, axis(POSITION, block)]);
        let rest: Vec<Axis> = cut.axes().iter().filter(|axis| axis.name != BLOCKS).copied().collect();
        cut.broadcast(&[&[count], rest.as_slice()].concat())
    }

    /// Merges blocks along a leading axis and removes their padding.
    fn join<'b>(&self, blocks: Tensor<'b>, axes: &[Axis]) -> Tensor<'b> {
        let Layout { run, query_block: block, .. } = self.layout;
        let count = blocks.axis(BLOCKS);
        let order: Vec<Axis> = axes
            .iter()
            .flat_map(
                |axis| if axis.name == POSITION { vec![count, axis.with_size(block)] } else { vec![*axis] },
            )
            .collect();
        let filled = blocks.broadcast(&order).merge(&[BLOCKS, POSITION], POSITION);
        let run_of_blocks = run.next_multiple_of(block);
        if run_of_blocks == run {
            filled
        } else if count.size * block == run_of_blocks {
            filled.slice(POSITION, 0, run)
        } else {
            let runs = axis(RUNS, count.size * block / run_of_blocks);
            let apart = filled.split(POSITION, &[runs, axis(POSITION, run_of_blocks)]);
            apart.slice(POSITION, 0, run).merge(&[RUNS, POSITION], POSITION)
        }
    }

    /// Keys, or an array with their axes, of the whole sequence in the order of the text, padded to whole blocks.
    fn keys<'b>(&self, own: Tensor<'b>, filler: f64) -> Tensor<'b> {
        let stored = match self.shards.along(POSITION) {
            Some(devices) => devices.all_gather(own, KV_POSITION),
            None => own,
        };
        let read = self.layout.order.read(stored, KV_POSITION);
        let missing = self.filled_length() - self.layout.length;
        if missing == 0 { read } else { read.pad(KV_POSITION, 0, missing, filler) }
    }

    /// Sums gradients of keys or values over all devices and returns a device's shard.
    fn own_keys<'b>(&self, read: Tensor<'b>) -> Tensor<'b> {
        let length = self.layout.length;
        let read = if self.filled_length() == length { read } else { read.slice(KV_POSITION, 0, length) };
        let stored = self.layout.order.store(read, KV_POSITION);
        match self.shards.along(POSITION) {
            Some(devices) => devices.reduce_scatter(stored, KV_POSITION),
            None => stored,
        }
    }

    fn filled_length(&self) -> usize {
        self.layout.num_key_blocks() * self.layout.key_block
    }

    /// The attention logits of a block of queries with a block of keys, before soft-capping.
    fn uncapped<'b>(&self, query: Tensor<'b>, key: Tensor<'b>) -> Tensor<'b> {
        let product = if self.options.float32_product { DType::F32 } else { query.dtype() };
        query.cast(product).contract_into(key.cast(product), &[HEAD_DIM], DType::F32)
    }

    fn capped<'b>(&self, scores: Tensor<'b>) -> Tensor<'b> {
        match self.options.soft_cap {
            Some(cap) => (scores / cap).tanh() * cap,
            None => scores,
        }
    }

    fn masked<'b>(
        &self,
        scores: Tensor<'b>,
        queries: QueryBlock<Tensor<'b>>,
        key_segments: Tensor<'b>,
        key_block: Tensor<'b>,
    ) -> Tensor<'b> {
        let region = scores.region();
        let places = |start: Tensor<'b>, axis: Axis| region.iota(DType::I32, axis) + start;
        let keys = scores.axis(KV_POSITION);
        let first_key = key_block * self.layout.key_block as f64;
        let pair = [&*queries.segments.axes(), &[keys]].concat();
        let segments = queries.segments.broadcast(&pair);
        let same = self.options.mask.joins(segments, key_segments, self.layout.length);
        let allowed =
            self.options.mask.allows(places(queries.place, scores.axis(POSITION)), places(first_key, keys));
        let mask = allowed.map_or(same, |allowed| same.logical_and(allowed));
        mask.select(scores, region.full(DType::F32, &[], MASKED).broadcast(&scores.axes()))
    }

    /// The attributes of the CPU kernel, which computes attention in blocks of its own within sequences that are whole
    /// and in the order of the text, without blocks of the mask. `None` for any other.
    fn attributes(&self) -> Option<Vec<(&'static str, i64)>> {
        let is_whole = self.shards.along(POSITION).is_none() && self.layout.order == SequenceOrder::AsRead;
        let has_blocks = self.options.mask.block.is_some();
        (is_whole && self.is_usual && !has_blocks).then(|| self.options.for_kernels())
    }

    /// The forward pass for queries, keys, values, segments and sinks.
    fn forward<'b>(&self, region: Region<'b>, arguments: &[Tensor<'b>]) -> Rows<'b> {
        if let Some(rows) = self.forward_on_tpu(region, arguments) {
            return rows;
        }
        let results = match self.attributes() {
            Some(attributes) => region.kernel(
                &kernels::ATTENTION_FORWARD,
                [attributes, vec![(WITH_SCORES, i64::from(self.with_scores))]].concat(),
                arguments,
                |_, arguments| self.forward_blocks(&arguments),
            ),
            None => self.forward_blocks(arguments),
        };
        Rows { context: results[0], log_sums: results[1], largest_scores: results.get(2).copied() }
    }

    fn forward_blocks<'b>(&self, arguments: &[Tensor<'b>]) -> Vec<Tensor<'b>> {
        let &[query, key, value, segments, sinks] = arguments else {
            unreachable!("the kernel has five arguments")
        };
        let [places, firsts, ends] = self.tables(query.region());
        self.on_devices(
            [places, firsts, ends, query, key, value, segments, sinks],
            |[places, firsts, ends, query, key, value, segments, sinks]| {
                self.forward_shard([places, firsts, ends], query, key, value, segments, sinks)
            },
        )
    }

    /// As [`Kernel::forward`], for one device's queries.
    fn forward_shard<'b>(
        &self,
        [place, first, end]: [Tensor<'b>; 3],
        query: Tensor<'b>,
        key: Tensor<'b>,
        value: Tensor<'b>,
        segments: Tensor<'b>,
        sinks: Tensor<'b>,
    ) -> Vec<Tensor<'b>> {
        let region = query.region();
        let block = self.layout.query_block;
        let (key, value) = (self.keys(key, 0.0), self.keys(value, 0.0));
        let key_segments = self.keys(segments.rename(POSITION, KV_POSITION), FILLER);
        let inputs = QueryBlock {
            place,
            first,
            end,
            query: self.blocks(query, 0.0),
            segments: self.blocks(segments, FILLER),
        };
        let blocks = inputs.place.axis(BLOCKS);
        let query_axes = query.axes();
        let row_axes: Vec<Axis> = query_axes.iter().filter(|axis| axis.name != HEAD_DIM).copied().collect();
        let context_axes = [&row_axes[..], &[value.axis(VALUE_DIM)]].concat();
        let ([], made) = region.scan_list(ScanOptions::over(blocks), [], &inputs, |region, [], q| {
            let rows = resized(&row_axes, POSITION, block);
            let wide = resized(&context_axes, POSITION, block);
            // The loop starts with the sinks: relative to themselves their exponential is 1, and their value is 0.
            let mut start = vec![
                q.first,
                sinks.broadcast(&rows),
                region.full(DType::F32, &rows, 1.0),
                region.full(DType::F32, &wide, 0.0),
            ];
            if self.with_scores {
                start.push(region.full(DType::F32, &rows, MASKED));
            }
            let last = region.while_loop_list(
                Some(self.layout.mean_visits(self.options.mask)),
                &start,
                |_, carry| carry[0].less(q.end),
                |_, carry| {
                    let (block, largest, sum, total) = (carry[0], carry[1], carry[2], carry[3]);
                    let (k, v, k_segments) = self.key_block(key, value, key_segments, block);
                    let uncapped = self.uncapped(q.query, k);
                    let scores = self.masked(self.capped(uncapped), q, k_segments, block);
                    let next = largest.maximum(scores.max(&[KV_POSITION]).broadcast(&largest.axes()));
                    let weights = (scores - next).exp();
                    let fade = (largest - next).exp();
                    let product = weights.cast(v.dtype()).contract_into(v, &[KV_POSITION], DType::F32);
                    let mut after = vec![
                        block + 1.0,
                        next,
                        sum * fade + weights.sum(&[KV_POSITION]),
                        total * fade + product,
                    ];
                    // Unlike the subtracted maxima, these exclude sinks.
                    after.extend(carry.get(4).map(|largest| {
                        let scores = self.masked(uncapped, q, k_segments, block);
                        largest.maximum(scores.max(&[KV_POSITION]).broadcast(&largest.axes()))
                    }));
                    after
                },
            );
            let (largest, sum, total) = (last[1], last[2], last[3]);
            let rows = [(total / sum).cast(q.query.dtype()), largest + sum.log()];
            ([], rows.into_iter().chain(last.get(4).copied()).collect())
        });
        let joined = |(index, blocks): (usize, &Tensor<'b>)| {
            self.join(*blocks, if index == 0 { &context_axes } else { &row_axes })
        };
        made.iter().enumerate().map(joined).collect()
    }

    fn key_block<'b>(
        &self,
        key: Tensor<'b>,
        value: Tensor<'b>,
        segments: Tensor<'b>,
        block: Tensor<'b>,
    ) -> (Tensor<'b>, Tensor<'b>, Tensor<'b>) {
        let size = self.layout.key_block;
        let start = block * size as f64;
        let cut = |tensor: Tensor<'b>| tensor.dynamic_slice(KV_POSITION, start, size);
        (cut(key), cut(value), cut(segments))
    }

    /// The gradients of queries, keys, values and sinks, from the residuals of the forward pass and the cotangent.
    fn backward<'b>(&self, region: Region<'b>, operands: &[Tensor<'b>]) -> Vec<Tensor<'b>> {
        if let Some(gradients) = self.backward_on_tpu(region, operands) {
            return gradients;
        }
        match self.attributes() {
            Some(attributes) => {
                region.kernel(&kernels::ATTENTION_BACKWARD, attributes, operands, |_, operands| {
                    self.backward_blocks(&operands)
                })
            }
            None => self.backward_blocks(operands),
        }
    }

    fn backward_blocks<'b>(&self, operands: &[Tensor<'b>]) -> Vec<Tensor<'b>> {
        let [query, key, value, segments, sinks, context, log_sums, cotangent] = operands else {
            unreachable!("the forward function returns seven residuals")
        };
        let (query, key, value, segments, cotangent) = (*query, *key, *value, *segments, *cotangent);
        let correction = correction(*context, cotangent);
        let [places, firsts, ends] = self.tables(query.region());
        let mut gradients = self.on_devices(
            [places, firsts, ends, query, key, value, segments, cotangent, *log_sums, correction],
            |[places, firsts, ends, query, key, value, segments, cotangent, log_sums, correction]| {
                let rows = [cotangent, log_sums, correction];
                self.backward_shard([places, firsts, ends], query, key, value, segments, rows)
            },
        );
        gradients.push(gradient_of_sinks(*sinks, *log_sums, correction));
        gradients
    }

    /// The gradients of one device's queries, and the device's shard of the gradients of keys and values.
    fn backward_shard<'b>(
        &self,
        [place, first, end]: [Tensor<'b>; 3],
        query: Tensor<'b>,
        own_key: Tensor<'b>,
        own_value: Tensor<'b>,
        segments: Tensor<'b>,
        [cotangent, log_sums, correction]: [Tensor<'b>; 3],
    ) -> Vec<Tensor<'b>> {
        let region: Region<'b> = query.region();
        let Layout { query_block, key_block: block_size, .. } = self.layout;
        let (key, value) = (self.keys(own_key, 0.0), self.keys(own_value, 0.0));
        let key_segments = self.keys(segments.rename(POSITION, KV_POSITION), FILLER);
        let inputs = BackwardBlock {
            block: QueryBlock {
                place,
                first,
                end,
                query: self.blocks(query, 0.0),
                segments: self.blocks(segments, FILLER),
            },
            cotangent: self.blocks(cotangent, 0.0),
            log_sums: self.blocks(log_sums, 0.0),
            correction: self.blocks(correction, 0.0),
        };
        let blocks = inputs.block.place.axis(BLOCKS);
        let query_axes = query.axes();
        let zeros = |like: Tensor<'b>| region.full(DType::F32, &like.axes(), 0.0);
        let ([key_gradient, value_gradient], [query_gradient]) = region.scan(
            ScanOptions::over(blocks),
            [zeros(key), zeros(value)],
            &inputs,
            |region, [dk, dv], rows| {
                let q = rows.block;
                let wide = resized(&query_axes, POSITION, query_block);
                let start = [q.first, region.full(DType::F32, &wide, 0.0), dk, dv];
                let [_, dq, dk, dv] = region.while_loop(
                    Some(self.layout.mean_visits(self.options.mask)),
                    start,
                    |_, [block, _, _, _]| block.less(q.end),
                    |_, [block, dq, dk, dv]| {
                        let (k, v, k_segments) = self.key_block(key, value, key_segments, block);
                        let dtype = k.dtype();
                        let scores = self.capped(self.uncapped(q.query, k));
                        let masked = self.masked(scores, q, k_segments, block);
                        let weights = (masked - rows.log_sums).exp();
                        let from_value = rows.cotangent.contract_into(v, &[VALUE_DIM], DType::F32);
                        let gradient = weights * (from_value - rows.correction);
                        let gradient = match self.options.soft_cap {
                            // The derivative of tanh is 1 - tanh².
                            Some(cap) => gradient - gradient * (scores / cap).square(),
                            None => gradient,
                        };
                        let scores_gradient = gradient.cast(dtype);
                        let start = block * block_size as f64;
                        let dv_block =
                            weights.cast(dtype).contract_into(rows.cotangent, &[POSITION, GROUP], DType::F32);
                        let dk_block = scores_gradient.contract_into(q.query, &[POSITION, GROUP], DType::F32);
                        let dq_block = scores_gradient.contract_into(k, &[KV_POSITION], DType::F32);
                        let old_dk = dk.dynamic_slice(KV_POSITION, start, block_size);
                        let old_dv = dv.dynamic_slice(KV_POSITION, start, block_size);
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
        vec![
            self.join(query_gradient, &query_axes).cast(query.dtype()),
            self.own_keys(key_gradient).cast(own_key.dtype()),
            self.own_keys(value_gradient).cast(own_value.dtype()),
        ]
    }
}

/// The derivative of the softmax subtracts this, the weighted mean of the cotangents, from each logit's cotangent.
fn correction<'b>(context: Tensor<'b>, cotangent: Tensor<'b>) -> Tensor<'b> {
    (context.cast(DType::F32) * cotangent.cast(DType::F32)).sum(&[VALUE_DIM])
}

/// A sink's value is 0, so the cotangent of its logit is the weighted mean alone, with a minus sign.
fn gradient_of_sinks<'b>(sinks: Tensor<'b>, log_sums: Tensor<'b>, correction: Tensor<'b>) -> Tensor<'b> {
    let weights = (sinks.broadcast(&log_sums.axes()) - log_sums).exp();
    let others: Vec<&'static str> =
        log_sums.axes().iter().map(|axis| axis.name).filter(|name| !sinks.has_axis(name)).collect();
    (weights * correction).sum(&others) * -1.0
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: usize = 128;

    /// The number of pairs of blocks that each of `shards` devices visits.
    fn visited(shards: usize, order: SequenceOrder, num_blocks: usize) -> Vec<i32> {
        let layout = Layout::new(num_blocks * BLOCK, order, shards, BLOCK, BlockSizes::NONE);
        assert_eq!(layout.num_key_blocks(), num_blocks);
        let BlockTables { firsts, ends, .. } = layout.tables(MaskSpec::CAUSAL);
        let each: Vec<i32> = firsts.iter().zip(&ends).map(|(first, end)| end - first).collect();
        each.chunks(num_blocks / shards).map(|shard| shard.iter().sum()).collect()
    }

    #[test]
    fn paired_chunks_share_the_work() {
        for shards in [2, 4, 8] {
            let num_blocks = 64;
            let whole = (num_blocks * (num_blocks + 1) / 2) as i32;
            let paired = visited(shards, SequenceOrder::Paired { shards }, num_blocks);
            assert_eq!(paired, vec![whole / shards as i32; shards]);
            // In text order the last device visits nearly twice its share of the triangle.
            let rows = num_blocks / shards;
            let triangle = |shard: usize| (shard * rows * rows + rows * (rows + 1) / 2) as i32;
            let as_read: Vec<i32> = (0..shards).map(triangle).collect();
            assert_eq!(visited(shards, SequenceOrder::AsRead, num_blocks), as_read);
        }
    }

    #[test]
    fn blocks_end_with_their_chunk() {
        // Chunks of 7 places in blocks of 4 and 3.
        let order = SequenceOrder::Paired { shards: 2 };
        let layout = Layout::new(28, order, 2, 4, BlockSizes::NONE);
        let tables = layout.tables(MaskSpec { window: Some(3), ..MaskSpec::CAUSAL });
        assert_eq!(tables.places, [0, 4, 21, 25, 7, 11, 14, 18]);
        assert_eq!(tables.firsts, [0, 0, 4, 5, 1, 2, 3, 4]);
        assert_eq!(tables.ends, [1, 2, 7, 7, 3, 4, 5, 6]);
    }

    #[test]
    fn blocks_are_evenly_large() {
        let filled = |length: usize, order: SequenceOrder, shards: usize| {
            let layout = Layout::new(length, order, shards, BLOCK, BlockSizes::NONE);
            (layout.query_block, layout.run.next_multiple_of(layout.query_block) - layout.run)
        };
        assert_eq!(filled(2080, SequenceOrder::Paired { shards: 4 }, 4), (87, 1));
        assert_eq!(filled(600, SequenceOrder::AsRead, 1), (120, 0));
        assert_eq!(filled(1024, SequenceOrder::AsRead, 1), (BLOCK, 0));
        assert_eq!(filled(100, SequenceOrder::AsRead, 1), (100, 0));
    }

    #[test]
    fn blocks_fill_registers_where_that_needs_no_padding() {
        for (length, expected) in [(4096, 512), (2304, 384), (2176, 128), (512, 512), (600, 300), (100, 100)]
        {
            let layout = Layout::new(length, SequenceOrder::AsRead, 1, 512, BlockSizes::NONE);
            assert_eq!([layout.query_block, layout.key_block], [expected; 2], "{length}");
        }
    }

    #[test]
    fn logits_of_a_block_fit_into_vector_memory() {
        let sizes = [1, 32, 33, 128, 129, 1000].map(|heads| block_size(Target::Tpu, heads, 4096));
        assert_eq!(sizes, [512, 512, 256, 256, 128, 128]);
        assert_eq!([8, 9].map(|heads| block_size(Target::Tpu, heads, 8192)), [1024, 512]);
        assert_eq!(block_size(Target::Gpu, 1, 8192), 512);
        assert_eq!(block_size(Target::CPU, 1, 100), block_size(Target::CPU, 1000, 10_000));
    }

    #[test]
    fn given_sizes_are_bounds_and_those_of_keys_and_queries_differ() {
        let check = |length: usize, queries: Option<usize>, keys: Option<usize>, expected: [usize; 2]| {
            let sizes = BlockSizes { queries, keys };
            let layout = Layout::new(length, SequenceOrder::AsRead, 1, BLOCK, sizes);
            assert_eq!([layout.query_block, layout.key_block], expected, "{sizes:?}");
        };
        check(1024, Some(512), Some(256), [512, 256]);
        check(1000, Some(512), None, [500, 125]);
        check(1000, None, Some(300), [125, 250]);
        check(600, Some(4096), Some(4096), [600, 600]);
    }
}
