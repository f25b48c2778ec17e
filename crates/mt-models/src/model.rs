//! What all models have in common.

use std::path::PathBuf;

use mt_config::ModelGroup;
use mt_nn::{ParamSpec, SequenceOrder, axes::KV_POSITION};
use mt_shape::{Axis, DType, Path};
use mt_trace::{Key, Memory, Precision, Tensor};

use crate::{
    FlopCount, LayerOutput, OfLayers, ScoreWeights, StoredParameter,
    decoder::{Activation, RegionActivations},
    families::build_decoder,
    hugging_face::FileTensor,
};

/// A model cannot be built or converted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ModelError {
    #[error(
        "`mlp_activations` has {0} functions, but a feed-forward layer has one or two projections\nhint: use `mlp_activations=silu,linear` for a gated layer"
    )]
    Activations(usize),
    #[error(
        "`num_kv_shared_layers` is set, but layers that take keys and values from others cannot be scanned\nhint: set `scan_layers=false`, or leave out `num_kv_shared_layers`"
    )]
    SharedLayersScanned,
    #[error(
        "`hidden_size_per_layer_input` is set, but layers with vectors of their own for tokens cannot be scanned\nhint: set `scan_layers=false`, or leave out `hidden_size_per_layer_input`"
    )]
    PerLayerVectorsScanned,
    #[error(
        "`max_target_length` is {length}, but the model has {positions} learned positions\nhint: set `max_target_length={positions}`, or a larger `trainable_position_size` for a new model"
    )]
    TooFewPositions { length: usize, positions: usize },
    #[error(
        "layer {layer} takes keys and values from an earlier layer of its kind, but there is none\nhint: lower `num_kv_shared_layers`"
    )]
    NothingToShare { layer: usize },
    #[error(
        "cannot read `{path}`: {reason}\nhint: name the directory of a model that Hugging Face's library wrote"
    )]
    Unreadable { path: PathBuf, reason: String },
    #[error("`{path}` is of the model type `{model_type}`, which is not built yet\nhint: what works is {}", built.join(", "))]
    UnknownModelType { path: PathBuf, model_type: String, built: Vec<String> },
    #[error("`{key}` of `{path}` is `{value}`, but it has to be {expected}")]
    WrongValue { path: PathBuf, key: String, value: String, expected: String },
    #[error("`{path}` has no `{key}`\nhint: the file is damaged, or of another version of its model type")]
    MissingValue { path: PathBuf, key: String },
    #[error("`{key}` of `{path}` is `{value}`, but {feature} is not built yet")]
    NotBuilt { path: PathBuf, key: String, value: String, feature: String },
    #[error(
        "models of this kind of layer (`decoder_block`) have no form of Hugging Face's\nhint: only families that are published there can be read from and written to its directories"
    )]
    NoHuggingFaceForm,
    #[error(
        "a `config.json` of the model type `{model_type}` cannot say what this model is; what would be lost: {}\nhint: leave out the keys that make it differ from the published models; `maxtext config diff` lists the keys of a run",
        differing.join(", ")
    )]
    NotDescribable { model_type: String, differing: Vec<String> },
    #[error(
        "Hugging Face's form of this family has no name for the parameter `{role}`\nhint: leave out the key that adds it, such as `attention_bias` or `mlp_bias`"
    )]
    NoTensorName { role: String },
}

/// Tokens with their places.
///
/// # Shapes
/// `i32[batch, position]`, each
#[derive(Clone, Copy)]
pub struct Tokens<'t> {
    pub tokens: Tensor<'t>,
    /// The place of each token in its document.
    pub positions: Tensor<'t>,
    /// Which document of its row each token belongs to; 0 is padding.
    pub segmentation: Tensor<'t>,
    /// How the tokens of a row are stored. Those that attend to a cache are as read.
    pub order: SequenceOrder,
}

impl<'t> Tokens<'t> {
    /// Tokens that are stored in the order in which they are read.
    pub fn as_read(tokens: Tensor<'t>, positions: Tensor<'t>, segmentation: Tensor<'t>) -> Self {
        Self { tokens, positions, segmentation, order: SequenceOrder::AsRead }
    }
}

