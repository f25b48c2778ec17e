//! Attention masks: the keys that each query sees.

use std::ops::Range;

use mt_shape::{Axis, DType};
use mt_trace::Tensor;

use crate::{
    SequenceOrder,
    axes::{KV_POSITION, POSITION},
};

/// The keys of its own segment that a query sees: those that all fields allow. Places are indices in the row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaskSpec {
    /// Restricts a query to keys at or before its own place.
    pub causal: bool,
    /// With a window of `w`, restricts a query to keys at places above `place - w`.
    pub window: Option<usize>,
    /// With chunks of `c`, restricts a query to keys with the same `place / c`, rounded down.
    pub chunk: Option<usize>,
    /// With blocks of `b`, restricts a query to keys of its own block and of earlier ones. Blocks are counted from the
    /// start of each document: those of a token are `position / b`, rounded down.
    pub block: Option<usize>,
}

impl MaskSpec {
    /// All keys at or before the query's place.
    pub const CAUSAL: Self = Self { causal: true, window: None, chunk: None, block: None };

    /// All keys of the query's own block of `size` positions and of earlier blocks (Arriola et al., 2025).
    pub const fn blocks(size: usize) -> Self {
        Self { causal: false, window: None, chunk: None, block: Some(size) }
    }

    /// The number of latest tokens, its own included, that a query sees at most; `None` for all.
    pub fn reach(self) -> Option<usize> {
        self.window.into_iter().chain(self.chunk).min()
    }

    /// The blocks of keys that some query at these places sees. A block has `block` places.
    pub(super) fn visible_blocks(
        self,
        queries: Range<usize>,
        block: usize,
        num_blocks: usize,
    ) -> Range<usize> {
        let (first_query, last_query) = (queries.start, queries.end - 1);
        let (mut first, mut last) = (0, num_blocks * block - 1);
        if self.causal {
            last = last.min(last_query);
        }
        if let Some(size) = self.block {
            // Where a document begins is not known here; its blocks may begin anywhere.
            last = last.min(last_query + size - 1);
        }
        if let Some(window) = self.window {
            first = first.max((first_query + 1).saturating_sub(window));
        }
        if let Some(chunk) = self.chunk {
            first = first.max(first_query / chunk * chunk);
            last = last.min(last_query / chunk * chunk + chunk - 1);
        }
        first / block..last / block + 1
    }

    /// Whether a query sees keys with these numbers of segments ([`Segments::coded`]), regardless of places. `length` is
    /// the number of keys in a row.
    ///
    /// # Shapes
    /// `i32[…, position, kv_position], i32[…, kv_position] -> bool[…, position, kv_position]`
    #[track_caller]
    pub(super) fn joins<'t>(self, queries: Tensor<'t>, keys: Tensor<'t>, length: usize) -> Tensor<'t> {
        let Some(block) = self.block else { return queries.equals(keys) };
        let keys = keys.broadcast(&queries.axes());
        let first_of_segment = queries - queries.remainder(numbers_of_segment(block, length));
        queries.greater_equal(keys).logical_and(keys.greater_equal(first_of_segment))
    }

    /// Whether queries at `query_place` see keys at `key_place`, regardless of segments and the blocks within them.
    ///
    /// # Shapes
    /// `i32[…, position], i32[…, kv_position] -> bool[…, position, kv_position]`; `None` if each query sees all keys
    #[track_caller]
    pub(super) fn allows<'t>(self, query_place: Tensor<'t>, key_place: Tensor<'t>) -> Option<Tensor<'t>> {
        let pair = [&*query_place.axes(), &[key_place.axis(KV_POSITION)]].concat();
        let queries = query_place.broadcast(&pair);
        let keys = key_place.broadcast(&pair);
        let mut conditions = Vec::new();
        if self.causal {
            conditions.push(queries.greater_equal(keys));
        }
        if let Some(window) = self.window {
            conditions.push((queries - keys).less(window as f64));
        }
        if let Some(chunk) = self.chunk {
            conditions.push((queries / chunk as f64).equals(keys / chunk as f64));
        }
        conditions.into_iter().reduce(|all, condition| all.logical_and(condition))
    }
}

/// The factor of segments in the numbers that masks with blocks compare: more than the number of blocks in a row.
fn numbers_of_segment(block: usize, length: usize) -> f64 {
    (length.div_ceil(block) + 1) as f64
}

