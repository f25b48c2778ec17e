//! How a head's queries and keys are cut into blocks, and which see which.

use std::ops::{Range, RangeInclusive};

use super::{
    Inputs, Mask, Operand, Options, Shape,
    format::{Format, load_words, zip_rows},
    operands::Row,
    simd::{Simd, transpose},
};

/// Queries in a block: as many as four of the widest vectors hold.
pub(super) const NUM_QUERIES: usize = 64;

/// Widths of what holds a row of a head.
#[derive(Clone, Copy)]
pub(super) struct Widths {
    pub head_dim: usize,
    /// Words with an element or more.
    pub words: usize,
    /// Words of a row that is stored as it is.
    pub row: usize,
    /// Words of a row with an element in each.
    pub columns: usize,
}

impl Widths {
    pub(super) fn new(head_dim: usize, step: usize) -> Self {
        let words = head_dim.div_ceil(step);
        let [row, columns] = [words, head_dim].map(|size| size.next_multiple_of(16));
        Self { head_dim, words, row, columns }
    }
}

/// What one row of a batch and one head of keys have to do.
#[derive(Clone, Copy)]
pub(super) struct Sequence<'a> {
    pub options: &'a Options,
    pub batch: usize,
    pub kv_head: usize,
    /// Of all positions.
    pub segments: &'a [i32],
    /// Keys in a block.
    pub num_keys: usize,
}

/// A block of queries, whose columns are positions one after the other, each with its group.
pub(super) struct Columns {
    /// Those that are queries. The others are computed, too, and left.
    pub count: usize,
    rows: [Row; NUM_QUERIES],
    /// The first and the last key that each sees by its place.
    first: [u32; NUM_QUERIES],
    last: [u32; NUM_QUERIES],
    segments: [u32; NUM_QUERIES],
    /// Of all together, the first and the last key that some see, and that all see.
    some: RangeInclusive<usize>,
    all: RangeInclusive<usize>,
    /// The least and the largest segment.
    segment_bounds: (i32, i32),
}

/// A block of keys that a block of queries visits.
pub(super) struct Visit {
    /// The first key.
    pub start: usize,
    pub count: usize,
    /// Whether some queries do not see some of the keys.
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

    /// The blocks of keys that some of these blocks of queries see by their places.
    pub(super) fn key_blocks(&self, query_blocks: Range<usize>) -> Range<usize> {
        let Shape { length, group, .. } = self.options.shape;
        let first = query_blocks.start * NUM_QUERIES / group;
        let last = (query_blocks.end * NUM_QUERIES).min(length * group) - 1;
        let start = self.options.mask.seen(first, length).0;
        let end = self.options.mask.seen(last / group, length).1;
        start / self.num_keys..end / self.num_keys + 1
    }

    /// Cuts all blocks of queries into so many shares that visit about as many keys.
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

    /// The keys of a block.
    pub(super) fn keys(&self, block: usize) -> Range<usize> {
        let start = block * self.num_keys;
        start..(start + self.num_keys).min(self.options.shape.length)
    }

    /// The least and the largest segment of each block of keys.
    pub(super) fn segment_bounds(&self, key_blocks: Range<usize>) -> Vec<(i32, i32)> {
        let bounds = |block: usize| {
            let segments = &self.segments[self.keys(block)];
            segments.iter().fold((i32::MAX, i32::MIN), |(least, largest), segment| {
                (least.min(*segment), largest.max(*segment))
            })
        };
        key_blocks.map(bounds).collect()
    }

    /// How a block of queries visits a block of keys, whose segments lie between two, if it sees some of them.
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

    /// Stores a block of keys' rows, and zeros after the last.
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

    /// Of a block's rows, rows with a word for each key, or for a few neighbours.
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

    /// Which queries of a vector see a key.
    #[inline(always)]
    pub(super) fn see<S: Simd>(&self, simd: S, column: usize, key: usize, segment: i32) -> S::Mask {
        let key = simd.splat_word(key as u32);
        let after_first = simd.at_most(load_words(simd, &self.first[column..]), key);
        let before_last = simd.at_most(key, load_words(simd, &self.last[column..]));
        let segments = load_words(simd, &self.segments[column..]);
        let same = simd.equal_words(segments, simd.splat_word(segment as u32));
        simd.both(simd.both(after_first, before_last), same)
    }

    /// Stores the queries' rows, and zeros after the last.
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
    /// The first and the last key that a query at a place sees.
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
