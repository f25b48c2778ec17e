//! The layout in which Kaggle has Gemma, Gemma 2 and Gemma 3: a checkpoint of Orbax with the parameters of Google's own
//! library.
//!
//! It is read as the equivalent Hugging Face directory. There is no description: sizes follow from the arrays, and
//! the other values depend on the generation alone, except for a few that the width decides.

use std::{collections::BTreeMap, path::Path};

use mt_checkpoint::{Checkpoint, StoredValue};
use mt_shape::{DType, HostArray};
use serde_json::{Map, Value, json};

use super::transpose::transpose_bytes;
use crate::{ModelError, StateError};

/// The description of the arrays.
pub(super) const TREE_FILE: &str = "_METADATA";

/// Arrays of the encoder of images, which text models leave out.
const OF_IMAGES: &[&str] = &["SigLiPFromPatches", "embedder.mm_"];

/// How a tensor of Hugging Face's format lies in an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    /// As it is.
    Same,
    /// `[heads, inputs, width]` as rows of heads, at this index of a leading axis if there is one.
    HeadRows(Option<usize>),
    /// `[heads, width, outputs]` as columns of heads.
    HeadColumns,
    /// `[inputs, outputs]` transposed.
    Transposed,
    /// One half of `[2, inputs, outputs]`, or of `[2, outputs, inputs]`, which later models have.
    Half(usize),
}

/// The tensors in an array of a layer, or of the model, by the end of its name.
const ARRAYS: &[(&str, &[(&str, Form)])] = &[
    ("embedder.input_embedding", &[("model.embed_tokens.weight", Form::Same)]),
    ("final_norm.scale", &[("model.norm.weight", Form::Same)]),
    ("attn.q_einsum.w", &[("self_attn.q_proj.weight", Form::HeadRows(None))]),
    (
        "attn.kv_einsum.w",
        &[
            ("self_attn.k_proj.weight", Form::HeadRows(Some(0))),
            ("self_attn.v_proj.weight", Form::HeadRows(Some(1))),
        ],
    ),
    (
        "attn.qkv_einsum.w",
        &[
            ("self_attn.q_proj.weight", Form::HeadRows(Some(0))),
            ("self_attn.k_proj.weight", Form::HeadRows(Some(1))),
            ("self_attn.v_proj.weight", Form::HeadRows(Some(2))),
        ],
    ),
    ("attn.attn_vec_einsum.w", &[("self_attn.o_proj.weight", Form::HeadColumns)]),
    ("attn._query_norm.scale", &[("self_attn.q_norm.weight", Form::Same)]),
    ("attn._key_norm.scale", &[("self_attn.k_norm.weight", Form::Same)]),
    ("mlp.gating_einsum", &[("mlp.gate_proj.weight", Form::Half(0)), ("mlp.up_proj.weight", Form::Half(1))]),
    ("mlp.linear", &[("mlp.down_proj.weight", Form::Transposed)]),
    ("pre_attention_norm.scale", &[("input_layernorm.weight", Form::Same)]),
    ("post_attention_norm.scale", &[("post_attention_layernorm.weight", Form::Same)]),
    ("pre_ffw_norm.scale", &[("pre_feedforward_layernorm.weight", Form::Same)]),
    ("post_ffw_norm.scale", &[("post_feedforward_layernorm.weight", Form::Same)]),
];

/// Whether a path is a directory in this layout.
pub(super) fn is_at(path: &Path) -> bool {
    mt_config::is_gemma_of_kaggle(path)
}

/// The arrays of a model, as the tensors of a Hugging Face directory.
#[derive(Debug)]
pub(super) struct KaggleWeights {
    checkpoint: Checkpoint,
    /// The array and the form of each tensor.
    tensors: BTreeMap<String, (String, Form)>,
    width: usize,
}

