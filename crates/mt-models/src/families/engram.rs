//! Memories of n-grams, from the configuration: the vocabulary, the multipliers and the sizes of tables.

use std::path::Path;

use mt_config::{ModelGroup, TokenizerType};
use mt_data::{CompressedVocabulary, DataError, Tokenizer};
use mt_nn::engram::{EngramOptions, NgramHash};

use crate::{
    ModelError,
    decoder::{DecoderConfig, EngramConfig, TokenNumbers},
    numpy::Generator,
};

/// Separates the seeds of layers, as in DeepSeek's program.
const SEEDS_APART: u64 = 10_007;

/// Adds memories of n-grams to the layers that the configuration names.
///
/// # Errors
/// The tokenizer cannot be read.
pub(super) fn add_memories(group: &ModelGroup, config: &mut DecoderConfig) -> Result<(), ModelError> {
    let keys = &group.engram;
    if keys.engram_layers.is_empty() {
        return Ok(());
    }
    let vocabulary =
        vocabulary(group).map_err(|error| ModelError::NoVocabulary { reason: error.to_string() })?;
    let mut taken = Vec::new();
    for &layer in &keys.engram_layers {
        let hash = NgramHash {
            multipliers: multipliers(keys.engram_seed, layer, vocabulary.size, keys.engram_max_ngram_size),
            sizes: keys
                .engram_vocab_bases
                .iter()
                .map(|base| next_primes(*base, keys.engram_num_heads, &mut taken))
                .collect(),
            padding: vocabulary.padding,
        };
        config.layers[layer].engram = Some(EngramConfig {
            embed: group.emb_dim(),
            streams: group.hyper_connections.mhc_expansion_rate,
            options: EngramOptions {
                hash,
                entry_dim: keys.engram_head_dim,
                taps: keys.engram_kernel_size,
                norm: config.norm,
            },
        });
    }
    config.token_numbers = Some(TokenNumbers::new(vocabulary, group.vocab_size));
    config.separate_memories();
    Ok(())
}

/// The numbers of tokens that the run keeps, or those of the tokenizer that keys name. If there are both, they must be of
/// the same tokenizer.
fn vocabulary(group: &ModelGroup) -> Result<CompressedVocabulary, DataError> {
    let keys = &group.engram;
    let path = keys.tokenizer_path.as_deref();
    let open = || Tokenizer::open(Some(keys.tokenizer_type.name()), path);
    let Some(kept) = &keys.kept_numbers else {
        let tokenizer = open()?;
        tokenizer.check_vocab_size(group.vocab_size)?;
        return tokenizer.compressed();
    };
    let vocabulary = CompressedVocabulary::read(&kept.path)?;
    // Like other runs, this one continues without the tokenizer's original file.
    let exists = path.map_or(keys.tokenizer_type == TokenizerType::Byte, Path::exists);
    if kept.is_tokenizer_named && exists {
        vocabulary.check(&open()?)?;
    }
    Ok(vocabulary)
}

/// One odd factor for each token of the longest n-gram. The product of a factor with a number below `vocabulary` fits
/// into `i32`.
fn multipliers(seed: u64, layer: usize, vocabulary: usize, count: usize) -> Vec<i32> {
    let largest = i32::MAX as usize / vocabulary.max(1);
    let bound = (largest / 2).max(1) as u32;
    let mut generator = Generator::seeded(seed + SEEDS_APART * layer as u64);
    (0..count).map(|_| generator.below(bound) as i32 * 2 + 1).collect()
}

/// The next `count` primes from `base` on that are not among those that have been taken.
fn next_primes(base: usize, count: usize, taken: &mut Vec<usize>) -> Vec<usize> {
    let mut found = Vec::new();
    let mut candidate = base;
    while found.len() < count {
        if is_prime(candidate) && !taken.contains(&candidate) {
            found.push(candidate);
            taken.push(candidate);
        }
        candidate += 1;
    }
    found
}

fn is_prime(number: usize) -> bool {
    number >= 2
        && (2..).take_while(|factor| factor * factor <= number).all(|factor| !number.is_multiple_of(factor))
}
