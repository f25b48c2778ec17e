//! Blockwise attention by whole rows of scores, for TPUs.
//!
//! A block of queries multiplies all keys that any of its queries sees at once, so its softmax needs no running maximum.
//! Under a causal mask these keys are a prefix of the sequence. Each prefix is code of its own, so that the compiler
//! knows its size. Under a window all blocks see equally many keys, which a loop slices. An outer loop goes over groups
//! of heads, so that the scores of a step fit into vector memory.

use std::ops::Range;

use mt_shape::{Axis, DType, HostArray, Tree, axis};
use mt_trace::{Region, ScanOptions, Tensor};

use super::{
    BLOCKS, BlockSizes, FILLER, GROUP, HEAD_DIM, KV_HEADS, KV_POSITION, Kernel, LANES, Layout, MASKED,
    MaskSpec, POSITION, VALUE_DIM,
};
use crate::SequenceOrder;

/// The heads of keys of all sequences on a device.
const HEADS: &str = "heads_of_rows";
/// The steps of the loop over groups of such heads.
const STEPS: &str = "steps_of_heads";

/// The most bytes of the scores of a step, of which several arrays of this size exist at a time: a quarter of the vector
/// memory of a v5p.
const SCORES: usize = 16 << 20;
/// The usual number of prefixes of a sequence, each of which takes time to compile.
const PREFIXES: usize = 8;
/// The most prefixes, whatever sizes are given.
const MOST_PREFIXES: usize = 32;
/// The most positions of a block of queries if no size is given.
const QUERIES: usize = 512;

/// The division of a device's attention into blocks of whole rows of scores.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Plan {
    layout: Layout,
    /// The heads of a step, which divide those of the device.
    heads: usize,
    pieces: Vec<Piece>,
}

/// Consecutive blocks of queries that multiply equally many keys.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Piece {
    blocks: Range<usize>,
    /// The place of the first key of each block.
    starts: Vec<usize>,
    num_keys: usize,
}

impl Plan {
    /// Whether all blocks are steps of one loop, whose code is no longer than that of blocks with running sums.
    pub fn is_one_loop(&self) -> bool {
        self.pieces.len() == 1
    }

    /// The blocks for sequences of `length` in the order of the text, with `num_heads` heads of keys in all sequences,
    /// each of which `group` heads of queries share. `None` if the scores of 128 queries do not fit, which blocks of
    /// keys need then.
    pub fn new(
        length: usize,
        num_heads: usize,
        group: usize,
        mask: MaskSpec,
        given: BlockSizes,
        block: Option<usize>,
    ) -> Option<Self> {
        let most = given.queries.or(block).unwrap_or(QUERIES);
        let step = length.div_ceil(PREFIXES).next_multiple_of(LANES);
        let sizes = [most, QUERIES, 256, LANES].into_iter().filter(|queries| *queries <= most);
        let mut made = sizes.map(|queries| {
            let queries = match given.queries.or(block) {
                Some(_) => length.div_ceil(length.div_ceil(queries)),
                None => in_lanes(length, queries.min(step)),
            };
            let keys = match given.keys.or(block) {
                Some(keys) => length.div_ceil(length.div_ceil(keys).min(MOST_PREFIXES)),
                // Windows move by blocks of queries; prefixes are few.
                None if mask.reach().is_some() => queries,
                None => step.next_multiple_of(queries),
            };
            let layout = Layout {
                length,
                order: SequenceOrder::AsRead,
                run: length,
                query_block: queries,
                key_block: keys,
            };
            let pieces = pieces(layout, mask);
            let widest = pieces.iter().map(|piece| piece.num_keys).max().unwrap_or(0);
            let bytes = group * queries * widest * size_of::<f32>();
            let fits = |heads: &usize| num_heads.is_multiple_of(*heads) && heads * bytes <= SCORES;
            let heads = (1..=num_heads).rev().find(fits)?;
            Some(Self { layout, heads, pieces })
        });
        made.find_map(|plan| plan)
    }
}

