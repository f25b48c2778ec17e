//! Byte-level byte pair encoding without the tokenizers library.
//!
//! The library keeps a map of offsets for every character and a string for every token, which takes most of its time. Its
//! tokens are the reference: what this code does not encode in the same way is left to the library.

use std::collections::HashMap;
use std::sync::Mutex;

use serde::Deserialize;
use tokenizers::models::bpe::BPE;
use tokenizers::{Model, ModelWrapper, NormalizerWrapper};

use super::backend::{AddedToken, AddedTokens};
use super::bpe::byte_characters;
use super::learn::{Pair, PairHashing};
use super::words::{Division, divide};

/// The longest word that is encoded here. The library's work grows less with the length.
const MAX_WORD_BYTES: usize = 256;
/// The longest word whose tokens are remembered, and the number of words that each thread remembers.
const MAX_CACHED_BYTES: usize = 48;
const MAX_CACHED_WORDS: usize = 1 << 15;

/// A byte-level tokenizer whose tokens depend on merges alone.
pub(super) struct ByteLevel {
    divisions: Vec<Division>,
    /// True for models that normalize texts: only texts in composed form are encoded here.
    normalizes: bool,
    /// The tokens that are searched before the text is normalized, and behind it.
    added: [AddedTokens; 2],
    /// The token of each byte.
    bytes: [u32; 256],
    /// The number of bytes of each token.
    lengths: Vec<u32>,
    /// The priority, 0 first, and the token of each pair that is merged.
    merges: HashMap<Pair, (u32, u32), PairHashing>,
    /// The tokens that need no merges, by their bytes.
    whole: HashMap<Vec<u8>, u32>,
    caches: Vec<Mutex<Cache>>,
}

/// The tokens of words.
type Cache = HashMap<Box<[u8]>, Box<[u32]>>;

impl ByteLevel {
    /// The tokenizer that was read from `file`; `None` if the library has to encode its texts.
    pub(super) fn of(tokenizer: &tokenizers::Tokenizer, file: &[u8]) -> Option<Self> {
        let model = bpe(tokenizer)?;
        let is_absent = |text: &Option<String>| text.as_ref().is_none_or(String::is_empty);
        let is_plain = model.dropout.is_none_or(|share| share == 0.0)
            && is_absent(&model.continuing_subword_prefix)
            && is_absent(&model.end_of_word_suffix)
            && tokenizer.get_truncation().is_none()
            && tokenizer.get_padding().is_none();
        let normalizes = match tokenizer.get_normalizer() {
            None => false,
            Some(NormalizerWrapper::NFC(_)) => true,
            Some(_) => return None,
        };
        if !is_plain {
            return None;
        }
        let divisions = Division::all(tokenizer.get_pre_tokenizer()?)?;
        let added = added(tokenizer, normalizes)?;
        let alphabet = byte_characters();
        let byte_of: HashMap<char, u8> = alphabet.iter().copied().zip(0..=u8::MAX).collect();
        let vocabulary = model.get_vocab();
        let last = vocabulary.values().max().copied()?;
        let mut lengths = vec![0; last as usize + 1];
        let mut whole = HashMap::new();
        for (token, id) in &vocabulary {
            let spelled: Option<Vec<u8>> =
                token.chars().map(|character| byte_of.get(&character).copied()).collect();
            lengths[*id as usize] = spelled.as_ref().map_or(token.len(), Vec::len) as u32;
            if let Some(spelled) = spelled.filter(|_| model.ignore_merges) {
                whole.insert(spelled, *id);
            }
        }
        let mut bytes = [0; 256];
        for (byte, character) in bytes.iter_mut().zip(alphabet) {
            *byte = vocabulary.get(&character.to_string()).copied()?;
        }
        let merges = merges(file, &vocabulary)?;
        let num_caches = rayon::current_num_threads() + 1;
        let caches = (0..num_caches).map(|_| Mutex::default()).collect();
        Some(Self { divisions, normalizes, added, bytes, lengths, merges, whole, caches })
    }

