//! Model families: what each makes of the configuration, and what its parameters are called elsewhere.
//!
//! A family is one file with a [`Family`]; adding one is adding a file and a line to [`FAMILIES`].

mod describe;
mod gemma;
mod gemma4;
mod gpt;
mod llama;
mod names;
mod olmo;
mod qwen;
mod simple;

use mt_config::{DecoderBlock, ModelGroup};
use mt_nn::{ParamSpec, RotaryScaling};
use mt_shape::Path;

pub use names::{Layout, TensorName};

use crate::{
    ModelError, StoredParameter, StoredSlice,
    decoder::{Decoder, DecoderConfig, LayerConfig, NormKind, Parameter, Place},
    hugging_face::{HuggingFaceConfig, Settings},
};

/// A family of models.
#[derive(Debug)]
pub struct Family {
    /// The kinds of layers it builds.
    pub blocks: &'static [DecoderBlock],
    /// What the configuration means.
    pub describe: fn(&ModelGroup) -> Result<DecoderConfig, ModelError>,
    /// The names that parts of a layer have in MaxText's checkpoints; parts that are not listed keep theirs.
    pub maxtext_parts: &'static [(&'static str, &'static str)],
    /// How MaxText names layers.
    pub maxtext_layers: MaxTextLayers,
    /// MaxText folds attention's scale into the query projection.
    pub folds_query_scale: bool,
    /// Hugging Face's side, where there are published models.
    pub hugging_face: Option<HuggingFaceFamily>,
}

/// How MaxText names the layers of a cycle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MaxTextLayers {
    /// `layers`, or `layers_3`; of a longer cycle `layers.layers_2`, and `layers_remainder.layers_0` after it.
    Plain,
    /// Two layers are one, whose parts are `…_local` and `…_global`.
    Pairs,
}

/// What a family's models look like in Hugging Face's directories.
#[derive(Debug)]
pub struct HuggingFaceFamily {
    /// `model_type` of `config.json`.
    pub model_types: &'static [&'static str],
    /// What transformers assumes where a `config.json` does not have a key, other than for most families.
    pub usual: &'static [(&'static str, f64)],
    /// Tensors of the model and of each layer (`{}` is its number).
    pub tensors: &'static [&'static [TensorName]],
    /// The keys that a `config.json` means.
    pub settings: fn(&HuggingFaceConfig) -> Result<Settings, ModelError>,
    /// The `config.json` of a model of ours.
    pub config: fn(&ModelGroup, &DecoderConfig) -> serde_json::Map<String, serde_json::Value>,
}

/// All families.
pub static FAMILIES: &[&Family] = &[
    &llama::LLAMA,
    &llama::MISTRAL,
    &gemma::GEMMA,
    &gemma::GEMMA2,
    &gemma::GEMMA3,
    &gemma4::GEMMA4,
    &gemma4::GEMMA4_SMALL,
    &qwen::QWEN2,
    &qwen::QWEN3,
    &olmo::OLMO3,
    &gpt::GPT3,
    &simple::DEFAULT,
    &simple::SIMPLE,
    &simple::SIMPLE_MLP,
];

/// The family that builds a kind of layer.
pub fn family_of(block: DecoderBlock) -> &'static Family {
    let family = FAMILIES.iter().find(|family| family.blocks.contains(&block));
    family.expect("every kind of layer that the configuration lets pass has a family")
}

/// Builds the model that a configuration describes.
///
/// # Errors
/// The configuration's values do not make a model.
pub fn build_decoder(group: &ModelGroup) -> Result<Decoder, ModelError> {
    let family = family_of(group.decoder_block);
    let config = (family.describe)(group)?;
    config.check()?;
    Ok(Decoder::new(config, family))
}

impl Family {
    /// How each parameter is stored in MaxText's checkpoints.
    pub(crate) fn storage(
        &self,
        config: &DecoderConfig,
        specs: &[(Path, ParamSpec)],
    ) -> Vec<StoredParameter> {
        let segments = config.segments();
        specs
            .iter()
            .map(|(path, spec)| self.stored(config, &Parameter::of(&segments, path, spec), spec))
            .collect()
    }

