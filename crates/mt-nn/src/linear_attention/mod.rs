//! Linear attention with a decaying memory, in chunks.
//!
//! The memory of a head is one matrix `S`, from keys to values. Each token `i` lets it decay and writes to it, and then
//! reads it with its query: the output is `Sᵢᵀqᵢ`. There are two ways to write:
//!
//! - the sum `Sᵢ = dᵢ Sᵢ₋₁ + kᵢ ⊗ βᵢvᵢ`, as in Mamba-2 (Dao and Gu, 2024), and
//! - the delta rule `Sᵢ = dᵢ Sᵢ₋₁ + kᵢ ⊗ βᵢ(vᵢ − dᵢ Sᵢ₋₁ᵀkᵢ)`, which corrects the value that the key recalls, as in
//!   Gated DeltaNet (Yang et al., 2024). Within a chunk the corrections of all tokens are the solution of one triangular
//!   system.
//!
//! Tokens are processed in chunks, so that a sequence costs a number of products that is linear in its length.

mod inverse;

use std::collections::BTreeMap;

use mt_derive::Tree;
use mt_shape::{Axis, DType, axis};
use mt_trace::{Precision, SavePolicy, ScanOptions, Tensor};

use crate::{
    attention::MASKED,
    axes::{HEAD_DIM, KEY_HEADS, KV_POSITION, POSITION, VALUE_DIM, VALUE_GROUP},
    convolution::last_segment,
};

pub use inverse::unit_lower_inverse;

/// The inputs of the rule. Value heads `r·i` to `r·i + r - 1` share the key head `i`.
#[derive(Clone, Copy, Debug, Tree)]
pub struct LinearAttentionInputs<L> {
    /// `[batch, position, key_heads, head_dim]`
    pub query: L,
    /// `[batch, position, key_heads, head_dim]`
    pub key: L,
    /// `[batch, position, key_heads, value_group, value_dim]`
    pub value: L,
    /// `f32[batch, position, key_heads, value_group]`: the strength with which a token writes; 0 for padding.
    pub write: L,
    /// `f32[batch, position, key_heads, value_group]`: the logarithm of the factor by which memory decays before a token
    /// writes, at most 0; 0 for padding.
    pub log_decay: L,
    /// `i32[batch, position]`: the document of each token; 0 is padding.
    pub segments: L,
}

const CHUNKS: &str = "chunks";

/// Added to the squared length of queries and keys before they are scaled to length 1.
const EPSILON: f64 = 1e-6;

/// The way in which tokens write to the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryUpdate {
    /// The value is added.
    Sum,
    /// The delta rule: the difference between the value and what the key recalls is added.
    Correction,
}

/// The options of linear attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinearAttentionOptions {
    pub update: MemoryUpdate,
    /// The largest number of tokens in a chunk.
    pub chunk: usize,
    /// Whether queries and keys are scaled to length 1.
    pub normalizes: bool,
    /// Multiplies queries.
    pub query_scale: f64,
}

impl LinearAttentionOptions {
    /// A product in `f32`. Corrections of a chunk's tokens build on each other, which multiplies errors; so they take
    /// the full precision.
    #[track_caller]
    fn product<'t>(&self, lhs: Tensor<'t>, rhs: Tensor<'t>, over: &'static str) -> Tensor<'t> {
        match self.update {
            MemoryUpdate::Sum => lhs.contract(rhs, &[over]),
            MemoryUpdate::Correction => product(lhs, rhs, over),
        }
    }
}

/// A product in full `f32`.
#[track_caller]
fn product<'t>(lhs: Tensor<'t>, rhs: Tensor<'t>, over: &'static str) -> Tensor<'t> {
    lhs.contract_at(rhs, &[over], Precision::Highest)
}

/// The memory before the first token: zeros.
///
/// # Shapes
/// `f32[batch, key_heads, head_dim, value_group, value_dim]`
#[track_caller]
pub fn empty_memory<'t>(inputs: &LinearAttentionInputs<Tensor<'t>>) -> Tensor<'t> {
    let LinearAttentionInputs { key, value, segments, .. } = *inputs;
    let rows = segments.axes()[0];
    let axes =
        [rows, key.axis(KEY_HEADS), key.axis(HEAD_DIM), value.axis(VALUE_GROUP), value.axis(VALUE_DIM)];
    segments.region().full(DType::F32, &axes, 0.0)
}

