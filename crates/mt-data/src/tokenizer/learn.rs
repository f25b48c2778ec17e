//! Learning of the merges of byte pair encoding from words and their counts.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};

use crate::error::{DataError, Result};
use crate::watch::{Task, Watch};

/// Two adjacent token ids.
pub(super) type Pair = (u32, u32);

/// The separator before the first word and after each word.
const SEPARATOR: u32 = u32::MAX;
/// Marks a former end of a token that is now inside another token.
const INSIDE: u32 = u32::MAX - 1;
/// The number of occurrences that are processed between two checks for cancellation.
const CHECK_EVERY: usize = 1 << 20;

/// The number of occurrences of a pair, and their possible positions. Positions stay listed after the pair has left
/// them.
#[derive(Default)]
struct Occurrences {
    count: u64,
    positions: Vec<u32>,
}

type Pairs = HashMap<Pair, Occurrences, PairHashing>;

/// Hashing of pairs.
pub(super) type PairHashing = BuildHasherDefault<PairHasher>;

/// The merges in the order of learning, as pairs of ids. Special tokens have the first ids, the bytes the next 256, and
/// each merge one more.
///
/// The work for a merge is proportional to the occurrences of its pair, even in long words.
///
/// # Errors
/// The distinct words take more positions than 32 bits count; [`DataError::Stopped`].
pub(super) fn learn_merges(
    words: impl IntoIterator<Item = (Vec<u8>, u64)>,
    num_special: usize,
    vocab_size: usize,
    watch: Watch<'_>,
) -> Result<Vec<Pair>> {
    let mut text = Text::new(words, num_special)?;
    let mut pairs = text.count_pairs(num_special, watch)?;
    let mut queue: BinaryHeap<(u64, Reverse<Pair>)> =
        pairs.iter().map(|(pair, found)| (found.count, Reverse(*pair))).collect();
    let mut tokens = Spellings::new(num_special);
    let mut merges = Vec::new();
    while tokens.len() < vocab_size {
        let Some((queued, Reverse(pair))) = queue.pop() else { break };
        let Some(found) = pairs.get(&pair) else { continue };
        if found.count < 2 {
            pairs.remove(&pair);
            continue;
        }
        if found.count != queued {
            // The pair has become rarer since it was queued, so it is queued again with its present count.
            queue.push((found.count, Reverse(pair)));
            continue;
        }
        let found = pairs.remove(&pair).expect("the pair was found above");
        // If another pair spells the same token already, this pair is never merged.
        let Some(new) = tokens.join(pair) else { continue };
        merges.push(pair);
        watch.advance(Task::LearnMerges, tokens.len() as u64, Some(vocab_size as u64))?;
        for made in text.merge(pair, new, &found.positions, &mut pairs, watch)? {
            // A pair that occurs only once now never occurs twice later.
            match pairs[&made].count {
                0 | 1 => _ = pairs.remove(&made),
                count => queue.push((count, Reverse(made))),
            }
        }
    }
    // A small text has fewer pairs than the vocabulary has room for.
    watch.advance(Task::LearnMerges, tokens.len() as u64, Some(tokens.len() as u64))?;
    Ok(merges)
}

/// All distinct words in a row, with one position per byte. A token's id is stored at its first and at its last
/// position, so that both neighbors of a token are found from its ends.
struct Text {
    symbols: Vec<u32>,
    /// The word of each position.
    words: Vec<u32>,
    /// The number of occurrences of each word.
    counts: Vec<u64>,
    /// The number of bytes of each token, by id.
    lengths: Vec<u32>,
}

impl Text {
    fn new(words: impl IntoIterator<Item = (Vec<u8>, u64)>, num_special: usize) -> Result<Self> {
        let lengths = vec![1; num_special + 256];
        let mut text = Self { symbols: vec![SEPARATOR], words: vec![0], counts: Vec::new(), lengths };
        for (word, count) in words {
            let index = text.counts.len() as u32;
            text.symbols.extend(word.iter().map(|byte| num_special as u32 + u32::from(*byte)));
            text.symbols.push(SEPARATOR);
            text.words.resize(text.symbols.len(), index);
            text.counts.push(count);
            if text.symbols.len() > INSIDE as usize {
                let reason =
                    "its distinct words take more than 4 GiB; train it on fewer documents".to_owned();
                return Err(DataError::Train { reason });
            }
        }
        Ok(text)
    }

    /// The pairs of bytes that occur more than once.
    fn count_pairs(&self, num_special: usize, watch: Watch<'_>) -> Result<Pairs> {
        let mut table: Vec<Occurrences> = Vec::new();
        table.resize_with(256 * 256, Occurrences::default);
        let byte = |symbol: u32| symbol as usize - num_special;
        for (position, window) in self.symbols.windows(2).enumerate() {
            if position % CHECK_EVERY == 0 {
                watch.check()?;
            }
            if window[0] != SEPARATOR && window[1] != SEPARATOR {
                let found = &mut table[byte(window[0]) * 256 + byte(window[1])];
                found.count += self.counts[self.words[position] as usize];
                found.positions.push(position as u32);
            }
        }
        let pair = |index: usize| ((num_special + index / 256) as u32, (num_special + index % 256) as u32);
        let found = table.into_iter().enumerate().filter(|(_, found)| found.count > 1);
        Ok(found.map(|(index, found)| (pair(index), found)).collect())
    }