    /// Calls `visit` with each token of a text and the number of its bytes, in order. Returns whether it can: otherwise the
    /// library has to encode the text.
    ///
    /// # Errors
    /// The library rejects a long word.
    pub(super) fn for_each(
        &self,
        model: &BPE,
        text: &str,
        mut visit: impl FnMut(u32, usize),
    ) -> Result<bool, String> {
        if self.normalizes && !text.chars().all(is_composed) {
            return Ok(false);
        }
        // Threads outside the pool share the first cache, unless another one has it.
        let own = rayon::current_thread_index().map_or(0, |index| (index + 1) % self.caches.len());
        let (mut locked, mut none) = (self.caches[own].try_lock().ok(), None);
        let cache = locked.as_deref_mut().unwrap_or_else(|| none.insert(Cache::default()));
        let mut failed = None;
        for (stretch, exact) in self.added[0].split(text) {
            for (stretch, normalized) in self.added[1].split(stretch) {
                divide(&self.divisions, stretch, &mut |word| {
                    let found = self.word(model, word.as_bytes(), cache, |id| {
                        visit(id, self.lengths[id as usize] as usize);
                    });
                    failed = failed.take().or(found.err());
                });
                self.visit_added(1, normalized, &mut visit);
            }
            self.visit_added(0, exact, &mut visit);
        }
        failed.map_or(Ok(true), Err)
    }

    fn visit_added(&self, which: usize, token: Option<u32>, visit: &mut impl FnMut(u32, usize)) {
        if let Some(id) = token {
            visit(id, self.added[which].text(id).map_or(0, str::len));
        }
    }

    fn word(
        &self,
        model: &BPE,
        word: &[u8],
        cache: &mut Cache,
        visit: impl FnMut(u32),
    ) -> Result<(), String> {
        if let Some(ids) = cache.get(word) {
            ids.iter().copied().for_each(visit);
            return Ok(());
        }
        if word.len() > MAX_WORD_BYTES {
            let alphabet = byte_characters();
            let spelled: String = word.iter().map(|byte| alphabet[usize::from(*byte)]).collect();
            let tokens = model.tokenize(&spelled).map_err(|error| error.to_string())?;
            tokens.into_iter().map(|token| token.id).for_each(visit);
            return Ok(());
        }
        let ids = self.merged(word);
        if word.len() <= MAX_CACHED_BYTES {
            if cache.len() >= MAX_CACHED_WORDS {
                cache.clear();
            }
            cache.insert(word.into(), ids.as_slice().into());
        }
        ids.into_iter().for_each(visit);
        Ok(())
    }

    /// The tokens of a word: the pair with the first priority is merged, the leftmost of equal ones, until none is left.
    fn merged(&self, word: &[u8]) -> Vec<u32> {
        const NONE: (u32, u32) = (u32::MAX, 0);
        if let Some(id) = self.whole.get(word) {
            return vec![*id];
        }
        let mut ids: Vec<u32> = word.iter().map(|byte| self.bytes[usize::from(*byte)]).collect();
        let merge = |left: u32, right: u32| self.merges.get(&(left, right)).copied().unwrap_or(NONE);
        let mut found: Vec<(u32, u32)> = ids.windows(2).map(|pair| merge(pair[0], pair[1])).collect();
        while let Some((place, (priority, id))) =
            found.iter().copied().enumerate().min_by_key(|(_, (priority, _))| *priority)
            && priority < NONE.0
        {
            ids[place] = id;
            ids.remove(place + 1);
            found.remove(place);
            if place > 0 {
                found[place - 1] = merge(ids[place - 1], id);
            }
            if place < found.len() {
                found[place] = merge(id, ids[place + 1]);
            }
        }
        ids
    }
}

/// The model of byte pairs.
pub(super) fn bpe(tokenizer: &tokenizers::Tokenizer) -> Option<&BPE> {
    match tokenizer.get_model() {
        ModelWrapper::BPE(model) => Some(model),
        _ => None,
    }
}