/// Applies the rule to whole sequences, or to tokens that follow those of a memory. Each document begins with an empty
/// memory; the given one belongs to the document of the first token. Returns the output, and the memory after all tokens.
///
/// # Shapes
/// `f32[batch, position, key_heads, value_group, value_dim]`, and the memory's
#[track_caller]
pub fn linear_attention<'t>(
    inputs: &LinearAttentionInputs<Tensor<'t>>,
    memory: Tensor<'t>,
    options: &LinearAttentionOptions,
) -> (Tensor<'t>, Tensor<'t>) {
    let rows = inputs.segments.axes()[0];
    let region = inputs.segments.region();
    let memory = memory.cast(DType::F32);
    let document = inputs.segments.at(POSITION, 0);
    let length = inputs.segments.axis(POSITION).size;
    // Chunks are evened out, so that little of the last one is left empty.
    let count = length.div_ceil(options.chunk.max(1));
    let size = length.div_ceil(count);
    let [chunks, position] = [axis(CHUNKS, count), axis(POSITION, size)];
    let cut = |tensor: Tensor<'t>, order: &[&'static str]| {
        let filled = tensor.pad(POSITION, 0, count * size - length, 0.0);
        let names: Vec<&'static str> = [CHUNKS, rows.name].iter().chain(order).copied().collect();
        filled.split(POSITION, &[chunks, position]).order(&names)
    };
    let cut = LinearAttentionInputs {
        query: cut(inputs.query, &[KEY_HEADS, POSITION, HEAD_DIM]),
        key: cut(inputs.key, &[KEY_HEADS, POSITION, HEAD_DIM]),
        value: cut(inputs.value, &[KEY_HEADS, VALUE_GROUP, POSITION, VALUE_DIM]),
        write: cut(inputs.write, &[KEY_HEADS, VALUE_GROUP, POSITION]),
        log_decay: cut(inputs.log_decay, &[KEY_HEADS, VALUE_GROUP, POSITION]),
        segments: cut(inputs.segments, &[POSITION]),
    };
    let (output, memory) = if count == 1 {
        let one = mt_shape::Tree::map_leaves(&cut, |_, tensor| tensor.squeeze(CHUNKS));
        let made = chunk(&one, Memory { memory, document }, options);
        (made.output.unsqueeze(CHUNKS), made.after.memory)
    } else {
        // The backward pass recomputes each chunk from the memory before it.
        let scan = ScanOptions::over(chunks).saving(SavePolicy::Names(BTreeMap::new()));
        let ([memory, _], [output]) =
            region.scan(scan, [memory, document], &cut, |_, [memory, document], inputs| {
                let made = chunk(&inputs, Memory { memory, document }, options);
                ([made.after.memory, made.after.document], [made.output])
            });
        (output, memory)
    };
    let output = output.order(&[rows.name, CHUNKS, POSITION, KEY_HEADS, VALUE_GROUP, VALUE_DIM]);
    (output.merge(&[CHUNKS, POSITION], POSITION).slice(POSITION, 0, length), memory)
}

/// The memory between chunks.
struct Memory<'t> {
    /// `f32[batch, key_heads, head_dim, value_group, value_dim]`
    memory: Tensor<'t>,
    /// The document that it belongs to: `i32[batch]`.
    document: Tensor<'t>,
}

/// The results of a chunk.
struct Made<'t> {
    /// `f32[batch, key_heads, value_group, position, value_dim]`
    output: Tensor<'t>,
    after: Memory<'t>,
}

