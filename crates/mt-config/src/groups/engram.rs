//! Layers with a memory of n-grams.

use std::path::{Path, PathBuf};

use super::{
    choices::{DecoderBlock, TokenizerType},
    group,
    run::{run_directory_of, saved_config_path, token_numbers_path},
};
use crate::{
    config::{Config, not_built},
    error::Problem,
    origin::Origin,
};

group! {
    /// The memory of n-grams, and the tokenizer whose vocabulary it compresses.
    pub struct EngramGroup {
        engram_layers: Vec<usize>,
        engram_num_heads: usize,
        engram_head_dim: usize,
        engram_vocab_bases: Vec<usize>,
        engram_max_ngram_size: usize,
        engram_kernel_size: usize,
        engram_seed: u64,
        tokenizer_type: TokenizerType,
        tokenizer_path: Option<PathBuf>,
    }
    besides {
        kept_numbers: Option<KeptNumbers> = |config, _| Some(KeptNumbers::of(config)),
    }
}

/// The numbers of tokens that a run keeps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptNumbers {
    /// The file of the numbers.
    pub path: PathBuf,
    /// Whether keys name a tokenizer for this command, rather than for the run. Its numbers must be the same.
    pub is_tokenizer_named: bool,
}

impl KeptNumbers {
    /// The numbers of the run itself if it has checkpoints, or of the run whose weights are loaded.
    fn of(config: &Config) -> Option<Self> {
        let path = |key| {
            let value = config.entry(key).value.as_str().filter(|path| !path.is_empty());
            value.map(PathBuf::from)
        };
        let loaded = path("load_parameters_path").or_else(|| path("load_full_state_path"));
        let loaded = loaded.and_then(|path| run_directory_of(&path));
        let own = path("run_name").map(|name| {
            path("base_output_directory").unwrap_or_else(|| PathBuf::from("maxtext_output")).join(name)
        });
        let has_checkpoints = |run: &PathBuf| {
            mt_storage::list(&run.join("checkpoints")).is_ok_and(|entries| !entries.is_empty())
        };
        let has_memories =
            config.entry("engram_layers").value.as_array().is_some_and(|layers| !layers.is_empty());
        // An object store is listed only for runs that keep such numbers.
        let own = own.filter(|run| has_memories || !mt_storage::is_remote(run)).filter(has_checkpoints);
        let own = own.map(|run| match mt_storage::is_remote(&run) {
            true => run_directory_of(&run).unwrap_or(run),
            false => run,
        });
        let run = [own, loaded].into_iter().flatten().find(|run| token_numbers_path(run).is_file())?;
        let is_named = |key| is_set_for(config, key, &run);
        let is_tokenizer_named = is_named("tokenizer_path") || is_named("tokenizer_type");
        Some(Self { path: token_numbers_path(&run), is_tokenizer_named })
    }
}

/// Whether the user set a key elsewhere than in the configuration that a run saved.
fn is_set_for(config: &Config, key: &str, run: &Path) -> bool {
    match &config.entry(key).origin {
        Origin::File { path, .. } => {
            std::path::absolute(path.as_path()).ok() != std::path::absolute(saved_config_path(run)).ok()
        }
        origin => origin.is_given(),
    }
}

impl EngramGroup {
    fn check(&self, config: &Config, problems: &mut Vec<Problem>) {
        if self.engram_layers.is_empty() {
            return;
        }
        if config.entry("decoder_block").value != DecoderBlock::DeepSeek.name() {
            problems
                .push(not_built(config.entry("engram_layers"), "a memory of n-grams in this model family"));
            return;
        }
        let is_bytes = self.tokenizer_type == TokenizerType::Byte;
        let loads = ["load_parameters_path", "load_full_state_path"]
            .iter()
            .any(|key| config.entry(key).value.as_str().is_some_and(|path| !path.is_empty()));
        if self.tokenizer_path.is_none() && !is_bytes && self.kept_numbers.is_none() {
            problems.push(Problem::inconsistent(
                format!(
                    "{}, whose memory compresses the tokenizer's vocabulary, but {}",
                    config.stated("engram_layers"),
                    config.stated("tokenizer_path")
                ),
                if loads {
                    "name the tokenizer that the model was trained with, with `tokenizer_path` or `tokenizer_type=byte`; \
                     or load the directory of its run, which keeps the numbers of tokens"
                } else {
                    "name a `tokenizer.json` that exists before the run, or use `tokenizer_type=byte`"
                },
            ));
        }
        let lengths = self.engram_max_ngram_size - 1;
        if self.engram_vocab_bases.len() != lengths {
            problems.push(Problem::inconsistent(
                format!(
                    "{}, but {}, which has tables for {lengths} lengths",
                    config.stated("engram_vocab_bases"),
                    config.stated("engram_max_ngram_size")
                ),
                format!("name {lengths} numbers, one for each length of n-gram from 2 on"),
            ));
        }
        if self.engram_vocab_bases.iter().any(|base| !(2..=1 << 27).contains(base)) {
            problems.push(Problem::inconsistent(
                format!("{}, which are no sizes of tables", config.stated("engram_vocab_bases")),
                "use numbers from 2 to 134217728, such as 100000",
            ));
        }
        // Entries of all tables of a layer are numbered in 32 bits; tables are slightly larger than their bases.
        let num_entries = self.engram_num_heads.saturating_mul(self.engram_vocab_bases.iter().sum());
        if num_entries > 1 << 30 {
            problems.push(Problem::inconsistent(
                format!(
                    "{} and {}, which make {num_entries} entries in each layer",
                    config.stated("engram_vocab_bases"),
                    config.stated("engram_num_heads")
                ),
                format!("use smaller tables: at most {} entries", 1 << 30),
            ));
        }
        let is_repeated = |(place, layer)| self.engram_layers[..place].contains(layer);
        if self.engram_layers.iter().enumerate().any(is_repeated) {
            problems.push(Problem::inconsistent(
                format!("{}, which names a layer twice", config.stated("engram_layers")),
                "name each layer once",
            ));
        }
    }
}
