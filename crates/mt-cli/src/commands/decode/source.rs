//! What is decoded with: the model's configuration, and its tokenizer.

use std::path::{Path, PathBuf};

use mt_config::{
    Config, DecodeConfig, Entry, Origin, Request as ConfigRequest, TokenizerType, TrainConfig,
    run_directory_of, saved_config_path,
};
use mt_data::Tokenizer;
use mt_engine::{EngineError, check_checkpoint, load_tokenizer};
use mt_models::hugging_face::HuggingFaceConfig;

use crate::{
    commands::{WEIGHTS_KEYS, over_run, published, resolve, warn},
    failure::Failure,
};

/// Where the weights are.
pub struct Source {
    /// The run that they belong to.
    run: Option<PathBuf>,
    /// The published model that they are.
    published: Option<PathBuf>,
}

/// The configuration, on top of that of the run or of the published model whose weights are loaded. A checkpoint that
/// belongs to neither needs its model described by keys.
pub fn configure(arguments: Vec<String>) -> Result<(Config, Source), Failure> {
    let request = ConfigRequest::from_process(arguments);
    let given = Config::resolve(&request)?;
    let path_of = |key: &str| given.entry(key).value.as_str().unwrap_or_default().to_owned();
    let named = WEIGHTS_KEYS.into_iter().map(|key| (key, path_of(key))).find(|(_, path)| !path.is_empty());
    let Some((key, path)) = named else {
        return Err(Failure::user(
            "nothing says which model to decode with\n\
             hint: name a run, a checkpoint or a published model's directory: \
             `load_parameters_path=maxtext_output/my_run`",
        ));
    };
    let path = Path::new(&path);
    if !path.exists() {
        return Err(Failure::user(format!(
            "`{key}` is `{}` ({}), which does not exist\nhint: name the directory of a run, of a checkpoint or of a \
             published model",
            path.display(),
            given.entry(key).origin
        )));
    }
    if let Some(directory) = published(&given) {
        let mut config = resolve(&request)?;
        check_checkpoint(&directory)?;
        fit_to_context(&mut config, &directory)?;
        admit_prompts(&mut config, |entry| entry.origin.is_given());
        warn(&config);
        return Ok((config, Source { run: None, published: Some(directory) }));
    }
    check_checkpoint(path)?;
    let run = run_directory_of(path);
    let mut config = match &run {
        Some(run) => over_trained(request, &given, run)?,
        None => given,
    };
    admit_prompts(&mut config, |entry| is_set_here(entry, run.as_deref()));
    warn(&config);
    Ok((config, Source { run, published: None }))
}

/// The configuration on top of a run's.
fn over_trained(request: ConfigRequest, given: &Config, run: &Path) -> Result<Config, Failure> {
    let mut request = over_run(request, given, run);
    // A file that is named here replaces whatever kind of tokenizer the run has.
    let is_default = |key: &str| given.entry(key).origin == Origin::Default;
    if !is_default("tokenizer_path") && is_default("tokenizer_type") {
        request.arguments.push("tokenizer_type=huggingface".to_owned());
    }
    let config = Config::resolve(&request)?;
    let trained = Config::resolve(&ConfigRequest::default().over_saved(saved_config_path(run)))?;
    note_length(&config, size(&trained, "max_target_length"));
    Ok(config)
}

/// Sequences are no longer by default than the model has been trained on.
fn fit_to_context(config: &mut Config, directory: &Path) -> Result<(), Failure> {
    let description = HuggingFaceConfig::read(directory)?;
    let of =
        |key| description.integer(key).map(|length| length.and_then(|length| u64::try_from(length).ok()));
    let Some(context) = of("max_position_embeddings")?.or(of("n_positions")?).filter(|length| *length > 1)
    else {
        return Ok(());
    };
    if !config.entry("max_target_length").origin.is_given() {
        let length = context.min(size(config, "max_target_length"));
        config.adopt("max_target_length", length);
    }
    note_length(config, context);
    Ok(())
}

