//! Byte-level byte pair encoding: its trainer, and the `tokenizer.json` it is saved as.
//!
//! The library's own trainer iterates over hash maps with random seeds, and a pair of which it queued two sets of
//! occurrences is merged in an order that depends on them. Here every choice is made by counts and ids only, so the
//! same documents give the same file, bit for bit.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, HashSet};

use rayon::prelude::*;
use serde_json::{Map, Value, json};
use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};

use super::Tokenizer;
use crate::error::{DataError, Result};

/// The special tokens of the tokenizers made here: padding (id 0, so that zeros are padding), BOS and EOS.
pub const BYTE_LEVEL_SPECIAL_TOKENS: [&str; 3] = ["<|pad|>", "<|begin_of_text|>", "<|end_of_text|>"];

/// Documents whose words are counted at a time.
const CHUNK: usize = 256;

/// Trains a byte-level BPE tokenizer of at most `vocab_size` tokens: the special tokens, the 256 bytes, and the merges
/// of the most frequent pairs. Ties go to the pair whose ids are smallest. A small text may have fewer pairs that occur
/// twice than there is room for.
///
/// # Errors
/// A vocabulary without room for bytes and special tokens, documents without text, and errors of `documents`.
pub fn train_bpe<I>(documents: I, vocab_size: usize, special_tokens: &[&str]) -> Result<Tokenizer>
where
    I: IntoIterator<Item = Result<String>>,
{
    let minimum = 256 + special_tokens.len();
    if vocab_size < minimum {
        return Err(DataError::VocabularyTooSmall { vocab_size, specials: special_tokens.len(), minimum });
    }
    let words = count_words(documents, special_tokens)?;
    if words.is_empty() {
        return Err(DataError::Train { reason: "the documents hold no text".into() });
    }
    let merges = learn_merges(words, special_tokens.len(), vocab_size);
    let json = byte_level_json(special_tokens, &merges);
    Tokenizer::from_json("`trained here`".into(), json.into_bytes())
}

/// Two token ids next to each other.
type Pair = (u32, u32);

/// How often each word occurs, a word being what the pre-tokenizer does not split; ordered, so that nothing below
/// depends on hashing.
fn count_words<I>(documents: I, special_tokens: &[&str]) -> Result<BTreeMap<String, u64>>
where
    I: IntoIterator<Item = Result<String>>,
{
    let json = byte_level_json(special_tokens, &[]);
    let failure = |error: tokenizers::Error| DataError::Train { reason: error.to_string() };
    let splitter = tokenizers::Tokenizer::from_bytes(json).map_err(failure)?;
    let splitter = splitter.get_pre_tokenizer().expect("a byte-level tokenizer has a pre-tokenizer");
    let count = |text: &String| -> Result<HashMap<String, u64>> {
        let mut split = PreTokenizedString::from(text.as_str());
        splitter.pre_tokenize(&mut split).map_err(failure)?;
        let mut counts = HashMap::new();
        for (word, _, _) in split.get_splits(OffsetReferential::Normalized, OffsetType::None) {
            match counts.get_mut(word) {
                Some(count) => *count += 1,
                None => _ = counts.insert(word.to_string(), 1),
            }
        }
        Ok(counts)
    };
    let mut words = BTreeMap::new();
    let mut documents = documents.into_iter();
    loop {
        let chunk = documents.by_ref().take(CHUNK).collect::<Result<Vec<String>>>()?;
        if chunk.is_empty() {
            return Ok(words);
        }
        for counts in chunk.par_iter().map(count).collect::<Vec<_>>() {
            for (word, count) in counts? {
                *words.entry(word).or_insert(0) += count;
            }
        }
    }
}

