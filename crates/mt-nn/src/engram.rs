//! A memory of n-grams: vectors that hashes of the last tokens select, gated by the residual stream (DeepSeek-AI, 2026,
//! "Conditional Memory via Scalable Lookup").

use mt_derive::Tree;
use mt_shape::{Axis, DType, HostArray, LogicalAxis, axis, logical};
use mt_trace::Tensor;

use crate::{
    Linear, NormOptions, RmsNorm, WHOLE_SEQUENCES, Weight,
    attention::Segments,
    axes::{EMBED, POSITION, STREAMS},
    convolution::{CHANNEL, Convolution, DepthwiseKernel, ONE, convolve, last_columns, with_columns_before},
    lookup::lookup_on_devices,
};

/// The entries of all tables of a layer, one table behind the other.
pub const ENTRY: &str = "entry";
/// The tables.
pub const TABLES: &str = "tables";
/// The width of an entry.
pub const ENTRY_DIM: &str = "entry_dim";
/// The entries of all tables side by side.
pub const MEMORY_DIM: &str = "memory_dim";
/// The residual streams, each of which gates the memory by itself, in the parameters.
pub const BRANCH: &str = "branch";

/// The parameters of a memory.
#[derive(Clone, Debug, Tree)]
pub struct Engram<L> {
    pub multi_head_embedding: EntryTables<L>,
    /// `[memory_dim, branch, embed]`
    pub key_proj: Linear<L>,
    /// `[memory_dim, embed]`
    pub value_proj: Linear<L>,
    /// `[branch, embed]`
    pub k_norm: RmsNorm<L>,
    /// `[branch, embed]`
    pub q_norm: RmsNorm<L>,
    pub short_conv: ShortConvolution<L>,
}

/// The tables of all lengths of n-grams.
#[derive(Clone, Debug, Tree)]
pub struct EntryTables<L> {
    pub embedding: EntryTable<L>,
}

/// `[entry, entry_dim]`
#[derive(Clone, Debug, Tree)]
pub struct EntryTable<L> {
    pub embedding: Weight<L>,
}

/// A convolution of normalized vectors over the last tokens.
#[derive(Clone, Debug, Tree)]
pub struct ShortConvolution<L> {
    /// `[branch, embed]`
    pub norm: RmsNorm<L>,
    /// `[tap, one, channel]`
    pub conv: DepthwiseKernel<L>,
}

/// How n-grams select entries. The hash of the last `n` tokens is the exclusive or of the products of their numbers with
/// the first `n` multipliers; its remainder by a table's size is the table's entry.
#[derive(Clone, Debug, PartialEq)]
pub struct NgramHash {
    /// One odd factor for each token of the longest n-gram, the last token first. Products fit into `i32`.
    pub multipliers: Vec<i32>,
    /// The sizes of the tables for each length of n-gram from 2 on.
    pub sizes: Vec<Vec<usize>>,
    /// The number that stands for tokens before a document's first one.
    pub padding: i32,
}

impl NgramHash {
    /// The number of tokens in the longest n-grams.
    pub fn longest(&self) -> usize {
        self.multipliers.len()
    }

    /// The number of tables.
    pub fn num_tables(&self) -> usize {
        self.sizes.iter().map(Vec::len).sum()
    }

    /// The entries of all tables together.
    pub fn num_entries(&self) -> usize {
        self.sizes.iter().flatten().sum()
    }