/// What layers keep of earlier tokens, such as keys and values.
#[derive(Clone)]
pub struct GenerationState<'t> {
    /// In the order of [`ForwardPass::state`].
    pub arrays: Vec<Tensor<'t>>,
    /// The slot of the first token of this call: an `i32` scalar.
    pub start: Tensor<'t>,
    /// Which document each slot belongs to, this call's tokens included; 0 is empty. `i32[batch, kv_position]`
    pub segmentation: Tensor<'t>,
    /// Whether this call's tokens fill all of these slots: they then attend to each other as whole sequences do.
    pub is_filled: bool,
    /// The number of slots when all is read, of which a call may have only the first: frequencies that depend on the
    /// length of the text are then the same in all calls.
    pub slots: usize,
}

/// How a model is run.
#[derive(Clone, Default)]
pub struct Forward<'t> {
    /// The key of this step's dropout, if activations are dropped.
    pub dropout: Option<Key<'t>>,
    /// What is kept of earlier tokens, in generation. It is returned with these tokens added.
    pub state: Option<GenerationState<'t>>,
    /// What each layer makes is returned as well, under names.
    pub taps: bool,
    /// The kinds of layers' outputs that are returned as [`Hidden::layer_outputs`].
    pub layer_outputs: Vec<LayerOutput>,
    /// The memory that the parameters of layers are in; all others are on the device.
    pub layers_in: Memory,
}

/// What a model makes of tokens.
#[derive(Clone)]
pub struct Hidden<'t> {
    /// The hidden states that the head takes: `[batch, position, embed]`.
    pub hidden: Tensor<'t>,
    /// The state after these tokens, if there was one, in the order of [`ForwardPass::state`].
    pub state: Vec<Tensor<'t>>,
    /// Names and values of what layers made, if they were asked for.
    pub taps: Vec<(String, Tensor<'t>)>,
    /// What was asked for of layers, with entries for those that have it.
    pub layer_outputs: Vec<OfLayers<'t>>,
    /// What is added to the loss besides that of the tokens, under the names of metrics. Each is of the whole call,
    /// not a sum over its tokens.
    pub auxiliary_losses: Vec<(&'static str, Tensor<'t>)>,
}

/// An array that generation keeps for a layer, or for stacked layers.
#[derive(Clone, Debug, PartialEq)]
pub struct StateSpec {
    /// Which of the layers, or stacks of layers, that keep anything it is of.
    pub group: usize,
    /// Its name there, such as `key`.
    pub name: &'static str,
    pub axes: Vec<Axis>,
    pub logical_axes: Vec<Option<&'static str>>,
    pub dtype: DType,
    pub kept: Kept,
}

/// How long an array of the state is kept, and how a call changes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kept {
    /// It has slots along `kv_position`, one for every `stride` tokens; a call writes those of its own tokens. Slots
    /// that are `window` tokens back are not read again.
    Slots { window: Option<usize>, stride: usize },
    /// A call replaces it. Tokens of padding, which belong to no document, must leave no trace in it.
    Whole,
}

impl Kept {
    /// The array `old` after a call whose first token has the number `start`, given what the layer returned of it.
    #[track_caller]
    pub(crate) fn updated<'t>(self, old: Tensor<'t>, start: Tensor<'t>, new: Tensor<'t>) -> Tensor<'t> {
        let new = new.cast(old.dtype());
        match self {
            Self::Slots { stride: 1, .. } => old.dynamic_update(KV_POSITION, start, new),
            Self::Slots { stride, .. } => old.dynamic_update(KV_POSITION, start / stride as f64, new),
            Self::Whole => new,
        }
    }
}

impl StateSpec {
    /// Its name among those of all layers, such as `0.key`.
    pub fn full_name(&self) -> String {
        format!("{}.{}", self.group, self.name)
    }

    /// How many slots it has, if it has any.
    pub fn slots(&self) -> usize {
        self.axes.iter().find(|axis| axis.name == KV_POSITION).map_or(0, |axis| axis.size)
    }

    /// The sizes of its axes.
    pub fn dims(&self) -> Vec<usize> {
        self.axes.iter().map(|axis| axis.size).collect()
    }
}

/// The parameters of a model, and the function from tokens to scores of the next ones.
pub trait ForwardPass {
    /// The parameters in the order in which functions take them.
    fn parameters(&self) -> Vec<(Path, ParamSpec)>;

    /// The precision of products of `f32` in the model's programs.
    fn precision(&self) -> Precision;

    /// How many positions there are vectors for, where positions are learned.
    fn num_learned_positions(&self) -> Option<usize>;

