//! Decoders that draft from the states of another model (EAGLE, EAGLE-2, EAGLE-3), in their published forms.
//!
//! EAGLE-3 reads the residual streams that enter three of the served model's layers, side by side. It has a head of its own
//! over a subset of the vocabulary; `d2t` holds for each of its tokens the distance to the token of the served model.

use std::{
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
};

use mt_config::LoadConfig;
use mt_models::{
    ArrayUse, LayerOutput, Model, OfLayers, SavedParameters,
    decoder::{Decoder, FusionConfig, LayerStatesConfig, STATES_OF_LAYERS},
    hugging_face::{EagleDescription, has_tensor, read_tensor, tensor_dims},
};
use mt_nn::axes::{BATCH, EMBED, POSITION, VOCAB};
use mt_runtime::Array;
use mt_shape::{DType, HostArray, Sharding, axis};
use mt_trace::{Inputs, Tensor};

use super::{
    program::{Rows, ServePrograms},
    speculation::DraftModel,
};
use crate::{EngineError, LoadedModel, sampler::Sampler};

/// The tokens of a drafting decoder's head.
const DRAFT_TOKEN: &str = "draft_token";
/// The path of a model's embedding table.
const TABLE: &str = "token_embedder.embedding";
/// The tensors that tell EAGLE-3 from EAGLE.
const OF_LAYER_STATES: [&str; 3] = ["d2t", "midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"];

/// A decoder that drafts from the states of the model that it was loaded for.
#[derive(Clone)]
pub struct EagleModel {
    /// The directory of the decoder.
    pub checkpoint: PathBuf,
    pub(super) draft: DraftModel,
    /// Set for EAGLE-3.
    states: Option<LayerStates>,
}

/// The settings of EAGLE-3's inputs and of its head.
#[derive(Clone)]
struct LayerStates {
    /// The served model's layers behind which the states are read.
    layers: Vec<usize>,
    /// Whether the decoder uses the served model's embedding table.
    shares_table: bool,
    /// The number of the head's tokens, if an array behind the decoder's parameters maps them to those of the served model:
    /// `i32[draft_token]`.
    num_tokens: Option<usize>,
}

impl fmt::Debug for EagleModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EagleModel").field("checkpoint", &self.checkpoint).finish_non_exhaustive()
    }
}

/// Loads the decoder of a published directory that drafts from the states of another model, on its devices.
///
/// # Errors
/// The decoder does not fit the model, or its weights do not match its description.
pub fn load_eagle(config: &LoadConfig, other: &LoadedModel) -> Result<EagleModel, EngineError> {
    let path = config.checkpoint.parameters_path().ok_or(EngineError::NoCheckpoint)?;
    let Some(projection) = tensor_dims(path, "fc.weight") else {
        return Err(wrong(
            path,
            "has no tensor `fc.weight`, and so no layer of EAGLE",
            "name a directory with `fc` and `embed_tokens` and `layers.0`, or `midlayer`, or use \
             `speculative_method=draft_model`",
        ));
    };
    let mut fusion = FusionConfig { has_bias: has_tensor(path, "fc.bias"), states: None };
    let is_of_layers = OF_LAYER_STATES.iter().any(|name| has_tensor(path, name));
    let described = is_of_layers.then(|| EagleDescription::read(path)).transpose()?;
    let mut layers = Vec::new();
    if let Some(described) = &described {
        layers = layers_read(path, described, other.model.num_stream_layers())?;
        let width = other.model.width() * layers.len();
        if projection.last() != Some(&width) {
            return Err(wrong(
                path,
                &format!(
                    "reads {} numbers of each token, but layers {layers:?} of the served model output {width}",
                    projection.last().unwrap_or(&0)
                ),
                "use a layer that was trained for the served model",
            ));
        }
        let vocab = tensor_dims(path, "lm_head.weight").and_then(|dims| dims.first().copied());
        fusion.states = Some(LayerStatesConfig {
            width,
            vocab: vocab.unwrap_or(config.model.vocab_size),
            has_table: has_tensor(path, "embed_tokens.weight"),
            begins_normalized: described.begins_normalized,
        });
    }
    let model: Arc<dyn Model> = Arc::new(Decoder::drafting(&config.model, fusion)?);
    let saved = SavedParameters::open_with(&*model, path, None)?;
    let mut arrays = saved.load(&*model, &other.runtime, &other.placement, ArrayUse::Read)?.arrays;
    let states = match fusion.states {
        None => None,
        Some(states) => {
            if !states.has_table {
                check_table(path, &*model, other)?;
            }
            let tokens = tokens_of(path, states.vocab, other)?;
            let num_tokens = tokens.as_ref().map(|tokens| tokens.dims()[0]);
            arrays.extend(tokens);
            Some(LayerStates { layers, shares_table: !states.has_table, num_tokens })
        }
    };
    let draft = DraftModel { model, parameters: Arc::new(arrays), vocab_size: config.model.vocab_size };
    Ok(EagleModel { checkpoint: path.to_owned(), draft, states })
}

/// The served model's layers behind which states are read. A description names the layers that the states enter.
fn layers_read(path: &Path, described: &EagleDescription, count: usize) -> Result<Vec<usize>, EngineError> {
    // The authors' choice: an early layer, a middle one, and a late one.
    let of_authors = || vec![2, count / 2, count.saturating_sub(3)];
    let entered = described.layers.clone().unwrap_or_else(of_authors);
    match entered.iter().all(|layer| (1..=count).contains(layer)) {
        true => Ok(entered.into_iter().map(|layer| layer - 1).collect()),
        false => Err(wrong(
            path,
            &format!(
                "reads the states that enter layers {entered:?}, but the served model has {count} layers with one residual \
                 stream"
            ),
            "use a layer that was trained for the served model, or another `speculative_method`",
        )),
    }
}