    /// The entries that the n-grams ending at each token select. `before[k]` are the tokens' numbers `k` places earlier.
    ///
    /// # Shapes
    /// `i32[batch, position]` for each place -> `i32[batch, position, tables]`
    #[track_caller]
    fn entries<'t>(&self, before: &[Tensor<'t>]) -> Tensor<'t> {
        let region = before[0].region();
        let product = |place: usize| before[place] * f64::from(self.multipliers[place]);
        let mut hash = product(0);
        let (mut entries, mut offset) = (Vec::new(), 0);
        for (place, sizes) in (1..).zip(&self.sizes) {
            hash = hash.logical_xor(product(place));
            let tables = axis(TABLES, sizes.len());
            let table = |numbers: Vec<i32>| {
                let values = HostArray::from_slice(DType::I32, &[numbers.len()], &numbers);
                region.table(values.expect("one number for each table"), &[tables])
            };
            let offsets = sizes.iter().map(|size| {
                let own = offset;
                offset += *size as i32;
                own
            });
            let offsets = table(offsets.collect());
            let moduli = table(sizes.iter().map(|size| *size as i32).collect());
            let axes = [&*hash.axes(), &[tables]].concat();
            entries.push(hash.broadcast(&axes).remainder(moduli.broadcast(&axes)) + offsets);
        }
        entries[0].concatenate(&entries[1..], TABLES)
    }
}

/// The sizes and options of a memory.
#[derive(Clone, Debug, PartialEq)]
pub struct EngramOptions {
    pub hash: NgramHash,
    /// The width of an entry.
    pub entry_dim: usize,
    /// The number of places that the convolution covers, each as many tokens apart as the longest n-gram has.
    pub taps: usize,
    pub norm: NormOptions,
}

impl EngramOptions {
    /// The width of the entries of all tables side by side.
    pub fn memory_dim(&self) -> Axis {
        axis(MEMORY_DIM, self.hash.num_tables() * self.entry_dim)
    }

    /// The number of tokens before the last one that the convolution covers.
    pub fn window(&self) -> usize {
        (self.taps - 1) * self.hash.longest()
    }
}

/// The state after some tokens.
#[derive(Clone, Copy, Debug, Tree)]
pub struct EngramState<L> {
    /// The numbers of the last tokens less that of padding, `i32[batch, tap]`.
    pub tokens: L,
    /// The inputs of the convolution at the last tokens, `[batch, tap, embed]`, or `[batch, tap, residual_stream, embed]`
    /// with several streams. Absent if it covers one token.
    pub window: Option<L>,
}

/// Logical axes of [`EngramState::tokens`].
pub const TOKENS: [Option<LogicalAxis>; 2] = [Some(logical::DECODE_BATCH), None];
/// Logical axes of the table of entries.
pub const TABLE: [Option<LogicalAxis>; 2] = [Some(logical::VOCAB), Some(logical::EMBED_VOCAB)];
/// Logical axes of the selected entries. A device has all tokens of a sequence.
pub const SELECTED: [Option<LogicalAxis>; 3] = [Some(logical::ACTIVATION_KV_BATCH), None, None];

/// As [`WHOLE_SEQUENCES`], for several residual streams.
const WHOLE_STREAMS: [Option<LogicalAxis>; 4] =
    [Some(logical::ACTIVATION_KV_BATCH), None, Some(logical::STREAMS), Some(logical::ACTIVATION_EMBED)];

/// The least magnitude of a gate's logit before its root is taken.
const LEAST_LOGIT: f64 = 1e-6;

