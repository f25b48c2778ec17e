//! From a configuration to an engine: the model, its weights and its tokenizer.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use mt_checkpoint::{Checkpoint, SkippedStep, complete_steps, latest_valid};
use mt_config::{DecodeConfig, LoadConfig, Notice, TokenizerGroup};
use mt_data::{Tokenizer, TokenizerKind};
use mt_models::{
    Model, StateArray, StateError, StateSpec, build,
    hugging_face::{Weights, check_files, is_hugging_face as is_published},
    load_parameters,
};
use mt_runtime::{Array, CompileSettings, Platform, Runtime, start_runtime};
use mt_shape::{Placement, PlacementRow, Sharding, check_axes, placement_table};

use crate::{Engine, EngineError, EngineOptions, Session};

/// Most rows that run at once.
pub(crate) const MAX_BATCH: usize = 64;

/// A model that is ready to continue text.
pub struct Loaded {
    engine: Engine,
    parameters: Vec<Array>,
    pub tokenizer: Arc<Tokenizer>,
    /// The step of the checkpoint, where its directory tells it.
    pub step: Option<u64>,
    /// The directory of its arrays.
    pub checkpoint: PathBuf,
    /// Newer checkpoints that are damaged, newest first.
    pub skipped: Vec<SkippedStep>,
    /// Notes and warnings about the placement.
    pub notices: Vec<Notice>,
    /// Tables of where everything is, if the configuration asks for them.
    pub placements: Option<String>,
}

impl Loaded {
    /// The engine with its weights.
    ///
    /// # Errors
    /// They do not fit the model.
    pub fn session(&self) -> Result<Session<'_>, EngineError> {
        self.engine.with(&self.parameters)
    }
}

/// A model with its weights on the devices.
pub struct LoadedModel {
    pub runtime: Runtime,
    pub placement: Arc<Placement>,
    pub model: Arc<dyn Model>,
    /// In the model's order, placed by its rules.
    pub parameters: Vec<Array>,
    pub vocab_size: usize,
    /// The step of the checkpoint, where its directory tells it.
    pub step: Option<u64>,
    /// The directory of the arrays.
    pub checkpoint: PathBuf,
    /// Newer checkpoints that are damaged, newest first.
    pub skipped: Vec<SkippedStep>,
    /// Notes and warnings about the placement.
    pub notices: Vec<Notice>,
    /// Tables of where everything is, if the configuration asks for them.
    pub placements: Option<String>,
}

/// Loads the published weights, the newest undamaged checkpoint, or the very step that the configuration names.
///
/// # Errors
/// The weights and the model do not fit each other, or cannot be read.
pub fn load_model(config: &LoadConfig) -> Result<LoadedModel, EngineError> {
    let group = &config.checkpoint;
    let path = group.parameters_path().or(group.load_full_state_path.as_deref());
    let path = path.ok_or(EngineError::NoCheckpoint)?;
    let model: Arc<dyn Model> = build(&config.model)?.into();
    let published = if is_published(path) { Some(Weights::open(&*model, path)?) } else { None };
    let runtime = start_runtime(&config.run, &config.debug)?;
    let topology = config.placement.topology(runtime.num_devices(), runtime.slices().as_deref())?;
    let placement = Arc::new(config.placement.placement(topology)?);
    check_axes(&placement, &shardings(&*model, &placement, config.model.max_target_length))?;
    let mut notices = config.placement.misspelled_rules(&placement);
    if runtime.platform() == Platform::Cpu {
        notices.extend(config.model.notes_on_cpus.iter().cloned().map(Notice::Note));
    }
    let loaded = match published {
        Some(published) => LoadedWeights {
            parameters: published.load_to_read(&runtime, &placement, &*model, None)?,
            step: None,
            path: path.to_owned(),
            skipped: Vec::new(),
        },
        None => weights(&runtime, &placement, &*model, path)?,
    };
    let placements = config
        .debug
        .debug_sharding
        .then(|| report(&*model, &placement, &loaded.parameters, config.model.max_target_length));
    Ok(LoadedModel {
        runtime,
        placement,
        model,
        parameters: loaded.parameters,
        vocab_size: config.model.vocab_size,
        step: loaded.step,
        checkpoint: loaded.path,
        skipped: loaded.skipped,
        notices,
        placements,
    })
}

/// Where parameters are, and the caches of as many sequences as run at once.
fn shardings(model: &dyn Model, placement: &Placement, length: usize) -> Vec<Sharding> {
    let parameters = StateArray::parameters(model);
    let parameters = parameters.iter().map(|array| array.sharding(placement));
    let state = model.state(MAX_BATCH, length);
    parameters
        .chain(state.iter().map(|array| placement.sharding(&array.logical_axes, &array.dims())))
        .collect()
}

/// Tables of where parameters are, and the caches of as many sequences as run at once.
fn report(model: &dyn Model, placement: &Placement, parameters: &[Array], length: usize) -> String {
    let owned = |names: &[Option<&str>]| -> Vec<Option<String>> {
        names.iter().map(|name| name.map(str::to_owned)).collect()
    };
    let rows: Vec<PlacementRow> = model
        .parameters()
        .iter()
        .zip(parameters)
        .map(|((path, spec), array)| {
            let axes = array.sharding().spec.to_string();
            PlacementRow::new(
                &path.to_string(),
                &spec.dims(),
                owned(&spec.logical_axes),
                axes,
                array.bytes_on_device(0),
            )
        })
        .collect();
    let of_parameters = placement_table("parameter", &rows);
    let kept = |array: &StateSpec| {
        let (name, dims) = (array.full_name(), array.dims());
        let sharding = placement.sharding(&array.logical_axes, &dims);
        let bytes = sharding.shard_dims(&dims).iter().product::<usize>() * array.dtype.byte_size();
        PlacementRow::new(&name, &dims, owned(&array.logical_axes), sharding.spec.to_string(), bytes)
    };
    let rows: Vec<PlacementRow> = model.state(MAX_BATCH, length).iter().map(kept).collect();
    of_parameters + &placement_table(&format!("cache of {MAX_BATCH} sequences"), &rows)
}