impl KaggleWeights {
    pub fn open(path: &Path) -> Result<Self, StateError> {
        let checkpoint = Checkpoint::open_path(path)?;
        let mut tensors = BTreeMap::new();
        let mut width = 0;
        let is_first = !checkpoint.entries().iter().any(|entry| entry.name.contains("post_ffw_norm"));
        for entry in checkpoint.entries() {
            let StoredValue::Array { dims, .. } = &entry.value else { continue };
            // Keys of the tree are paths themselves.
            let plain = entry.name.replace('/', ".");
            let plain = plain.trim_start_matches("params.").trim_start_matches("transformer.");
            if OF_IMAGES.iter().any(|start| plain.starts_with(start)) {
                continue;
            }
            if plain == "embedder.input_embedding" {
                width = dims.last().copied().unwrap_or(0);
            }
            let (layer, within) = match plain.strip_prefix("layer_").and_then(|rest| rest.split_once('.')) {
                Some((layer, within)) => (Some(layer), within),
                None => (None, plain),
            };
            // Some versions of the library nest these two once more.
            let known = ARRAYS.iter().find(|(name, _)| {
                within == *name || within.strip_suffix(".w").is_some_and(|within| within == *name)
            });
            let Some((name, held)) = known else {
                // An unknown array is no tensor of the model, which loading reports.
                tensors.insert(entry.name.clone(), (entry.name.clone(), Form::Same));
                continue;
            };
            for (tensor, form) in *held {
                // The first generation has no norms behind attention and feed-forward parts.
                let tensor = match *name {
                    "pre_ffw_norm.scale" if is_first => "post_attention_layernorm.weight",
                    _ => tensor,
                };
                let tensor =
                    layer.map_or(tensor.to_owned(), |layer| format!("model.layers.{layer}.{tensor}"));
                tensors.insert(tensor, (entry.name.clone(), *form));
            }
        }
        Ok(Self { checkpoint, tensors, width })
    }

    /// The names of the tensors.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    fn array(&self, tensor: &str) -> Option<(&str, Form, DType, &[usize])> {
        let (name, form) = self.tensors.get(tensor)?;
        let (dtype, dims) = self.checkpoint.array(name).ok()?;
        Some((name, *form, dtype, dims))
    }

    /// The element type of a tensor.
    pub fn dtype(&self, tensor: &str) -> Option<DType> {
        self.array(tensor).map(|(_, _, dtype, _)| dtype)
    }

    /// The dimensions of a tensor.
    pub fn dims(&self, tensor: &str) -> Option<Vec<usize>> {
        let (_, form, _, dims) = self.array(tensor)?;
        Some(match (form, dims) {
            (Form::HeadRows(None), [heads, inputs, width])
            | (Form::HeadRows(Some(_)), [_, heads, inputs, width]) => vec![heads * width, *inputs],
            (Form::HeadColumns, [heads, width, outputs]) => vec![*outputs, heads * width],
            (Form::Transposed, [inputs, outputs]) => vec![*outputs, *inputs],
            (Form::Half(_), [_, one, other]) if *one == self.width => vec![*other, *one],
            (Form::Half(_), [_, one, other]) => vec![*one, *other],
            (_, dims) => dims.to_vec(),
        })
    }

    /// Reads a tensor.
    pub fn read(&self, tensor: &str) -> Result<HostArray, StateError> {
        let Some(((name, form, _, dims), shape)) = self.array(tensor).zip(self.dims(tensor)) else {
            let missing = mt_checkpoint::CheckpointError::NoSuchArray {
                checkpoint: self.checkpoint.path().to_owned(),
                name: tensor.to_owned(),
            };
            return Err(missing.into());
        };
        let index = match form {
            Form::HeadRows(index) => index,
            Form::Half(index) => Some(index),
            Form::Same | Form::HeadColumns | Form::Transposed => None,
        };
        let mut ranges: Vec<std::ops::Range<usize>> = dims.iter().map(|dim| 0..*dim).collect();
        if let (Some(index), Some(first)) = (index, ranges.first_mut()) {
            *first = index..index + 1;
        }
        let read = self.checkpoint.read(name, &ranges)?;
        let inner = &read.dims()[usize::from(index.is_some())..];
        Ok(match (form, inner) {
            (Form::HeadRows(_), [_, inputs, width]) => transposed(&read, [*inputs, *width], &shape),
            (Form::HeadColumns, [heads, width, outputs]) => {
                transposed(&read, [heads * width, *outputs], &shape)
            }
            (Form::Transposed, [inputs, outputs]) => transposed(&read, [*inputs, *outputs], &shape),
            (Form::Half(_), [inputs, outputs]) if *inputs == self.width => {
                transposed(&read, [*inputs, *outputs], &shape)
            }
            _ => read.reshaped(&shape),
        })
    }
}