/// Says so if sequences may become longer than those that the model has seen.
fn note_length(config: &Config, trained: u64) {
    if size(config, "max_target_length") > trained {
        eprintln!(
            "note: the model was trained on sequences of {trained} tokens; text beyond that length may make no sense"
        );
    }
}

/// Prompts may be as long as there is room for them and a token of an answer, unless the user says less.
fn admit_prompts(config: &mut Config, is_set: impl Fn(&Entry) -> bool) {
    let length = size(config, "max_target_length");
    if length > 1 && !is_set(config.entry("max_prefill_predict_length")) {
        config.adopt("max_prefill_predict_length", length - 1);
    }
}

fn size(config: &Config, key: &str) -> u64 {
    config.entry(key).value.as_u64().unwrap_or_default()
}

/// Whether a value belongs to this command rather than to the run.
fn is_set_here(entry: &Entry, run: Option<&Path>) -> bool {
    match &entry.origin {
        Origin::File { path, .. } => run.is_none_or(|run| **path != saved_config_path(run)),
        origin => origin.is_given(),
    }
}

/// A tokenizer, and the directory of its files, if it has any.
pub struct FoundTokenizer {
    pub tokenizer: Tokenizer,
    pub directory: Option<PathBuf>,
}

impl Source {
    /// The tokenizer: the one that is named for this command, or the one that comes with the weights.
    pub fn tokenizer(&self, config: &Config, decode: &DecodeConfig) -> Result<FoundTokenizer, Failure> {
        let mut group = decode.tokenizer.clone();
        let mut brought = decode.checkpoint.brought_tokenizer();
        let is_set = |key: &str| is_set_here(config.entry(key), self.run.as_deref());
        if is_set("tokenizer_path") && group.tokenizer_path.is_some()
            || is_set("tokenizer_type") && group.tokenizer_type == TokenizerType::Byte
        {
            brought = None;
        } else if is_set("tokenizer_type") && (self.published.is_some() || group.tokenizer_path.is_some()) {
            // The kind is to be checked, or chosen among those of a directory.
            group.tokenizer_path =
                brought.take().filter(|_| self.published.is_some()).or(group.tokenizer_path);
        }
        let tokenizer = load_tokenizer(&group, brought.as_deref()).map_err(|error| match error {
            EngineError::NoTokenizer if let Some(directory) = &self.published => Failure::user(format!(
                "`{}` holds no tokenizer\nhint: copy the model's `tokenizer.json` or `tokenizer.model` and its \
                 `tokenizer_config.json` there, or name it with `tokenizer_path`",
                directory.display()
            )),
            error => error.into(),
        })?;
        let named = group.tokenizer_path.filter(|_| group.tokenizer_type != TokenizerType::Byte);
        let directory = brought.or_else(|| {
            let path = named?;
            if path.is_dir() { Some(path) } else { path.parent().map(Path::to_owned) }
        });
        Ok(FoundTokenizer { tokenizer, directory })
    }
}

/// Whether texts begin with the token for it. The tokenizer of a published model says so itself, where the user does
/// not.
pub fn begins_texts(config: &Config, tokenizer: &Tokenizer) -> bool {
    let entry = config.entry("add_bos");
    let set = entry.value == true;
    if published(config).is_none() || entry.origin.is_given() {
        return set;
    }
    tokenizer.adds_bos().unwrap_or(set)
}

/// Lets a run that begins with a published model begin its texts as that model's tokenizer does, and decode like it.
pub fn adopt_tokenizer_settings(config: &mut Config) -> Result<(), Failure> {
    let is_text = config.entry("dataset_type").value == "hf";
    if !is_text || published(config).is_none() || config.entry("add_bos").origin.is_given() {
        return Ok(());
    }
    // What is wrong with the keys is said with all else that is.
    let Ok(settings) = TrainConfig::from_config(config) else { return Ok(()) };
    let inherited = settings.inherited_tokenizer();
    if inherited.is_some() || settings.tokenizer.tokenizer_path.is_some() {
        let tokenizer = load_tokenizer(&settings.tokenizer, inherited.as_deref())?;
        let begins = begins_texts(config, &tokenizer);
        config.adopt("add_bos", begins);
    }
    Ok(())
}
