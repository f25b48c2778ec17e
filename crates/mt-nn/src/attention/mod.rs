//! Grouped-query attention.

mod blockwise;
mod cache;
mod dense;
mod mask;

use mt_derive::Tree;
use mt_shape::{Axis, DType, Tree, axis};
use mt_trace::{DeviceGroup, Tensor};

use crate::{
    Linear, NormOptions, RmsNorm, RotaryAngles,
    axes::{EMBED, GROUP, HEAD_DIM, KV_HEADS, KV_POSITION, POSITION, QUERY_HEADS, VALUE_DIM},
    rms_normalize,
};

pub use blockwise::{BLOCK_SIZE, blockwise};
pub use cache::{CachedKeysValues, KeysValues};
pub use dense::dense;
pub use mask::{MaskSpec, Segments};

/// How scores are computed and which keys a query sees.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionOptions {
    /// What scores are multiplied by, usually `head_dim^-0.5`.
    pub scale: f64,
    pub kernel: AttentionKernel,
    /// Multiplies queries and keys in `f32`.
    pub float32_product: bool,
    /// Keeps scores in `f32`, whatever type the products have.
    pub float32_scores: bool,
    pub mask: MaskSpec,
    /// With a cap of `c`, scores `s` become `c · tanh(s / c)`, which stays within `-c..c`.
    pub soft_cap: Option<f64>,
    /// Of the norms of queries, keys and values.
    pub norm: NormOptions,
    /// Normalizes values over each head, without a scale.
    pub normalize_values: bool,
}

/// How attention over whole sequences runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionKernel {
    /// Dense below [`DENSE_LIMIT`] positions, blockwise from there on.
    Automatic,
    /// With the whole matrix of scores.
    Dense,
    /// Block by block, in memory linear in the length.
    Blockwise,
}

/// The length from which block by block is the default. On 2 cores, by `examples/attention.rs`, it takes 0.57 of dense
/// attention's processor time at 512 positions, 0.42 at 1024 and 0.35 at 2048 (`bf16`: 0.52, 0.35 and 0.27).
pub const DENSE_LIMIT: usize = 512;

/// What masked scores are set to: low enough to vanish, finite so that rows without any key stay numbers.
pub(crate) const MASKED: f64 = -1e30;

impl AttentionOptions {
    /// What kernels are told: no window or chunk is 0, and the cap is the bits of an `f32`, of which 0 is none.
    fn for_kernels(&self) -> Vec<(&'static str, i64)> {
        let MaskSpec { causal, window, chunk } = self.mask;
        let size = |size: Option<usize>| size.map_or(0, |size| size as i64);
        let soft_cap = self.soft_cap.map_or(0, |cap| (cap as f32).to_bits());
        vec![
            ("causal", i64::from(causal)),
            ("window", size(window)),
            ("chunk", size(chunk)),
            ("soft_cap", i64::from(soft_cap)),
        ]
    }
}

/// `f32[kv_heads, group]`: the sinks of a query's heads, and scores of what is masked if there are none.
#[track_caller]
fn sinks_of_heads<'t>(query: Tensor<'t>, sinks: Option<Tensor<'t>>) -> Tensor<'t> {
    let in_groups = [query.axis(KV_HEADS), query.axis(GROUP)];
    match sinks {
        Some(sinks) => sinks.cast(DType::F32).broadcast(&in_groups),
        None => query.region().full(DType::F32, &in_groups, MASKED),
    }
}

/// Multi-head attention with query heads in groups that share keys and values (Ainslie et al., 2023).
#[derive(Clone, Debug, Tree)]
pub struct Attention<L> {
    /// `[embed, q_heads, head_dim]`
    pub query: Linear<L>,
    /// `[embed, kv_heads, head_dim]`; absent if keys and values are those of another layer.
    pub key: Option<Linear<L>>,
    /// `[embed, kv_heads, value_dim]`; absent beside a key projection whose results, before their norm and rotation,
    /// are the values, too.
    pub value: Option<Linear<L>>,
    /// `[q_heads, value_dim, embed]`
    pub out: Linear<L>,
    /// `[head_dim]`, for each head, or `[q_heads, head_dim]`, over all heads together.
    pub query_norm: Option<RmsNorm<L>>,
    /// `[head_dim]` or `[kv_heads, head_dim]`
    pub key_norm: Option<RmsNorm<L>>,
    /// `[q_heads]`: one more score for each head, of a key whose value is zero (Xiao et al., 2023).
    pub sinks: Option<L>,
}

