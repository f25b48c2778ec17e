//! Model families: their descriptions of decoders, and the names of their parameters in other formats.
//!
//! A family is a file with a [`Family`] and a line in [`FAMILIES`].

mod adapters;
mod deepseek;
mod deepseek4;
mod describe;
mod engram;
mod envy;
#[cfg(test)]
mod expert_names;
mod gemma;
mod gemma4;
mod gpt;
mod gpt_oss;
mod invariant;
mod llama;
mod llama4;
mod mamba;
mod mixtral;
mod names;
mod olmo;
mod qwen;
mod qwen3_5;
mod qwen3_custom;
mod qwen_hybrid;
mod simple;
mod t5;

use mt_config::{AttentionType, DecoderBlock, ModelGroup};
use mt_nn::{AdapterArray, ParamSpec, RotaryScaling, attention::MaskSpec};
use mt_shape::Path;

pub use adapters::peft_modules;
pub use names::{Along, Fused, FusedOrder, LayerStack, Layout, Placeholder, Portion, TensorName};
pub(crate) use names::{FUSION, SCORE};

use crate::{
    ModelError, StoredParameter, StoredSlice,
    decoder::{
        Decoder, DecoderConfig, ExpertsConfig, LayerConfig, MlpAndExpertsConfig, NormKind, Parameter, Place,
    },
    hugging_face::{Described, Field},
};

/// A family of models.
#[derive(Debug)]
pub struct Family {
    /// The values of `decoder_block` that the family builds.
    pub blocks: &'static [DecoderBlock],
    /// Turns the configuration into the description of a decoder.
    pub describe: fn(&ModelGroup) -> Result<DecoderConfig, ModelError>,
    /// The names of a layer's modules in MaxText's checkpoints. Modules that are not listed have the same name.
    pub maxtext_names: &'static [(&'static str, &'static str)],
    /// MaxText's naming scheme for layers.
    pub maxtext_layers: MaxTextLayers,
    /// Whether MaxText folds attention's scale into the query projection.
    pub folds_query_scale: bool,
    /// The Hugging Face format, for families with published models.
    pub hugging_face: Option<HuggingFaceFamily>,
}

/// MaxText's naming scheme for layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MaxTextLayers {
    /// The names of each run of the stack.
    Plain,
    /// Each stored layer is a pair of layers, whose modules are named `…_local` and `…_global`.
    Pairs,
}

/// Hugging Face's form of a family.
#[derive(Debug)]
pub struct HuggingFaceFamily {
    /// The values of `model_type`. A model is exported as the first one that fits.
    pub model_types: &'static [ModelType],
    /// The fields of `config.json`.
    pub fields: &'static [&'static [Field]],
    /// Configuration keys that all models of the family set and no field states.
    pub always: &'static [(&'static str, bool)],
    /// The tensors of the model and of each layer.
    pub tensors: &'static [&'static [TensorName]],
    /// Whether a model does not need a tensor of the files, such as a buffer.
    pub ignores: fn(&DecoderConfig, &str) -> bool,
}

/// A value of `model_type`.
#[derive(Debug)]
pub struct ModelType {
    pub name: &'static str,
    pub architecture: &'static str,
    /// Fields besides those of the family.
    pub fields: &'static [Field],
    /// Whether files of this type are read; others are only written.
    pub is_read: bool,
    /// Whether the head is tied exactly if the files hold no matrix of its own, whatever `tie_word_embeddings` says.
    pub tied_by_files: bool,
    /// Other names in files of the tensor that is written under a name.
    pub other_names: fn(&str) -> Vec<String>,
    /// The name of a tensor of a module that predicts further tokens, from the module's number and the tensor's name in
    /// a layer, such as `attn.wq_a.weight`. Without it, modules are named as layers behind the last one.
    pub module_name: Option<fn(usize, &str) -> String>,
    /// Whether a model is exported as this type.
    pub is_of: fn(&Described<'_>) -> bool,
}

impl ModelType {
    const fn new(name: &'static str, architecture: &'static str) -> Self {
        Self {
            name,
            architecture,
            fields: &[],
            is_read: true,
            tied_by_files: false,
            other_names: |_| Vec::new(),
            module_name: None,
            is_of: |_| true,
        }
    }
}

/// All families.
pub static FAMILIES: &[&Family] = &[
    &llama::LLAMA,
    &llama::MISTRAL,
    &llama4::LLAMA4,
    &gemma::GEMMA,
    &gemma::GEMMA2,
    &gemma::GEMMA3,
    &gemma4::GEMMA4,
    &gemma4::GEMMA4_SMALL,
    &qwen::QWEN2,
    &qwen::QWEN3,
    &qwen::QWEN3_MOE,
    &qwen3_custom::QWEN3_CUSTOM_MOE,
    &qwen_hybrid::QWEN3_NEXT,
    &qwen3_5::QWEN3_5,
    &mamba::MAMBA2,
    &mamba::BAMBA,
    &mixtral::MIXTRAL,
    &deepseek::DEEPSEEK,
    &deepseek4::DEEPSEEK4,
    &envy::ENVY,
    &olmo::OLMO3,
    &gpt::GPT3,
    &gpt_oss::GPT_OSS,
    &t5::T5,
    &simple::DEFAULT,
    &simple::SIMPLE,
    &simple::SIMPLE_MLP,
];

/// The family that builds a `decoder_block`.
pub fn family_of(block: DecoderBlock) -> &'static Family {
    let family = FAMILIES.iter().find(|family| family.blocks.contains(&block));
    family.expect("every `decoder_block` that the configuration accepts has a family")
}

