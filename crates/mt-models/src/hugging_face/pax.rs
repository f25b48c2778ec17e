//! The layout of GPT-3 in Pax: a directory of Zarr arrays, each with all layers, among those of the optimizer.
//!
//! It is read as the equivalent Hugging Face directory of GPT-2, which has the same layers. Sizes follow from the arrays.

use std::{
    ops::Range,
    path::{Path, PathBuf},
};

use mt_checkpoint::{CheckpointError, CheckpointItem};
use mt_shape::{DType, HostArray};
use serde_json::{Map, Value, json};

use super::transpose::transpose_bytes;
use crate::{ModelError, StateError};

/// The array with the number of steps, which stands for a description in messages.
pub(super) const STEP: &str = "step";

const OF_MODEL: &str = "mdl_vars.params.lm.";
const OF_LAYERS: &str = "transformer.repeat.sub.x_layers_0.";

/// How a tensor of GPT-2 lies in an array, or in a layer of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    /// As it is.
    Same,
    /// One less than the scale of a norm.
    LessOne,
    /// `[columns, rows]`.
    Transposed,
    /// Queries, keys and values, `[3, embed, heads, width]`, as columns of one matrix.
    Columns,
    /// The same of biases, `[3, heads, width]`.
    Row,
    /// `[embed, heads, width]` with the first axis last.
    HeadRows,
}

/// A tensor, its array, and the form in which that holds it.
type Held = (&'static str, &'static str, Form);

const MODEL: &[Held] = &[
    ("wte.weight", "softmax.logits_ffn.linear.w", Form::Transposed),
    ("wpe.weight", "position_emb.emb_var", Form::Same),
    ("ln_f.weight", "final_ln.scale", Form::LessOne),
    ("ln_f.bias", "final_ln.bias", Form::Same),
];

const LAYER: &[Held] = &[
    ("ln_1.weight", "layer_norm.scale", Form::LessOne),
    ("ln_1.bias", "layer_norm.bias", Form::Same),
    ("attn.c_attn.weight", "self_attention.combined_qkv.w", Form::Columns),
    ("attn.c_attn.bias", "self_attention.combined_qkv.b", Form::Row),
    ("attn.c_proj.weight", "self_attention.post.w", Form::HeadRows),
    ("attn.c_proj.bias", "self_attention.post.b", Form::Same),
    ("ln_2.weight", "ff_layer.layer_norm.scale", Form::LessOne),
    ("ln_2.bias", "ff_layer.layer_norm.bias", Form::Same),
    ("mlp.c_fc.weight", "ff_layer.ffn_layer1.linear.w", Form::Same),
    ("mlp.c_fc.bias", "ff_layer.ffn_layer1.bias.b", Form::Same),
    ("mlp.c_proj.weight", "ff_layer.ffn_layer2.linear.w", Form::Same),
    ("mlp.c_proj.bias", "ff_layer.ffn_layer2.bias.b", Form::Same),
];

/// The directory with the arrays, if a path is one of this layout.
pub(super) fn at(path: &Path) -> Option<PathBuf> {
    mt_config::gpt3_of_pax(path)
}

/// The arrays of a model, as the tensors of a Hugging Face directory.
#[derive(Debug)]
pub(super) struct PaxWeights {
    arrays: CheckpointItem,
    tensors: Vec<Tensor>,
}

#[derive(Debug)]
struct Tensor {
    name: String,
    array: String,
    /// The place on the leading axis of the array.
    layer: Option<usize>,
    form: Form,
}

impl PaxWeights {
    pub fn open(path: &Path) -> Result<Self, StateError> {
        let directory = at(path).unwrap_or_else(|| path.to_owned());
        let arrays = CheckpointItem::of_arrays(&directory, |name| name.starts_with(OF_MODEL))?;
        let mut tensors = Vec::new();
        for entry in arrays.entries() {
            let own = entry.name.strip_prefix(OF_MODEL).unwrap_or(&entry.name);
            let (within, held) = match own.strip_prefix(OF_LAYERS) {
                Some(within) => (within, LAYER),
                None => (own, MODEL),
            };
            let mut add = |name: String, layer, form| {
                tensors.push(Tensor { name, array: entry.name.clone(), layer, form });
            };
            let num_layers = arrays.array(&entry.name)?.1.first().copied().unwrap_or(0);
            match held.iter().find(|(_, array, _)| *array == within) {
                // An unknown array is no tensor of the model, which loading reports.
                None => add(entry.name.clone(), None, Form::Same),
                Some((tensor, _, form)) if held.len() == MODEL.len() => {
                    add(format!("transformer.{tensor}"), None, *form);
                }
                Some((tensor, _, form)) => {
                    for layer in 0..num_layers {
                        add(format!("transformer.h.{layer}.{tensor}"), Some(layer), *form);
                    }
                }
            }
        }
        Ok(Self { arrays, tensors })
    }

