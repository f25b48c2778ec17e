//! Gated DeltaNet (Yang et al., 2024): a mixer whose memory of earlier tokens is one matrix per head.
//!
//! Each token lets the matrix decay, and then corrects the value that its key recalls:
//! `S ← d·S + k ⊗ β(v − (d·S)ᵀk)`, with the output `Sᵀq`. The module [`linear_attention`](crate::linear_attention)
//! computes this rule.

use mt_derive::Tree;
use mt_shape::{Axis, DType, LogicalAxis, axis, logical};
use mt_trace::Tensor;

use crate::{
    Linear, NormOptions, RESIDUAL, RmsNorm, WHOLE_SEQUENCES,
    attention::Segments,
    axes::{EMBED, HEAD_DIM, KEY_HEADS, POSITION, VALUE_DIM, VALUE_GROUP},
    convolution::{Convolution, convolve},
    linear_attention::{
        LinearAttentionInputs, LinearAttentionOptions, MemoryUpdate, empty_memory, linear_attention,
    },
    slices::slices,
};

pub use crate::convolution::{CHANNEL, DepthwiseKernel, ONE, TAP};

/// The parameters of Gated DeltaNet. Value heads `r·i` to `r·i + r - 1` share the key head `i`.
#[derive(Clone, Debug, Tree)]
pub struct GatedDelta<L> {
    /// `[embed, projected]`: for each key head its query, its key, and the values and output gates of its value heads.
    pub in_proj_qkvz: Linear<L>,
    /// `[embed, rates]`: for each key head the write strengths, then the decays of its value heads.
    pub in_proj_ba: Linear<L>,
    /// The channels are the queries of all heads, then the keys, then the values.
    pub conv1d: DepthwiseKernel<L>,
    /// `[value_heads]`: the logarithm of each head's rate of decay.
    pub a_log: L,
    /// `[value_heads]`
    pub dt_bias: L,
    /// `[value_dim]`, over the output of a head.
    pub norm: RmsNorm<L>,
    /// `[values, embed]`
    pub out_proj: Linear<L>,
}

/// The sizes of Gated DeltaNet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaSizes {
    pub key_heads: usize,
    /// The number of value heads that share a key head.
    pub group: usize,
    /// The width of a head's queries and keys.
    pub key: usize,
    /// The width of a head's values.
    pub value: usize,
    /// The number of tokens that the convolution covers.
    pub taps: usize,
}

impl DeltaSizes {
    /// The number of value heads.
    pub fn value_heads(self) -> usize {
        self.key_heads * self.group
    }

    /// The number of channels of the convolution that belong to a key head: query, key and values.
    pub fn channels_per_head(self) -> usize {
        2 * self.key + self.group * self.value
    }

    /// The number of channels of the convolution.
    pub fn channels(self) -> usize {
        self.key_heads * self.channels_per_head()
    }

    /// The sizes of the groups into which each key head's columns of `in_proj_qkvz` fall.
    pub fn projected_groups(self) -> [usize; 4] {
        let values = self.group * self.value;
        [self.key, self.key, values, values]
    }

    /// The width of `in_proj_qkvz`.
    pub fn projected(self) -> usize {
        self.key_heads * self.projected_groups().iter().sum::<usize>()
    }

    fn key_heads_axis(self) -> Axis {
        axis(KEY_HEADS, self.key_heads)
    }

    fn group_axis(self) -> Axis {
        axis(VALUE_GROUP, self.group)
    }

    fn value_axis(self) -> Axis {
        axis(VALUE_DIM, self.value)
    }

    /// The axes of the window of a convolution: `[batch, tap, key_heads, projected]`, without the first tap.
    pub fn window(self, batch: Axis) -> [Axis; 4] {
        [batch, axis(TAP, self.taps - 1), self.key_heads_axis(), axis(PROJECTED, self.channels_per_head())]
    }

