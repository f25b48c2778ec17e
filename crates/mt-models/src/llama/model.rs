//! The model: parameters and wiring.

use mt_config::ModelGroup;
use mt_derive::Tree;
use mt_nn::{
    Dropout, Embedding, Initializer, LayerIndex, Linear, Mlp, ParamSpec, RmsNorm, RotaryAngles,
    attention::{Attention, AttentionInputs, CachedKeysValues, KeysValues, Segments},
    axes::{BATCH, EMBED, KV_POSITION, LAYERS},
    constrain_to_specs,
};
use mt_shape::{Axis, DType, Path, Tree, axis};
use mt_trace::{Key, SavePolicy, ScanOptions, Tensor};

use super::LlamaConfig;
use crate::{Cache, CacheSpec, FlopCount, Forward, Model, ModelError, StoredParameter, Tokens};

/// One layer: attention, then a feed-forward layer, each on normalized input and added to the residual stream.
#[derive(Clone, Debug, Tree)]
pub struct DecoderLayer<L> {
    pub pre_self_attention_layer_norm: RmsNorm<L>,
    pub self_attention: Attention<L>,
    pub post_self_attention_layer_norm: RmsNorm<L>,
    pub mlp: Mlp<L>,
}

/// All layers: stacked along a leading axis and scanned, or one by one.
#[derive(Clone, Debug, Tree)]
pub enum Layers<L> {
    Scanned(DecoderLayer<L>),
    Unrolled(Vec<DecoderLayer<L>>),
}

/// The decoder proper.
#[derive(Clone, Debug, Tree)]
pub struct DecoderStack<L> {
    pub layers: Layers<L>,
    pub decoder_norm: RmsNorm<L>,
    /// Absent if the head is tied to the embedding.
    pub logits_dense: Option<Linear<L>>,
}

/// The whole model.
#[derive(Clone, Debug, Tree)]
pub struct Decoder<L> {
    pub token_embedder: Embedding<L>,
    pub decoder: DecoderStack<L>,
}

/// A model of this family.
#[derive(Clone, Debug)]
pub struct Llama {
    pub(super) config: LlamaConfig,
    pub(super) specs: Decoder<ParamSpec>,
}

/// What every layer shares.
#[derive(Clone, Copy)]
struct LayerInputs<'t> {
    angles: RotaryAngles<'t>,
    segments: Segments<'t>,
    start: Option<Tensor<'t>>,
}

/// What a scan over layers slices: parameters, the layers' dropout keys and caches.
#[derive(Tree)]
struct Sliced<L> {
    layer: DecoderLayer<L>,
    key: Option<L>,
    cache: Option<KeysValues<L>>,
}

const RESIDUAL: [Option<&str>; 3] =
    [Some("activation_batch"), Some("activation_norm_length"), Some("activation_embed")];

impl Llama {
    /// Builds a model of this family from the configuration.
    ///
    /// # Errors
    /// The configuration's values do not make a model.
    pub fn from_config(group: &ModelGroup) -> Result<Self, ModelError> {
        let config = LlamaConfig::from_config(group)?;
        let specs = specs(&config);
        Ok(Self { config, specs })
    }
}

fn layer_specs(config: &LlamaConfig) -> DecoderLayer<ParamSpec> {
    let LlamaConfig { embed, query_heads, kv_heads, head_dim, mlp, .. } = *config;
    let norm = || RmsNorm { scale: ParamSpec::new([(embed, "norm")], Initializer::Ones) };
    let into_embed = Initializer::fan_in(config.init_scale, embed.size);
    let key_value = || {
        Linear::without_bias(ParamSpec::new(
            [(embed, "embed"), (kv_heads, "kv_heads"), (head_dim, "kv_head_dim")],
            into_embed,
        ))
    };
    let hidden = || Linear::without_bias(ParamSpec::new([(embed, "embed"), (mlp, "mlp")], into_embed));
    let from_heads = Initializer::fan_in(config.init_scale, query_heads.size * head_dim.size);
    let from_hidden = Initializer::fan_in(config.init_scale, mlp.size);
    DecoderLayer {
        pre_self_attention_layer_norm: norm(),
        self_attention: Attention {
            query: Linear::without_bias(ParamSpec::new(
                [(embed, "embed"), (query_heads, "q_heads"), (head_dim, "kv")],
                into_embed,
            )),
            key: Some(key_value()),
            value: Some(key_value()),
            out: Linear::without_bias(ParamSpec::new(
                [(query_heads, "heads"), (head_dim, "kv"), (embed, "embed")],
                from_heads,
            )),
            query_norm: None,
            key_norm: None,
            sinks: None,
        },
        post_self_attention_layer_norm: norm(),
        mlp: Mlp {
            wi_0: hidden(),
            wi_1: (config.activations.len() == 2).then(hidden),
            wo: Linear::without_bias(ParamSpec::new([(mlp, "mlp"), (embed, "embed")], from_hidden)),
        },
    }
}