/// Builds the model that a configuration describes.
///
/// # Errors
/// The configuration's values describe no valid model.
pub fn build_decoder(group: &ModelGroup) -> Result<Decoder, ModelError> {
    let family = family_of(group.decoder_block);
    let mut config = (family.describe)(group)?;
    describe::set_query_key_scales(group, &mut config);
    config.check()?;
    invariant::make_invariant(group, &mut config)?;
    if group.layers.attention_type == AttentionType::BlockDiffusion {
        let sees_blocks = |layer: &LayerConfig| {
            layer.attention().is_some_and(|attention| {
                let mask = attention.options.mask;
                mask.block.is_some_and(|size| mask == MaskSpec::blocks(size))
            })
        };
        if let Some(layer) = config.layers.iter().position(|layer| !sees_blocks(layer)) {
            return Err(ModelError::LayerWithoutBlocks { layer });
        }
    }
    let dense = Decoder::new(config, family);
    Ok(match adapters::adapters(&dense, &group.lora)? {
        Some(adapters) => {
            Decoder::new(DecoderConfig { adapters: Some(adapters), ..dense.config().clone() }, family)
        }
        None => dense,
    })
}

impl Family {
    /// How each parameter is stored in MaxText's checkpoints. Arrays of one encoded weight are stored as one.
    pub(crate) fn storage(
        &self,
        config: &DecoderConfig,
        specs: &[(Path, ParamSpec)],
    ) -> Vec<StoredParameter> {
        let segments = config.segments();
        specs
            .iter()
            .map(|(path, spec)| {
                let (path, spec) = spec.stored_form(path);
                let parameter = Parameter::of(&segments, &path, &spec);
                match spec.adapter {
                    Some(AdapterArray::Whole) | None => self.stored(config, &parameter, &spec),
                    Some(array) => self.stored_adapter(config, parameter, &spec, array),
                }
            })
            .collect()
    }

    /// How an array of an adapter is stored: beside its weight, whose scale and order of outputs it shares.
    fn stored_adapter(
        &self,
        config: &DecoderConfig,
        parameter: Parameter,
        spec: &ParamSpec,
        array: AdapterArray,
    ) -> StoredParameter {
        let role = parameter.role.rsplit_once('.').map_or("", |(role, _)| role).to_owned();
        let (mut stored, _) = self.stored_alone(config, &Parameter { role, ..parameter }, spec);
        if let Some(last) = stored.key.last_mut() {
            *last = format!("{last}_{}", array.name());
        }
        match array {
            AdapterArray::A => StoredParameter { scale: 1.0, interleaved: false, ..stored },
            AdapterArray::B | AdapterArray::Magnitude | AdapterArray::Whole => stored,
        }
    }

    fn stored(&self, config: &DecoderConfig, parameter: &Parameter, spec: &ParamSpec) -> StoredParameter {
        let role = parameter.role.as_str();
        let layer = parameter.layers().first().map(|index| &config.layers[*index]);
        let (mut stored, earlier) = self.stored_alone(config, parameter, spec);
        if layer.and_then(LayerConfig::attention).is_some_and(|attention| attention.stored_fused) {
            self.fuse(config, role, &mut stored);
        }
        if let Some(count) = layer.and_then(|layer| fused_projections(layer, role)) {
            fuse_inputs(config, role, count, &mut stored);
        }
        if stored != earlier {
            stored.earlier = Some(Box::new(earlier));
        }
        stored
    }