    /// The axes of the memory: `[batch, key_heads, head_dim, value_group, value_dim]`.
    pub fn memory(self, batch: Axis) -> [Axis; 5] {
        [batch, self.key_heads_axis(), axis(HEAD_DIM, self.key), self.group_axis(), self.value_axis()]
    }
}

/// The options of Gated DeltaNet.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeltaOptions {
    pub sizes: DeltaSizes,
    /// The largest number of tokens in a chunk.
    pub chunk: usize,
    /// Whether queries and keys are scaled to length 1.
    pub normalizes: bool,
    /// The options of the norm of heads' outputs.
    pub norm: NormOptions,
}

impl DeltaOptions {
    /// The rule by which the memory changes.
    pub fn rule(&self) -> LinearAttentionOptions {
        LinearAttentionOptions {
            update: MemoryUpdate::Correction,
            chunk: self.chunk,
            normalizes: self.normalizes,
            query_scale: (self.sizes.key as f64).powf(-0.5),
        }
    }
}

/// The state after some tokens.
#[derive(Clone, Copy, Debug, Tree)]
pub struct DeltaState<L> {
    /// The inputs of the convolution at the last tokens, as [`DeltaSizes::window`] states. Absent if the convolution
    /// covers one token.
    pub window: Option<L>,
    /// `f32`, as [`DeltaSizes::memory`] states.
    pub memory: L,
}

/// The columns of a projection.
pub const PROJECTED: &str = "projected";
/// The columns of `in_proj_ba`.
pub const RATES: &str = "rates";
/// Value heads.
pub const VALUE_HEADS: &str = "value_heads";
/// The values of all heads.
pub const VALUES: &str = "values";

/// Logical axes of the window of a convolution.
pub const WINDOW: [Option<LogicalAxis>; 4] =
    [Some(logical::DECODE_BATCH), None, Some(logical::CACHE_HEADS), None];
/// Logical axes of the memory.
pub const MEMORY: [Option<LogicalAxis>; 5] =
    [Some(logical::DECODE_BATCH), Some(logical::CACHE_HEADS), None, None, None];
/// Logical axes of projections. A device has all tokens of a sequence, since each depends on all earlier ones.
pub const PROJECTION: [Option<LogicalAxis>; 4] =
    [Some(logical::ACTIVATION_KV_BATCH), None, Some(logical::ACTIVATION_KV_HEADS), None];
/// Logical axes of outputs of heads.
pub const HEADS: [Option<LogicalAxis>; 5] =
    [Some(logical::ACTIVATION_KV_BATCH), None, Some(logical::ACTIVATION_KV_HEADS), None, None];

