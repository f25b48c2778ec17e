//! The decoder that all families describe: parameters, wiring, cache.
//!
//! A family decides what its layers have ([`DecoderConfig`]); everything here is shared, and asks for parts, never for
//! families.

mod activations;
mod config;
mod layer;
mod parameters;
mod stack;

use mt_derive::Tree;
use mt_nn::{
    Embedding, Initializer, LayerPlace, Linear, Norm, ParamSpec, PositionTable, RmsNorm, Rotary,
    RotaryAngles, RotaryOptions, RotaryScaling,
    attention::Segments,
    axes::{BATCH, EMBED, KV_POSITION, LAYERS, POSITION, TABLE_POSITION},
    sinusoidal_positions,
};
use mt_shape::{Axis, DType, Path, Tree, axis};
use mt_trace::Tensor;

pub use activations::{Activation, RegionActivations};
pub use config::{
    AttentionConfig, DecoderConfig, EmbeddingConfig, HeadConfig, LayerConfig, LayerNorms, MlpConfig,
    NormKind, Positions, QueryKeyNorm, Values,
};
pub use layer::{DecoderLayer, PerLayerInput};
pub use parameters::{Parameter, Place};
pub use stack::Layers;

pub(crate) use layer::PER_LAYER;
pub(crate) use parameters::role;

use layer::{RESIDUAL, norm_specs, rms_specs};
use stack::{StackInputs, stack_specs};

use crate::{
    CacheSpec, FlopCount, Forward, Hidden, LayerOutput, Model, ModelError, OfLayers, ScoreWeights,
    StoredParameter, Tokens,
    families::Family,
    hugging_face::{self, FileTensor},
};

/// All parameters of a decoder.
#[derive(Clone, Debug, Tree)]
pub struct DecoderParameters<L> {
    pub token_embedder: Embedding<L>,
    pub positions: Option<PositionTable<L>>,
    pub per_layer: Option<PerLayerEmbedding<L>>,
    pub layers: Layers<L>,
    pub final_norm: Option<Norm<L>>,
    /// Absent if the head is tied to the embedding.
    pub head: Option<Linear<L>>,
}

/// Vectors of each token for each layer.
#[derive(Clone, Debug, Tree)]
pub struct PerLayerEmbedding<L> {
    /// `[vocab, layers, per_layer]`
    pub embedding: L,
    /// `[embed, layers, per_layer]`
    pub projection: Linear<L>,
    pub norm: RmsNorm<L>,
}

/// Where scores of tokens are placed.
const LOGITS: [Option<&str>; 3] =
    [Some("activation_embed_and_logits_batch"), Some("activation_length"), Some("activation_vocab")];

/// The longest period of sinusoidal positions, over 2π.
const SINUSOIDAL_TIMESCALE: f64 = 10_000.0;

/// A model whose layers a family describes.
#[derive(Clone, Debug)]
pub struct Decoder {
    config: DecoderConfig,
    family: &'static Family,
    specs: DecoderParameters<ParamSpec>,
}

impl Decoder {
    /// Builds the model that a family's description means.
    pub fn new(config: DecoderConfig, family: &'static Family) -> Self {
        let specs = specs(&config);
        Self { config, family, specs }
    }

    /// The family that its names are of.
    pub fn family(&self) -> &'static Family {
        self.family
    }

    /// What the decoder is made of.
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }
}