/// The added tokens that are searched in the text as it is, and in the normalized one; `None` if one depends on its neighbors.
fn added(tokenizer: &tokenizers::Tokenizer, normalizes: bool) -> Option<[AddedTokens; 2]> {
    let mut lists = [Vec::new(), Vec::new()];
    for (id, token) in tokenizer.get_added_vocabulary().get_added_tokens_decoder() {
        let is_changed = normalizes && token.normalized && !token.content.chars().all(is_composed);
        if token.single_word || token.lstrip || token.rstrip || is_changed {
            return None;
        }
        let (text, is_special) = (token.content.clone(), token.special);
        lists[usize::from(token.normalized)].push(AddedToken { text, id: *id, is_special });
    }
    Some(lists.map(AddedTokens::new))
}

/// The merges of a `tokenizer.json`, which the library keeps to itself.
fn merges(file: &[u8], vocabulary: &HashMap<String, u32>) -> Option<HashMap<Pair, (u32, u32), PairHashing>> {
    #[derive(Deserialize)]
    struct File {
        model: Merges,
    }
    #[derive(Deserialize)]
    struct Merges {
        merges: Vec<Merge>,
    }
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Merge {
        Pair(String, String),
        Text(String),
    }
    let file: File = serde_json::from_slice(file).ok()?;
    let pair = |(priority, merge): (usize, &Merge)| {
        let (left, right) = match merge {
            Merge::Pair(left, right) => (left.as_str(), right.as_str()),
            Merge::Text(text) => text.split_once(' ')?,
        };
        let ids = (*vocabulary.get(left)?, *vocabulary.get(right)?);
        Some((ids, (priority as u32, *vocabulary.get(&[left, right].concat())?)))
    };
    file.model.merges.iter().enumerate().map(pair).collect()
}