/// The merges in the order in which they are learnt, as pairs of tokens in the vocabulary's spelling.
fn learn_merges(
    words: BTreeMap<String, u64>,
    num_special: usize,
    vocab_size: usize,
) -> Vec<(String, String)> {
    let alphabet = byte_characters();
    let ids: HashMap<char, u32> = alphabet
        .iter()
        .enumerate()
        .map(|(byte, character)| (*character, (num_special + byte) as u32))
        .collect();
    // The special tokens' ids come first; no word contains them.
    let mut tokens: Vec<String> = vec![String::new(); num_special];
    tokens.extend(alphabet.iter().map(char::to_string));
    let mut known: HashSet<String> = tokens[num_special..].iter().cloned().collect();

    let mut symbols: Vec<Vec<u32>> = Vec::with_capacity(words.len());
    let mut counts: Vec<u64> = Vec::with_capacity(words.len());
    for (word, count) in words {
        symbols.push(word.chars().map(|character| ids[&character]).collect());
        counts.push(count);
    }
    // Of each pair, how often it occurs and in which words. Words stay listed after the pair has left them.
    let mut pairs: HashMap<Pair, (u64, Vec<u32>)> = HashMap::new();
    for (index, word) in symbols.iter().enumerate() {
        for pair in word.windows(2) {
            let entry = pairs.entry((pair[0], pair[1])).or_default();
            entry.0 += counts[index];
            if entry.1.last() != Some(&(index as u32)) {
                entry.1.push(index as u32);
            }
        }
    }
    let mut queue: BinaryHeap<(u64, Reverse<Pair>)> =
        pairs.iter().map(|(pair, (count, _))| (*count, Reverse(*pair))).collect();

    let mut merges = Vec::new();
    while tokens.len() < vocab_size {
        let Some((queued, Reverse(pair))) = queue.pop() else { break };
        let Some((count, _)) = pairs.get(&pair) else { continue };
        if *count != queued {
            // The pair has become rarer since it was queued; it waits for its turn again.
            if *count > 1 {
                queue.push((*count, Reverse(pair)));
            }
            continue;
        }
        if *count < 2 {
            break;
        }
        let (_, places) = pairs.remove(&pair).expect("the pair was found above");
        let merged = format!("{}{}", tokens[pair.0 as usize], tokens[pair.1 as usize]);
        if !known.insert(merged.clone()) {
            // Another pair spells the same token already.
            continue;
        }
        let new = tokens.len() as u32;
        merges.push((tokens[pair.0 as usize].clone(), tokens[pair.1 as usize].clone()));
        tokens.push(merged);
        let mut changed = HashSet::new();
        for place in places {
            let word = &mut symbols[place as usize];
            let count = counts[place as usize];
            if !word.windows(2).any(|window| (window[0], window[1]) == pair) {
                continue;
            }
            for window in word.windows(2) {
                if let Some(entry) = pairs.get_mut(&(window[0], window[1])) {
                    entry.0 -= count;
                }
            }
            replace(word, pair, new);
            for window in word.windows(2) {
                let neighbour = (window[0], window[1]);
                let is_new = neighbour.0 == new || neighbour.1 == new;
                // A pair that was dropped because its token exists stays dropped.
                let entry = match pairs.get_mut(&neighbour) {
                    Some(entry) => entry,
                    None if is_new => pairs.entry(neighbour).or_default(),
                    None => continue,
                };
                entry.0 += count;
                if is_new {
                    changed.insert(neighbour);
                    if entry.1.last() != Some(&place) {
                        entry.1.push(place);
                    }
                }
            }
        }
        queue.extend(changed.into_iter().map(|pair| (pairs[&pair].0, Reverse(pair))));
    }
    merges
}

/// Joins each occurrence of `pair` from the left.
fn replace(word: &mut Vec<u32>, pair: Pair, new: u32) {
    let (mut read, mut write) = (0, 0);
    while read < word.len() {
        if read + 1 < word.len() && (word[read], word[read + 1]) == pair {
            word[write] = new;
            read += 2;
        } else {
            word[write] = word[read];
            read += 1;
        }
        write += 1;
    }
    word.truncate(write);
}

/// The printable character that stands for each byte in a byte-level vocabulary: itself where it is printable, else the
/// next free one from U+0100 on.
fn byte_characters() -> [char; 256] {
    let mut next = 0x100u32;
    std::array::from_fn(|byte| {
        let byte = byte as u32;
        if matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) {
            return char::from(byte as u8);
        }
        next += 1;
        char::from_u32(next - 1).expect("the code points after U+0100 are characters")
    })
}

/// The `tokenizer.json` of a byte-level BPE: special tokens first, then the bytes, then a token for each merge.
pub(super) fn byte_level_json(special_tokens: &[&str], merges: &[(String, String)]) -> String {
    let tokens = special_tokens.iter().map(|token| token.to_string());
    let tokens = tokens.chain(byte_characters().into_iter().map(String::from));
    let tokens = tokens.chain(merges.iter().map(|(left, right)| format!("{left}{right}")));
    let vocabulary: Map<String, Value> = tokens.enumerate().map(|(id, token)| (token, json!(id))).collect();
    let added = special_tokens.iter().enumerate().map(|(id, token)| {
        json!({
            "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
            "special": true,
        })
    });
    let byte_level = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": true,
    });
    let tokenizer = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added.collect::<Vec<_>>(),
        "normalizer": null,
        "pre_tokenizer": byte_level,
        "post_processor": null,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocabulary,
            "merges": merges.iter().map(|(left, right)| json!([left, right])).collect::<Vec<_>>(),
        },
    });
    let mut text = serde_json::to_string_pretty(&tokenizer).expect("strings are representable in JSON");
    text.push('\n');
    text
}