fn specs(config: &LlamaConfig) -> Decoder<ParamSpec> {
    let LlamaConfig { embed, vocab, layers, .. } = *config;
    let layer = layer_specs(config);
    let layers = if config.scan_layers {
        Layers::Scanned(layer.map_leaves(|_, spec| spec.stacked(layers)))
    } else {
        Layers::Unrolled(
            (0..layers.size).map(|index| layer.map_leaves(|_, spec| spec.of_layer(index))).collect(),
        )
    };
    let token = Initializer::Normal { deviation: (embed.size as f64).powf(-0.5) };
    let head = Initializer::fan_in(config.init_scale, embed.size);
    let decoder = Decoder {
        token_embedder: Embedding {
            embedding: ParamSpec::new([(vocab, "vocab"), (embed, "embed_vocab")], token),
        },
        decoder: DecoderStack {
            layers,
            decoder_norm: RmsNorm { scale: ParamSpec::new([(embed, "norm")], Initializer::Ones) },
            logits_dense: (!config.tied_head).then(|| {
                Linear::without_bias(ParamSpec::new([(embed, "embed_vocab"), (vocab, "vocab")], head))
            }),
        },
    };
    decoder.map_leaves(|_, spec| spec.clone().with_dtype(config.weight_dtype))
}

impl<'t> DecoderLayer<Tensor<'t>> {
    /// Applies the layer to the residual stream.
    ///
    /// # Shapes
    /// `[batch, position, embed] -> [batch, position, embed]`
    fn forward(
        &self,
        x: Tensor<'t>,
        config: &LlamaConfig,
        inputs: LayerInputs<'t>,
        dropout: Dropout<'t>,
        cache: Option<KeysValues<Tensor<'t>>>,
    ) -> (Tensor<'t>, Option<KeysValues<Tensor<'t>>>) {
        let inputs = AttentionInputs {
            angles: Some(inputs.angles),
            segments: inputs.segments,
            cache: cache.zip(inputs.start).map(|(cached, start)| CachedKeysValues { cached, start }),
            shared: None,
        };
        let attended = x.scope("self_attention", |x| {
            let normed = self.pre_self_attention_layer_norm.forward(x, EMBED, config.norm);
            self.self_attention.forward(normed, &inputs, &config.attention)
        });
        let x = (x + dropout.apply("attention", attended.output)).constrain(&RESIDUAL);
        let hidden = x.scope("mlp", |x| {
            let normed = self.post_self_attention_layer_norm.forward(x, EMBED, config.norm);
            self.mlp.forward(normed, &config.activations, dropout)
        });
        let x = (x + dropout.apply("mlp", hidden)).constrain(&RESIDUAL);
        (x, attended.written)
    }
}

impl<'t> Layers<Tensor<'t>> {
    fn forward(
        &self,
        x: Tensor<'t>,
        config: &LlamaConfig,
        inputs: LayerInputs<'t>,
        dropout: Option<Key<'t>>,
        cache: Option<KeysValues<Tensor<'t>>>,
    ) -> (Tensor<'t>, Option<KeysValues<Tensor<'t>>>) {
        match self {
            Self::Scanned(layer) => scanned(layer, x, config, inputs, dropout, cache),
            Self::Unrolled(layers) => unrolled(layers, x, config, inputs, dropout, cache),
        }
    }
}

fn layer_dropout<'t>(config: &LlamaConfig, key: Option<Tensor<'t>>) -> Dropout<'t> {
    match key {
        Some(key) => Dropout::On { rate: config.dropout_rate, key: Key::new(key) },
        None => Dropout::Off,
    }
}

fn scanned<'t>(
    layer: &DecoderLayer<Tensor<'t>>,
    x: Tensor<'t>,
    config: &LlamaConfig,
    inputs: LayerInputs<'t>,
    dropout: Option<Key<'t>>,
    cache: Option<KeysValues<Tensor<'t>>>,
) -> (Tensor<'t>, Option<KeysValues<Tensor<'t>>>) {
    let region = x.region();
    let layers = config.layers;
    let keys = dropout.map(|key| {
        let index = LayerIndex { index: region.iota(DType::U64, layers) };
        let ([], [keys]) = region.scan(ScanOptions::over(layers), [], &index, |_, [], layer| {
            ([], [key.fold_in(layer.index).value()])
        });
        keys
    });
    let save = config.remat.clone().unwrap_or(SavePolicy::Everything);
    let options = ScanOptions::over(layers).saving(save);
    let slice_specs: Vec<ParamSpec> =
        layer_specs(config).leaves().into_iter().map(|(_, spec)| spec).collect();
    let sliced = Sliced { layer: layer.clone(), key: keys, cache };
    if cache.is_none() {
        let ([x], []) = region.scan(options, [x], &sliced, |_, [x], slice| {
            let layer = constrain_to_specs(&slice.layer, &slice_specs);
            let dropout = layer_dropout(config, slice.key);
            ([layer.forward(x, config, inputs, dropout, None).0], [])
        });
        return (x, None);
    }
    let ([x], [key, value]) = region.scan(options, [x], &sliced, |_, [x], slice| {
        let layer = constrain_to_specs(&slice.layer, &slice_specs);
        let dropout = layer_dropout(config, slice.key);
        let (x, cache) = layer.forward(x, config, inputs, dropout, slice.cache);
        let cache = cache.expect("a layer with a cache returns one");
        ([x], [cache.key, cache.value])
    });
    (x, Some(KeysValues { key, value }))
}

