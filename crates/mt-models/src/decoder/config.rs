//! What a family decides about its decoder.

use mt_nn::{NormOptions, WeightFormat};
use mt_shape::{Axis, DType};
use mt_trace::{Precision, SavePolicy};

use super::{
    AttentionConfig, FeedForwardConfig, LayerRun, MixerConfig, MlpConfig,
    part::{PartDescription, SpecBuilder},
};

/// A decoder-only language model: dimensions, layers, and how it is run.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderConfig {
    pub embed: Axis,
    pub vocab: Axis,
    /// One for each layer.
    pub layers: Vec<LayerConfig>,
    /// The runs that layers form, in order; the first begins with the first layer.
    pub runs: Vec<LayerRun>,
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
    /// The precision of products of `f32`.
    pub precision: Precision,
    /// The form of the matrices of linear maps.
    pub weight_format: WeightFormat,
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
    /// Accelerators look tables up by products with one-hot vectors.
    pub by_product: bool,
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
    pub mixer: Option<MixerConfig>,
    pub feed_forward: Option<FeedForwardConfig>,
    pub norms: LayerNorms,
    /// Mixer and feed-forward part read the same normalized input and are added together.
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

impl LayerConfig {
    /// Its parts, in the order in which they are applied.
    pub fn parts(&self) -> impl Iterator<Item = &dyn PartDescription> {
        let mixer = self.mixer.as_deref();
        mixer.into_iter().chain(self.feed_forward.as_deref())
    }

    /// Its mixer, if that is attention.
    pub fn attention(&self) -> Option<&AttentionConfig> {
        self.mixer.as_ref()?.get()
    }

    /// As [`Self::attention`], to be changed.
    pub fn attention_mut(&mut self) -> Option<&mut AttentionConfig> {
        self.mixer.as_mut()?.get_mut()
    }

    /// Its feed-forward part, if that is dense.
    pub fn mlp(&self) -> Option<&MlpConfig> {
        self.feed_forward.as_ref()?.get()
    }

    /// As [`Self::mlp`], to be changed.
    pub fn mlp_mut(&mut self) -> Option<&mut MlpConfig> {
        self.feed_forward.as_mut()?.get_mut()
    }
}

impl DecoderConfig {
    /// The attention of the layers that have one.
    pub fn attentions(&self) -> impl Iterator<Item = &AttentionConfig> {
        self.layers.iter().filter_map(LayerConfig::attention)
    }

    /// How parameters are declared.
    pub(super) fn builder(&self) -> SpecBuilder {
        SpecBuilder {
            embed: self.embed,
            norm: self.norm,
            init_scale: self.init_scale,
            dtype: self.weight_dtype,
            weights: self.weight_format,
        }
    }
}
