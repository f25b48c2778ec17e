//! The model of `maxtext decode`: its configuration, weights and tokenizer.

use std::path::{Path, PathBuf};

use mt_config::{
    CheckpointGroup, Config, Entry, Origin, Request as ConfigRequest, TokenizerChoice, TokenizerGroup,
    TokenizerType, TrainConfig, WEIGHTS_KEYS, run_directory_of, saved_config_path,
};
use mt_data::{DataError, Tokenizer};
use mt_engine::check_checkpoint;
use mt_models::hugging_face::HuggingFaceConfig;

use crate::{
    commands::{over_run, published, resolve, warn, with_adapter_settings},
    failure::Failure,
};

/// The directory that the weights come from.
pub struct Source {
    /// The directory of the published model.
    published: Option<PathBuf>,
    given: Given,
}

/// Whether keys were set for this command rather than by the run.
struct Given {
    tokenizer_path: bool,
    tokenizer_type: bool,
    add_bos: bool,
}

impl Given {
    fn of(config: &Config, run: Option<&Path>) -> Self {
        let is_set = |key: &str| is_set_here(config.entry(key), run);
        Self {
            tokenizer_path: is_set("tokenizer_path"),
            tokenizer_type: is_set("tokenizer_type"),
            add_bos: is_set("add_bos"),
        }
    }
}

/// Resolves the configuration on top of that of the run or published model whose weights are loaded. For other
/// checkpoints, keys must describe the model.
pub fn configure(arguments: Vec<String>) -> Result<(Config, Source), Failure> {
    let request = ConfigRequest::from_process(arguments);
    let given = Config::resolve(&request)?;
    // The group names a copy on this machine where a key names a published model elsewhere.
    let group = CheckpointGroup::from_config(&given)?;
    let paths = [&group.load_parameters_path, &group.hf_model_path, &group.load_full_state_path];
    let mut named =
        WEIGHTS_KEYS.into_iter().zip(paths).filter_map(|(key, path)| Some((key, path.as_deref()?)));
    let Some((key, path)) = named.next() else {
        return Err(Failure::user(
            "no key names a model to decode with\n\
             hint: name a run, a checkpoint or a published model's directory: \
             `load_parameters_path=maxtext_output/my_run`",
        ));
    };
    if !mt_storage::exists(path) {
        return Err(Failure::user(format!(
            "`{key}` is `{}` ({}), which does not exist\nhint: name the directory of a run, of a checkpoint or of a \
             published model",
            path.display(),
            given.entry(key).origin
        )));
    }
    if let Some(directory) = published(&given) {
        let config = resolve(&request)?;
        check_checkpoint(&directory)?;
        let config = fitted_to_context(config, &directory)?;
        let config = admitting_prompts(config, |entry| entry.origin.is_given());
        warn(&config);
        let given = Given::of(&config, None);
        return Ok((config, Source { published: Some(directory), given }));
    }
    check_checkpoint(path)?;
    let run = run_directory_of(path);
    let config = match &run {
        Some(run) => over_trained(request, &given, run)?,
        None => with_adapter_settings(given)?,
    };
    let config = admitting_prompts(config, |entry| is_set_here(entry, run.as_deref()));
    warn(&config);
    let given = Given::of(&config, run.as_deref());
    Ok((config, Source { published: None, given }))
}

/// Resolves the configuration on top of that of a run.
fn over_trained(request: ConfigRequest, given: &Config, run: &Path) -> Result<Config, Failure> {
    let mut request = over_run(request, given, run);
    // A tokenizer file that is named here overrides the run's tokenizer type.
    let is_default = |key: &str| given.entry(key).origin == Origin::Default;
    if !is_default("tokenizer_path") && is_default("tokenizer_type") {
        request.arguments.push("tokenizer_type=huggingface".to_owned());
    }
    let config = resolve(&request)?;
    let trained = Config::resolve(&ConfigRequest::default().over_saved(saved_config_path(run)))?;
    note_length(length_of(&config), length_of(&trained));
    Ok(config)
}

/// Limits the default sequence length to the context length of the model.
fn fitted_to_context(config: Config, directory: &Path) -> Result<Config, Failure> {
    let description = HuggingFaceConfig::read(directory)?;
    let of =
        |key| description.integer(key).map(|length| length.and_then(|length| u64::try_from(length).ok()));
    let Some(context) = of("max_position_embeddings")?.or(of("n_positions")?).filter(|length| *length > 1)
    else {
        return Ok(config);
    };
    let length = length_of(&config);
    let is_given = config.entry("max_target_length").origin.is_given();
    let config =
        if is_given { config } else { config.with_derived("max_target_length", context.min(length)) };
    note_length(length_of(&config), context);
    Ok(config)
}

