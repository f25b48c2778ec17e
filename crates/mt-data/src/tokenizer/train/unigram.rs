//! Unigram models (Kudo 2018), trained as SentencePiece trains them: frequent substrings of words are pruned by the likelihood
//! that each adds, between steps of expectation maximization.
//!
//! The trainer of the tokenizers library finds fewer substrings, and its models are less likely by a tenth and more. Here sums
//! are over blocks of words of a fixed size, and equal scores are ordered by text, so that the same text gives the same model.

use std::collections::{HashMap, HashSet};

use rayon::prelude::*;
use serde_json::json;

use super::super::{bpe::added_tokens, trie::ByteTrie};
use super::characters::{Counts, marked};
use super::{TrainingOptions, model_file};
use crate::error::Result;
use crate::watch::{Task, Watch};

/// The most characters of a piece.
const MOST_CHARACTERS: usize = 16;
/// The most substrings at the beginning, and the most words in which they are counted.
const SEEDS: usize = 1_000_000;
const SEED_WORDS: usize = 1_000_000;
/// The share of pieces that remain when some are pruned.
const SHRINKING: f64 = 0.75;
/// Steps of expectation maximization between two prunings.
const STEPS: usize = 2;
/// Pieces that are expected less often are dropped.
const LEAST_EXPECTED: f64 = 0.5;
/// The most pieces, as a multiple of the wanted ones, from which the most probable are tried as the result.
const MOST_CANDIDATES: usize = 2;
/// Words whose counts are added up apart.
const BLOCK: usize = 4096;

/// The pieces of a model with the logarithms of their probabilities.
pub(super) fn train<I>(
    documents: I,
    options: &TrainingOptions,
    watch: Watch<'_>,
) -> Result<Vec<(String, f32)>>
where
    I: IntoIterator<Item = Result<String>>,
{
    let (words, characters) = marked(documents, options, watch)?;
    let words: Vec<(String, u64)> = words.into_iter().collect();
    let size = options.vocab_size - model_file::RESERVED;
    let mut model = Model::seeds(&words, &characters);
    // As SentencePiece, a tenth more pieces remain until the last ones are chosen by their probabilities. Text decides how many
    // pieces are better chosen so than pruned by what each adds, so the most probable of several choices is the result.
    let desired = size * 11 / 10;
    let mut best: Option<(f64, Model)> = None;
    loop {
        for _ in 0..STEPS {
            watch.advance(Task::LearnMerges, model.pieces.len() as u64, None)?;
            let expected = model.expected(&words);
            model.maximize(&expected, true);
        }
        let is_last = model.pieces.len() <= desired;
        if is_last || model.pieces.len() <= size * MOST_CANDIDATES {
            let chosen = model.chosen(size).refitted(&words);
            let likelihood = chosen.likelihood(&words);
            if best.as_ref().is_none_or(|(of_best, _)| likelihood > *of_best) {
                best = Some((likelihood, chosen));
            }
        }
        if is_last {
            break;
        }
        let most = desired.max((model.pieces.len() as f64 * SHRINKING) as usize);
        model.prune(&words, most);
    }
    Ok(best.map(|(_, model)| model.in_order()).unwrap_or_default())
}

/// Pieces with the logarithms of their probabilities. Single characters always remain, so that every word has a path.
struct Model {
    pieces: Vec<(String, f64)>,
    trie: ByteTrie,
}

/// A piece in a word: where it begins and ends, and its number.
type Edge = (usize, usize, u32);

impl Model {
    fn new(pieces: Vec<(String, f64)>) -> Self {
        let entries = pieces.iter().enumerate().map(|(id, (piece, _))| (piece.as_bytes(), id as u32));
        let trie = ByteTrie::new(entries.collect());
        Self { pieces, trie }
    }