/// The size of blocks of up to `most` positions that fill registers, with as little padding as possible.
fn in_lanes(length: usize, most: usize) -> usize {
    let mut whole = (1..=most / LANES).rev().map(|rows| rows * LANES);
    let even = length.div_ceil(length.div_ceil(most));
    let filled = if length < LANES { even } else { even.next_multiple_of(LANES) };
    whole.find(|block| length.is_multiple_of(*block)).unwrap_or(filled)
}

fn pieces(layout: Layout, mask: MaskSpec) -> Vec<Piece> {
    let (block, num_blocks) = (layout.key_block, layout.num_key_blocks());
    let visible: Vec<Range<usize>> = (0..layout.length)
        .step_by(layout.query_block)
        .map(|start| {
            let queries = start..(start + layout.query_block).min(layout.length);
            mask.visible_blocks(queries, block, num_blocks)
        })
        .collect();
    let widest = visible.iter().map(Range::len).max().unwrap_or(0);
    let moves = mask.reach().is_some() && 4 * widest <= 3 * num_blocks;
    if moves {
        let start = |visible: &Range<usize>| visible.start.min(num_blocks - widest) * block;
        let starts = visible.iter().map(start).collect();
        return vec![Piece { blocks: 0..visible.len(), starts, num_keys: widest * block }];
    }
    let mut pieces: Vec<Piece> = Vec::new();
    for (index, visible) in visible.iter().enumerate() {
        let (start, num_keys) = (visible.start * block, visible.len() * block);
        match pieces.last_mut() {
            Some(last) if last.num_keys == num_keys && last.starts[0] == start => {
                last.blocks.end = index + 1;
                last.starts.push(start);
            }
            _ => pieces.push(Piece { blocks: index..index + 1, starts: vec![start], num_keys }),
        }
    }
    pieces
}

impl Piece {
    /// The first key, if all blocks have the same.
    fn start(&self) -> Option<usize> {
        let first = self.starts[0];
        self.starts.iter().all(|start| *start == first).then_some(first)
    }
}

/// Keys and what has their axes.
#[derive(Clone, Copy, mt_derive::Tree)]
struct Keys<L> {
    key: L,
    value: L,
    segments: L,
}

/// Queries and what has their axes, in the forward pass.
#[derive(Clone, Copy, mt_derive::Tree)]
struct Queries<L> {
    query: L,
    segments: L,
}

/// What the backward pass has of each query.
#[derive(Clone, Copy, mt_derive::Tree)]
struct Residuals<L> {
    queries: Queries<L>,
    cotangent: L,
    log_sums: L,
    correction: L,
}

/// The inputs of a group of heads in the forward pass.
#[derive(mt_derive::Tree)]
struct ForwardStep<L> {
    queries: Queries<L>,
    keys: Keys<L>,
    sinks: L,
}

/// The inputs of a group of heads in the backward pass.
#[derive(mt_derive::Tree)]
struct BackwardStep<L> {
    residuals: Residuals<L>,
    keys: Keys<L>,
}

/// A block of queries.
#[derive(mt_derive::Tree)]
struct ForwardBlock<L> {
    /// The place of the first query.
    place: L,
    /// The place of the first key.
    start: L,
    queries: Queries<L>,
}

#[derive(mt_derive::Tree)]
struct BackwardBlock<L> {
    place: L,
    start: L,
    residuals: Residuals<L>,
}

/// The heads of keys of all sequences on a device.
#[derive(Clone, Copy)]
struct Heads {
    batch: Axis,
    kv_heads: Axis,
    /// The heads of a step.
    of_step: usize,
}

impl Heads {
    fn num_steps(self) -> usize {
        self.batch.size * self.kv_heads.size / self.of_step
    }

    fn options(self) -> ScanOptions {
        ScanOptions::over(axis(STEPS, self.num_steps()))
    }