/// What attention is given beside activations.
#[derive(Clone, Copy)]
pub struct AttentionInputs<'t> {
    /// Turn queries and keys; none where these do not know positions.
    pub angles: Option<RotaryAngles<'t>>,
    pub segments: Segments<'t>,
    /// Where this layer's own keys and values are kept. Without a first query in `segments` they fill it, and what is
    /// attended to are these alone.
    pub cache: Option<CachedKeysValues<'t>>,
    /// [`Attended::keys_values`] of another layer, for a layer without keys.
    pub shared: Option<KeysValues<Tensor<'t>>>,
    /// Whether [`Attended::largest_scores`] are wanted.
    pub with_scores: bool,
}

/// What attention returns.
#[derive(Clone, Copy)]
pub struct Attended<'t> {
    /// `[batch, position, embed]`
    pub output: Tensor<'t>,
    /// The keys and values that were attended to, normalized and turned: those of the whole cache if there is one.
    pub keys_values: KeysValues<Tensor<'t>>,
    /// This call's keys and values, which are to be written to the cache if there is one.
    pub written: Option<KeysValues<Tensor<'t>>>,
    /// `f32[batch, q_heads]`, if they are wanted: the largest score of each head with any key that one of a row's tokens
    /// sees, scaled, and before it is capped. Rows without tokens have the score of what is masked. They have no gradient.
    pub largest_scores: Option<Tensor<'t>>,
}

/// What a kernel makes of queries, keys and values.
#[derive(Clone, Copy)]
pub struct Context<'t> {
    /// `[batch, kv_heads, position, group, value_dim]`
    pub context: Tensor<'t>,
    /// `f32[batch, kv_heads, position, group]`, if they are wanted: each query's largest score, before it is capped.
    pub largest_scores: Option<Tensor<'t>>,
}

// A tensor is placed before it is named: a remat policy that keeps it keeps it split.
/// Queries.
pub const QUERY: [Option<&str>; 4] = [
    Some("activation_kv_batch"),
    Some("activation_length_attn"),
    Some("activation_heads"),
    Some("activation_kv"),
];
/// What heads make of values, in groups that share these.
pub const CONTEXT: [Option<&str>; 5] = [
    Some("activation_kv_batch"),
    Some("activation_kv_heads"),
    Some("activation_length_attn"),
    None,
    Some("activation_kv_head_dim"),
];
/// What is made of a cache, whose heads are split as it says: by another name for the dimension of a head, the tensor
/// axes would be taken.
const CONTEXT_OF_CACHE: [Option<&str>; 5] =
    [Some("decode_batch"), Some("cache_heads"), Some("activation_length_attn"), None, Some("cache_kv")];
/// What projections are made of, split as their results are, and so its gradient. Products that also split a sequence in
/// another way (`sequence`, `tensor_sequence`) are something that the partitioner gets wrong where key heads are copied
/// along such an axis and a tensor axis splits them.
const INPUT: [Option<&str>; 3] =
    [Some("activation_kv_batch"), Some("activation_length_attn"), Some("activation_embed")];
const LARGEST_SCORES: [Option<&str>; 2] = [Some("activation_kv_batch"), Some("activation_heads")];
const OUTPUT: [Option<&str>; 3] =
    [Some("activation_batch"), Some("activation_norm_length"), Some("activation_embed")];
/// Keys and values.
pub const ACTIVATION: [Option<&str>; 4] = [
    Some("activation_kv_batch"),
    Some("activation_length_attn"),
    Some("activation_kv_heads"),
    Some("activation_kv_head_dim"),
];
/// Keys and values in a cache.
pub const CACHED: [Option<&str>; 4] =
    [Some("decode_batch"), Some("cache_sequence"), Some("cache_heads"), Some("cache_kv")];
