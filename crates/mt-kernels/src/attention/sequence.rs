//! Blocks of a sequence's queries and keys, and the visibility of keys.

use std::ops::{Range, RangeInclusive};

use super::{
    Inputs, Mask, Operand, Options, Shape,
    format::{Format, load_words, zip_rows},
    operands::Row,
    simd::{Simd, transpose},
};

/// Queries in a block: the lanes of four of the widest vectors.
pub(super) const NUM_QUERIES: usize = 64;

/// Widths of the buffers that hold a row of a head.
#[derive(Clone, Copy)]
pub(super) struct Widths {
    pub head_dim: usize,
    /// Words that hold at least one element.
    pub words: usize,
    /// Words of a row that is stored in the format of a left operand, up to a whole tile.
    pub row: usize,
    /// Words of a row with one element in each, up to a whole tile.
    pub columns: usize,
}

impl Widths {
    pub(super) fn new(head_dim: usize, step: usize) -> Self {
        let words = head_dim.div_ceil(step);
        let [row, columns] = [words, head_dim].map(|size| size.next_multiple_of(16));
        Self { head_dim, words, row, columns }
    }
}

/// One row of the batch and one KV head.
#[derive(Clone, Copy)]
pub(super) struct Sequence<'a> {
    pub options: &'a Options,
    pub batch: usize,
    pub kv_head: usize,
    /// `[length]`
    pub segments: &'a [i32],
    /// Keys in a block.
    pub num_keys: usize,
}

/// A block of queries. Its columns run over the groups of a position and then over positions.
pub(super) struct Columns {
    /// The columns that are queries. The remaining columns are computed and not stored.
    pub count: usize,
    rows: [Row; NUM_QUERIES],
    /// The first and the last key that the mask lets each query see, segments aside.
    first: [u32; NUM_QUERIES],
    last: [u32; NUM_QUERIES],
    segments: [u32; NUM_QUERIES],
    /// The first and the last key that at least one query sees, and that all queries see, segments aside.
    some: RangeInclusive<usize>,
    all: RangeInclusive<usize>,
    /// The least and the largest segment number.
    segment_bounds: (i32, i32),
}

/// A block of keys that a block of queries visits.
pub(super) struct Visit {
    /// The first key.
    pub start: usize,
    pub count: usize,
    /// Whether at least one query does not see at least one of the keys.
    pub is_masked: bool,
}

impl<'a> Sequence<'a> {
    pub(super) fn new<E>(
        options: &'a Options,
        inputs: &Inputs<'a, E>,
        index: usize,
        num_keys: usize,
    ) -> Self {
        let Shape { length, kv_heads, .. } = options.shape;
        let (batch, kv_head) = (index / kv_heads, index % kv_heads);
        Self { options, batch, kv_head, segments: &inputs.segments[batch * length..][..length], num_keys }
    }

    pub(super) fn num_query_blocks(&self) -> usize {
        (self.options.shape.length * self.options.shape.group).div_ceil(NUM_QUERIES)
    }

    pub(super) fn columns(&self, block: usize) -> Columns {
        let Shape { length, group, .. } = self.options.shape;
        let start = block * NUM_QUERIES;
        let count = (length * group - start).min(NUM_QUERIES);
        let row =
            |position: usize, group: usize| Row { batch: self.batch, kv_head: self.kv_head, position, group };
        let mut columns = Columns {
            count,
            rows: [row(start / group, start % group); NUM_QUERIES],
            first: [0; NUM_QUERIES],
            last: [0; NUM_QUERIES],
            segments: [0; NUM_QUERIES],
            some: 0..=0,
            all: 0..=0,
            segment_bounds: (i32::MAX, i32::MIN),
        };
        let Row { mut position, group: mut in_group, .. } = columns.rows[0];
        let (mut some, mut all) = ((usize::MAX, 0), (0, usize::MAX));
        let mut seen = self.options.mask.seen(position, length);
        for column in 0..count {
            columns.rows[column] = row(position, in_group);
            let segment = self.segments[position];
            columns.first[column] = seen.0 as u32;
            columns.last[column] = seen.1 as u32;
            columns.segments[column] = segment as u32;
            let (least, largest) = columns.segment_bounds;
            columns.segment_bounds = (least.min(segment), largest.max(segment));
            some = (some.0.min(seen.0), some.1.max(seen.1));
            all = (all.0.max(seen.0), all.1.min(seen.1));
            in_group += 1;
            if in_group == group {
                (position, in_group) = (position + 1, 0);
                if position < length {
                    seen = self.options.mask.seen(position, length);
                }
            }
        }
        columns.some = some.0..=some.1;
        columns.all = all.0..=all.1;
        columns
    }

    /// The blocks of keys that at least one of these blocks of queries sees, segments aside.
    pub(super) fn key_blocks(&self, query_blocks: Range<usize>) -> Range<usize> {
        let Shape { length, group, .. } = self.options.shape;
        let first = query_blocks.start * NUM_QUERIES / group;
        let last = (query_blocks.end * NUM_QUERIES).min(length * group) - 1;
        let start = self.options.mask.seen(first, length).0;
        let end = self.options.mask.seen(last / group, length).1;
        start / self.num_keys..end / self.num_keys + 1
    }

