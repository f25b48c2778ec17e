//! Layers with a memory of n-grams.

use std::path::PathBuf;

use super::{
    choices::{DecoderBlock, TokenizerType},
    group,
};
use crate::{
    config::{Config, not_built},
    error::Problem,
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
        if config.entry("mtp_num_layers").value != 0 {
            problems.push(not_built(
                config.entry("mtp_num_layers"),
                "multi-token prediction with a memory of n-grams",
            ));
        }
        if config.entry("mhc_expansion_rate").value.as_u64().is_some_and(|streams| streams > 1) {
            problems.push(not_built(
                config.entry("mhc_expansion_rate"),
                "hyper-connections around a memory of n-grams",
            ));
        }
        let is_bytes = self.tokenizer_type == TokenizerType::Byte;
        if self.tokenizer_path.is_none() && !is_bytes {
            problems.push(Problem::inconsistent(
                format!(
                    "{}, whose memory compresses the tokenizer's vocabulary, but {}",
                    config.stated("engram_layers"),
                    config.stated("tokenizer_path")
                ),
                "name a `tokenizer.json` that exists before the run, or use `tokenizer_type=byte`",
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