    /// As [`Self::stored`], as an array of its own; and its form in earlier versions of this program.
    fn stored_alone(
        &self,
        config: &DecoderConfig,
        parameter: &Parameter,
        spec: &ParamSpec,
    ) -> (StoredParameter, StoredParameter) {
        let role = parameter.role.as_str();
        let is_stacked = matches!(parameter.place, Place::Cycle { .. });
        let layer = parameter.layers().first().map(|index| &config.layers[*index]);
        let attention = layer.and_then(LayerConfig::attention);
        let mut stored = StoredParameter {
            key: self.maxtext_key(config, parameter),
            // Vectors have fewer axes than the configured axis may require.
            layer_axis: is_stacked.then(|| config.param_scan_axis.min(spec.axes.len() - 1)),
            scale: 1.0,
            offset: if role.ends_with("norm.scale") && config.stores_norm_offset {
                config.norm.offset
            } else {
                0.0
            },
            interleaved: false,
            slice: None,
            earlier: None,
        };
        if let Some(attention) = attention {
            let role = role.strip_prefix("attention_then_experts.").unwrap_or(role);
            let is_query = role.starts_with("attention.query.");
            if is_query && self.folds_query_scale {
                stored.scale = attention.options.scale;
            }
            let rotated = is_query || role.starts_with("attention.key.");
            let scaling = attention.rotary.map(|rotary| rotary.scaling);
            let is_published_so = attention.options.is_interleaved;
            stored.interleaved =
                rotated && !is_published_so && matches!(scaling, Some(RotaryScaling::Llama3 { .. }));
        }
        if role == "token_embedder.embedding" {
            stored.scale = config.embedding.scale.unwrap_or(1.0);
        }
        let mut earlier = stored.clone();
        earlier.key = gpt::earlier_key(&stored.key);
        if norm_kind(config, layer, role) == Some(NormKind::Layer) && role.ends_with(".scale") {
            // MaxText multiplies by `1 + w` here.
            stored.offset -= 1.0;
        }
        if layer.and_then(LayerConfig::mlp).is_some_and(|mlp| mlp.activations.len() == 1) {
            // Without a gate the single projection has no number.
            rename(&mut stored.key, "wi_0", "wi");
        }
        (stored, earlier)
    }

    /// Makes queries, keys and values slices of one array, `qkv_proj`: `[embed, 3, heads, head_dim]`, or
    /// `[3, heads, head_dim]` for biases.
    fn fuse(&self, config: &DecoderConfig, role: &str, stored: &mut StoredParameter) {
        let Some((name, kind)) = role.strip_prefix("attention.").and_then(|rest| rest.split_once('.')) else {
            return;
        };
        let Some(index) = ["query", "key", "value"].iter().position(|known| *known == name) else { return };
        let axis = usize::from(kind == "kernel");
        rename(&mut stored.key, name, "qkv_proj");
        stored.slice = Some(StoredSlice { axis, index, of: 3, is_exact: !self.folds_query_scale });
        // The stored array has one more axis before which the layer axis may be.
        stored.layer_axis = stored.layer_axis.map(|_| config.param_scan_axis.min(axis + 3));
    }

    fn maxtext_key(&self, config: &DecoderConfig, parameter: &Parameter) -> Vec<String> {
        let role = parameter.role.as_str();
        if let Some((module, rest)) = parameter.in_prediction() {
            return self.maxtext_prediction_key(module, rest);
        }
        if parameter.place == Place::Model {
            let renames = [
                ("final_norm", "decoder.decoder_norm"),
                ("head", "decoder.logits_dense"),
                ("encoder.final_norm", "encoder.encoder_norm"),
                ("relative_bias", "decoder.relative_bias"),
                ("score", "decoder.score"),
                ("hc_head", "decoder.hc_head"),
                ("positions.table", "decoder.position_embedder.embedding"),
                ("per_layer", "decoder.per_layer"),
            ];
            return renamed(role, &renames);
        }
        let (layers, pair) = match (self.maxtext_layers, parameter.place) {
            (MaxTextLayers::Pairs, Place::Layer { index, .. }) => {
                (vec![format!("layers_{}", index / 2)], Some(index % 2))
            }
            (MaxTextLayers::Pairs, Place::Cycle { slot, .. }) => (vec!["layers".to_owned()], Some(slot)),
            (_, place) => (config.stored_layers(place), None),
        };
        let mut path = renamed(role, self.maxtext_names);
        if let Some(pair) = pair {
            path[0].push_str(if pair == 0 { "_local" } else { "_global" });
        }
        let is_of_encoder =
            parameter.layers().first().is_some_and(|layer| *layer < config.num_encoder_layers());
        let stack = if is_of_encoder { "encoder" } else { "decoder" };
        [vec![stack.to_owned()], layers, path].concat()
    }

