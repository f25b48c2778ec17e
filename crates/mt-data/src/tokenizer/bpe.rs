//! Byte-level byte pair encoding: its trainer, and its `tokenizer.json`.
//!
//! The trainer of the tokenizers library iterates over hash maps with random seeds. If it queues a pair twice, with
//! different sets of occurrences, the order of merges depends on these seeds. This trainer decides by counts and ids
//! only, so the same documents give the same file, bit for bit.

use std::collections::{BTreeMap, HashMap};

use rayon::prelude::*;
use serde_json::{Map, Value, json};

use super::Tokenizer;
use super::learn::learn_merges;
use super::pieces::pieces;
use super::words::{Division, divide};
use crate::error::{DataError, Result};
use crate::watch::{Task, Watch};

/// The special tokens of built-in and trained tokenizers: padding (id 0, so that zeros are padding), BOS and EOS.
pub const BYTE_LEVEL_SPECIAL_TOKENS: [&str; 3] = ["<|pad|>", "<|begin_of_text|>", "<|end_of_text|>"];

/// Documents, or pieces of long ones, whose words are counted in parallel.
const CHUNK_DOCUMENTS: usize = 256;
/// The bytes of text that complete a chunk, whatever its number of documents.
const CHUNK_BYTES: usize = 16 << 20;
/// Longer words are cut. The limit bounds the memory of a word, and it turns a long run of one character into a few
/// distinct words with large counts.
const MAX_WORD_BYTES: usize = 16 << 10;

/// Trains a byte-level BPE tokenizer of at most `vocab_size` tokens: the special tokens, the 256 bytes, and the merges
/// of the most frequent pairs. Ties go to the pair with the smallest ids. A small text may have fewer pairs that occur
/// twice, and then the vocabulary is smaller. A word of more than 16 KiB counts as several words.
///
/// # Errors
/// The vocabulary has no room for bytes and special tokens, the documents hold no text, or `documents` yields an error.
/// [`DataError::Stopped`] if the watch requests it.
pub fn train_bpe<I>(
    documents: I,
    vocab_size: usize,
    special_tokens: &[&str],
    watch: Watch<'_>,
) -> Result<Tokenizer>
where
    I: IntoIterator<Item = Result<String>>,
{
    let minimum = 256 + special_tokens.len();
    if vocab_size < minimum {
        return Err(DataError::VocabularyTooSmall { vocab_size, specials: special_tokens.len(), minimum });
    }
    let words = count_words(documents, watch)?;
    if words.is_empty() {
        return Err(DataError::Train { reason: "the documents hold no text".into() });
    }
    let mut spelled: Vec<String> = special_tokens.iter().map(|token| (*token).to_owned()).collect();
    spelled.extend(byte_characters().iter().map(char::to_string));
    let mut merges = Vec::new();
    for (left, right) in learn_merges(words, special_tokens.len(), vocab_size, watch)? {
        let (left, right) = (spelled[left as usize].clone(), spelled[right as usize].clone());
        spelled.push(format!("{left}{right}"));
        merges.push((left, right));
    }
    let json = byte_level_json(special_tokens, &merges);
    Tokenizer::from_json("`trained here`".into(), json.into_bytes())
}

/// The number of occurrences of each word. The map is ordered, so that the result does not depend on hashing.
fn count_words<I>(documents: I, watch: Watch<'_>) -> Result<BTreeMap<Vec<u8>, u64>>
where
    I: IntoIterator<Item = Result<String>>,
{
    let count = |text: &&'_ str| -> HashMap<Vec<u8>, u64> {
        let mut counts = HashMap::new();
        divide(&[Division::Gpt2], text, &mut |word| {
            for word in word.as_bytes().chunks(MAX_WORD_BYTES) {
                match counts.get_mut(word) {
                    Some(count) => *count += 1,
                    None => _ = counts.insert(word.to_vec(), 1),
                }
            }
        });
        counts
    };
    let (mut words, mut done) = (BTreeMap::new(), 0);
    let mut documents = documents.into_iter();
    loop {
        let chunk = next_chunk(&mut documents)?;
        if chunk.is_empty() {
            return Ok(words);
        }
        let pieces: Vec<&str> = chunk.iter().flat_map(|text| pieces(text)).collect();
        for group in pieces.chunks(CHUNK_DOCUMENTS) {
            for counts in group.par_iter().map(count).collect::<Vec<_>>() {
                for (word, count) in counts {
                    *words.entry(word).or_insert(0) += count;
                }
            }
            done += group.iter().map(|piece| piece.len() as u64).sum::<u64>();
            watch.advance(Task::CountWords, done, None)?;
        }
    }
}

/// The next documents whose words are counted at a time; empty at the end.
pub(super) fn next_chunk(documents: &mut impl Iterator<Item = Result<String>>) -> Result<Vec<String>> {
    let (mut chunk, mut bytes) = (Vec::new(), 0);
    while chunk.len() < CHUNK_DOCUMENTS && bytes < CHUNK_BYTES {
        let Some(document) = documents.next() else { break };
        let document = document?;
        bytes += document.len();
        chunk.push(document);
    }
    Ok(chunk)
}

/// The character that represents each byte in a byte-level vocabulary: the byte's own character if it is printable,
/// otherwise the next free one from U+0100 on.
pub(super) fn byte_characters() -> [char; 256] {
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

/// The `added_tokens` of special tokens, which have the first ids.
pub(super) fn added_tokens(special: &[&str]) -> Vec<Value> {
    let token = |(id, token): (usize, &&str)| {
        json!({
            "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
            "special": true,
        })
    };
    special.iter().enumerate().map(token).collect()
}

/// The `tokenizer.json` of a byte-level BPE: special tokens first, then the bytes, then a token for each merge.
pub(super) fn byte_level_json(special_tokens: &[&str], merges: &[(String, String)]) -> String {
    let tokens = special_tokens.iter().map(|token| token.to_string());
    let tokens = tokens.chain(byte_characters().into_iter().map(String::from));
    let tokens = tokens.chain(merges.iter().map(|(left, right)| format!("{left}{right}")));
    let vocabulary: Map<String, Value> = tokens.enumerate().map(|(id, token)| (token, json!(id))).collect();
    let byte_level = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": true,
    });
    let tokenizer = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added_tokens(special_tokens),
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