    /// A tensor of each sequence, each head or both, cut into the heads of each step. `rest` are its other axes.
    fn steps<'b>(self, tensor: Tensor<'b>, rest: &[&'static str]) -> Tensor<'b> {
        let rest = rest.iter().map(|name| tensor.axis(name));
        let axes: Vec<Axis> = [self.batch, self.kv_heads].into_iter().chain(rest).collect();
        let merged = tensor.broadcast(&axes).merge(&[self.batch.name, KV_HEADS], HEADS);
        merged.split(HEADS, &[axis(STEPS, self.num_steps()), axis(HEADS, self.of_step)])
    }

    /// The reverse of [`Self::steps`].
    fn whole(self, steps: Tensor<'_>) -> Tensor<'_> {
        steps.merge(&[STEPS, HEADS], HEADS).split(HEADS, &[self.batch, self.kv_heads])
    }
}

impl Plan {
    fn heads(&self, query: Tensor<'_>) -> Heads {
        Heads { batch: query.axes()[0], kv_heads: query.axis(KV_HEADS), of_step: self.heads }
    }

    /// Queries, or a tensor with their axis, padded to whole blocks.
    fn filled<'b>(&self, own: Tensor<'b>, filler: f64) -> Tensor<'b> {
        let missing = self.layout.length.next_multiple_of(self.layout.query_block) - self.layout.length;
        if missing == 0 { own } else { own.pad(POSITION, 0, missing, filler) }
    }

    /// The keys of all steps, padded to whole blocks.
    fn keys<'b>(&self, heads: Heads, [key, value, segments]: [Tensor<'b>; 3]) -> Keys<Tensor<'b>> {
        let filled = self.layout.num_key_blocks() * self.layout.key_block;
        let missing = filled - self.layout.length;
        let padded = |tensor: Tensor<'b>, filler: f64| {
            if missing == 0 { tensor } else { tensor.pad(KV_POSITION, 0, missing, filler) }
        };
        Keys {
            key: heads.steps(padded(key, 0.0), &[KV_POSITION, HEAD_DIM]),
            value: heads.steps(padded(value, 0.0), &[KV_POSITION, VALUE_DIM]),
            segments: heads.steps(padded(segments.rename(POSITION, KV_POSITION), FILLER), &[KV_POSITION]),
        }
    }

    fn queries<'b>(&self, heads: Heads, query: Tensor<'b>, segments: Tensor<'b>) -> Queries<Tensor<'b>> {
        Queries {
            query: heads.steps(self.filled(query, 0.0), &[GROUP, POSITION, HEAD_DIM]),
            segments: heads.steps(self.filled(segments, FILLER), &[POSITION]),
        }
    }

    /// The results for all queries of the device, from those of the steps.
    fn of_queries<'b>(&self, heads: Heads, steps: Tensor<'b>) -> Tensor<'b> {
        let whole = heads.whole(steps);
        let length = self.layout.length;
        let own = if whole.axis(POSITION).size == length { whole } else { whole.slice(POSITION, 0, length) };
        let wide = own.axes().last().map(|last| last.name).filter(|last| *last != POSITION);
        let order = [heads.batch.name, KV_HEADS, POSITION, GROUP];
        own.order(&order.into_iter().chain(wide).collect::<Vec<_>>())
    }

    /// The places of a piece's blocks and of their first keys.
    fn tables<'b>(&self, region: Region<'b>, piece: &Piece) -> [Tensor<'b>; 2] {
        let place = |block: usize| (block * self.layout.query_block) as i32;
        let places: Vec<i32> = piece.blocks.clone().map(place).collect();
        let starts: Vec<i32> = piece.starts.iter().map(|start| *start as i32).collect();
        [places, starts].map(|numbers| {
            let count = numbers.len();
            let table =
                HostArray::from_slice(DType::I32, &[count], &numbers).expect("one number for each block");
            region.table(table, &[axis(BLOCKS, count)])
        })
    }

    /// The queries of a piece, in blocks along a leading axis.
    fn blocks<'b>(&self, piece: &Piece, rows: Tensor<'b>) -> Tensor<'b> {
        let block = self.layout.query_block;
        let own = rows.slice(POSITION, piece.blocks.start * block, piece.blocks.end * block);
        let cut = own.split(POSITION, &[axis(BLOCKS, piece.blocks.len()), axis(POSITION, block)]);
        let rest = cut.axes().iter().filter(|axis| axis.name != BLOCKS).copied().collect::<Vec<_>>();
        cut.broadcast(&[&[cut.axis(BLOCKS)], rest.as_slice()].concat())
    }

    /// Merges the results of a piece's blocks.
    fn joined<'b>(&self, blocks: Tensor<'b>) -> Tensor<'b> {
        let count = blocks.axis(BLOCKS);
        let axes = blocks.axes();
        let order: Vec<Axis> = axes[1..]
            .iter()
            .flat_map(|axis| if axis.name == POSITION { vec![count, *axis] } else { vec![*axis] })
            .collect();
        blocks.broadcast(&order).merge(&[BLOCKS, POSITION], POSITION)
    }
}