    /// Merges the occurrences of `pair`, from left to right, into the token `new`. Returns the pairs that contain
    /// `new`.
    fn merge(
        &mut self,
        pair: Pair,
        new: u32,
        positions: &[u32],
        pairs: &mut Pairs,
        watch: Watch<'_>,
    ) -> Result<Vec<Pair>> {
        let mut made = Vec::new();
        let length = |text: &Self, symbol: u32| text.lengths[symbol as usize] as usize;
        let (left, right) = (length(self, pair.0), length(self, pair.1));
        self.lengths.push((left + right) as u32);
        let mut add = |pairs: &mut Pairs, pair: Pair, position: usize, count: u64| {
            let found = pairs.entry(pair).or_insert_with(|| {
                made.push(pair);
                Occurrences::default()
            });
            found.count += count;
            found.positions.push(position as u32);
        };
        // A pair that is merged already, or never will be, is no longer counted.
        let subtract = |pairs: &mut Pairs, pair: Pair, count: u64| {
            if let Some(found) = pairs.get_mut(&pair) {
                found.count -= count;
            }
        };
        for (index, first) in positions.iter().map(|position| *position as usize).enumerate() {
            if index % CHECK_EVERY == CHECK_EVERY - 1 {
                watch.check()?;
            }
            let second = first + left;
            if (self.symbols[first], self.symbols[second]) != pair {
                continue;
            }
            let count = self.counts[self.words[first] as usize];
            let (before, after) = (self.symbols[first - 1], self.symbols[second + right]);
            self.symbols[second - 1] = INSIDE;
            self.symbols[second] = INSIDE;
            self.symbols[first] = new;
            self.symbols[second + right - 1] = new;
            if before != SEPARATOR {
                subtract(pairs, (before, pair.0), count);
                add(pairs, (before, new), first - length(self, before), count);
            }
            if after != SEPARATOR {
                subtract(pairs, (pair.1, after), count);
                add(pairs, (new, after), first, count);
            }
        }
        Ok(made)
    }
}

/// The bytes of each token.
struct Spellings {
    tokens: Vec<Vec<u8>>,
    known: HashSet<Vec<u8>>,
}

impl Spellings {
    /// Special tokens have no bytes, because no word contains them.
    fn new(num_special: usize) -> Self {
        let bytes = (0..=u8::MAX).map(|byte| vec![byte]);
        let tokens = std::iter::repeat_n(Vec::new(), num_special).chain(bytes.clone()).collect();
        Self { tokens, known: bytes.collect() }
    }

    fn len(&self) -> usize {
        self.tokens.len()
    }

    /// The id of a new token that joins two tokens; `None` if a token with these bytes exists.
    fn join(&mut self, (left, right): Pair) -> Option<u32> {
        let spelled = [&self.tokens[left as usize][..], &self.tokens[right as usize]].concat();
        if !self.known.insert(spelled.clone()) {
            return None;
        }
        self.tokens.push(spelled);
        Some(self.tokens.len() as u32 - 1)
    }
}

/// A hash of two ids. It takes one multiplication per id, because there are millions of pairs and the input is trusted.
#[derive(Default)]
pub(super) struct PairHasher(u64);

