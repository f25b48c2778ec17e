//! Unigram models, by the trainer of the tokenizers library.
//!
//! The library orders some equal scores by hashes with random seeds, and divides sums among threads. Here words come in
//! order, one thread adds, and equal scores are ordered by text, so that the same text gives the same model.

use serde_json::json;
use tokenizers::models::unigram::{Unigram, UnigramTrainer};
use tokenizers::utils::parallelism::{get_parallelism, set_parallelism};

use super::characters::{alphabet, count, marked_words, of_known};
use super::symbols::with_space;
use super::{TrainingOptions, model_file, too_small};
use crate::error::{DataError, Result};
use crate::watch::Watch;

/// The score that the library adds from one character without a score of its own to the next.
const MISSING_STEP: f64 = 0.0001;
/// The sum of all counts: the library counts in 32 bits.
const MOST_WORDS: u64 = 1 << 30;

/// The pieces of a model with the logarithms of their probabilities.
pub(super) fn train<I>(
    documents: I,
    options: &TrainingOptions,
    watch: Watch<'_>,
) -> Result<Vec<(String, f32)>>
where
    I: IntoIterator<Item = Result<String>>,
{
    let words = count(documents, marked_words, watch)?;
    let characters = with_space(alphabet(&words, options.character_coverage));
    let minimum = model_file::RESERVED + characters.len();
    if options.vocab_size < minimum {
        return Err(too_small(options, minimum));
    }
    let words = of_known(words, &characters);
    let divisor = words.values().sum::<u64>().div_ceil(MOST_WORDS).max(1);
    let scaled = |count: u64| u32::try_from((count / divisor).max(1)).unwrap_or(u32::MAX);
    let sentences: Vec<(String, u32)> =
        words.into_iter().map(|(word, count)| (word, scaled(count))).collect();
    let failure = |reason: String| DataError::Train { reason };
    let trainer = UnigramTrainer::builder()
        .show_progress(false)
        .vocab_size((options.vocab_size - model_file::RESERVED) as u32)
        .initial_alphabet(characters.iter().copied().collect())
        .build()
        .map_err(|error| failure(error.to_string()))?;
    watch.check()?;
    let mut model = Unigram::default();
    let was_parallel = get_parallelism();
    set_parallelism(false);
    let trained = trainer.do_train(sentences, &mut model);
    set_parallelism(was_parallel);
    trained.map_err(|error| failure(error.to_string()))?;
    watch.check()?;
    Ok(ordered(model.iter().cloned().collect()))
}

/// The pieces by descending scores, then by their texts.
fn ordered(mut pieces: Vec<(String, f64)>) -> Vec<(String, f32)> {
    let least = pieces.iter().map(|(_, score)| *score).fold(f64::INFINITY, f64::min);
    // Characters that the model has lost get the least score, plus a little more for each in a random order.
    let is_single = |piece: &str| piece.chars().nth(1).is_none();
    let (mut missing, mut step) = (Vec::new(), 0.0);
    loop {
        let score = least + step;
        let found = pieces.iter().position(|(piece, of)| *of == score && is_single(piece));
        let Some(found) = found else { break };
        missing.push(pieces.swap_remove(found).0);
        step += MISSING_STEP;
    }
    missing.sort_unstable();
    let mut step = 0.0;
    for piece in missing {
        pieces.push((piece, least + step));
        step += MISSING_STEP;
    }
    pieces.sort_by(|one, other| other.1.total_cmp(&one.1).then_with(|| one.0.cmp(&other.0)));
    pieces.into_iter().map(|(piece, score)| (piece, score as f32)).collect()
}

/// The `tokenizer.json` of a model, with the ids that its SentencePiece file has.
pub(super) fn json(pieces: &[(String, f32)]) -> String {
    let special = model_file::SPECIAL;
    let bytes = (0..256).map(|byte| format!("<0x{byte:02X}>"));
    let reserved = special.map(str::to_owned).into_iter().chain(bytes).map(|piece| (piece, 0.0));
    let vocabulary: Vec<_> = reserved
        .chain(pieces.iter().map(|(piece, score)| (piece.clone(), f64::from(*score))))
        .map(|(piece, score)| json!([piece, score]))
        .collect();
    let added = special.iter().enumerate().map(|(id, token)| {
        json!({
            "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
            "special": true,
        })
    });
    // As SentencePiece, a mark is added even before a space. Words begin with marks.
    let normalizer = json!({"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "\u{2581}"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"},
    ]});
    let words = json!({
        "type": "Split", "pattern": {"String": "\u{2581}"}, "behavior": "MergedWithNext", "invert": false,
    });
    let tokenizer = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added.collect::<Vec<_>>(),
        "normalizer": normalizer,
        "pre_tokenizer": words,
        "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]},
        "model": {"type": "Unigram", "unk_id": model_file::UNKNOWN, "byte_fallback": true, "vocab": vocabulary},
    });
    let mut text = serde_json::to_string_pretty(&tokenizer).expect("strings are representable in JSON");
    text.push('\n');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_characters_are_ordered_by_text() {
        let pieces =
            |order: [(&str, f64); 4]| ordered(order.map(|(piece, score)| (piece.to_owned(), score)).to_vec());
        let one = pieces([("ab", -1.0), ("y", -5.0), ("x", -5.0 + MISSING_STEP), ("cd", -2.0)]);
        let other = pieces([("x", -5.0), ("cd", -2.0), ("ab", -1.0), ("y", -5.0 + MISSING_STEP)]);
        assert_eq!(one, other);
        assert_eq!(one.iter().map(|(piece, _)| piece.as_str()).collect::<Vec<_>>(), ["ab", "cd", "y", "x"]);
    }
}