fn specs(config: &DecoderConfig) -> DecoderParameters<ParamSpec> {
    let (embed, vocab) = (config.embed, config.vocab);
    let layers = axis(LAYERS, config.layers.len());
    let normal = |width: usize| Initializer::Normal { deviation: (width as f64).powf(-0.5) };
    let positions = match config.embedding.positions {
        Positions::Learned(count) => Some(PositionTable {
            table: ParamSpec::new(
                [(axis(TABLE_POSITION, count), "position"), (embed, "embed_vocab")],
                normal(embed.size),
            ),
        }),
        _ => None,
    };
    let per_layer = config.embedding.per_layer.map(|width| PerLayerEmbedding {
        embedding: ParamSpec::new(
            [(vocab, "vocab"), (layers, "layers_of_token"), (width, "embed_vocab")],
            normal(width.size),
        ),
        projection: Linear {
            kernel: ParamSpec::new(
                [(embed, "embed"), (layers, "layers_of_token"), (width, "mlp")],
                Initializer::fan_in(config.init_scale, embed.size),
            ),
            bias: None,
        },
        norm: rms_specs(width, config.norm),
    });
    let head = (!config.head.tied).then(|| Linear {
        kernel: ParamSpec::new(
            [(embed, "embed_vocab"), (vocab, "vocab")],
            Initializer::fan_in(config.init_scale, embed.size),
        ),
        bias: None,
    });
    let decoder = DecoderParameters {
        token_embedder: Embedding {
            embedding: ParamSpec::new([(vocab, "vocab"), (embed, "embed_vocab")], normal(embed.size)),
        },
        positions,
        per_layer,
        layers: stack_specs(config),
        final_norm: config.final_norm.map(|kind| norm_specs(kind, embed, config.norm)),
        head,
    };
    decoder.map_leaves(|_, spec| spec.clone().with_dtype(config.weight_dtype))
}

impl<'t> PerLayerEmbedding<Tensor<'t>> {
    /// The vectors of each token for each layer, made of its own and of what the first layer is given.
    ///
    /// # Shapes
    /// `i32[batch, position], [batch, position, embed] -> [batch, position, layers, per_layer]`
    fn forward(&self, tokens: Tensor<'t>, x: Tensor<'t>, config: &DecoderConfig) -> Tensor<'t> {
        let width = self.embedding.axis(PER_LAYER).size as f64;
        let looked_up = Embedding { embedding: self.embedding }.lookup(tokens, config.dtype);
        let looked_up = looked_up * rounded(width.sqrt(), config.dtype);
        let projected = self.projection.forward(x, &[EMBED]) * (config.embed.size as f64).powf(-0.5);
        (self.norm.forward(projected, PER_LAYER, config.norm) + looked_up) * 2_f64.powf(-0.5)
    }
}

/// What taps show of layers.
const TAPS: &[LayerOutput] = &[LayerOutput::Attention, LayerOutput::Mlp, LayerOutput::Residual];

/// Names and values of what layers made, from the first layer to the last.
fn named_taps<'t>(made: &[OfLayers<'t>]) -> Vec<(String, Tensor<'t>)> {
    let named = made.iter().filter_map(|of_layers| {
        let name = match of_layers.output {
            LayerOutput::Attention => "attention",
            LayerOutput::Mlp => "mlp",
            LayerOutput::Residual => "output",
            LayerOutput::LargestScores => return None,
        };
        Some(of_layers.of_each().into_iter().map(move |(layer, value)| (layer, name, value)))
    });
    let mut each: Vec<(usize, &str, Tensor<'t>)> = named.flatten().collect();
    each.sort_by_key(|(layer, ..)| *layer);
    each.into_iter().map(|(layer, name, value)| (format!("layers.{layer}.{name}"), value)).collect()
}

/// A number as activations of this type hold it.
fn rounded(number: f64, dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => half::bf16::from_f32(number as f32).to_f64(),
        DType::F16 => half::f16::from_f32(number as f32).to_f64(),
        _ => f64::from(number as f32),
    }
}

impl Model for Decoder {
    fn parameters(&self) -> Vec<(Path, ParamSpec)> {
        self.specs.leaves()
    }

    fn storage(&self) -> Vec<StoredParameter> {
        self.family.storage(&self.config, &self.specs.leaves())
    }

    fn otherwise_scanned(&self) -> Option<Box<dyn Model>> {
        let scan_layers = !self.config.scan_layers;
        let can_be = !(scan_layers && self.config.shares_layers());
        let config = DecoderConfig { scan_layers, ..self.config.clone() };
        can_be.then(|| -> Box<dyn Model> { Box::new(Self::new(config, self.family)) })
    }

    fn file_tensors(&self) -> Result<Vec<FileTensor>, ModelError> {
        hugging_face::file_tensors(self)
    }

    fn ignores_tensor(&self, name: &str) -> bool {
        let tied = self.config.head.tied && name.ends_with("lm_head.weight");
        // Layers that take keys and values from others keep matrices that nothing uses in older files.
        let of_keys = ["k_proj.weight", "v_proj.weight", "k_norm.weight"];
        tied || (self.config.shares_layers() && of_keys.iter().any(|end| name.ends_with(end)))
    }