/// The segments of queries and keys. A query sees only keys of its own segment.
#[derive(Clone, Copy)]
pub struct Segments<'t> {
    /// `i32[batch, position]`; 0 is padding.
    pub query: Tensor<'t>,
    /// `i32[batch, kv_position]`
    pub key: Tensor<'t>,
    /// The place of the first query among the keys, an `i32` scalar; `None` if it is the first place.
    pub first_query: Option<Tensor<'t>>,
    /// The order in which queries and keys are stored. Keys of a cache are always `AsRead`.
    pub order: SequenceOrder,
    /// The position of each query in its document, `i32[batch, position]`; `None` if each row is one document. Only
    /// masks with blocks need it.
    pub positions: Option<Tensor<'t>>,
}

impl<'t> Segments<'t> {
    /// The segments with all tensors of tokens mapped, such as to those of some rows.
    #[must_use]
    pub fn mapped(&self, map: &dyn Fn(Tensor<'t>) -> Tensor<'t>) -> Self {
        Self { query: map(self.query), key: map(self.key), positions: self.positions.map(map), ..*self }
    }

    /// The segments of sequences that attend to themselves.
    ///
    /// # Shapes
    /// `i32[batch, position]`
    pub fn within(segmentation: Tensor<'t>, order: SequenceOrder) -> Self {
        let key = segmentation.rename(POSITION, KV_POSITION);
        Self { query: segmentation, key, first_query: None, order, positions: None }
    }

    /// The segments of queries that attend to a cache, from the key at `start` on. A row of a cache is one document.
    pub fn of_cache(query: Tensor<'t>, key: Tensor<'t>, start: Tensor<'t>, order: SequenceOrder) -> Self {
        Self { query, key, first_query: Some(start), order, positions: None }
    }

    /// With the position of each query in its document.
    pub fn with_positions(self, positions: Tensor<'t>) -> Self {
        Self { positions: Some(positions), ..self }
    }

    /// The segments as masks compare them: with blocks, each number is that of the segment times
    /// [`numbers_of_segment`] plus that of the block within the segment.
    #[track_caller]
    pub(super) fn coded(self, spec: MaskSpec) -> Self {
        let Some(block) = spec.block else { return self };
        let (queries, keys) = (self.query.axis(POSITION), self.key.axis(KV_POSITION));
        let region = self.query.region();
        let step = numbers_of_segment(block, keys.size);
        let code = |segments: Tensor<'t>, positions: Tensor<'t>| {
            segments * step + (positions / block as f64).broadcast(&segments.axes())
        };
        let Some(first) = self.first_query else {
            let places = self.order.places(region.iota(DType::I32, queries), queries.size);
            let places = places.broadcast(&self.query.axes());
            // Padding has no position. By its places, no query sees further than a block.
            let position = |positions| self.query.differs(0.0).select(positions, places);
            let query = code(self.query, self.positions.map_or(places, position));
            return Self { query, key: query.rename(POSITION, KV_POSITION), ..self };
        };
        // A cache holds one document in each row.
        let (query_places, key_places) = self.places_of_tokens(first);
        Self { query: code(self.query, query_places), key: code(self.key, key_places), ..self }
    }

    /// The places of queries and keys among the tokens of their row. A prompt shorter than the longest one leaves slots
    /// empty before the generated tokens; they have no place.
    #[track_caller]
    fn places_of_tokens(self, first: Tensor<'t>) -> (Tensor<'t>, Tensor<'t>) {
        let keys = self.key.differs(0.0).cast(DType::I32).cumulative_sum(KV_POSITION) - 1.0;
        let own = keys.dynamic_slice(KV_POSITION, first, self.query.axis(POSITION).size);
        (own.rename(KV_POSITION, POSITION), keys)
    }

    /// The places of queries and of keys. A prompt shorter than the longest one leaves slots of a cache empty before the
    /// generated tokens; with `of_tokens` these have no place.
    ///
    /// # Shapes
    /// `i32[position], i32[kv_position]`, or `i32[batch, …]` in a cache with `of_tokens`
    pub(super) fn places(self, of_tokens: bool) -> (Tensor<'t>, Tensor<'t>) {
        let region = self.query.region();
        let (queries, keys) = (self.query.axis(POSITION), self.key.axis(KV_POSITION));
        let place = |of: Axis| self.order.places(region.iota(DType::I32, of), of.size);
        match self.first_query {
            None => (place(queries), place(keys)),
            Some(first) if of_tokens => self.places_of_tokens(first),
            Some(first) => (place(queries) + first, place(keys)),
        }
    }

    /// The mask of pairs: whether each query sees each key.
    ///
    /// # Shapes
    /// `bool[batch, position, kv_position]`
    #[track_caller]
    pub fn mask(self, spec: MaskSpec) -> Tensor<'t> {
        let keys = self.key.axis(KV_POSITION);
        let pair = [&*self.query.axes(), &[keys]].concat();
        let coded = self.coded(spec);
        let same = spec.joins(coded.query.broadcast(&pair), coded.key, keys.size);
        let (query_place, key_place) = self.places(spec.window.is_some() || spec.chunk.is_some());
        match spec.allows(query_place, key_place) {
            Some(allowed) => same.logical_and(allowed.broadcast(&pair)),
            None => same,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl MaskSpec {
        fn sees(self, query: usize, key: usize) -> bool {
            (!self.causal || key <= query)
                && self.window.is_none_or(|window| key + window > query)
                && self.chunk.is_none_or(|chunk| query / chunk == key / chunk)
        }
    }

    #[test]
    fn visible_blocks_are_those_with_a_visible_key() {
        let sizes = [None, Some(1), Some(2), Some(4), Some(5), Some(9), Some(100)];
        for (causal, window, chunk) in [true, false]
            .into_iter()
            .flat_map(|causal| sizes.map(|window| (causal, window)))
            .flat_map(|(causal, window)| sizes.map(|chunk| (causal, window, chunk)))
        {
            let spec = MaskSpec { causal, window, chunk, block: None };
            let (block, num_blocks) = (4, 7);
            for query_block in 0..num_blocks {
                let places = |index: usize| index * block..(index + 1) * block;
                let sees = |key_block: &usize| {
                    places(query_block).any(|query| places(*key_block).any(|key| spec.sees(query, key)))
                };
                let visible: Vec<usize> = (0..num_blocks).filter(sees).collect();
                let visited: Vec<usize> =
                    spec.visible_blocks(places(query_block), block, num_blocks).collect();
                assert_eq!(visited, visible, "{spec:?}, block {query_block}");
            }
            // Ranges of queries that begin inside a block.
            for first in 0..num_blocks * block - 5 {
                let sees = |key_block: &usize| {
                    (first..first + 5).any(|query| {
                        (key_block * block..(key_block + 1) * block).any(|key| spec.sees(query, key))
                    })
                };
                let visible: Vec<usize> = (0..num_blocks).filter(sees).collect();
                let visited: Vec<usize> = spec.visible_blocks(first..first + 5, block, num_blocks).collect();
                assert_eq!(visited, visible, "{spec:?}, queries from {first}");
            }
        }
    }

    #[test]
    fn a_block_reaches_behind_each_query() {
        let spec = MaskSpec::blocks(6);
        // A query at place 7 may be the first of its block, which ends at place 12.
        assert_eq!(spec.visible_blocks(4..8, 4, 7), 0..4);
        assert_eq!(spec.visible_blocks(24..28, 4, 7), 0..7);
        assert_eq!(MaskSpec::blocks(1).visible_blocks(4..8, 4, 7), 0..2);
    }

    #[test]
    fn a_window_bounds_the_blocks_of_each_query() {
        let visited = |spec: MaskSpec, num_blocks: usize| -> usize {
            (0..num_blocks)
                .map(|index| spec.visible_blocks(index * 128..(index + 1) * 128, 128, num_blocks).len())
                .sum()
        };
        let windowed = MaskSpec { window: Some(512), ..MaskSpec::CAUSAL };
        let chunked = MaskSpec { chunk: Some(512), ..MaskSpec::CAUSAL };
        assert_eq!(visited(MaskSpec::CAUSAL, 64), 64 * 65 / 2);
        assert_eq!(visited(windowed, 64), 64 * 5 - (1 + 2 + 3 + 4));
        assert_eq!(visited(chunked, 64), 64 / 4 * (1 + 2 + 3 + 4));
    }
}