impl Piece {
    /// The keys of all blocks, if these have the same; else all keys, of which each block slices its own.
    fn common<'b>(&self, keys: Keys<Tensor<'b>>) -> Keys<Tensor<'b>> {
        match self.start() {
            Some(start) => keys.map_leaves(|_, keys| keys.slice(KV_POSITION, start, start + self.num_keys)),
            None => keys,
        }
    }

    /// The keys of a block, of [`Self::common`].
    fn own<'b>(&self, keys: Keys<Tensor<'b>>, start: Tensor<'b>) -> Keys<Tensor<'b>> {
        match self.start() {
            Some(_) => keys,
            None => keys.map_leaves(|_, keys| keys.dynamic_slice(KV_POSITION, start, self.num_keys)),
        }
    }
}

impl Kernel {
    /// The forward pass for one device's queries.
    pub(super) fn forward_rows<'b>(&self, plan: &Plan, arguments: [Tensor<'b>; 5]) -> Vec<Tensor<'b>> {
        let [query, key, value, segments, sinks] = arguments;
        let heads = plan.heads(query);
        let step = ForwardStep {
            queries: plan.queries(heads, query, segments),
            keys: plan.keys(heads, [key, value, segments]),
            sinks: heads.steps(sinks, &[GROUP]),
        };
        let ([], made) = query.region().scan_list(heads.options(), [], &step, |_, [], step| {
            let pieces = plan.pieces.iter().map(|piece| self.forward_piece(plan, piece, &step));
            ([], concatenated(pieces.collect()))
        });
        made.into_iter().map(|made| plan.of_queries(heads, made)).collect()
    }

    fn forward_piece<'b>(
        &self,
        plan: &Plan,
        piece: &Piece,
        step: &ForwardStep<Tensor<'b>>,
    ) -> Vec<Tensor<'b>> {
        let region = step.sinks.region();
        let keys = piece.common(step.keys);
        let [place, start] = plan.tables(region, piece);
        let queries = step.queries.map_leaves(|_, rows| plan.blocks(piece, *rows));
        let options = ScanOptions::over(place.axis(BLOCKS));
        let inputs = ForwardBlock { place, start, queries };
        let sinks = step.sinks;
        let ([], made) = region.scan_list(options, [], &inputs, |_, [], block| {
            let keys = piece.own(keys, block.start);
            let query = block.queries.query;
            let uncapped = self.uncapped(query, keys.key);
            let places = [block.place, block.start];
            let scores = self.seen(self.capped(uncapped), &block.queries, keys, places);
            let largest = scores.max(&[KV_POSITION]);
            let largest = match self.has_sinks {
                true => largest.maximum(sinks.broadcast(&largest.axes())),
                false => largest,
            };
            let weights = (scores - largest).exp();
            let sum = weights.sum(&[KV_POSITION]);
            let sum = match self.has_sinks {
                true => sum + (sinks.broadcast(&largest.axes()) - largest).exp(),
                false => sum,
            };
            let value = keys.value;
            let total = weights.cast(value.dtype()).contract_into(value, &[KV_POSITION], DType::F32);
            let mut made = vec![(total / sum).cast(query.dtype()), largest + sum.log()];
            if self.with_scores {
                made.push(self.seen(uncapped, &block.queries, keys, places).max(&[KV_POSITION]));
            }
            ([], made)
        });
        made.into_iter().map(|made| plan.joined(made)).collect()
    }

    /// Scores with those of keys that a query does not see masked. The places are those of the first query and key.
    fn seen<'b>(
        &self,
        scores: Tensor<'b>,
        queries: &Queries<Tensor<'b>>,
        keys: Keys<Tensor<'b>>,
        [place, start]: [Tensor<'b>; 2],
    ) -> Tensor<'b> {
        let region = scores.region();
        let places = |first: Tensor<'b>, axis: Axis| region.iota(DType::I32, axis) + first;
        let own = scores.axis(KV_POSITION);
        let pair = [&*queries.segments.axes(), &[own]].concat();
        let mask = self.options.mask;
        let same = mask.joins(queries.segments.broadcast(&pair), keys.segments, self.layout.length);
        let seen = match mask.allows(places(place, scores.axis(POSITION)), places(start, own)) {
            Some(allowed) => same.logical_and(allowed.broadcast(&pair)),
            None => same,
        };
        let axes = scores.axes();
        seen.broadcast(&axes).select(scores, region.full(DType::F32, &[], MASKED).broadcast(&axes))
    }

    /// The gradients of one device's queries, keys and values.
    pub(super) fn backward_rows<'b>(&self, plan: &Plan, operands: [Tensor<'b>; 7]) -> Vec<Tensor<'b>> {
        let [query, key, value, segments, cotangent, log_sums, correction] = operands;
        let heads = plan.heads(query);
        let residuals = Residuals {
            queries: plan.queries(heads, query, segments),
            cotangent: heads.steps(plan.filled(cotangent, 0.0), &[GROUP, POSITION, VALUE_DIM]),
            log_sums: heads.steps(plan.filled(log_sums, 0.0), &[GROUP, POSITION]),
            correction: heads.steps(plan.filled(correction, 0.0), &[GROUP, POSITION]),
        };
        let step = BackwardStep { residuals, keys: plan.keys(heads, [key, value, segments]) };
        let ([], made) = query.region().scan_list(heads.options(), [], &step, |_, [], step| {
            let (queries, [key, value]) = self.backward_step(plan, &step);
            ([], vec![queries, key.cast(step.keys.key.dtype()), value.cast(step.keys.value.dtype())])
        });
        let whole = |steps: Tensor<'b>| {
            let keys = heads.whole(steps);
            let length = plan.layout.length;
            if keys.axis(KV_POSITION).size == length { keys } else { keys.slice(KV_POSITION, 0, length) }
        };
        vec![plan.of_queries(heads, made[0]), whole(made[1]), whole(made[2])]
    }

    /// The gradients of a group of heads, of keys and values in `f32`.
    fn backward_step<'b>(
        &self,
        plan: &Plan,
        step: &BackwardStep<Tensor<'b>>,
    ) -> (Tensor<'b>, [Tensor<'b>; 2]) {
        let region = step.keys.key.region();
        let mut queries = Vec::new();
        let mut sums: Option<[Tensor<'b>; 2]> = None;
        // The last piece of a causal mask sees all keys, so that nothing needs to be filled with zeros.
        for piece in plan.pieces.iter().rev() {
            let [key, value] = [step.keys.key, step.keys.value];
            let is_whole = piece.num_keys == key.axis(KV_POSITION).size;
            let (own, made) = self.backward_piece(plan, piece, step);
            queries.push(own);
            sums = Some(match (sums, piece.start()) {
                (None, Some(_)) if is_whole => made,
                (None, None) => made,
                (sums, start) => {
                    let zeros = |like: Tensor<'b>| region.full(DType::F32, &like.axes(), 0.0);
                    let sums = sums.unwrap_or_else(|| [zeros(key), zeros(value)]);
                    let both = [0, 1].map(|index| (sums[index], made[index]));
                    both.map(|(sum, made)| added(sum, made, start))
                }
            });
        }
        queries.reverse();
        let queries = queries[0].concatenate(&queries[1..], POSITION);
        (queries, sums.expect("a sequence has at least one block"))
    }

    /// The gradients of a piece's queries, and those of its keys and values; of all keys if its blocks have different
    /// ones.
    fn backward_piece<'b>(
        &self,
        plan: &Plan,
        piece: &Piece,
        step: &BackwardStep<Tensor<'b>>,
    ) -> (Tensor<'b>, [Tensor<'b>; 2]) {
        let keys = piece.common(step.keys);
        let region = keys.key.region();
        let [place, start] = plan.tables(region, piece);
        let residuals = step.residuals.map_leaves(|_, rows| plan.blocks(piece, *rows));
        let options = ScanOptions::over(place.axis(BLOCKS));
        let inputs = BackwardBlock { place, start, residuals };
        let zeros = |like: Tensor<'b>| region.full(DType::F32, &like.axes(), 0.0);
        let carry = [zeros(keys.key), zeros(keys.value)];
        let (sums, [queries]) = region.scan(options, carry, &inputs, |_, sums, block| {
            let own = piece.own(keys, block.start);
            let (query, made) = self.backward_block(&block, own);
            let start = piece.start().is_none().then_some(block.start);
            let both = [0, 1].map(|index| (sums[index], made[index]));
            (both.map(|(sum, made)| moved(sum, made, start)), [query])
        });
        (plan.joined(queries), sums)
    }

    /// The gradients of a block's queries, in their type, and of its keys and values in `f32`.
    fn backward_block<'b>(
        &self,
        block: &BackwardBlock<Tensor<'b>>,
        keys: Keys<Tensor<'b>>,
    ) -> (Tensor<'b>, [Tensor<'b>; 2]) {
        let Residuals { queries, cotangent, log_sums, correction } = block.residuals;
        let dtype = keys.key.dtype();
        let scores = self.capped(self.uncapped(queries.query, keys.key));
        let seen = self.seen(scores, &queries, keys, [block.place, block.start]);
        let weights = (seen - log_sums).exp();
        let from_value = cotangent.contract_into(keys.value, &[VALUE_DIM], DType::F32);
        let gradient = weights * (from_value - correction);
        let gradient = match self.options.soft_cap {
            // The derivative of tanh is 1 - tanh².
            Some(cap) => gradient - gradient * (scores / cap).square(),
            None => gradient,
        };
        let gradient = gradient.cast(dtype);
        let of_rows = [POSITION, GROUP];
        let value = weights.cast(dtype).contract_into(cotangent, &of_rows, DType::F32);
        let key = gradient.contract_into(queries.query, &of_rows, DType::F32);
        let query = gradient.contract_into(keys.key, &[KV_POSITION], DType::F32);
        (query.cast(queries.query.dtype()), [key, value])
    }
}