    /// The key of a parameter of the prediction module `module`, which MaxText counts from 1.
    fn maxtext_prediction_key(&self, module: usize, rest: &str) -> Vec<String> {
        let number = module + 1;
        let mut path = match rest.strip_prefix("layer.") {
            Some(of_layer) => {
                [vec!["transformer_layer".to_owned()], renamed(of_layer, self.maxtext_names)].concat()
            }
            None => renamed(rest, &[("hidden_norm", "hidden_state_norm")]),
        };
        path[0] = format!("mtp_{number}_{}", path[0]);
        [vec!["mtp_block".to_owned(), format!("mtp_layer_{number}")], path].concat()
    }
}

/// The number of input projections that MaxText's checkpoints hold as one array, if the parameter is of an MLP for
/// which they do.
fn fused_projections(layer: &LayerConfig, role: &str) -> Option<usize> {
    let feed_forward = layer.feed_forward.as_ref()?;
    let beside = feed_forward.get::<MlpAndExpertsConfig>();
    let mlp = layer.mlp().or(beside.map(|both| &both.mlp)).filter(|mlp| mlp.stored_fused);
    let experts = feed_forward.get::<ExpertsConfig>().or(beside.map(|both| &both.experts));
    let shared = experts.and_then(|experts| experts.shared.as_ref()).filter(|shared| shared.stored_fused);
    let is_of = |module: &str| role.split('.').rev().nth(2) == Some(module);
    match (mlp, shared) {
        (_, Some(_)) if is_of("shared") => Some(2),
        (Some(mlp), _) if is_of("mlp") => Some(mlp.activations.len()),
        _ => None,
    }
}

/// Makes the input projections of an MLP slices of one array, `wi`: `[embed, 2, mlp]`, or `[2, mlp]` for biases.
fn fuse_inputs(config: &DecoderConfig, role: &str, count: usize, stored: &mut StoredParameter) {
    let names = ["wi_0", "wi_1"];
    let Some(index) = names.iter().position(|name| role.split('.').any(|segment| segment == *name)) else {
        return;
    };
    let axis = usize::from(role.ends_with(".kernel"));
    rename(&mut stored.key, names[index], "wi");
    stored.slice = Some(StoredSlice { axis, index, of: count, is_exact: true });
    // The stored array has one more axis before which the layer axis may be.
    stored.layer_axis = stored.layer_axis.map(|_| config.param_scan_axis.min(axis + 2));
}

/// The segments of a role, of which a table renames the beginning.
fn renamed(role: &str, table: &[(&str, &str)]) -> Vec<String> {
    let hit = table.iter().find_map(|(ours, theirs)| {
        let rest = role.strip_prefix(ours)?;
        (rest.is_empty() || rest.starts_with('.')).then(|| format!("{theirs}{rest}"))
    });
    hit.as_deref().unwrap_or(role).split('.').map(str::to_owned).collect()
}

/// The kind of the norm that a parameter belongs to, for norms around a layer's parts and the final norm.
fn norm_kind(config: &DecoderConfig, layer: Option<&LayerConfig>, role: &str) -> Option<NormKind> {
    let norms = layer.map(|layer| layer.norms).unwrap_or_default();
    match role.split('.').next()? {
        "final_norm" => config.final_norm,
        "pre_attention_norm" | "pre_cross_attention_norm" => norms.pre_attention,
        "post_attention_norm" => norms.post_attention,
        "pre_mlp_norm" => norms.pre_mlp,
        "post_mlp_norm" => norms.post_mlp,
        _ => None,
    }
}

fn rename(key: &mut [String], from: &str, to: &str) {
    for segment in key.iter_mut().filter(|segment| *segment == from) {
        *segment = to.to_owned();
    }
}