impl<'t> GatedDelta<Tensor<'t>> {
    /// Applies the mixer to whole sequences, or to the tokens that follow those of a state. Returns the output and the
    /// state after the tokens. Padding changes no state. With a state, it follows all tokens of the call, whose first
    /// token continues the state's document.
    ///
    /// # Shapes
    /// `[batch, position, embed] -> [batch, position, embed]`
    #[track_caller]
    pub fn forward(
        &self,
        x: Tensor<'t>,
        segments: Segments<'t>,
        state: Option<DeltaState<Tensor<'t>>>,
        options: &DeltaOptions,
    ) -> (Tensor<'t>, DeltaState<Tensor<'t>>) {
        let sizes = options.sizes;
        let order = segments.order;
        let x = order.read(x, POSITION).constrain(&WHOLE_SEQUENCES);
        let segments = order.read(segments.query, POSITION);
        let per_head = axis(PROJECTED, sizes.projected() / sizes.key_heads);
        let projected =
            self.in_proj_qkvz.forward(x, &[EMBED]).split(PROJECTED, &[sizes.key_heads_axis(), per_head]);
        let projected = projected.constrain(&PROJECTION).named("query_proj");
        let [key, value] = [sizes.key, sizes.group * sizes.value];
        let [mixed, gate] = slices(projected, PROJECTED, [2 * key + value, value]);
        let convolution = Convolution { kernel: self.conv1d.by_head(sizes), bias: None, dilation: 1 };
        let convolved = convolve(mixed, &convolution, state.and_then(|state| state.window), segments);
        let of_values =
            |tensor: Tensor<'t>| tensor.split(PROJECTED, &[sizes.group_axis(), sizes.value_axis()]);
        let (write, log_decay) = self.rates(x, segments, sizes);
        let [query, key, value] = slices(convolved.output, PROJECTED, [key, key, value]);
        let inputs = LinearAttentionInputs {
            query: query.rename(PROJECTED, HEAD_DIM),
            key: key.rename(PROJECTED, HEAD_DIM),
            value: of_values(value),
            write,
            log_decay,
            segments,
        };
        let memory = state.map_or_else(|| empty_memory(&inputs).constrain(&MEMORY), |state| state.memory);
        let (output, memory) = linear_attention(&inputs, memory, &options.rule());
        let output = output.cast(x.dtype()).constrain(&HEADS).named("context").named("attention_out");
        let gate = of_values(gate).cast(DType::F32);
        let normalized = self.norm.forward(output, VALUE_DIM, options.norm).cast(DType::F32);
        let gated = (normalized * gate.silu()).cast(x.dtype());
        let split = [sizes.key_heads_axis(), sizes.group_axis(), sizes.value_axis()];
        let output = self.out_proj.with_split(VALUES, &split);
        let output = output.forward(gated, &[KEY_HEADS, VALUE_GROUP, VALUE_DIM]);
        let output = order.store(output, POSITION).constrain(&RESIDUAL).named("out_proj");
        (output, DeltaState { window: convolved.window, memory })
    }

    /// The strength with which each token writes, and the logarithm of the factor by which memory decays before.
    /// Padding does neither.
    ///
    /// # Shapes
    /// `[batch, position, embed] -> f32[batch, position, key_heads, value_group]`, twice
    #[track_caller]
    fn rates(&self, x: Tensor<'t>, segments: Tensor<'t>, sizes: DeltaSizes) -> (Tensor<'t>, Tensor<'t>) {
        let heads = sizes.key_heads_axis();
        let both = self.in_proj_ba.forward(x, &[EMBED]).split(RATES, &[heads, axis(RATES, 2 * sizes.group)]);
        let both = both.constrain(&PROJECTION).named("query_proj").cast(DType::F32);
        let [write, decay] =
            slices(both, RATES, [sizes.group; 2]).map(|half| half.rename(RATES, VALUE_GROUP));
        let of_heads = |parameter: Tensor<'t>| {
            parameter.cast(DType::F32).split(VALUE_HEADS, &[heads, sizes.group_axis()])
        };
        let write = write.sigmoid();
        let log_decay = (decay + of_heads(self.dt_bias)).softplus() * of_heads(self.a_log).exp() * -1.0;
        let axes = write.axes();
        let nothing = x.region().full(DType::F32, &axes, 0.0);
        let is_token = segments.differs(0.0).broadcast(&axes);
        (is_token.select(write, nothing), is_token.select(log_decay, nothing))
    }
}

impl<'t> DepthwiseKernel<Tensor<'t>> {
    /// The filter in the order of the projection's columns.
    ///
    /// # Shapes
    /// `[tap, one, channel] -> [tap, key_heads, projected]`
    #[track_caller]
    fn by_head(&self, sizes: DeltaSizes) -> Tensor<'t> {
        let heads = sizes.key_heads_axis();
        let kernel = self.kernel.squeeze(ONE);
        let mut start = 0;
        let projected = [sizes.key, sizes.key, sizes.group * sizes.value].map(|width| {
            let end = start + sizes.key_heads * width;
            let columns = kernel.slice(CHANNEL, start, end).split(CHANNEL, &[heads, axis(PROJECTED, width)]);
            start = end;
            columns
        });
        projected[0].concatenate(&projected[1..], PROJECTED)
    }
}