/// Loads a model, and makes an engine of it.
///
/// # Errors
/// The weights, the model and the tokenizer do not fit each other, or one of them cannot be read.
pub fn load(config: &DecodeConfig, tokenizer: Tokenizer) -> Result<Loaded, EngineError> {
    tokenizer.check_vocab_size(config.model.vocab_size)?;
    let loaded = load_model(&config.loading())?;
    let options = EngineOptions {
        vocab_size: config.model.vocab_size,
        num_choices: tokenizer.vocab_size(),
        max_target_length: config.decode.max_target_length,
        max_prefill_length: config.decode.max_prefill_predict_length,
        max_batch: MAX_BATCH,
        compile: CompileSettings::of(&config.debug),
    };
    let types = loaded.parameters.iter().map(Array::dtype).collect();
    let engine = Engine::new(loaded.runtime, loaded.placement, loaded.model, types, options);
    Ok(Loaded {
        engine,
        parameters: loaded.parameters,
        tokenizer: Arc::new(tokenizer),
        step: loaded.step,
        checkpoint: loaded.checkpoint,
        skipped: loaded.skipped,
        notices: loaded.notices,
        placements: loaded.placements,
    })
}

/// Checks that there is a checkpoint where a path leads, before anything is built for it.
///
/// # Errors
/// There is none, or its description is damaged or of a kind that cannot be read.
pub fn check_checkpoint(path: &Path) -> Result<(), EngineError> {
    if is_published(path) {
        check_files(path)?;
        return Ok(());
    }
    // That the newest step is damaged is no matter: loading passes it over.
    if checkpoints_directory(path)?.is_none() {
        Checkpoint::open_path(path)?;
    }
    Ok(())
}

/// The tokenizer in the directory `brought`, which comes with the weights, or else the one that the configuration names.
///
/// # Errors
/// There is none, or it cannot be read.
pub fn load_tokenizer(group: &TokenizerGroup, brought: Option<&Path>) -> Result<Tokenizer, EngineError> {
    if let Some(directory) = brought {
        return Ok(Tokenizer::load(directory)?);
    }
    let Some(kind) = TokenizerKind::named(group.tokenizer_type.name()) else { return Ok(Tokenizer::bytes()) };
    let path = group.tokenizer_path.as_ref().ok_or(EngineError::NoTokenizer)?;
    Ok(Tokenizer::load_as(path, kind)?)
}

/// The tokens of a prompt. An empty prompt is the token that begins a text.
///
/// # Errors
/// The prompt is empty and the tokenizer has no such token, or the tokenizer refuses the text.
pub fn encode_prompt(tokenizer: &Tokenizer, text: &str, add_bos: bool) -> Result<Vec<u32>, EngineError> {
    let tokens = tokenizer.encode(text, add_bos, false)?;
    match (tokens.is_empty(), tokenizer.special().bos) {
        (false, _) => Ok(tokens),
        (true, Some(bos)) => Ok(vec![bos]),
        (true, None) => Err(EngineError::NothingToStartFrom { tokenizer: tokenizer.name().to_owned() }),
    }
}

struct LoadedWeights {
    parameters: Vec<Array>,
    step: Option<u64>,
    path: PathBuf,
    skipped: Vec<SkippedStep>,
}

fn weights(
    runtime: &Runtime,
    placement: &Placement,
    model: &dyn Model,
    path: &Path,
) -> Result<LoadedWeights, EngineError> {
    let Some(checkpoints) = checkpoints_directory(path)? else {
        let checkpoint = Checkpoint::open_path(path)?;
        let parameters = load_parameters(runtime, placement, model, &checkpoint)?;
        let (step, path) = (checkpoint.step(), checkpoint.path().to_owned());
        return Ok(LoadedWeights { parameters, step, path, skipped: Vec::new() });
    };
    let latest = latest_valid(&checkpoints, |checkpoint| {
        let path = checkpoint.path().to_owned();
        match load_parameters(runtime, placement, model, checkpoint) {
            Ok(parameters) => Ok(Ok((parameters, path))),
            // Only damage leads to an older step.
            Err(StateError::Checkpoint(error)) => Err(error),
            Err(error) => Ok(Err(error)),
        }
    })?;
    let latest = latest.ok_or(EngineError::NoCheckpoint)?;
    let (parameters, path) = latest.value?;
    Ok(LoadedWeights { parameters, step: Some(latest.step), path, skipped: latest.skipped })
}

/// The directory of steps that a path means: the run's or itself. `None` if it is one checkpoint, or none at all.
fn checkpoints_directory(path: &Path) -> Result<Option<PathBuf>, EngineError> {
    if !path.is_dir() {
        return Ok(None);
    }
    for candidate in [path.join("checkpoints"), path.to_owned()] {
        if !complete_steps(&candidate)?.is_empty() {
            return Ok(Some(candidate));
        }
    }
    Ok(None)
}