    /// The characters, and the substrings of words that occur more than once.
    fn seeds(words: &[(String, u64)], characters: &[char]) -> Self {
        let mut by_count: Vec<&(String, u64)> = words.iter().collect();
        by_count.sort_by(|one, other| other.1.cmp(&one.1).then_with(|| one.0.cmp(&other.0)));
        by_count.truncate(SEED_WORDS);
        let mut counts = HashMap::<&str, u64>::new();
        let mut single: Counts = characters.iter().map(|character| (character.to_string(), 1)).collect();
        for (word, count) in by_count {
            let ends: Vec<usize> = word.char_indices().map(|(place, _)| place).chain([word.len()]).collect();
            for first in 0..ends.len() - 1 {
                *single.entry(word[ends[first]..ends[first + 1]].to_owned()).or_insert(0) += count;
                for last in first + 2..ends.len().min(first + MOST_CHARACTERS + 1) {
                    *counts.entry(&word[ends[first]..ends[last]]).or_insert(0) += count;
                }
            }
        }
        counts.retain(|_, count| *count > 1);
        // As in a suffix tree, a piece that one character always follows is left to the longer one.
        let parts = counts.iter().filter_map(|(piece, count)| {
            let (last, _) = piece.char_indices().next_back()?;
            counts.get_key_value(&piece[..last]).filter(|(_, of_part)| *of_part == count)
        });
        let parts: HashSet<&str> = parts.map(|(part, _)| *part).collect();
        let scored = counts.into_iter().filter(|(piece, _)| !parts.contains(piece));
        let scored = scored.map(|(piece, count)| (piece, count * piece.chars().count() as u64));
        let mut scored: Vec<(&str, u64)> = scored.collect();
        scored.sort_by(|one, other| other.1.cmp(&one.1).then_with(|| one.0.cmp(other.0)));
        scored.truncate(SEEDS);
        let scored = scored.into_iter().map(|(piece, score)| (piece.to_owned(), score));
        let all: Vec<(String, u64)> = single.into_iter().chain(scored).collect();
        let total = all.iter().map(|(_, score)| *score as f64).sum::<f64>().ln();
        Self::new(all.into_iter().map(|(piece, score)| (piece, (score as f64).ln() - total)).collect())
    }

    /// The pieces in a text, by where they begin.
    fn edges(&self, text: &str) -> Vec<Edge> {
        let mut edges = Vec::new();
        for (start, _) in text.char_indices() {
            self.trie
                .prefixes(&text.as_bytes()[start..], |length, id| edges.push((start, start + length, id)));
        }
        edges
    }

    fn score(&self, id: u32) -> f64 {
        self.pieces[id as usize].1
    }

    /// The number of occurrences of each piece that is expected over all divisions of the words.
    fn expected(&self, words: &[(String, u64)]) -> Vec<f64> {
        let of_block = |block: &[(String, u64)]| {
            let mut found = HashMap::<u32, f64>::new();
            for (word, count) in block {
                let edges = self.edges(word);
                let mut forward = vec![f64::NEG_INFINITY; word.len() + 1];
                let mut backward = forward.clone();
                (forward[0], backward[word.len()]) = (0.0, 0.0);
                for (start, end, id) in &edges {
                    forward[*end] = log_sum(forward[*end], forward[*start] + self.score(*id));
                }
                for (start, end, id) in edges.iter().rev() {
                    backward[*start] = log_sum(backward[*start], backward[*end] + self.score(*id));
                }
                for (start, end, id) in edges {
                    let share = (forward[start] + self.score(id) + backward[end] - backward[0]).exp();
                    *found.entry(id).or_insert(0.0) += share * *count as f64;
                }
            }
            found
        };
        let blocks: Vec<HashMap<u32, f64>> = words.par_chunks(BLOCK).map(of_block).collect();
        let mut expected = vec![0.0; self.pieces.len()];
        for (id, count) in blocks.into_iter().flatten() {
            expected[id as usize] += count;
        }
        expected
    }

    /// Sets the probabilities to the expected ones, with a prior that favors few pieces. Rare pieces are dropped on request.
    fn maximize(&mut self, expected: &[f64], drops_rare: bool) {
        let pieces = std::mem::take(&mut self.pieces).into_iter().zip(expected);
        let kept = pieces.filter_map(|((piece, _), count)| {
            let is_kept = *count >= LEAST_EXPECTED || is_single(&piece) || !drops_rare;
            is_kept.then(|| (piece, count.max(LEAST_EXPECTED)))
        });
        let kept: Vec<(String, f64)> = kept.collect();
        let total = digamma(kept.iter().map(|(_, count)| count).sum());
        *self = Self::new(kept.into_iter().map(|(piece, count)| (piece, digamma(count) - total)).collect());
    }