/// A sum of all keys with the gradients of those from `start` on; without a start, `sum` has the same keys.
fn added<'b>(sum: Tensor<'b>, made: Tensor<'b>, start: Option<usize>) -> Tensor<'b> {
    let start = start.map(|start| sum.region().integer(DType::I32, start as i64));
    moved(sum, made, start)
}

/// As [`added`], from a place that is known only when the program runs.
fn moved<'b>(sum: Tensor<'b>, made: Tensor<'b>, start: Option<Tensor<'b>>) -> Tensor<'b> {
    let Some(start) = start else { return sum + made };
    let old = sum.dynamic_slice(KV_POSITION, start, made.axis(KV_POSITION).size);
    sum.dynamic_update(KV_POSITION, start, old + made)
}

/// The results of all pieces, one after another.
fn concatenated(pieces: Vec<Vec<Tensor<'_>>>) -> Vec<Tensor<'_>> {
    let number = pieces.first().map_or(0, Vec::len);
    let of = |index: usize| pieces.iter().map(move |piece| piece[index]).collect::<Vec<_>>();
    (0..number).map(|index| of(index)[0].concatenate(&of(index)[1..], POSITION)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: MaskSpec = MaskSpec { window: Some(1024), ..MaskSpec::CAUSAL };

    fn plan(length: usize, num_heads: usize, group: usize, mask: MaskSpec) -> Plan {
        Plan::new(length, num_heads, group, mask, BlockSizes::NONE, None).unwrap()
    }

    #[test]
    fn prefixes_of_a_causal_mask_cover_all_keys() {
        let plan = plan(8192, 8, 1, MaskSpec::CAUSAL);
        assert_eq!([plan.layout.query_block, plan.layout.key_block, plan.heads], [512, 1024, 1]);
        let sizes: Vec<usize> = plan.pieces.iter().map(|piece| piece.num_keys).collect();
        assert_eq!(sizes, (1..=8).map(|number| number * 1024).collect::<Vec<_>>());
        assert!(plan.pieces.iter().all(|piece| piece.start() == Some(0) && piece.blocks.len() == 2));
        assert!(!plan.is_one_loop());
    }

    #[test]
    fn a_window_is_one_loop_over_blocks_of_equal_width() {
        let plan = plan(8192, 8, 1, WINDOW);
        let [piece] = &plan.pieces[..] else { panic!("{:?}", plan.pieces) };
        assert_eq!((piece.blocks.clone(), piece.num_keys, plan.heads), (0..16, 1536, 4));
        assert_eq!(piece.starts[..5], [0, 0, 0, 512, 1024]);
        assert_eq!(piece.starts[15] + piece.num_keys, 8192);
        assert!(plan.is_one_loop());
        // A window that is nearly as long as the sequence is no gain.
        assert!(!self::plan(1536, 8, 1, WINDOW).is_one_loop());
        let all = MaskSpec { causal: false, ..MaskSpec::CAUSAL };
        assert!(self::plan(2048, 8, 1, all).is_one_loop());
    }

    #[test]
    fn scores_fit_into_vector_memory() {
        for (length, group) in [(1000, 1), (4096, 4), (32_768, 1), (4096, 8)] {
            let plan = plan(length, 12, group, MaskSpec::CAUSAL);
            let widest = plan.pieces.iter().map(|piece| piece.num_keys).max().unwrap();
            assert!(plan.heads * group * plan.layout.query_block * widest * 4 <= SCORES, "{plan:?}");
            assert!(widest >= length && plan.layout.query_block.is_multiple_of(LANES), "{plan:?}");
        }
        assert_eq!(Plan::new(131_072, 1, 1, MaskSpec::CAUSAL, BlockSizes::NONE, None), None);
    }

    #[test]
    fn given_sizes_bound_blocks_and_prefixes() {
        let given = |queries, keys| {
            let sizes = BlockSizes { queries: Some(queries), keys: Some(keys) };
            let plan = Plan::new(4096, 2, 1, MaskSpec::CAUSAL, sizes, None).unwrap();
            [plan.layout.query_block, plan.layout.key_block, plan.pieces.len()]
        };
        assert_eq!(given(256, 512), [256, 512, 8]);
        assert_eq!(given(512, 4096), [512, 4096, 1]);
        // Scores of 2048 queries do not fit, and each prefix is code.
        assert_eq!(given(2048, 2048), [512, 2048, 2]);
        assert_eq!(given(128, 64), [128, 128, 32]);
    }
}