    /// Hidden states, and the state of generation if there was one.
    ///
    /// # Shapes
    /// `i32[batch, position] -> [batch, position, embed]`
    fn hidden<'t>(&self, parameters: &[Tensor<'t>], tokens: Tokens<'t>, forward: Forward<'t>) -> Hidden<'t>;

    /// Which of the parameters the head takes, in its order.
    fn head_parameters(&self) -> Vec<usize>;

    /// Scores of every token of the vocabulary as the next one, from the parameters that
    /// [`ForwardPass::head_parameters`] names.
    ///
    /// # Shapes
    /// `[batch, position, embed] -> [batch, position, vocab]`
    fn apply_head<'t>(&self, parameters: &[Tensor<'t>], hidden: Tensor<'t>) -> Tensor<'t>;

    /// The arrays that generation keeps for `batch` sequences of up to `slots` tokens: those of one layer after the
    /// other, or of one stack of layers.
    fn state(&self, batch: usize, slots: usize) -> Vec<StateSpec>;

    /// Scores of every token of the vocabulary as the next one, and the state of generation if there was one.
    ///
    /// # Shapes
    /// `i32[batch, position] -> [batch, position, vocab]`
    fn logits<'t>(
        &self,
        parameters: &[Tensor<'t>],
        tokens: Tokens<'t>,
        forward: Forward<'t>,
    ) -> (Tensor<'t>, Vec<Tensor<'t>>) {
        let hidden = self.hidden(parameters, tokens, forward);
        (self.head(parameters, hidden.hidden), hidden.state)
    }

    /// As [`ForwardPass::apply_head`], from all parameters.
    fn head<'t>(&self, parameters: &[Tensor<'t>], hidden: Tensor<'t>) -> Tensor<'t> {
        let of_head: Vec<Tensor<'t>> =
            self.head_parameters().into_iter().map(|index| parameters[index]).collect();
        self.apply_head(&of_head, hidden)
    }
}

/// How a model's parameters are stored: in MaxText's checkpoints and in Hugging Face's files.
pub trait Storage {
    /// How each parameter is stored in MaxText's checkpoints, in the same order.
    fn storage(&self) -> Vec<StoredParameter>;

    /// The same model with its layers scanned if they are not, or the other way round, if they can be.
    fn otherwise_scanned(&self) -> Option<Box<dyn Model>>;

    /// The tensors of Hugging Face's files that hold the parameters.
    ///
    /// # Errors
    /// The model's family has no such form.
    fn file_tensors(&self) -> Result<Vec<FileTensor>, ModelError>;

    /// Whether a tensor of Hugging Face's files is known and not needed, such as the output matrix of a tied head.
    fn ignores_tensor(&self, name: &str) -> bool;
}

/// What follows from a model's shapes: sizes, memory and operations.
pub trait Description: ForwardPass {
    /// What attention's scores are made of, of all layers that have attention.
    fn score_weights(&self) -> Vec<ScoreWeights>;

    /// The tensors that the layers make of `rows` sequences of `length` tokens, by the regions that the backward pass
    /// computes again.
    fn activations(&self, rows: usize, length: usize) -> Vec<RegionActivations>;

    /// What [`ForwardPass::apply_head`] makes of as many.
    fn scores(&self, rows: usize, length: usize) -> Activation;

    /// Floating-point operations of training.
    fn flops(&self) -> FlopCount;

    /// The number of weights.
    fn num_parameters(&self) -> usize {
        self.parameters().iter().map(|(_, spec)| spec.num_elements()).sum()
    }

    /// The number of active parameters: those that multiply the activations of one token. These are all but the tables
    /// that are only looked up (of tokens, positions, and tokens for each layer), of which a token uses one row, and the
    /// experts that it is not sent to. A table that is the output matrix as well counts.
    fn num_active_parameters(&self) -> usize {
        self.num_parameters()
    }
}

/// A language model: everything that a [`ForwardPass`], a [`Storage`] and a [`Description`] say of it.
pub trait Model: Storage + Description + Send + Sync {}

impl<M: Storage + Description + Send + Sync> Model for M {}

/// Builds the model that a configuration describes.
///
/// # Errors
/// The configuration's values do not make a model.
pub fn build(group: &ModelGroup) -> Result<Box<dyn Model>, ModelError> {
    Ok(Box::new(build_decoder(group)?))
}