    /// The names of the tensors.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.iter().map(|tensor| tensor.name.as_str())
    }

    /// A tensor with the type and the dimensions of its array, or of its layer in that.
    fn held(&self, name: &str) -> Option<(&Tensor, DType, &[usize])> {
        let tensor = self.tensors.iter().find(|tensor| tensor.name == name)?;
        let (dtype, dims) = self.arrays.array(&tensor.array).ok()?;
        Some((tensor, dtype, dims.get(usize::from(tensor.layer.is_some())..)?))
    }

    /// The element type of a tensor.
    pub fn dtype(&self, name: &str) -> Option<DType> {
        self.held(name).map(|(_, dtype, _)| dtype)
    }

    /// The dimensions of a tensor.
    pub fn dims(&self, name: &str) -> Option<Vec<usize>> {
        let (tensor, _, dims) = self.held(name)?;
        Some(match (tensor.form, dims) {
            (Form::Transposed, [columns, rows]) => vec![*rows, *columns],
            (Form::Columns, [parts, inputs, heads, width]) => vec![*inputs, parts * heads * width],
            (Form::Row, [parts, heads, width]) => vec![parts * heads * width],
            (Form::HeadRows, [outputs, heads, width]) => vec![heads * width, *outputs],
            (_, dims) => dims.to_vec(),
        })
    }

    /// Reads a tensor.
    pub fn read(&self, name: &str) -> Result<HostArray, StateError> {
        let Some(((tensor, _, dims), shape)) = self.held(name).zip(self.dims(name)) else {
            let checkpoint = self.arrays.path().to_owned();
            return Err(CheckpointError::NoSuchArray { checkpoint, name: name.to_owned() }.into());
        };
        let mut ranges: Vec<Range<usize>> = tensor.layer.map(|layer| layer..layer + 1).into_iter().collect();
        ranges.extend(dims.iter().map(|dim| 0..*dim));
        let read = self.arrays.read(&tensor.array, &ranges)?;
        Ok(match (tensor.form, dims) {
            (Form::Transposed, [columns, rows]) => transposed(&read, [*columns, *rows], &shape),
            (Form::Columns, [parts, inputs, _, _]) => beside(&read, [*parts, *inputs], &shape),
            (Form::HeadRows, [outputs, heads, width]) => transposed(&read, [*outputs, heads * width], &shape),
            (Form::LessOne, _) => {
                let scales: Vec<f32> = read.to_f64().iter().map(|scale| (scale + 1.0) as f32).collect();
                HostArray::from_slice(DType::F32, &shape, &scales).expect("there is a scale for each element")
            }
            _ => read.reshaped(&shape),
        })
    }
}

/// A matrix of `[rows, columns]` transposed, in another shape.
fn transposed(array: &HostArray, [rows, columns]: [usize; 2], shape: &[usize]) -> HostArray {
    let mut made = HostArray::zeros(array.dtype(), shape);
    transpose_bytes(array.bytes(), made.bytes_mut(), array.dtype().byte_size(), columns, rows);
    made
}

/// Matrices of `rows` rows, one after another, side by side.
fn beside(array: &HostArray, [parts, rows]: [usize; 2], shape: &[usize]) -> HostArray {
    let mut made = HostArray::zeros(array.dtype(), shape);
    let line = array.bytes().len() / (parts * rows).max(1);
    for (index, from) in array.bytes().chunks_exact(line.max(1)).enumerate() {
        let (part, row) = (index / rows, index % rows);
        made.bytes_mut()[(row * parts + part) * line..][..line].copy_from_slice(from);
    }
    made
}

/// The values of the equivalent `config.json`.
pub(super) fn config_values(path: &Path) -> Result<Map<String, Value>, ModelError> {
    let unreadable = |reason: String| ModelError::Unreadable { path: path.to_owned(), reason };
    let weights = PaxWeights::open(path).map_err(|error| unreadable(error.to_string()))?;
    let dims = |tensor: &str| {
        let name = format!("transformer.{tensor}");
        let found = weights.dims(&name).filter(|dims| dims.len() == 2);
        found.ok_or_else(|| unreadable(format!("it has no array for `{tensor}`")))
    };
    let (embedding, positions) = (dims("wte.weight")?, dims("wpe.weight")?);
    let heads = weights.held("transformer.h.0.attn.c_proj.weight").and_then(|(_, _, dims)| dims.get(1));
    let heads = heads.ok_or_else(|| unreadable("it has no array for attention".to_owned()))?;
    let num_layers = (0..)
        .take_while(|layer| weights.dtype(&format!("transformer.h.{layer}.ln_1.bias")).is_some())
        .count();
    let values = json!({
        "model_type": "gpt2",
        "n_embd": embedding[1],
        "n_head": heads,
        "n_layer": num_layers,
        "n_inner": dims("h.0.mlp.c_fc.weight")?[1],
        "n_positions": positions[0],
        "vocab_size": embedding[0],
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new",
        "tie_word_embeddings": true,
    });
    match values {
        Value::Object(values) => Ok(values),
        _ => unreachable!("the literal is an object"),
    }
}
