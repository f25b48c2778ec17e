//! What a family decides about its decoder.

use mt_nn::{Activation, NormOptions, RotaryOptions, attention::AttentionOptions};
use mt_shape::{Axis, DType};
use mt_trace::SavePolicy;

/// A decoder-only language model: dimensions, layers, and how it is run.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderConfig {
    pub embed: Axis,
    pub vocab: Axis,
    /// One for each layer.
    pub layers: Vec<LayerConfig>,
    /// After how many layers their kinds repeat. Scanning takes whole cycles; what is left is unrolled.
    pub cycle: usize,
    pub norm: NormOptions,
    pub final_norm: Option<NormKind>,
    pub embedding: EmbeddingConfig,
    pub head: HeadConfig,
    /// Rotary frequencies follow from the length of the sequences: by this factor, beyond this length.
    pub dynamic_ntk: Option<(f64, usize)>,
    pub dropout_rate: f64,
    pub init_scale: f64,
    /// The type of activations.
    pub dtype: DType,
    pub weight_dtype: DType,
    pub scan_layers: bool,
    pub param_scan_axis: usize,
    /// None keeps all activations.
    pub remat: Option<SavePolicy>,
}

/// What tokens become before the first layer.
#[derive(Clone, Debug, PartialEq)]
pub struct EmbeddingConfig {
    /// Multiplies the vectors, rounded to the type of activations first, as Gemma's √width is.
    pub scale: Option<f64>,
    pub positions: Positions,
    /// Vectors of each token for each layer, of this width (Gemma's small models).
    pub per_layer: Option<Axis>,
}

/// What is added to embeddings for positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Positions {
    /// Nothing: layers turn queries and keys, if anything.
    None,
    /// A learned vector for each of this many positions.
    Learned(usize),
    /// Sines and cosines.
    Sinusoidal,
}

/// How hidden states become scores of tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadConfig {
    /// The embedding table is the output matrix.
    pub tied: bool,
    /// Multiplies the scores.
    pub scale: f64,
    /// `c · tanh(scores / c)`.
    pub soft_cap: Option<f64>,
    /// Multiplies hidden states and matrix in `f32`.
    pub in_f32: bool,
}

/// One layer.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerConfig {
    pub attention: Option<AttentionConfig>,
    pub mlp: Option<MlpConfig>,
    pub norms: LayerNorms,
    /// Attention and feed-forward layer read the same normalized input and are added together.
    pub parallel: bool,
    /// The layer's output is multiplied by a number of its own.
    pub scaled: bool,
    /// A product with a square matrix, which is all that a benchmark's layer does.
    pub square: bool,
}

/// Which normalizations a layer has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerNorms {
    pub pre_attention: Option<NormKind>,
    /// Of what attention adds to the residual stream.
    pub post_attention: Option<NormKind>,
    pub pre_mlp: Option<NormKind>,
    /// Of what the feed-forward layer adds.
    pub post_mlp: Option<NormKind>,
}

/// A kind of normalization.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    RootMeanSquare,
    /// With mean and bias.
    Layer,
}

impl LayerNorms {
    /// Before each part.
    pub fn before(kind: NormKind) -> Self {
        Self { pre_attention: Some(kind), pre_mlp: Some(kind), ..Self::default() }
    }

    /// After each part.
    pub fn after(kind: NormKind) -> Self {
        Self { post_attention: Some(kind), post_mlp: Some(kind), ..Self::default() }
    }

    /// Before and after each part.
    pub fn around(kind: NormKind) -> Self {
        Self {
            pre_attention: Some(kind),
            post_attention: Some(kind),
            pre_mlp: Some(kind),
            post_mlp: Some(kind),
        }
    }
}

/// A layer's attention.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionConfig {
    pub query_heads: Axis,
    pub kv_heads: Axis,
    pub head_dim: Axis,
    /// Of queries, keys and values.
    pub input_bias: bool,
    pub output_bias: bool,
    pub query_key_norm: QueryKeyNorm,
    pub values: Values,
    pub sinks: bool,
    /// None turns nothing.
    pub rotary: Option<RotaryOptions>,
    /// MaxText's checkpoints hold the projections of queries, keys and values as one array.
    pub stored_fused: bool,
    pub options: AttentionOptions,
}

/// How queries and keys are normalized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueryKeyNorm {
    None,
    PerHead,
    /// All heads together.
    AllHeads,
}

/// Where keys and values come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Values {
    /// A projection of their own.
    Own,
    /// The projection of the keys.
    OfKeys,
    /// Both are those of an earlier layer.
    OfLayer(usize),
}

/// A layer's feed-forward part.
#[derive(Clone, Debug, PartialEq)]
pub struct MlpConfig {
    pub width: Axis,
    /// One for each projection.
    pub activations: Vec<Activation>,
    pub bias: bool,
}

impl DecoderConfig {
    /// How many whole cycles are scanned, from the first layer on.
    pub fn num_cycles(&self) -> usize {
        if !self.scan_layers {
            return 0;
        }
        let same = self
            .layers
            .iter()
            .enumerate()
            .take_while(|(index, layer)| **layer == self.layers[index % self.cycle]);
        same.count() / self.cycle
    }

    /// Whether layers take keys and values from other layers, which scanned layers cannot.
    pub fn shares_layers(&self) -> bool {
        self.attentions().any(|attention| matches!(attention.values, Values::OfLayer(_)))
    }

    /// The attention of the layers that have one.
    pub fn attentions(&self) -> impl Iterator<Item = &AttentionConfig> {
        self.layers.iter().filter_map(|layer| layer.attention.as_ref())
    }
}