    fn stored(&self, config: &DecoderConfig, parameter: &Parameter, spec: &ParamSpec) -> StoredParameter {
        let role = parameter.role.as_str();
        let is_stacked = matches!(parameter.place, Place::Cycle { .. });
        let layer = parameter.layers().first().map(|index| &config.layers[*index]);
        let attention = layer.and_then(LayerConfig::attention);
        let mut stored = StoredParameter {
            key: self.maxtext_key(parameter),
            // Vectors have fewer axes than the configured position may ask for.
            layer_axis: is_stacked.then(|| config.param_scan_axis.min(spec.axes.len() - 1)),
            scale: 1.0,
            offset: if role.ends_with("norm.scale") { config.norm.offset } else { 0.0 },
            interleaved: false,
            slice: None,
            earlier: None,
        };
        if let Some(attention) = attention {
            let is_query = role.starts_with("attention.query.");
            if is_query && self.folds_query_scale {
                stored.scale = attention.options.scale;
            }
            let rotated = is_query || role.starts_with("attention.key.");
            let scaling = attention.rotary.map(|rotary| rotary.scaling);
            stored.interleaved = rotated && matches!(scaling, Some(RotaryScaling::Llama3 { .. }));
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
            // Without a gate there is one projection, which has no number.
            rename(&mut stored.key, "wi_0", "wi");
        }
        if attention.is_some_and(|attention| attention.stored_fused) {
            self.fuse(config, role, &mut stored);
        }
        if stored != earlier {
            stored.earlier = Some(Box::new(earlier));
        }
        stored
    }

    /// Makes queries, keys and values slices of one array, `qkv_proj`: `[embed, 3, heads, head_dim]`, or the biases
    /// without the first axis.
    fn fuse(&self, config: &DecoderConfig, role: &str, stored: &mut StoredParameter) {
        let Some((name, kind)) = role.strip_prefix("attention.").and_then(|rest| rest.split_once('.')) else {
            return;
        };
        let Some(index) = ["query", "key", "value"].iter().position(|known| *known == name) else { return };
        let axis = usize::from(kind == "kernel");
        rename(&mut stored.key, name, "qkv_proj");
        stored.slice = Some(StoredSlice { axis, index, of: 3, is_exact: !self.folds_query_scale });
        // There is one more axis before which that of layers may be.
        stored.layer_axis = stored.layer_axis.map(|_| config.param_scan_axis.min(axis + 3));
    }

    fn maxtext_key(&self, parameter: &Parameter) -> Vec<String> {
        let role = parameter.role.as_str();
        let numbered = |name: &str, index: usize| format!("{name}_{index}");
        let in_decoder = |rest: Vec<String>| [vec!["decoder".to_owned()], rest].concat();
        let renamed = |table: &[(&str, &str)]| -> Vec<String> {
            let hit = table.iter().find_map(|(ours, theirs)| {
                let rest = role.strip_prefix(ours)?;
                (rest.is_empty() || rest.starts_with('.')).then(|| format!("{theirs}{rest}"))
            });
            hit.as_deref().unwrap_or(role).split('.').map(str::to_owned).collect()
        };
        let (layers, pair): (Vec<String>, Option<usize>) = match (parameter.place, self.maxtext_layers) {
            (Place::Model, _) => {
                let key = renamed(&[
                    ("final_norm", "decoder.decoder_norm"),
                    ("head", "decoder.logits_dense"),
                    ("positions.table", "decoder.position_embedder.embedding"),
                    ("per_layer", "decoder.per_layer"),
                ]);
                return key;
            }
            (Place::Layer { index, .. }, MaxTextLayers::Pairs) => {
                (vec![numbered("layers", index / 2)], Some(index % 2))
            }
            (Place::Cycle { slot, .. }, MaxTextLayers::Pairs) => (vec!["layers".to_owned()], Some(slot)),
            (Place::Layer { remainder: Some(index), .. }, _) => {
                (vec!["layers_remainder".to_owned(), numbered("layers", index)], None)
            }
            (Place::Layer { index, .. }, _) => (vec![numbered("layers", index)], None),
            (Place::Cycle { length: 1, .. }, _) => (vec!["layers".to_owned()], None),
            (Place::Cycle { slot, .. }, _) => (vec!["layers".to_owned(), numbered("layers", slot)], None),
        };
        let mut part = renamed(self.maxtext_parts);
        if let Some(pair) = pair {
            part[0].push_str(if pair == 0 { "_local" } else { "_global" });
        }
        in_decoder([layers, part].concat())
    }
}

/// The kind of the norm that a parameter belongs to, if it does to one of those around a layer's parts or the last.
fn norm_kind(config: &DecoderConfig, layer: Option<&LayerConfig>, role: &str) -> Option<NormKind> {
    let norms = layer.map(|layer| layer.norms).unwrap_or_default();
    match role.split('.').next()? {
        "final_norm" => config.final_norm,
        "pre_attention_norm" => norms.pre_attention,
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