fn unrolled<'t>(
    layers: &[DecoderLayer<Tensor<'t>>],
    x: Tensor<'t>,
    config: &LlamaConfig,
    inputs: LayerInputs<'t>,
    dropout: Option<Key<'t>>,
    cache: Option<KeysValues<Tensor<'t>>>,
) -> (Tensor<'t>, Option<KeysValues<Tensor<'t>>>) {
    let mut x = x;
    let mut written: Vec<KeysValues<Tensor<'t>>> = Vec::new();
    for (index, layer) in layers.iter().enumerate() {
        let region = x.region();
        let key = dropout.map(|key| key.fold_in(region.integer(DType::U64, index as i64)).value());
        let cached = cache.as_ref().map(|cache| cache.map_leaves(|_, all| all.at(LAYERS, index)));
        x = x.scope(&format!("layers_{index}"), |x| match (&config.remat, cached) {
            (Some(save), None) => {
                let arguments = Sliced { layer: layer.clone(), key, cache: None };
                let [x] = region.remat(save.clone(), [x], &arguments, |_, [x], slice| {
                    let dropout = layer_dropout(config, slice.key);
                    [slice.layer.forward(x, config, inputs, dropout, None).0]
                });
                x
            }
            (_, cached) => {
                let (x, cache) = layer.forward(x, config, inputs, layer_dropout(config, key), cached);
                written.extend(cache);
                x
            }
        });
    }
    let stack = |pick: fn(&KeysValues<Tensor<'t>>) -> Tensor<'t>| {
        let layers: Vec<Tensor<'t>> = written.iter().map(|cache| pick(cache).unsqueeze(LAYERS)).collect();
        layers[0].concatenate(&layers[1..], LAYERS)
    };
    let cache = (!written.is_empty())
        .then(|| KeysValues { key: stack(|cache| cache.key), value: stack(|cache| cache.value) });
    (x, cache)
}

impl Model for Llama {
    fn parameters(&self) -> Vec<(Path, ParamSpec)> {
        self.specs.leaves()
    }

    fn storage(&self) -> Vec<StoredParameter> {
        super::convert::storage(&self.config, &self.specs)
    }

    fn logits<'t>(
        &self,
        parameters: &[Tensor<'t>],
        tokens: Tokens<'t>,
        forward: Forward<'t>,
    ) -> (Tensor<'t>, Option<KeysValues<Tensor<'t>>>) {
        let config = &self.config;
        let model = self.specs.with_leaves(parameters.iter().copied());
        let segments = match &forward.cache {
            None => Segments::within(tokens.segmentation),
            Some(Cache { segmentation, start, .. }) => {
                Segments { query: tokens.segmentation, key: *segmentation, first_query: Some(*start) }
            }
        };
        let inputs = LayerInputs {
            angles: config.rotary.angles(tokens.positions),
            segments,
            start: forward.cache.map(|cache| cache.start),
        };
        let dropout = forward.dropout.filter(|_| config.dropout_rate > 0.0);
        let x = model.token_embedder.lookup(tokens.tokens, config.dtype).constrain(&RESIDUAL);
        let cache = forward.cache.map(|cache| cache.layers);
        let (x, cache) =
            x.scope("decoder", |x| model.decoder.layers.forward(x, config, inputs, dropout, cache));
        let x = model.decoder.decoder_norm.forward(x, EMBED, config.norm);
        let x = if config.logits_in_f32 { x.cast(DType::F32) } else { x };
        let logits = x.scope("logits", |x| match &model.decoder.logits_dense {
            Some(head) => head.forward(x, &[EMBED]),
            None if config.normalize_tied_logits => {
                model.token_embedder.attend(x) * (config.embed.size as f64).powf(-0.5)
            }
            None => model.token_embedder.attend(x),
        });
        let logits = logits.constrain(&[
            Some("activation_embed_and_logits_batch"),
            Some("activation_length"),
            Some("activation_vocab"),
        ]);
        (logits, cache)
    }

    fn cache(&self, batch: usize, slots: usize) -> CacheSpec {
        let LlamaConfig { layers, kv_heads, head_dim, dtype, .. } = self.config;
        let axes: Vec<Axis> = vec![layers, axis(BATCH, batch), axis(KV_POSITION, slots), kv_heads, head_dim];
        let logical_axes = vec![None, Some("decode_batch"), None, Some("cache_heads"), Some("cache_kv")];
        CacheSpec { axes, logical_axes, dtype }
    }

    fn flops(&self) -> FlopCount {
        let config = &self.config;
        let all: usize = self.specs.leaves().iter().map(|(_, spec)| spec.num_elements()).sum();
        let embedding = config.vocab.size * config.embed.size;
        // A tied table is counted once, as the head.
        let looked_up = if config.tied_head { 0 } else { embedding };
        FlopCount {
            weights_per_token: all - looked_up,
            num_layers: config.layers.size,
            num_query_heads: config.query_heads.size,
            head_dim: config.head_dim.size,
        }
    }
}