impl Hasher for PairHasher {
    fn finish(&self) -> u64 {
        self.0 ^ (self.0 >> 32)
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u32(u32::from(*byte));
        }
    }

    fn write_u32(&mut self, id: u32) {
        self.0 = (self.0 ^ u64::from(id)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use proptest::prelude::*;
    use serde_json::Value;
    use tokenizers::models::bpe::{BPE, BpeTrainer};
    use tokenizers::tokenizer::Trainer;

    use super::super::bpe::byte_characters;
    use super::*;

    /// The definition: count all pairs again after each merge, and merge the most frequent one whose token is new.
    fn by_definition(words: &[(Vec<u8>, u64)], num_special: usize, vocab_size: usize) -> Vec<Pair> {
        let mut tokens = Spellings::new(num_special);
        let symbol = |byte: &u8| num_special as u32 + u32::from(*byte);
        let mut words: Vec<(Vec<u32>, u64)> =
            words.iter().map(|(word, count)| (word.iter().map(symbol).collect(), *count)).collect();
        let (mut merges, mut dropped) = (Vec::new(), HashSet::new());
        while tokens.len() < vocab_size {
            let mut counts: BTreeMap<Pair, u64> = BTreeMap::new();
            for (word, count) in &words {
                for window in word.windows(2) {
                    *counts.entry((window[0], window[1])).or_default() += count;
                }
            }
            let candidates = counts.into_iter().filter(|(pair, _)| !dropped.contains(pair));
            let best = candidates.max_by_key(|(pair, count)| (*count, Reverse(*pair)));
            let Some((pair, _)) = best.filter(|(_, count)| *count > 1) else { break };
            let Some(new) = tokens.join(pair) else {
                dropped.insert(pair);
                continue;
            };
            merges.push(pair);
            for (word, _) in &mut words {
                let mut index = 0;
                while index + 1 < word.len() {
                    if (word[index], word[index + 1]) == pair {
                        word.splice(index..index + 2, [new]);
                    }
                    index += 1;
                }
            }
        }
        merges
    }

    fn learnt(words: &[(Vec<u8>, u64)], vocab_size: usize) -> Vec<Pair> {
        learn_merges(words.iter().cloned(), 3, vocab_size, Watch::silent()).unwrap()
    }

    /// The merges of the tokenizers library's trainer, as texts.
    fn of_library(words: &[(String, u64)], vocab_size: usize) -> Vec<(String, String)> {
        let alphabet = byte_characters().into_iter().collect();
        let mut trainer = BpeTrainer::builder()
            .vocab_size(vocab_size)
            .min_frequency(2)
            .initial_alphabet(alphabet)
            .show_progress(false)
            .build();
        let texts = words.iter().flat_map(|(word, count)| std::iter::repeat_n(word, *count as usize));
        trainer.feed(texts, |word| Ok(vec![word.to_owned()])).unwrap();
        let mut model = BPE::default();
        trainer.train(&mut model).unwrap();
        let model = serde_json::to_value(&model).unwrap();
        let merges: Vec<Value> = serde_json::from_value(model["merges"].clone()).unwrap();
        let pair = |merge: &Value| match merge.as_str().and_then(|text| text.split_once(' ')) {
            Some((left, right)) => (left.to_owned(), right.to_owned()),
            None => serde_json::from_value(merge.clone()).unwrap(),
        };
        merges.iter().map(pair).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(400))]

        /// Letters have the same order here and in the library, so that ties are decided alike. The library merges pairs that
        /// spell a known token, in an order that depends on random seeds.
        #[test]
        fn merges_are_those_of_the_library(
            words in proptest::collection::vec(("[a-h]{1,10}", 1u64..60), 1..40), vocab_size in 256usize..340,
        ) {
            let expected = of_library(&words, vocab_size);
            let spelled: HashSet<String> = expected.iter().map(|(left, right)| format!("{left}{right}")).collect();
            prop_assume!(spelled.len() == expected.len());
            let mut counts = BTreeMap::<Vec<u8>, u64>::new();
            for (word, count) in &words {
                *counts.entry(word.as_bytes().to_vec()).or_default() += count;
            }
            let mut tokens = byte_characters().map(String::from).to_vec();
            let mut merges = Vec::new();
            for (left, right) in learn_merges(counts, 0, vocab_size, Watch::silent()).unwrap() {
                let pair = (tokens[left as usize].clone(), tokens[right as usize].clone());
                tokens.push(format!("{}{}", pair.0, pair.1));
                merges.push(pair);
            }
            prop_assert_eq!(merges, expected);
        }

        #[test]
        fn merges_are_those_of_the_definition(
            words in proptest::collection::vec((proptest::collection::vec(0u8..3, 1..24), 1u64..4), 1..8),
            vocab_size in 260usize..300,
        ) {
            prop_assert_eq!(learnt(&words, vocab_size), by_definition(&words, 3, vocab_size));
        }
    }

    #[test]
    fn runs_merge_from_the_left() {
        for length in 1..40 {
            let words = [(vec![b'a'; length], 1)];
            assert_eq!(learnt(&words, 300), by_definition(&words, 3, 300), "{length}");
        }
    }

    #[test]
    fn one_long_word_takes_work_in_proportion_to_its_length() {
        // Merges double the letters of a pseudo-random word; each of them has thousands of occurrences in one word.
        let mut state = 1u64;
        let mut letter = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 60) as u8
        };
        let word: Vec<u8> = (0..2_000_000).map(|_| letter()).collect();
        let merges = learnt(&[(word, 1)], 2000);
        assert_eq!(merges.len(), 2000 - 259);
    }

    #[test]
    fn learning_stops_on_request() {
        let reports = AtomicUsize::new(0);
        let report = |progress: crate::Progress| {
            assert_eq!((progress.task, progress.total), (Task::LearnMerges, Some(300)));
            reports.fetch_add(1, Ordering::Relaxed);
        };
        let is_stopped = || reports.load(Ordering::Relaxed) >= 2;
        let words = [(b"abababcdcdcdefefef".to_vec(), 1)];
        let stopped = learn_merges(words, 0, 300, Watch::new(&report, &is_stopped));
        assert!(matches!(stopped, Err(DataError::Stopped)));
        assert_eq!(reports.into_inner(), 2);
    }
}