/// Prints a note if sequences may exceed the length on which the model was trained.
fn note_length(length: u64, trained: u64) {
    if length > trained {
        say!(
            "note: the model was trained on sequences of {trained} tokens; text beyond that length may make no sense"
        );
    }
}

/// The configuration in which a prompt may be one token shorter than a sequence, unless the user sets the limit.
fn admitting_prompts(config: Config, is_set: impl Fn(&Entry) -> bool) -> Config {
    let length = length_of(&config);
    if length > 1 && !is_set(config.entry("max_prefill_predict_length")) {
        return config.with_derived("max_prefill_predict_length", length - 1);
    }
    config
}

/// The length of sequences. The other keys of a command need not be consistent yet.
fn length_of(config: &Config) -> u64 {
    config.entry("max_target_length").value.as_u64().unwrap_or_default()
}

/// Whether a value was set for this command rather than by the run.
fn is_set_here(entry: &Entry, run: Option<&Path>) -> bool {
    match &entry.origin {
        Origin::File { path, .. } => run.is_none_or(|run| **path != saved_config_path(run)),
        origin => origin.is_given(),
    }
}

/// A tokenizer, and the directory of its files, if any.
pub struct FoundTokenizer {
    pub tokenizer: Tokenizer,
    pub directory: Option<PathBuf>,
}

impl Source {
    /// The tokenizer: the one that this command names, or else the one that accompanies the weights.
    pub fn tokenizer(
        &self,
        group: &TokenizerGroup,
        checkpoint: &CheckpointGroup,
    ) -> Result<FoundTokenizer, Failure> {
        let mut group = group.clone();
        let mut brought = checkpoint.brought_tokenizer();
        let given = &self.given;
        let is_byte = group.tokenizer_type == TokenizerType::Byte;
        if given.tokenizer_type && is_byte {
            brought = None;
            // A file that the run names does not matter; one that is named here is a contradiction.
            group.tokenizer_path = group.tokenizer_path.filter(|_| given.tokenizer_path);
        } else if group.tokenizer_path.is_some()
            && (given.tokenizer_path || given.tokenizer_type && self.published.is_none())
        {
            brought = None;
        }
        let TokenizerChoice { kind, path } = group.choice(brought.as_ref());
        let tokenizer = Tokenizer::open(kind, path).map_err(|error| match error {
            DataError::NoTokenizer if let Some(directory) = &self.published => Failure::user(format!(
                "`{}` contains no tokenizer\nhint: copy the model's `tokenizer.json` or `tokenizer.model` and its \
                 `tokenizer_config.json` there, or name it with `tokenizer_path`",
                directory.display()
            )),
            error => error.into(),
        })?;
        let directory = path.and_then(|path| if path.is_dir() { Some(path) } else { path.parent() });
        Ok(FoundTokenizer { tokenizer, directory: directory.map(Path::to_owned) })
    }

    /// Whether BOS is prepended. A published model's tokenizer decides, unless the user does.
    pub fn begins_texts(&self, group: &TokenizerGroup, tokenizer: &Tokenizer) -> bool {
        match self.published {
            Some(_) if !self.given.add_bos => tokenizer.adds_bos().unwrap_or(group.add_bos),
            _ => group.add_bos,
        }
    }
}

/// The configuration of a training run. A run that begins with a published model prepends BOS if that model's tokenizer
/// does and `add_bos` is not set.
pub fn with_tokenizer_settings(config: Config) -> Result<Config, Failure> {
    let is_text = config.entry("dataset_type").value == "hf";
    if !is_text || published(&config).is_none() || config.entry("add_bos").origin.is_given() {
        return Ok(config);
    }
    // The caller reads the keys again, and reports mistakes in them together with all others.
    let Ok(settings) = TrainConfig::from_config(&config) else { return Ok(config) };
    let inherited = settings.inherited_tokenizer();
    if inherited.is_some() || settings.tokenizer.tokenizer_path.is_some() {
        let TokenizerChoice { kind, path } = settings.tokenizer.choice(inherited.as_ref());
        let tokenizer = Tokenizer::open(kind, path)?;
        let begins = tokenizer.adds_bos().unwrap_or(settings.tokenizer.add_bos);
        return Ok(config.with_derived("add_bos", begins));
    }
    Ok(config)
}