/// Processes the tokens of a chunk together.
///
/// With the decay `D` from one token to another, the values `u` that the tokens write are `uᵢ = βᵢ vᵢ` for a sum. For the
/// delta rule they satisfy
/// `uᵢ = βᵢ (vᵢ − Dᵢ Sᵀkᵢ − Σⱼ Dᵢⱼ (kᵢ·kⱼ) uⱼ)` over earlier tokens `j` of the same document, where `Dᵢ` is the decay
/// from the beginning of the chunk.
#[track_caller]
fn chunk<'t>(
    inputs: &LinearAttentionInputs<Tensor<'t>>,
    before: Memory<'t>,
    options: &LinearAttentionOptions,
) -> Made<'t> {
    let LinearAttentionInputs { write, log_decay, segments, .. } = *inputs;
    let Memory { memory, document } = before;
    let rows = segments.axes()[0].name;
    let product = |lhs: Tensor<'t>, rhs: Tensor<'t>, over| options.product(lhs, rhs, over);
    let of_keys = |tensor: Tensor<'t>| tensor.rename(POSITION, KV_POSITION);
    let key = normalized(inputs.key, options);
    let query = normalized(inputs.query, options);
    let query = if options.query_scale == 1.0 { query } else { query * options.query_scale };
    let total = log_decay.cumulative_sum(POSITION);
    let Pairs { decay, is_earlier } = Pairs::of(total, segments);
    let by_value_head =
        |tensor: Tensor<'t>| tensor.order(&[rows, KEY_HEADS, VALUE_GROUP, POSITION, VALUE_DIM]);
    let is_in = |document: Tensor<'t>| segments.equals(document).cast(DType::F32);

    let entering = total.exp() * is_in(document);
    let value = inputs.value.cast(DType::F32);
    let written = match options.update {
        MemoryUpdate::Sum => value * write,
        MemoryUpdate::Correction => {
            let corrected = decay * product(key, of_keys(key), HEAD_DIM) * write;
            let nothing = segments.region().full(DType::F32, &corrected.axes(), 0.0);
            let lower = is_earlier.broadcast(&corrected.axes()).select(corrected, nothing);
            let known = by_value_head(product(key, memory, HEAD_DIM)) * entering;
            product(unit_lower_inverse(lower), of_keys((value - known) * write), KV_POSITION)
        }
    };

    let recalled = by_value_head(product(query, memory, HEAD_DIM)) * entering;
    let within = decay * product(query, of_keys(key), HEAD_DIM);
    let output = recalled + product(within, of_keys(written), KV_POSITION);

    let last = last_segment(segments, document);
    let whole = log_decay.sum(&[POSITION]);
    let kept = whole.exp() * last.equals(document).cast(DType::F32);
    let leaving = (whole.broadcast(&total.axes()) - total).exp() * is_in(last);
    let memory = memory * kept + product(key, written * leaving, POSITION);
    Made { output, after: Memory { memory, document: last } }
}

/// The pairs of tokens of a chunk.
struct Pairs<'t> {
    /// The decay from one token to another of its document, or to itself; 0 for other pairs.
    /// `f32[batch, key_heads, value_group, position, kv_position]`
    decay: Tensor<'t>,
    /// `bool[position, kv_position]`
    is_earlier: Tensor<'t>,
}

impl<'t> Pairs<'t> {
    /// The pairs of tokens with these sums of decays.
    #[track_caller]
    fn of(total: Tensor<'t>, segments: Tensor<'t>) -> Self {
        let region = total.region();
        let position = segments.axis(POSITION);
        let other = axis(KV_POSITION, position.size);
        let pair = [position, other];
        let place = |own: Axis| region.iota(DType::I32, own).broadcast(&pair);
        let (place, earlier_place) = (place(position), place(other));
        let of_rows = [&*segments.axes(), &[other]].concat();
        let is_same = segments.broadcast(&of_rows).equals(segments.rename(POSITION, KV_POSITION));
        let is_seen = is_same.logical_and(place.greater_equal(earlier_place).broadcast(&of_rows));
        let axes = [&*total.axes(), &[other]].concat();
        let difference = total.broadcast(&axes) - total.rename(POSITION, KV_POSITION);
        // Masked before the exponential, which would overflow for later tokens.
        let masked = region.full(DType::F32, &axes, MASKED);
        let decay = is_seen.broadcast(&axes).select(difference, masked).exp();
        Self { decay, is_earlier: place.greater(earlier_place) }
    }
}

/// Queries or keys in `f32`, scaled to length 1 if the options say so.
#[track_caller]
fn normalized<'t>(x: Tensor<'t>, options: &LinearAttentionOptions) -> Tensor<'t> {
    let x = x.cast(DType::F32);
    if options.normalizes { x * (x.square().sum(&[HEAD_DIM]) + EPSILON).rsqrt() } else { x }
}
