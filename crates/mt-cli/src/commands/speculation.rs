//! Speculative decoding: the source of drafts, by the keys.

use std::path::{Path, PathBuf};

use mt_config::{Config, DecodeConfig, SpeculativeMethod};
use mt_data::{DataError, Tokenizer};
use mt_engine::{
    LoadedModel, load_beside,
    serve::{DraftModel, MedusaHeads, Speculation, SpeculationMethod, load_eagle},
};

use crate::{
    commands::decode::{FoundTokenizer, Source, configure},
    failure::Failure,
};

/// The number of tokens that are drafted for a step unless a key sets it.
const NUM_TOKENS: usize = 4;

/// The source of drafts, as far as it is known before any weight is read.
pub struct PreparedSpeculation {
    num_tokens: Option<usize>,
    method: PreparedMethod,
}

enum PreparedMethod {
    NGrams { shortest: usize, longest: usize },
    Model(Box<DecodeConfig>),
    Predictions,
    Eagle(Box<DecodeConfig>),
    Medusa(PathBuf),
}

impl PreparedSpeculation {
    /// Reads the keys, and the configuration and tokenizer of a model that drafts.
    pub fn prepare(
        config: &Config,
        decode: &DecodeConfig,
        tokenizer: &Tokenizer,
    ) -> Result<Option<Self>, Failure> {
        let keys = &decode.serve;
        let Some(method) = keys.speculative_method else { return Ok(None) };
        if decode.model.decoder_block.has_encoder() {
            return Err(Failure::user(
                "`speculative_method` drafts tokens, and a model with an encoder generates token by token\n\
                 hint: leave out `speculative_method`",
            ));
        }
        let method = match method {
            SpeculativeMethod::NGram => {
                PreparedMethod::NGrams { shortest: keys.prompt_lookup_min, longest: keys.prompt_lookup_max }
            }
            SpeculativeMethod::DraftModel => {
                let (draft, source) = draft_config(config, decode)?;
                let found = source.tokenizer(&draft.tokenizer, &draft.checkpoint)?;
                check_tokenizer(decode, tokenizer, &found)?;
                PreparedMethod::Model(Box::new(draft))
            }
            SpeculativeMethod::Mtp if decode.model.mtp_num_layers == 0 => {
                return Err(Failure::user(
                    "`speculative_method` is `mtp`, but no module that predicts further tokens is loaded\n\
                     hint: set `mtp_num_layers=1` if the weights have one, or use `speculative_method=ngram`",
                ));
            }
            SpeculativeMethod::Mtp => PreparedMethod::Predictions,
            SpeculativeMethod::Eagle => PreparedMethod::Eagle(Box::new(draft_config(config, decode)?.0)),
            SpeculativeMethod::Medusa => PreparedMethod::Medusa(existing(decode)?.to_owned()),
        };
        Ok(Some(Self { num_tokens: keys.num_speculative_tokens, method }))
    }

    /// Loads the source of drafts onto the devices of the model that it drafts for.
    pub fn load(self, loaded: &LoadedModel) -> Result<Speculation, Failure> {
        let say_source = |checkpoint: &Path| say!("drafting with: {}", checkpoint.display());
        let mut most = usize::MAX;
        let method = match self.method {
            PreparedMethod::NGrams { shortest, longest } => SpeculationMethod::NGrams { shortest, longest },
            PreparedMethod::Predictions => SpeculationMethod::Predictions,
            PreparedMethod::Model(draft) => {
                let draft = load_beside(&draft.loading(), loaded)?;
                say_source(&draft.checkpoint);
                SpeculationMethod::Model(DraftModel::from(draft))
            }
            PreparedMethod::Eagle(draft) => {
                let eagle = load_eagle(&draft.loading(), loaded)?;
                say_source(&eagle.checkpoint);
                SpeculationMethod::Eagle(eagle)
            }
            PreparedMethod::Medusa(directory) => {
                let heads = MedusaHeads::load(&directory, loaded)?;
                say!("drafting with {} heads: {}", heads.count(), directory.display());
                most = heads.count();
                SpeculationMethod::Medusa(heads)
            }
        };
        Ok(Speculation { num_tokens: self.num_tokens.unwrap_or(NUM_TOKENS.min(most)), method })
    }
}

/// The directory that drafts, which has to exist.
fn existing(decode: &DecodeConfig) -> Result<&Path, Failure> {
    let path = decode.serve.speculative_model.as_deref().unwrap_or(Path::new(""));
    if path.exists() {
        return Ok(path);
    }
    Err(Failure::user(format!(
        "`speculative_model` is `{}`, which does not exist\nhint: name the directory of a run, of a checkpoint, of a \
         published model or of published heads",
        path.display()
    )))
}

/// The configuration of a model that drafts. It runs on the same hardware, with the same types.
fn draft_config(config: &Config, decode: &DecodeConfig) -> Result<(DecodeConfig, Source), Failure> {
    let path = existing(decode)?;
    let mut arguments = vec![
        format!("load_parameters_path={}", path.display()),
        format!("max_target_length={}", decode.model.max_target_length),
    ];
    for key in ["hardware", "dtype", "weight_dtype"] {
        let entry = config.entry(key);
        if let Some(value) = entry.value.as_str().filter(|_| entry.origin.is_given()) {
            arguments.push(format!("{key}={value}"));
        }
    }
    let (draft, source) = configure(arguments)?;
    Ok((DecodeConfig::from_config(&draft)?, source))
}

/// Checks that a model that drafts gives tokens the same numbers.
fn check_tokenizer(
    decode: &DecodeConfig,
    tokenizer: &Tokenizer,
    found: &FoundTokenizer,
) -> Result<(), Failure> {
    match tokenizer.check_same_numbers(&found.tokenizer) {
        Ok(()) => Ok(()),
        Err(DataError::OtherNumbers { id, own, other, .. }) => Err(Failure::user(format!(
            "the model in `{}` has another tokenizer: its token {id} is {other:?}, and that of the served model {own:?}\n\
             hint: draft with a smaller model of the same family",
            existing(decode)?.display()
        ))),
        Err(error) => Err(error.into()),
    }
}
