//! Grouped-query attention.

mod blockwise;
mod cache;
mod dense;

use mt_derive::Tree;
use mt_shape::{Axis, DType, axis};
use mt_trace::Tensor;

use crate::{
    Linear, RotaryAngles,
    axes::{EMBED, GROUP, HEAD_DIM, KV_HEADS, KV_POSITION, POSITION, QUERY_HEADS},
};

pub use blockwise::{BLOCK_SIZE, blockwise};
pub use cache::{CachedKeysValues, KeysValues};
pub use dense::dense;

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

/// Which tokens may see which: those of one segment, at or before their own place.
#[derive(Clone, Copy)]
pub struct Segments<'t> {
    /// `i32[batch, position]`; 0 is padding.
    pub query: Tensor<'t>,
    /// `i32[batch, kv_position]`
    pub key: Tensor<'t>,
    /// The place of the first query among the keys: an `i32` scalar, or none if it is the first.
    pub first_query: Option<Tensor<'t>>,
}

impl<'t> Segments<'t> {
    /// Sequences that attend to themselves.
    ///
    /// # Shapes
    /// `i32[batch, position]`
    pub fn within(segmentation: Tensor<'t>) -> Self {
        Self { query: segmentation, key: segmentation.rename(POSITION, KV_POSITION), first_query: None }
    }

    /// Whether each query sees each key.
    ///
    /// # Shapes
    /// `bool[batch, position, kv_position]`
    #[track_caller]
    pub fn mask(self) -> Tensor<'t> {
        let region = self.query.region();
        let (queries, keys) = (self.query.axis(POSITION), self.key.axis(KV_POSITION));
        let axes = [&*self.query.axes(), &[keys]].concat();
        let mut query_place = region.iota(DType::I32, queries);
        if let Some(first) = self.first_query {
            query_place = query_place + first;
        }
        let key_place = region.iota(DType::I32, keys);
        let causal = query_place.broadcast(&[queries, keys]).greater_equal(key_place);
        let same = self.query.broadcast(&axes).equals(self.key);
        same.logical_and(causal)
    }
}

/// What masked scores are set to: low enough to vanish, finite so that rows without any key stay numbers.
pub(crate) const MASKED: f64 = -1e30;

/// Multi-head attention with query heads in groups that share keys and values (Ainslie et al., 2023).
#[derive(Clone, Debug, Tree)]
pub struct Attention<L> {
    /// `[embed, q_heads, head_dim]`
    pub query: Linear<L>,
    /// `[embed, kv_heads, head_dim]`
    pub key: Linear<L>,
    /// `[embed, kv_heads, head_dim]`
    pub value: Linear<L>,
    /// `[q_heads, head_dim, embed]`
    pub out: Linear<L>,
}

// A tensor is placed before it is named: a remat policy that keeps it keeps it split.
const QUERY: [Option<&str>; 4] = [
    Some("activation_kv_batch"),
    Some("activation_length_attn"),
    Some("activation_heads"),
    Some("activation_kv"),
];
const CONTEXT: [Option<&str>; 5] = [
    Some("activation_kv_batch"),
    Some("activation_kv_heads"),
    Some("activation_length_attn"),
    None,
    Some("activation_kv_head_dim"),
];
const OUTPUT: [Option<&str>; 3] =
    [Some("activation_batch"), Some("activation_norm_length"), Some("activation_embed")];
const ACTIVATION: [Option<&str>; 4] = [
    Some("activation_kv_batch"),
    Some("activation_length_attn"),
    Some("activation_kv_heads"),
    Some("activation_kv_head_dim"),
];

impl<'t> Attention<Tensor<'t>> {
    /// Attends within whole sequences, or to a cache, which is returned with this call's keys and values written.
    ///
    /// # Shapes
    /// `[batch, position, embed] -> [batch, position, embed]`
    #[track_caller]
    pub fn forward(
        &self,
        x: Tensor<'t>,
        angles: RotaryAngles<'t>,
        segments: Segments<'t>,
        options: &AttentionOptions,
        cache: Option<CachedKeysValues<'t>>,
    ) -> (Tensor<'t>, Option<KeysValues<Tensor<'t>>>) {
        let kv_heads = self.key.kernel.axis(KV_HEADS);
        let heads = self.query.kernel.axis(QUERY_HEADS);
        let group = axis(GROUP, heads.size / kv_heads.size);
        let query = angles.rotate(self.query.forward(x, &[EMBED])) * options.scale;
        let query = query.constrain(&QUERY).named("query_proj").split(QUERY_HEADS, &[kv_heads, group]);
        let key = angles.rotate(self.key.forward(x, &[EMBED])).constrain(&ACTIVATION).named("key_proj");
        let value = self.value.forward(x, &[EMBED]).constrain(&ACTIVATION).named("value_proj");
        let (key, value) = (key.rename(POSITION, KV_POSITION), value.rename(POSITION, KV_POSITION));
        let (context, written) = match cache {
            None => (self_attention(query, key, value, segments, options), None),
            Some(cache) => {
                let all = cache.write(key, value);
                let (key, value) = (all.key.cast(x.dtype()), all.value.cast(x.dtype()));
                (dense(query, key, value, segments.mask(), options), Some(all))
            }
        };
        let context = context.constrain(&CONTEXT).named("context");
        let kernel = self.out.kernel.split(QUERY_HEADS, &[kv_heads, group]);
        let output = Linear { kernel }.forward(context, &[KV_HEADS, GROUP, HEAD_DIM]);
        (output.constrain(&OUTPUT).named("out_proj"), written)
    }
}

fn self_attention<'t>(
    query: Tensor<'t>,
    key: Tensor<'t>,
    value: Tensor<'t>,
    segments: Segments<'t>,
    options: &AttentionOptions,
) -> Tensor<'t> {
    let length = query.axis(POSITION).size;
    let is_dense = match options.kernel {
        AttentionKernel::Automatic => length < DENSE_LIMIT,
        AttentionKernel::Dense => true,
        AttentionKernel::Blockwise => false,
    };
    if is_dense {
        dense(query, key, value, segments.mask(), options)
    } else {
        blockwise(query, key, value, segments.query, options, BLOCK_SIZE.min(length))
    }
}

/// Axes of a tensor with one of them replaced.
pub(crate) fn resized(axes: &[Axis], name: &str, size: usize) -> Vec<Axis> {
    axes.iter().map(|axis| if axis.name == name { axis.with_size(size) } else { *axis }).collect()
}