    /// The most probable division of a text, without the piece `banned`.
    fn likeliest(&self, text: &str, banned: Option<u32>) -> Vec<u32> {
        let mut best = vec![(f64::NEG_INFINITY, 0, 0); text.len() + 1];
        best[0].0 = 0.0;
        for (start, end, id) in self.edges(text) {
            let score = best[start].0 + self.score(id);
            if Some(id) != banned && score > best[end].0 {
                best[end] = (score, start, id);
            }
        }
        let (mut path, mut end) = (Vec::new(), text.len());
        while end > 0 && best[end].0.is_finite() {
            path.push(best[end].2);
            end = best[end].1;
        }
        path.reverse();
        if end == 0 { path } else { Vec::new() }
    }

    /// Drops the pieces without which the likelihood falls least, down to `most`.
    fn prune(&mut self, words: &[(String, u64)], most: usize) {
        // Expected counts, because endings have no place in the most probable divisions as long as whole words are pieces.
        let counts = self.expected(words);
        let total = counts.iter().sum::<f64>();
        // The fall of the likelihood if all uses of a piece are replaced by its next best division.
        let loss = |id: usize| -> Option<f64> {
            let (piece, _) = &self.pieces[id];
            let count = counts[id];
            if is_single(piece) {
                return Some(f64::INFINITY);
            }
            if count < LEAST_EXPECTED || self.likeliest(piece, None).len() > 1 {
                return None;
            }
            let instead = self.likeliest(piece, Some(id as u32));
            let total_instead = (total + count * (instead.len() as f64 - 1.0)).ln();
            let of_others = instead.iter().map(|id| (counts[*id as usize] + count).ln() - total_instead);
            Some(count * (count.ln() - total.ln() - of_others.sum::<f64>()))
        };
        let losses: Vec<Option<f64>> = (0..self.pieces.len()).into_par_iter().map(loss).collect();
        let mut kept: Vec<(usize, f64)> =
            losses.into_iter().enumerate().filter_map(|(id, loss)| Some((id, loss?))).collect();
        kept.sort_by(|one, other| other.1.total_cmp(&one.1).then_with(|| one.0.cmp(&other.0)));
        kept.truncate(most);
        kept.sort_by_key(|(id, _)| *id);
        *self = Self::new(kept.into_iter().map(|(id, _)| self.pieces[id].clone()).collect());
    }

    /// The model with probabilities that its own pieces have in the words.
    fn refitted(mut self, words: &[(String, u64)]) -> Self {
        for _ in 0..STEPS {
            let expected = self.expected(words);
            self.maximize(&expected, false);
        }
        self
    }

    /// The logarithm of the probability of the words' most probable divisions.
    fn likelihood(&self, words: &[(String, u64)]) -> f64 {
        let of_word = |(word, count): &(String, u64)| {
            self.likeliest(word, None).into_iter().map(|id| self.score(id)).sum::<f64>() * *count as f64
        };
        let blocks: Vec<f64> = words.par_chunks(BLOCK).map(|block| block.iter().map(of_word).sum()).collect();
        blocks.into_iter().sum()
    }

    /// The pieces in descending order of their probabilities.
    fn in_order(self) -> Vec<(String, f32)> {
        let mut pieces = self.pieces;
        pieces.sort_by(|one, other| other.1.total_cmp(&one.1).then_with(|| one.0.cmp(&other.0)));
        pieces.into_iter().map(|(piece, score)| (piece, score as f32)).collect()
    }

    /// The characters and the most probable other pieces.
    fn chosen(&self, size: usize) -> Self {
        let mut pieces = self.pieces.clone();
        pieces.sort_by(|one, other| other.1.total_cmp(&one.1).then_with(|| one.0.cmp(&other.0)));
        let singles = pieces.iter().filter(|(piece, _)| is_single(piece)).count();
        let mut room = size.saturating_sub(singles);
        pieces.retain(|(piece, _)| {
            let is_kept = is_single(piece) || room > 0;
            room -= usize::from(is_kept && !is_single(piece));
            is_kept
        });
        Self::new(pieces)
    }
}

fn is_single(piece: &str) -> bool {
    piece.chars().nth(1).is_none()
}