    fn num_learned_positions(&self) -> Option<usize> {
        match self.config.embedding.positions {
            Positions::Learned(count) => Some(count),
            Positions::None | Positions::Sinusoidal => None,
        }
    }

    fn score_weights(&self) -> Vec<ScoreWeights> {
        let mut next = 0..;
        let numbers = self.specs.map_leaves(|_, _| next.next().expect("there is always a next number"));
        let scanned = numbers.layers.cycle.iter().enumerate();
        let scanned = scanned
            .map(|(slot, layer)| (layer, slot, LayerPlace::Stacked { first: slot, step: self.config.cycle }));
        let first = self.config.layers.len() - numbers.layers.rest.len();
        let rest = numbers
            .layers
            .rest
            .iter()
            .zip(first..)
            .map(|(layer, index)| (layer, index, LayerPlace::One(index)));
        let weights = scanned.chain(rest).filter_map(|(layer, index, place)| {
            let (numbers, attention) =
                (layer.attention.as_ref()?, self.config.layers[index].attention.as_ref()?);
            let of = |linear: &Linear<usize>| [linear.kernel].into_iter().chain(linear.bias).collect();
            let is_shared =
                self.config.attentions().any(|attention| attention.values == Values::OfLayer(index));
            let is_own = attention.values == Values::Own && !is_shared;
            let has_own_heads = attention.kv_heads.size == attention.query_heads.size;
            let keys = numbers.key.as_ref().filter(|_| is_own && has_own_heads);
            Some(ScoreWeights {
                place,
                queries: of(&numbers.query),
                keys: keys.map(of).unwrap_or_default(),
                are_normalized: attention.query_key_norm != QueryKeyNorm::None,
            })
        });
        weights.collect()
    }

