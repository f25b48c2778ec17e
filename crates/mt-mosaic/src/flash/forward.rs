//! The forward pass.

use mt_shape::DType;

use super::{Flash, Inputs, LANES, MASKED, Sizes, of_query, of_query_number};
use crate::{Binary, Builder, Comparison, Kernel, KernelError, Place, Reduction, Scalar, Tile, Unary};

struct Places {
    inputs: Inputs,
    sinks: Place,
    context: Place,
    log_sums: Place,
    largest: Place,
    sum: Place,
    total: Place,
    /// The segments of queries, in rows.
    segments: Place,
    /// The first key's place less that of the first query.
    offset: Scalar,
}

impl Flash {
    /// The forward pass.
    ///
    /// Operands, in blocks of queries and keys:
    ///
    /// - tables: the smallest segment of each block of each row, `[batch · blocks]`, and the largest
    /// - keys `bf16[batch, kv_heads, length, head_dim]` and values `bf16[batch, kv_heads, length, value_dim]`
    /// - queries, scaled, `bf16[batch, heads, length, head_dim]`
    /// - segments `i32[batch, 1, length]`, for queries and again for keys; padding has [`super::FILLER`]
    /// - sinks `f32[heads, 1, 128]`, with equal columns
    ///
    /// Results: the context `bf16[batch, heads, length, value_dim]`, and the logarithms of the sums of exponentiated logits
    /// `f32[batch, heads, 1, length]`.
    ///
    /// # Errors
    /// The kernel does not fit into the chip's memory.
    pub fn forward(&self) -> Result<Kernel, KernelError> {
        let pairs = self.pairs();
        let Sizes { batch, value_dim, .. } = self.sizes;
        let (block, heads, length) = (self.block, self.heads(), self.padded_length());
        let mut builder = Builder::new("flash_attention_forward", &[batch, heads, pairs.len()], 2);
        let [rows, columns] = Self::tables(&mut builder, &pairs);
        let pair = Scalar::Grid(2);
        let row = (pair.clone() + 1).entry(rows);
        let column = pair.clone().entry(columns);
        let is_visible = self.common_segment(&mut builder, &row, &column);
        let inputs = self.inputs(&mut builder, &row, &column);
        let zero = Scalar::Constant(0);
        let of_head = [Scalar::Grid(1), zero.clone(), zero];
        let sinks = builder.operand(DType::F32, &[heads, 1, LANES], &[1, 1, LANES], &of_head);
        let dims = [batch, heads, length, value_dim];
        let context = builder.result(DType::BF16, &dims, &[1, 1, block, value_dim], &of_query(&row));
        let dims = [batch, heads, 1, length];
        let log_sums = builder.result(DType::F32, &dims, &[1, 1, 1, block], &of_query_number(&row));
        let places = Places {
            inputs,
            sinks,
            context,
            log_sums,
            largest: builder.scratch(Tile::f32(block, LANES)),
            sum: builder.scratch(Tile::f32(block, LANES)),
            total: builder.scratch(Tile::f32(block, value_dim)),
            segments: builder.scratch(Tile::i32(block, LANES)),
            offset: (column - row.clone()) * block,
        };
        let changes = |neighbor: Scalar| neighbor.entry(rows).compares(Comparison::Different, row.clone());
        builder.branch(changes(pair.clone()), |b| self.begin(b, &places));
        builder.branch(is_visible, |b| self.visit(b, &places));
        builder.branch(changes(pair + 2), |b| self.end(b, &places));
        builder.finish()
    }

    /// Starts with the sinks: relative to themselves their exponential is 1, and their value is 0.
    fn begin(&self, b: &mut Builder, places: &Places) {
        let sinks = b.load(&places.sinks);
        let sinks = b.broadcast(sinks, self.block, LANES);
        b.store(&places.largest, sinks);
        let one = b.constant(Tile::f32(self.block, LANES), 1.0);
        b.store(&places.sum, one);
        let zero = b.constant(Tile::f32(self.block, self.sizes.value_dim), 0.0);
        b.store(&places.total, zero);
        let segments = self.in_rows(b, &places.inputs.query_segments);
        b.store(&places.segments, segments);
    }

    /// Adds the keys and values of a block to the running sums of a block of queries.
    fn visit(&self, b: &mut Builder, places: &Places) {
        let (block, repeats) = (self.block, self.block / LANES);
        let query = b.load(&places.inputs.query);
        let key = b.load(&places.inputs.key);
        let logits = b.product(query, key, [1, 1]);
        let logits = self.capped(b, logits);
        let queries = b.load(&places.segments);
        let queries = b.repeat(queries, repeats);
        let keys = b.load(&places.inputs.key_segments);
        let keys = b.broadcast(keys, block, block);
        let distance = |b: &mut Builder| {
            let queries = b.iota(Tile::i32(block, block), 0);
            let keys = b.iota(Tile::i32(block, block), 1);
            b.binary(Binary::Subtract, queries, keys)
        };
        let mask = self.mask(b, [queries, keys], distance, &places.offset);
        let hidden = b.constant(Tile::f32(block, block), MASKED);
        let logits = b.select(mask, logits, hidden);
        let old = b.load(&places.largest);
        let largest = b.reduce(Reduction::Maximum, logits, 1);
        let largest = b.broadcast(largest, block, LANES);
        let largest = b.binary(Binary::Maximum, old, largest);
        b.store(&places.largest, largest);
        let of_row = b.repeat(largest, repeats);
        let weights = b.binary(Binary::Subtract, logits, of_row);
        let weights = b.unary(Unary::Exponential, weights);
        let fade = b.binary(Binary::Subtract, old, largest);
        let fade = b.unary(Unary::Exponential, fade);
        let added = b.reduce(Reduction::Sum, weights, 1);
        let added = b.broadcast(added, block, LANES);
        let sum = b.load(&places.sum);
        let sum = b.binary(Binary::Multiply, sum, fade);
        let sum = b.binary(Binary::Add, sum, added);
        b.store(&places.sum, sum);
        let weights = b.cast(weights, DType::BF16);
        let value = b.load(&places.inputs.value);
        let product = b.product(weights, value, [1, 0]);
        let fade = b.repeat(fade, self.sizes.value_dim / LANES);
        let total = b.load(&places.total);
        let total = b.binary(Binary::Multiply, total, fade);
        let total = b.binary(Binary::Add, total, product);
        b.store(&places.total, total);
    }

    fn end(&self, b: &mut Builder, places: &Places) {
        let sum = b.load(&places.sum);
        let total = b.load(&places.total);
        let sums = b.repeat(sum, self.sizes.value_dim / LANES);
        let context = b.binary(Binary::Divide, total, sums);
        let context = b.cast(context, DType::BF16);
        b.store(&places.context, context);
        let largest = b.load(&places.largest);
        let logarithm = b.unary(Unary::Logarithm, sum);
        let log_sums = b.binary(Binary::Add, largest, logarithm);
        // All rows are equal.
        let log_sums = b.transpose(log_sums);
        let log_sums = b.reduce(Reduction::Maximum, log_sums, 0);
        b.store(&places.log_sums, log_sums);
    }
}