/// Matrices of `[rows, columns]`, one after another, each transposed, in another shape.
fn transposed(array: &HostArray, [rows, columns]: [usize; 2], shape: &[usize]) -> HostArray {
    let size = array.dtype().byte_size();
    let mut made = HostArray::zeros(array.dtype(), shape);
    let matrix = (rows * columns * size).max(1);
    for (from, to) in array.bytes().chunks_exact(matrix).zip(made.bytes_mut().chunks_exact_mut(matrix)) {
        transpose_bytes(from, to, size, columns, rows);
    }
    made
}

/// The values of the equivalent `config.json`.
pub(super) fn config_values(path: &Path) -> Result<Map<String, Value>, ModelError> {
    let unreadable = |reason: String| ModelError::Unreadable { path: path.to_owned(), reason };
    let weights = KaggleWeights::open(path).map_err(|error| unreadable(error.to_string()))?;
    let dims = |tensor: &str| {
        weights.dims(tensor).ok_or_else(|| unreadable(format!("it has no array for `{tensor}`")))
    };
    let of_array = |tensor: &str| weights.array(tensor).map(|(_, _, _, dims)| dims.to_vec());
    let embedding = dims("model.embed_tokens.weight")?;
    let queries = dims("model.layers.0.self_attn.q_proj.weight")?[0];
    let keys = dims("model.layers.0.self_attn.k_proj.weight")?[0];
    let array = of_array("model.layers.0.self_attn.q_proj.weight").unwrap_or_default();
    let head_dim = array
        .last()
        .copied()
        .filter(|width| *width > 0)
        .ok_or_else(|| unreadable("heads have no width".into()))?;
    let num_layers = (0..)
        .take_while(|layer| {
            weights.tensors.contains_key(&format!("model.layers.{layer}.input_layernorm.weight"))
        })
        .count();
    let (width, heads) = (embedding[1], queries / head_dim);
    let mut values = json!({
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": keys / head_dim,
        "head_dim": head_dim,
        "intermediate_size": dims("model.layers.0.mlp.gate_proj.weight")?[0],
        "num_hidden_layers": num_layers,
        "vocab_size": embedding[0],
        "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": true,
        "max_position_embeddings": 8192,
    });
    let more = values_of_generation(&weights, [width, heads, head_dim], num_layers);
    if let (Value::Object(values), Value::Object(more)) = (&mut values, more) {
        values.extend(more);
        if values["model_type"] == "gemma" {
            values.remove("hidden_activation");
        }
    }
    match values {
        Value::Object(values) => Ok(values),
        _ => unreachable!("the literal is an object"),
    }
}

/// The values that differ between the generations, by the tensors that each of them has.
fn values_of_generation(
    weights: &KaggleWeights,
    [width, heads, head_dim]: [usize; 3],
    num_layers: usize,
) -> Value {
    let has = |tensor: &str| weights.tensors.contains_key(&format!("model.layers.0.{tensor}"));
    // The largest models of the second and third generation scale by the width for each head, the others by the heads'.
    let scale = |largest: usize| if width == largest { width / heads } else { head_dim };
    if has("self_attn.q_norm.weight") {
        let is_smallest = width == 1152;
        let rope = match is_smallest {
            true => json!({ "rope_type": "default", "rope_theta": 1e6 }),
            false => json!({ "rope_type": "linear", "rope_theta": 1e6, "factor": 8.0 }),
        };
        let full = |layer: usize| (layer + 1).is_multiple_of(6);
        let layer_types: Vec<&str> = (0..num_layers)
            .map(|layer| if full(layer) { "full_attention" } else { "sliding_attention" })
            .collect();
        json!({
            "model_type": "gemma3_text",
            "query_pre_attn_scalar": scale(5376),
            "sliding_window": if is_smallest { 512 } else { 1024 },
            "layer_types": layer_types,
            "attn_logit_softcapping": null,
            "final_logit_softcapping": null,
            "rope_parameters": {
                "full_attention": rope,
                "sliding_attention": { "rope_type": "default", "rope_theta": 10_000.0 },
            },
            "max_position_embeddings": if is_smallest { 32_768 } else { 131_072 },
        })
    } else if has("post_feedforward_layernorm.weight") {
        json!({
            "model_type": "gemma2",
            "query_pre_attn_scalar": scale(4608),
            "sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "rope_parameters": { "rope_type": "default", "rope_theta": 10_000.0 },
        })
    } else {
        json!({
            "model_type": "gemma",
            "hidden_act": "gelu_pytorch_tanh",
            "rope_parameters": { "rope_type": "default", "rope_theta": 10_000.0 },
        })
    }
}