/// Keys and values as queries see them.
const ATTENDED: [Option<&str>; 4] = [
    Some("activation_kv_batch"),
    Some("activation_kv_length"),
    Some("activation_kv_heads"),
    Some("activation_kv_head_dim"),
];

impl<'t> Attention<Tensor<'t>> {
    /// Attends within whole sequences, or to a cache.
    ///
    /// # Shapes
    /// `[batch, position, embed] -> [batch, position, embed]`
    #[track_caller]
    pub fn forward(
        &self,
        x: Tensor<'t>,
        inputs: &AttentionInputs<'t>,
        options: &AttentionOptions,
    ) -> Attended<'t> {
        let x = x.constrain(&INPUT);
        let own = self.key.as_ref().map(|key| self.keys_values(x, key, inputs.angles, options));
        let (keys_values, written) = match (own, inputs.cache) {
            (Some(own), None) => (own, None),
            (Some(own), Some(cache)) => {
                // A cache stays where it is: the loop over layers would otherwise carry it whole.
                let all = match inputs.segments.first_query {
                    Some(_) => cache.write(own.key, own.value).map_leaves(|_, all| all.constrain(&CACHED)),
                    None => own.map_leaves(|_, own| own.cast(cache.cached.key.dtype())),
                };
                (all.map_leaves(|_, all| all.cast(x.dtype())), Some(own))
            }
            (None, _) => (inputs.shared.expect("a layer without keys is given those of another"), None),
        };
        let heads = self.query.axis(QUERY_HEADS);
        let query = prepared(self.query.forward(x, &[EMBED]), &self.query_norm, inputs.angles, options);
        let num_parts = query.parts(&QUERY).along(QUERY_HEADS).map_or(1, DeviceGroup::size);
        let attended = keys_values.for_each_part(num_parts, heads.size);
        let kv_heads = attended.key.axis(KV_HEADS);
        let in_groups = [kv_heads, axis(GROUP, heads.size / kv_heads.size)];
        let query =
            (query * options.scale).constrain(&QUERY).named("query_proj").split(QUERY_HEADS, &in_groups);
        let sinks = self.sinks.map(|sinks| sinks.split(QUERY_HEADS, &in_groups));
        let cache = inputs.cache.filter(|cache| {
            let is_attended = inputs.segments.first_query.is_some();
            is_attended && cache::has_kernel(query, cache) && num_parts == 1 && !inputs.with_scores
        });
        let Context { context, largest_scores } = match written.zip(cache) {
            Some((own, cache)) => cache::attend(query, own, cache, sinks, inputs.segments, options),
            None => attend(query, attended, sinks, inputs, options),
        };
        let placed = if inputs.segments.first_query.is_some() { &CONTEXT_OF_CACHE } else { &CONTEXT };
        let context = context.constrain(placed).named("context").named("attention_out");
        let output =
            self.out.with_split(QUERY_HEADS, &in_groups).forward(context, &[KV_HEADS, GROUP, VALUE_DIM]);
        let output = output.constrain(&OUTPUT).named("out_proj");
        let largest_scores = largest_scores.map(|scores| largest_of_rows(scores, inputs.segments.query));
        Attended { output, keys_values, written, largest_scores }
    }

    #[track_caller]
    fn keys_values(
        &self,
        x: Tensor<'t>,
        key: &Linear<Tensor<'t>>,
        angles: Option<RotaryAngles<'t>>,
        options: &AttentionOptions,
    ) -> KeysValues<Tensor<'t>> {
        let key = key.forward(x, &[EMBED]);
        let value = match &self.value {
            Some(value) => value.forward(x, &[EMBED]),
            None => key.rename(HEAD_DIM, VALUE_DIM),
        };
        let key = prepared(key, &self.key_norm, angles, options).constrain(&ACTIVATION).named("key_proj");
        let value = if options.normalize_values {
            rms_normalize(value, &[VALUE_DIM], options.norm.epsilon)
        } else {
            value
        };
        let value = value.constrain(&ACTIVATION).named("value_proj");
        KeysValues { key: key.rename(POSITION, KV_POSITION), value: value.rename(POSITION, KV_POSITION) }
    }
}

