//! Merges of pairs of symbols within words: characters, or pieces of words.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, HashMap};

use super::characters::{Counts, marked};
use super::{TrainingOptions, model_file};
use crate::error::{DataError, Result};
use crate::watch::{Task, Watch};

type Pair = (u32, u32);

/// Tokens by their texts.
pub(super) struct Vocabulary {
    pub texts: Vec<String>,
    ids: HashMap<String, u32>,
}

impl Vocabulary {
    pub(super) fn new(texts: impl IntoIterator<Item = String>) -> Self {
        let mut vocabulary = Self { texts: Vec::new(), ids: HashMap::new() };
        for text in texts {
            vocabulary.add(text);
        }
        vocabulary
    }

    /// The id of a text, which is added if it is new.
    pub(super) fn add(&mut self, text: String) -> u32 {
        let next = self.texts.len() as u32;
        *self.ids.entry(text).or_insert_with_key(|text| {
            self.texts.push(text.clone());
            next
        })
    }

    pub(super) fn id(&self, text: &str) -> Option<u32> {
        self.ids.get(text).copied()
    }
}

/// Adds a token for each of the most frequent pairs, until there are `limit` tokens, or no pair occurs twice. Ties go to the
/// pair with the smallest ids. `joined` spells the token of a pair.
pub(super) fn learn(
    mut words: Vec<(Vec<u32>, u64)>,
    vocabulary: &mut Vocabulary,
    limit: usize,
    joined: impl Fn(&str, &str) -> String,
    watch: Watch<'_>,
) -> Result<()> {
    let mut counts = HashMap::<Pair, u64>::new();
    let mut places = HashMap::<Pair, BTreeSet<u32>>::new();
    for (index, (word, count)) in words.iter().enumerate() {
        for pair in pairs(word) {
            *counts.entry(pair).or_insert(0) += count;
            places.entry(pair).or_default().insert(index as u32);
        }
    }
    let mut queue: BinaryHeap<(u64, Reverse<Pair>)> =
        counts.iter().map(|(pair, count)| (*count, Reverse(*pair))).collect();
    while vocabulary.texts.len() < limit {
        let Some((queued, Reverse(pair))) = queue.pop() else { break };
        let count = counts.get(&pair).copied().unwrap_or(0);
        if count != queued {
            // It has become rarer since it was queued.
            if count > 0 {
                queue.push((count, Reverse(pair)));
            }
            continue;
        }
        if count < 2 {
            break;
        }
        let text = joined(&vocabulary.texts[pair.0 as usize], &vocabulary.texts[pair.1 as usize]);
        let new = vocabulary.add(text);
        watch.advance(Task::LearnMerges, vocabulary.texts.len() as u64, Some(limit as u64))?;
        let mut grown = BTreeSet::new();
        for index in places.remove(&pair).unwrap_or_default() {
            let (word, count) = &mut words[index as usize];
            for old in pairs(word) {
                if let Some(known) = counts.get_mut(&old) {
                    *known -= *count;
                }
            }
            merge(word, pair, new);
            for made in pairs(word) {
                *counts.entry(made).or_insert(0) += *count;
                if made.0 == new || made.1 == new {
                    places.entry(made).or_default().insert(index);
                    grown.insert(made);
                }
            }
        }
        counts.remove(&pair);
        queue.extend(
            grown.into_iter().filter_map(|made| counts.get(&made).map(|count| (*count, Reverse(made)))),
        );
    }
    Ok(())
}

fn pairs(word: &[u32]) -> impl Iterator<Item = Pair> + '_ {
    word.windows(2).map(|pair| (pair[0], pair[1]))
}

/// Replaces a pair by a token, from left to right.
fn merge(word: &mut Vec<u32>, pair: Pair, new: u32) {
    let (mut read, mut written) = (0, 0);
    while read < word.len() {
        let is_pair = word[read] == pair.0 && word.get(read + 1) == Some(&pair.1);
        word[written] = if is_pair { new } else { word[read] };
        read += if is_pair { 2 } else { 1 };
        written += 1;
    }
    word.truncate(written);
}

/// The pieces of a SentencePiece model of byte pairs, with their scores: the earlier a merge, the higher.
pub(super) fn train_pieces<I>(
    documents: I,
    options: &TrainingOptions,
    watch: Watch<'_>,
) -> Result<Vec<(String, f32)>>
where
    I: IntoIterator<Item = Result<String>>,
{
    let (words, characters) = marked(documents, options, watch)?;
    let mut sorted = characters.clone();
    sorted.sort_unstable();
    let mut vocabulary = Vocabulary::new(sorted.iter().map(char::to_string));
    let symbols = spelled(&words, &vocabulary)?;
    let limit = options.vocab_size - model_file::RESERVED;
    learn(symbols, &mut vocabulary, limit, |left, right| format!("{left}{right}"), watch)?;
    // Characters follow the merges, as in SentencePiece.
    let merged = vocabulary.texts.split_off(characters.len()).into_iter();
    let pieces = merged.chain(characters.iter().map(char::to_string));
    Ok(pieces.enumerate().map(|(rank, piece)| (piece, -(rank as f32))).collect())
}

fn spelled(words: &Counts, vocabulary: &Vocabulary) -> Result<Vec<(Vec<u32>, u64)>> {
    let spell = |(word, count): (&String, &u64)| {
        let ids = word.chars().map(|character| {
            vocabulary.id(character.encode_utf8(&mut [0; 4])).ok_or_else(|| DataError::Train {
                reason: format!("the character `{character}` has no token"),
            })
        });
        Ok((ids.collect::<Result<Vec<u32>>>()?, *count))
    };
    words.iter().map(spell).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_frequent_pairs_are_merged_first() {
        let counts = Counts::from([("abab".to_owned(), 3), ("abc".to_owned(), 2), ("bc".to_owned(), 2)]);
        let mut vocabulary = Vocabulary::new(["a", "b", "c"].map(str::to_owned));
        let words = spelled(&counts, &vocabulary).unwrap();
        learn(words, &mut vocabulary, 100, |left, right| format!("{left}{right}"), Watch::silent()).unwrap();
        assert_eq!(vocabulary.texts, ["a", "b", "c", "ab", "abab", "bc", "abc"]);
    }
}