/// Checks that the decoder can use the served model's embedding table.
fn check_table(path: &Path, draft: &dyn Model, other: &LoadedModel) -> Result<(), EngineError> {
    if draft.width() == other.model.width() && table_of(&*other.model).is_some() {
        return Ok(());
    }
    Err(wrong(
        path,
        &format!(
            "has no `embed_tokens` and vectors of {} numbers, but those of the served model's tokens have {}",
            draft.width(),
            other.model.width()
        ),
        "use a layer that was trained for the served model",
    ))
}

/// The index of the embedding table among a model's parameters.
fn table_of(model: &dyn Model) -> Option<usize> {
    model.parameters().iter().position(|(path, _)| path.to_string() == TABLE)
}

/// The token of the served model for each token of the head, on the devices.
fn tokens_of(path: &Path, count: usize, other: &LoadedModel) -> Result<Option<Array>, EngineError> {
    if !has_tensor(path, "d2t") {
        return match count == other.vocab_size {
            true => Ok(None),
            false => Err(wrong(
                path,
                &format!(
                    "chooses from {count} tokens and the served model from {}, but `d2t` is missing",
                    other.vocab_size
                ),
                "name a directory with the tensor `d2t`, which maps tokens",
            )),
        };
    }
    let distances = read_tensor(path, "d2t")?;
    let distances = distances.as_slice::<i64>().ok().filter(|distances| distances.len() == count);
    let tokens: Option<Vec<i32>> = distances.and_then(|distances| {
        let token = |(token, distance): (i64, &i64)| token.checked_add(*distance);
        let inside = |token: &i64| (0..other.vocab_size as i64).contains(token);
        (0..).zip(distances).map(|pair| token(pair).filter(inside).map(|token| token as i32)).collect()
    });
    let Some(tokens) = tokens else {
        return Err(wrong(
            path,
            &format!(
                "has a tensor `d2t` that does not map {count} tokens to the {} of the served model",
                other.vocab_size
            ),
            "use a layer that was trained for the served model",
        ));
    };
    let tokens = HostArray::from_slice(DType::I32, &[count], &tokens).expect("there is a token for each");
    let sharding = Sharding::replicated(other.placement.mesh().clone(), 1);
    Ok(Some(Array::from_host(&other.runtime, &tokens, &sharding)?))
}

fn wrong(path: &Path, problem: &str, hint: &str) -> EngineError {
    EngineError::Speculation { problem: format!("`{}` {problem}", path.display()), hint: hint.to_owned() }
}

impl EagleModel {
    /// Whether the decoder reads states of several layers.
    pub(super) fn reads_layers(&self) -> bool {
        self.states.is_some()
    }

    /// Declares the map of tokens, which follows the decoder's parameters.
    pub(super) fn map<'t>(&self, inputs: &Inputs<'t>) -> Option<Tensor<'t>> {
        let axes = [axis(DRAFT_TOKEN, self.states.as_ref()?.num_tokens?)];
        Some(inputs.input("drafter.tokens", DType::I32, &axes, &[None], false))
    }

    /// The states that the decoder reads, side by side, of those behind all layers of the served model.
    ///
    /// # Shapes
    /// `[batch, position, states_of_layers]`
    pub(super) fn states_of<'t>(&self, of_layers: &[OfLayers<'t>]) -> Option<Tensor<'t>> {
        let states = self.states.as_ref()?;
        let residuals = of_layers.iter().filter(|made| made.label.kind == LayerOutput::Residual);
        let each: Vec<(usize, Tensor<'t>)> = residuals.flat_map(OfLayers::of_each).collect();
        let behind = |layer: &usize| {
            let found = each.iter().find(|(index, _)| index == layer);
            found.expect("the model has all layers that are read").1.order(&[BATCH, POSITION, EMBED])
        };
        let read: Vec<Tensor<'t>> = states.layers.iter().map(behind).collect();
        Some(read[0].concatenate(&read[1..], EMBED).rename(EMBED, STATES_OF_LAYERS))
    }

    /// The parameters that the decoder's layer takes beside the served model's.
    pub(super) fn of_layer<'t>(&self, served: &dyn Model, rows: &Rows<'t>) -> Vec<Tensor<'t>> {
        let num_own = self.draft.model.parameters().len();
        let shares_table = self.states.as_ref().is_some_and(|states| states.shares_table);
        let table = table_of(served).filter(|_| shares_table).map(|table| rows.parameters[table]);
        rows.drafter[..num_own].iter().copied().chain(table).collect()
    }
}

impl ServePrograms {
    /// The most probable token of each row by the decoder's own head: `[batch, position, embed] -> i32[batch, position]`, for
    /// one position.
    pub(super) fn likeliest_of_eagle<'t>(
        &self,
        eagle: &EagleModel,
        rows: &Rows<'t>,
        hidden: Tensor<'t>,
    ) -> Tensor<'t> {
        let logits = eagle.draft.model.head(&rows.drafter, hidden).squeeze(POSITION);
        let logits = logits.order(&[BATCH, VOCAB]).cast(DType::F32);
        let chosen = Sampler::Greedy.choose(logits, rows.read.before, None);
        let has_map = eagle.states.as_ref().is_some_and(|states| states.num_tokens.is_some());
        let map = rows.drafter.last().filter(|_| has_map);
        let tokens = map.map_or(chosen, |map| map.take(DRAFT_TOKEN, chosen));
        tokens.unsqueeze(POSITION).order(&[BATCH, POSITION])
    }
}