impl<'t> KeysValues<Tensor<'t>> {
    /// Keys and values with as many heads as queries are split into parts, if there are fewer: each device then has a
    /// copy of the head that its queries attend to. Otherwise the partitioner gathers scores.
    #[track_caller]
    fn for_each_part(self, num_parts: usize, query_heads: usize) -> Self {
        let heads = self.key.axis(KV_HEADS).size;
        let needed = (heads..=query_heads).find(|copies| {
            copies.is_multiple_of(heads)
                && copies.is_multiple_of(num_parts)
                && query_heads.is_multiple_of(*copies)
        });
        let copies = needed.unwrap_or(heads) / heads;
        if copies == 1 {
            return self;
        }
        let repeated = |tensor: Tensor<'t>| {
            let axes: Vec<Axis> = tensor
                .axes()
                .iter()
                .flat_map(|own| [Some(*own), (own.name == KV_HEADS).then(|| axis(GROUP, copies))])
                .flatten()
                .collect();
            tensor.broadcast(&axes).merge(&[KV_HEADS, GROUP], KV_HEADS).constrain(&ACTIVATION)
        };
        Self { key: repeated(self.key), value: repeated(self.value) }
    }
}

/// Projected queries or keys, normalized and turned.
#[track_caller]
fn prepared<'t>(
    projected: Tensor<'t>,
    norm: &Option<RmsNorm<Tensor<'t>>>,
    angles: Option<RotaryAngles<'t>>,
    options: &AttentionOptions,
) -> Tensor<'t> {
    let normalized = match norm {
        Some(norm) => norm.forward_over_scale(projected, options.norm),
        None => projected,
    };
    angles.map_or(normalized, |angles| angles.rotate(normalized))
}

/// The largest score of each head in a row, without those of padding.
///
/// # Shapes
/// `[batch, kv_heads, position, group], i32[batch, position] -> [batch, q_heads]`
#[track_caller]
fn largest_of_rows<'t>(scores: Tensor<'t>, segments: Tensor<'t>) -> Tensor<'t> {
    let axes = scores.axes();
    let none = scores.region().full(DType::F32, &axes, MASKED);
    let largest = segments.differs(0.0).broadcast(&axes).select(scores, none).max(&[POSITION]);
    let rows = segments.axes()[0].name;
    largest.order(&[rows, KV_HEADS, GROUP]).merge(&[KV_HEADS, GROUP], QUERY_HEADS).constrain(&LARGEST_SCORES)
}

#[track_caller]
fn attend<'t>(
    query: Tensor<'t>,
    keys_values: KeysValues<Tensor<'t>>,
    sinks: Option<Tensor<'t>>,
    &AttentionInputs { segments, with_scores, .. }: &AttentionInputs<'t>,
    options: &AttentionOptions,
) -> Context<'t> {
    let length = query.axis(POSITION).size;
    let is_cached = segments.first_query.is_some();
    let is_dense = match options.kernel {
        // Keys of a cache are not at the queries' places, which blocks take for granted.
        _ if is_cached => true,
        AttentionKernel::Automatic => length < DENSE_LIMIT,
        AttentionKernel::Dense => true,
        AttentionKernel::Blockwise => false,
    };
    if is_dense {
        // Queries may be split over devices; each sees all keys. A cache stays as it is placed: it is larger than what
        // few queries make of its parts.
        let placed = |tensor: &Tensor<'t>| if is_cached { *tensor } else { tensor.constrain(&ATTENDED) };
        let keys_values = keys_values.map_leaves(|_, tensor| placed(tensor));
        dense(query, keys_values, segments.mask(options.mask), sinks, options, with_scores)
    } else {
        blockwise(query, keys_values, segments, sinks, options, BLOCK_SIZE, with_scores)
    }
}

/// Axes of a tensor with one of them replaced.
pub(crate) fn resized(axes: &[Axis], name: &str, size: usize) -> Vec<Axis> {
    axes.iter().map(|axis| if axis.name == name { axis.with_size(size) } else { *axis }).collect()
}