    fn hidden<'t>(&self, parameters: &[Tensor<'t>], tokens: Tokens<'t>, forward: Forward<'t>) -> Hidden<'t> {
        let config = &self.config;
        let model = self.specs.with_leaves(parameters.iter().copied());
        let segments = match &forward.cache {
            Some(cache) if !cache.is_filled => Segments {
                query: tokens.segmentation,
                key: cache.segmentation,
                first_query: Some(cache.start),
                order: tokens.order,
            },
            _ => Segments::within(tokens.segmentation, tokens.order),
        };
        let length = forward.cache.as_ref().map_or(tokens.tokens.axis(POSITION).size, |cache| cache.slots);
        let mut angles: Vec<(RotaryOptions, RotaryAngles<'t>)> = Vec::new();
        for options in config.attentions().filter_map(|attention| attention.rotary) {
            if angles.iter().all(|(known, _)| *known != options) {
                let scaling = match config.dynamic_ntk {
                    Some((factor, original)) => RotaryScaling::dynamic_ntk(factor, original, length),
                    None => options.scaling,
                };
                let rotary = Rotary::new(&RotaryOptions { scaling, ..options });
                angles.push((options, rotary.angles(tokens.positions)));
            }
        }
        let mut x = model.token_embedder.lookup(tokens.tokens, config.dtype);
        if let Some(scale) = config.embedding.scale {
            x = x * rounded(scale, config.dtype);
        }
        let added = match (config.embedding.positions, &model.positions) {
            (Positions::Sinusoidal, _) => Some(
                sinusoidal_positions(tokens.positions, config.embed, SINUSOIDAL_TIMESCALE).cast(config.dtype),
            ),
            (_, table) => table.as_ref().map(|table| table.lookup(tokens.positions, config.dtype)),
        };
        if let Some(added) = added {
            x = x + added;
        }
        let x = x.constrain(&RESIDUAL);
        let inputs = StackInputs {
            angles,
            segments,
            dropout: forward.dropout.filter(|_| config.dropout_rate > 0.0),
            cache: forward.cache.as_ref().map(|cache| (cache.start, cache.layers.clone())),
            per_layer: model.per_layer.as_ref().map(|per_layer| per_layer.forward(tokens.tokens, x, config)),
            wanted: [forward.layer_outputs.as_slice(), if forward.taps { TAPS } else { &[] }].concat(),
            layers_in: forward.layers_in,
        };
        let mut taps = if forward.taps { vec![("embedding".to_owned(), x)] } else { Vec::new() };
        let outputs = x.scope("decoder", |x| model.layers.forward(x, config, &inputs));
        if forward.taps {
            taps.extend(named_taps(&outputs.others));
        }
        let hidden = match &model.final_norm {
            Some(norm) => norm.forward(outputs.x, EMBED, config.norm),
            None => outputs.x,
        };
        if forward.taps {
            taps.push(("final_norm".to_owned(), hidden));
        }
        let mut layer_outputs = outputs.others;
        layer_outputs.retain(|of_layers| forward.layer_outputs.contains(&of_layers.output));
        Hidden { hidden, cache: outputs.cache, taps, layer_outputs, auxiliary_losses: Vec::new() }
    }

    fn head_parameters(&self) -> Vec<usize> {
        let mut next = 0..;
        let numbers = self.specs.map_leaves(|_, _| next.next().expect("there is always a next number"));
        vec![numbers.head.map_or(numbers.token_embedder.embedding, |head| head.kernel)]
    }

    fn apply_head<'t>(&self, parameters: &[Tensor<'t>], hidden: Tensor<'t>) -> Tensor<'t> {
        let config = self.config.head;
        let x = if config.in_f32 { hidden.cast(DType::F32) } else { hidden };
        let logits = x.scope("logits", |x| {
            let matrix = parameters[0];
            let scores = match self.specs.head {
                Some(_) => Linear::without_bias(matrix).forward(x, &[EMBED]),
                None => Embedding { embedding: matrix }.attend(x),
            };
            let scores = if config.scale == 1.0 { scores } else { scores * config.scale };
            match config.soft_cap {
                Some(cap) => (scores * (1.0 / cap)).tanh() * cap,
                None => scores,
            }
        });
        logits.constrain(&LOGITS)
    }

    fn num_active_parameters(&self) -> usize {
        // Of a table for each layer a token uses one row, which is why publishers leave them out.
        let tables = self.specs.per_layer.as_ref().map_or(0, |per_layer| per_layer.embedding.num_elements());
        self.num_parameters() - tables
    }

    fn cache(&self, batch: usize, slots: usize) -> Vec<CacheSpec> {
        let caches = stack::caches(&self.config).into_iter().filter_map(|(stacked, layer)| {
            let attention = layer.attention.as_ref()?;
            let axes = [axis(BATCH, batch), axis(KV_POSITION, slots), attention.kv_heads, attention.head_dim];
            let logical_axes =
                [Some("decode_batch"), Some("cache_sequence"), Some("cache_heads"), Some("cache_kv")];
            Some(CacheSpec {
                axes: stacked.into_iter().chain(axes).collect::<Vec<Axis>>(),
                logical_axes: stacked.map(|_| None).into_iter().chain(logical_axes).collect(),
                dtype: self.config.dtype,
            })
        });
        caches.collect()
    }

    fn activations(&self, rows: usize, length: usize) -> Vec<RegionActivations> {
        self.config.activations(rows, length)
    }

    fn scores(&self, rows: usize, length: usize) -> Activation {
        Activation {
            name: None,
            dims: vec![rows, length, self.config.vocab.size],
            logical_axes: LOGITS.to_vec(),
            dtype: if self.config.head.in_f32 { DType::F32 } else { self.config.dtype },
        }
    }

    fn flops(&self) -> FlopCount {
        let all: usize = self.specs.leaves().iter().map(|(_, spec)| spec.num_elements()).sum();
        let table = |embedding: &ParamSpec| embedding.num_elements();
        // A tied table is counted once, as the head.
        let looked_up = if self.config.head.tied { 0 } else { table(&self.specs.token_embedder.embedding) };
        let looked_up = looked_up
            + self.specs.positions.as_ref().map_or(0, |positions| table(&positions.table))
            + self.specs.per_layer.as_ref().map_or(0, |per_layer| table(&per_layer.embedding));
        FlopCount {
            weights_per_token: all - looked_up,
            // Of the same shape as the table, whether it is the table or not.
            head_weights: table(&self.specs.token_embedder.embedding),
            attention: self
                .config
                .attentions()
                .map(|attention| crate::flops::AttentionFlops {
                    width: attention.query_heads.size * attention.head_dim.size,
                    window: attention.options.mask.window.or(attention.options.mask.chunk),
                })
                .collect(),
        }
    }
}