impl<'t> Engram<Tensor<'t>> {
    /// The summand of the residual stream, whose normalized form is `x`, and the state after the tokens.
    /// `numbers` are the tokens' numbers in the compressed vocabulary.
    ///
    /// Several residual streams share the entries and the values made of them. Each stream has keys, norms, and channels
    /// of the convolution of its own.
    ///
    /// With a state, the first token continues the state's document, and padding changes nothing.
    ///
    /// # Shapes
    /// `[batch, position, embed], i32[batch, position] -> [batch, position, embed]`, or
    /// `[batch, position, residual_stream, embed] -> [batch, position, residual_stream, embed]`
    #[track_caller]
    pub fn forward(
        &self,
        x: Tensor<'t>,
        numbers: Tensor<'t>,
        segments: Segments<'t>,
        state: Option<EngramState<Tensor<'t>>>,
        options: &EngramOptions,
    ) -> (Tensor<'t>, EngramState<Tensor<'t>>) {
        let order = segments.order;
        let x = whole_sequences(order.read(x, POSITION));
        let numbers = order.read(numbers, POSITION) - f64::from(options.hash.padding);
        let segments = order.read(segments.query, POSITION);
        let (selected, tokens) =
            self.selected(numbers, segments, state.map(|state| state.tokens), x.dtype(), options);

        // Without several streams, tensors have no axis for them.
        let of_streams = |tensor: Tensor<'t>| match x.has_axis(STREAMS) {
            true => tensor.rename(BRANCH, STREAMS),
            false => tensor.squeeze(BRANCH),
        };
        let own = |norm: &RmsNorm<Tensor<'t>>| RmsNorm { scale: of_streams(norm.scale) };
        let key = whole_sequences(of_streams(self.key_proj.forward(selected, &[MEMORY_DIM])));
        let key = own(&self.k_norm).forward(key, EMBED, options.norm);
        let query = own(&self.q_norm).forward(x, EMBED, options.norm);
        let width = x.axis(EMBED).size as f64;
        let logit = (query.cast(DType::F32) * key.cast(DType::F32)).sum(&[EMBED]) / width.sqrt();
        let gate = (logit.abs().maximum(LEAST_LOGIT).sqrt() * logit.sign()).sigmoid();
        let value = self.value_proj.forward(selected, &[MEMORY_DIM]).constrain(&WHOLE_SEQUENCES);
        let value = (value.cast(DType::F32).broadcast(&x.axes()) * gate).cast(x.dtype());

        let normalized = own(&self.short_conv.norm).forward(value, EMBED, options.norm);
        let kernel = self.short_conv.conv.kernel.squeeze(ONE);
        let kernel = match x.has_axis(STREAMS) {
            true => kernel.split(CHANNEL, &[x.axis(STREAMS), x.axis(EMBED)]),
            false => kernel.rename(CHANNEL, EMBED),
        };
        let window = state.and_then(|state| state.window);
        let convolution = Convolution { kernel, bias: None, dilation: options.hash.longest() };
        let convolved = convolve(normalized, &convolution, window, segments);
        let output = order.store(value + convolved.output, POSITION).named("engram");
        (output, EngramState { tokens, window: convolved.window })
    }

    /// The entries that the tokens' n-grams select, side by side, and the last tokens for the state.
    ///
    /// # Shapes
    /// `i32[batch, position], i32[batch, position], i32[batch, tap] -> [batch, position, memory_dim], i32[batch, tap]`
    #[track_caller]
    fn selected(
        &self,
        numbers: Tensor<'t>,
        segments: Tensor<'t>,
        last: Option<Tensor<'t>>,
        dtype: DType,
        options: &EngramOptions,
    ) -> (Tensor<'t>, Tensor<'t>) {
        let hash = &options.hash;
        let (earlier, length) = (hash.longest() - 1, numbers.axis(POSITION).size);
        let (columns, documents) = with_columns_before(numbers, last, segments, earlier);
        let before: Vec<Tensor<'t>> = (0..hash.longest())
            .map(|place| {
                let start = earlier - place;
                let is_same = documents.slice(POSITION, start, start + length).equals(segments);
                // Numbers less that of padding are 0 for padding.
                let number = columns.slice(POSITION, start, start + length) * is_same.cast(DType::I32);
                number + f64::from(hash.padding)
            })
            .collect();
        let entries = hash.entries(&before);
        let table = self.multi_head_embedding.embedding.embedding.whole();
        let found = lookup_on_devices(table, &TABLE, entries, &SELECTED, dtype);
        let merged = found.merge(&[TABLES, ENTRY_DIM], MEMORY_DIM).constrain(&SELECTED);
        (merged, last_columns(columns, documents, segments, earlier))
    }
}

/// Places activations so that a device has all tokens of a sequence.
fn whole_sequences(x: Tensor<'_>) -> Tensor<'_> {
    if x.has_axis(STREAMS) { x.constrain(&WHOLE_STREAMS) } else { x.constrain(&WHOLE_SEQUENCES) }
}