/// Whether the composed form keeps a character whatever its neighbors. Others may change.
fn is_composed(character: char) -> bool {
    matches!(
        character,
        '\0'..='\u{2ff}'
            | '\u{388}'..='\u{3ff}'
            | '\u{400}'..='\u{482}'
            | '\u{2002}'..='\u{2046}'
            | '\u{20a0}'..='\u{20cf}'
            | '\u{2190}'..='\u{2328}'
            | '\u{232b}'..='\u{27ff}'
            | '\u{3001}'..='\u{3029}'
            | '\u{3041}'..='\u{3096}'
            | '\u{30a1}'..='\u{30ff}'
            | '\u{4e00}'..='\u{9fff}'
            | '\u{ac00}'..='\u{d7a3}'
            | '\u{ff01}'..='\u{ff9d}'
            | '\u{1f300}'..='\u{1faff}'
    )
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;
    use tokenizers::normalizers::unicode::NFC;
    use tokenizers::{NormalizedString, Normalizer};

    use super::super::bpe::byte_level_json;
    use super::super::words::LLAMA3_PATTERN;
    use super::*;

    /// Tokenizers of the kinds that published models have, with few merges.
    fn tokenizers() -> Vec<(tokenizers::Tokenizer, ByteLevel)> {
        let merges = [
            ("Ġ", "t"),
            ("h", "e"),
            ("Ġt", "he"),
            ("a", "b"),
            ("ab", "ab"),
            ("b", "c"),
            ("a", "bc"),
            ("ab", "c"),
            ("1", "2"),
            ("Ã", "©"),
            ("Ċ", "Ċ"),
            ("ĠĠ", "ĠĠ"),
            ("Ġ", "Ġ"),
            ("é", "Ã"),
            ("'", "s"),
            ("abc", "abc"),
        ];
        let merges = merges.map(|(left, right)| (left.to_owned(), right.to_owned()));
        let json = byte_level_json(&["<|pad|>", "<|end|>", "<|endless|>"], &merges);
        let mut all = Vec::new();
        for pattern in [None, Some(LLAMA3_PATTERN.to_owned()), Some(r"\p{L}+|\s".to_owned())] {
            for ignores_merges in [false, true] {
                let mut value: serde_json::Value = serde_json::from_str(&json).unwrap();
                if let Some(pattern) = &pattern {
                    let split = json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
                    let mut bytes = value["pre_tokenizer"].clone();
                    bytes["use_regex"] = json!(false);
                    value["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [split, bytes]});
                    value["normalizer"] = json!({"type": "NFC"});
                }
                value["model"]["ignore_merges"] = json!(ignores_merges);
                value["added_tokens"][1]["normalized"] = json!(true);
                value["added_tokens"][2]["special"] = json!(false);
                // A token that no merge makes.
                value["model"]["vocab"]["Ġhello"] = json!(value["model"]["vocab"].as_object().unwrap().len());
                let file = serde_json::to_vec(&value).unwrap();
                let library = tokenizers::Tokenizer::from_bytes(&file).unwrap();
                let own = ByteLevel::of(&library, &file).expect("the tokenizer is encoded here");
                all.push((library, own));
            }
        }
        all
    }

    #[track_caller]
    fn check(library: &tokenizers::Tokenizer, own: &ByteLevel, text: &str) -> Result<bool, TestCaseError> {
        let expected = library.encode(text, false).unwrap();
        let (mut ids, mut ends, mut end) = (Vec::new(), Vec::new(), 0);
        let is_encoded = own
            .for_each(bpe(library).unwrap(), text, |id, length| {
                end += length;
                ids.push(id);
                ends.push(text.ceil_char_boundary(end));
            })
            .unwrap();
        if is_encoded {
            prop_assert_eq!(ids, expected.get_ids());
            let expected: Vec<usize> = expected.get_offsets().iter().map(|(_, end)| *end).collect();
            prop_assert_eq!(ends, expected);
        }
        Ok(is_encoded)
    }

    #[test]
    fn tokens_are_those_of_the_library() {
        let all = tokenizers();
        let text = r"([ ]{1,5}|(ab|bc|abc|the|é|hello){1,8}|[a-cé12]{1,6}|'s|<\|(pad|end|endless|endle)\|?>?|\n{1,3}|\PC){0,12}";
        let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(1500));
        runner
            .run(&text.prop_map(|text: String| text), |text| {
                all.iter().try_for_each(|(library, own)| check(library, own, &text).map(|_| ()))
            })
            .unwrap();
        for (library, own) in &all {
            for text in ["", " the the hello", &"abc".repeat(400), &" ".repeat(1000), &"漢字é".repeat(100)]
            {
                assert!(check(library, own, text).unwrap(), "{text}");
            }
            assert_eq!(check(library, own, "e\u{301}").unwrap(), !own.normalizes);
        }
    }

    #[test]
    fn composed_characters_stay() {
        let composed: Vec<char> = ('\0'..=char::MAX).filter(|character| is_composed(*character)).collect();
        let marks = ['\u{301}', '\u{3099}', '\u{1161}', '\u{11a8}'];
        assert!(marks.iter().all(|mark| !is_composed(*mark)));
        // Each follows itself and its neighbors.
        for text in
            [composed.iter().collect::<String>(), composed.iter().flat_map(|c| ['e', *c, *c]).collect()]
        {
            let mut normalized = NormalizedString::from(text.as_str());
            NFC.normalize(&mut normalized).unwrap();
            assert!(normalized.get() == text);
        }
    }

    #[test]
    fn other_tokenizers_are_left_to_the_library() {
        let json = byte_level_json(&["<|pad|>"], &[]);
        let is_left = |path: &str, value: serde_json::Value| {
            let mut file: serde_json::Value = serde_json::from_str(&json).unwrap();
            *file.pointer_mut(path).unwrap() = value;
            let file = serde_json::to_vec(&file).unwrap();
            ByteLevel::of(&tokenizers::Tokenizer::from_bytes(&file).unwrap(), &file).is_none()
        };
        assert!(!is_left("/normalizer", json!(null)));
        assert!(is_left("/normalizer", json!({"type": "NFKC"})));
        assert!(is_left("/model/dropout", json!(0.1)));
        assert!(is_left("/added_tokens/0/lstrip", json!(true)));
        assert!(is_left("/pre_tokenizer/add_prefix_space", json!(true)));
        assert!(is_left("/pre_tokenizer", json!({"type": "Whitespace"})));
        let truncation =
            json!({"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0});
        assert!(is_left("/truncation", truncation));
    }
}