/// The logarithm of the sum of two numbers with these logarithms.
fn log_sum(one: f64, other: f64) -> f64 {
    let (less, more) = if one < other { (one, other) } else { (other, one) };
    if less == f64::NEG_INFINITY { more } else { more + (less - more).exp().ln_1p() }
}

/// The derivative of the logarithm of the gamma function.
fn digamma(mut x: f64) -> f64 {
    let mut result = 0.0;
    while x < 7.0 {
        result -= 1.0 / x;
        x += 1.0;
    }
    let inverse = 1.0 / (x - 0.5);
    let square = inverse * inverse;
    let fourth = square * square;
    result + (x - 0.5).ln() + square / 24.0 - 7.0 / 960.0 * fourth + 31.0 / 8064.0 * fourth * square
        - 127.0 / 30720.0 * fourth * fourth
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
        "added_tokens": added_tokens(&special),
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
    use crate::random::mix;

    #[test]
    fn expectations_are_those_of_all_divisions() {
        let probability = |value: f64| value.ln();
        let model = Model::new(
            [("a", 0.3), ("b", 0.2), ("ab", 0.1)]
                .map(|(piece, value)| (piece.to_owned(), probability(value)))
                .to_vec(),
        );
        // `ab` divides into two pieces with probability 0.06, or is one with 0.1.
        let expected = model.expected(&[("ab".to_owned(), 16)]);
        let wanted = [6.0, 6.0, 10.0];
        assert!(expected.iter().zip(wanted).all(|(one, other)| (one - other).abs() < 1e-9), "{expected:?}");
        assert_eq!(model.likeliest("ab", None), [2]);
        assert_eq!(model.likeliest("ab", Some(2)), [0, 1]);
        assert!((digamma(2.0) - 0.422_784_335_1).abs() < 1e-6);
    }

    /// Each word is a piece at first, so that no most probable division has an ending of its own.
    #[test]
    fn endings_of_many_words_become_pieces() {
        let endings = ["", "ness", "able", "ing", "tion"];
        let mut draws = 0;
        let mut below = |bound: u64| {
            draws += 1;
            (mix(draws) >> 11) % bound
        };
        let letter = |letters: &str, place: u64| letters.chars().nth(place as usize).unwrap();
        let stems: Vec<String> = (0..150)
            .map(|_| {
                let letters =
                    (0..3).map(|_| [letter("bcdfghklmnprstvw", below(16)), letter("aeiou", below(5))]);
                letters.flatten().collect()
            })
            .collect();
        let texts: Vec<String> = (0..1500)
            .map(|_| {
                let word = |_| {
                    // Low numbers are more frequent.
                    let most = below(150) + 1;
                    format!("{}{}", stems[below(most) as usize], endings[below(5) as usize])
                };
                (0..6).map(word).collect::<Vec<_>>().join(" ")
            })
            .collect();
        let options = TrainingOptions {
            model: super::super::TokenizerModel::Unigram,
            format: super::super::super::TokenizerKind::HuggingFace,
            vocab_size: model_file::RESERVED + 250,
            character_coverage: 1.0,
            lowercase: false,
        };
        let pieces = train(texts.into_iter().map(Ok), &options, Watch::silent()).unwrap();
        for ending in &endings[1..] {
            assert!(pieces.iter().any(|(piece, _)| piece == ending), "{ending} {pieces:?}");
        }
    }

    #[test]
    fn frequent_words_become_pieces() {
        let words = [("▁river", 90), ("▁rivers", 20), ("▁mill", 60), ("▁mills", 30), ("▁milling", 9)];
        let words: Vec<(String, u64)> = words.map(|(word, count)| (word.to_owned(), count)).to_vec();
        let characters: Vec<char> = "▁rivesmlng".chars().collect();
        let mut model = Model::seeds(&words, &characters);
        for _ in 0..3 {
            let expected = model.expected(&words);
            model.maximize(&expected, true);
            model.prune(&words, 14);
        }
        let chosen = model.chosen(13).in_order();
        assert!(
            chosen.len() <= 13
                && ["▁river", "▁mill"].iter().all(|word| chosen.iter().any(|(piece, _)| piece == word)),
            "{chosen:?}"
        );
    }
}