    /// Cuts the blocks of queries into about `count` shares of similar cost, measured in visited blocks of keys.
    pub(super) fn shares(&self, count: usize) -> Vec<Range<usize>> {
        let num_blocks = self.num_query_blocks();
        let costs: Vec<usize> =
            (0..num_blocks).map(|block| self.key_blocks(block..block + 1).len()).collect();
        let total: usize = costs.iter().sum();
        let count = count.min(num_blocks);
        let (mut shares, mut start, mut sum) = (Vec::new(), 0, 0);
        for (block, cost) in costs.into_iter().enumerate() {
            sum += cost;
            let is_full = sum * count >= total * (shares.len() + 1);
            if is_full || block + 1 == num_blocks {
                shares.push(start..block + 1);
                start = block + 1;
            }
        }
        shares
    }

    /// The positions of a block of keys.
    pub(super) fn keys(&self, block: usize) -> Range<usize> {
        let start = block * self.num_keys;
        start..(start + self.num_keys).min(self.options.shape.length)
    }

    /// The least and the largest segment number of each block of keys.
    pub(super) fn segment_bounds(&self, key_blocks: Range<usize>) -> Vec<(i32, i32)> {
        let bounds = |block: usize| {
            let segments = &self.segments[self.keys(block)];
            segments.iter().fold((i32::MAX, i32::MIN), |(least, largest), segment| {
                (least.min(*segment), largest.max(*segment))
            })
        };
        key_blocks.map(bounds).collect()
    }

    /// How a block of queries visits a block of keys, given the bounds of the keys' segment numbers; `None` if all its
    /// keys are invisible.
    pub(super) fn visit(
        &self,
        columns: &Columns,
        block: usize,
        (least, largest): (i32, i32),
    ) -> Option<Visit> {
        let keys = self.keys(block);
        let keys = keys.start..keys.end.min(columns.some.end() + 1);
        let (own_least, own_largest) = columns.segment_bounds;
        if keys.end <= *columns.some.start() || keys.is_empty() || own_least > largest || own_largest < least
        {
            return None;
        }
        let is_one_segment = own_least == own_largest && least == largest;
        let see_all = *columns.all.start() <= keys.start && keys.end <= columns.all.end() + 1;
        Some(Visit { start: keys.start, count: keys.len(), is_masked: !(is_one_segment && see_all) })
    }

    /// Stores the rows of a block of keys and fills the rest with zeros.
    #[inline(always)]
    pub(super) fn copy_keys<F: Format>(
        &self,
        format: F,
        widths: Widths,
        block: usize,
        from: &Operand<'_, F::Element>,
        to: &mut [u32],
    ) {
        let keys = self.keys(block);
        let (own, rest) = to.split_at_mut(keys.len() * widths.row);
        for (position, to) in keys.zip(own.chunks_exact_mut(widths.row)) {
            let row = Row { batch: self.batch, kv_head: self.kv_head, position, group: 0 };
            format.copy_row(from.row(row), to);
        }
        rest.fill(0);
    }

    /// Transposes a block of keys to `[head_dim][words of keys]`.
    #[inline(always)]
    pub(super) fn transpose_keys<F: Format>(
        &self,
        format: F,
        widths: Widths,
        rows: &[u32],
        zipped: &mut [u32],
        to: &mut [u32],
    ) {
        let words = self.num_keys / F::STEP;
        let sizes = [words, widths.columns];
        if F::STEP == 1 {
            transpose(format.simd(), sizes, rows, widths.row, to, words);
        } else {
            zip_rows::<F>(rows, widths.row, zipped, widths.columns);
            transpose(format.simd(), sizes, zipped, widths.columns, to, words);
        }
    }
}

impl Columns {
    pub(super) fn rows(&self) -> &[Row] {
        &self.rows[..self.count]
    }

    /// The queries of a vector that see a key.
    #[inline(always)]
    pub(super) fn see<S: Simd>(&self, simd: S, column: usize, key: usize, segment: i32) -> S::Mask {
        let key = simd.splat_word(key as u32);
        let after_first = simd.at_most(load_words(simd, &self.first[column..]), key);
        let before_last = simd.at_most(key, load_words(simd, &self.last[column..]));
        let segments = load_words(simd, &self.segments[column..]);
        let same = simd.equal_words(segments, simd.splat_word(segment as u32));
        simd.both(simd.both(after_first, before_last), same)
    }

    /// Stores the rows of the queries and fills the rest with zeros.
    #[inline(always)]
    pub(super) fn copy_rows<F: Format>(
        &self,
        format: F,
        widths: Widths,
        from: &Operand<'_, F::Element>,
        to: &mut [u32],
    ) {
        let (own, rest) = to.split_at_mut(self.count * widths.row);
        for (row, to) in self.rows().iter().zip(own.chunks_exact_mut(widths.row)) {
            format.copy_row(from.row(*row), to);
        }
        rest.fill(0);
    }
}

impl Mask {
    /// The first and the last key that a query at a position sees, segments aside.
    fn seen(self, place: usize, length: usize) -> (usize, usize) {
        let (mut first, mut last) = (0, length - 1);
        if self.causal {
            last = place;
        }
        if let Some(window) = self.window {
            first = (place + 1).saturating_sub(window);
        }
        if let Some(chunk) = self.chunk {
            let start = place / chunk * chunk;
            first = first.max(start);
            last = last.min(start + chunk - 1);
        }
        (first, last)
    }
}
