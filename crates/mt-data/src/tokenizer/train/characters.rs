//! Words of a text for models over characters, and the characters that get pieces.

use std::collections::{BTreeMap, HashMap};

use rayon::prelude::*;

use super::super::bpe::next_chunk;
use super::{TrainingOptions, model_file, no_text, too_small};
use crate::error::Result;
use crate::watch::{Task, Watch};

/// SentencePiece's mark of a space.
pub(super) const SPACE: char = '\u{2581}';
/// Longer words are cut.
const MAX_WORD: usize = 256;

/// Words with the numbers of their occurrences.
pub(super) type Counts = BTreeMap<String, u64>;

/// Counts the words of documents, which `divide` passes to a function.
pub(super) fn count<I>(
    documents: I,
    divide: impl Fn(&str, &mut dyn FnMut(&str)) + Sync,
    watch: Watch<'_>,
) -> Result<Counts>
where
    I: IntoIterator<Item = Result<String>>,
{
    let (mut words, mut done, mut documents) = (Counts::new(), 0, documents.into_iter());
    loop {
        let chunk = next_chunk(&mut documents)?;
        if chunk.is_empty() {
            break;
        }
        let counted = chunk.par_iter().map(|text| {
            let mut counts = HashMap::<String, u64>::new();
            divide(text, &mut |word| match counts.get_mut(word) {
                Some(count) => *count += 1,
                None => _ = counts.insert(word.to_owned(), 1),
            });
            counts
        });
        for counts in counted.collect::<Vec<_>>() {
            for (word, count) in counts {
                *words.entry(word).or_insert(0) += count;
            }
        }
        done += chunk.iter().map(|text| text.len() as u64).sum::<u64>();
        watch.advance(Task::CountWords, done, None)?;
    }
    if words.is_empty() { Err(no_text()) } else { Ok(words) }
}

/// The class of a character: pieces hold one class, as SentencePiece's do.
fn class(character: char) -> u32 {
    match character as u32 {
        _ if !character.is_alphabetic() => 0,
        0x3040..=0x30ff | 0x3400..=0x4dbf | 0x4e00..=0x9fff | 0xf900..=0xfaff | 0x20000..=0x3134f => 1,
        0..0x250 | 0x1e00..=0x1eff => 2,
        code => 3 + (code >> 8),
    }
}

/// The words of a text for SentencePiece: a space before the text and each space is a mark, with which a word begins. Words
/// end where letters, other characters, or scripts begin.
pub(super) fn marked_words(text: &str, visit: &mut dyn FnMut(&str)) {
    let mut word = String::from(SPACE);
    let (mut of_word, mut length) = (None, 1);
    for character in text.chars() {
        let (is_space, own) = (character == ' ' || character == SPACE, class(character));
        let is_line = |character: char| character.is_control();
        let ends = is_space
            || of_word.is_some_and(|last: char| class(last) != own || is_line(last) != is_line(character))
            || length >= MAX_WORD;
        if ends && !word.is_empty() {
            visit(&word);
            word.clear();
            length = 0;
        }
        word.push(if is_space { SPACE } else { character });
        of_word = (!is_space).then_some(character);
        length += 1;
    }
    if !word.is_empty() {
        visit(&word);
    }
}

/// The most frequent characters, which make up a share of the text, in the order of their frequency.
pub(super) fn alphabet(words: &Counts, coverage: f64) -> Vec<char> {
    let mut counts = BTreeMap::<char, u64>::new();
    for (word, count) in words {
        for character in word.chars() {
            *counts.entry(character).or_insert(0) += count;
        }
    }
    let total: u64 = counts.values().sum();
    let mut characters: Vec<(char, u64)> = counts.into_iter().collect();
    characters.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    let mut covered = 0;
    let is_needed = |(_, count): &(char, u64)| {
        let is_needed = (covered as f64) < coverage * total as f64;
        covered += count;
        is_needed
    };
    characters.into_iter().take_while(is_needed).map(|(character, _)| character).collect()
}

/// The words of known characters: the others divide them.
pub(super) fn of_known(words: Counts, alphabet: &[char]) -> Counts {
    let known: std::collections::HashSet<char> = alphabet.iter().copied().collect();
    let mut divided = Counts::new();
    for (word, count) in words {
        for piece in word.split(|character| !known.contains(&character)).filter(|piece| !piece.is_empty()) {
            *divided.entry(piece.to_owned()).or_insert(0) += count;
        }
    }
    divided
}

/// The words of documents as SentencePiece divides them, without rare characters, and the characters that get pieces.
///
/// # Errors
/// The vocabulary has no room for the characters, or a document cannot be read.
pub(super) fn marked<I>(
    documents: I,
    options: &TrainingOptions,
    watch: Watch<'_>,
) -> Result<(Counts, Vec<char>)>
where
    I: IntoIterator<Item = Result<String>>,
{
    let words = count(documents, marked_words, watch)?;
    let mut characters = alphabet(&words, options.character_coverage);
    // Decoding needs the mark.
    if !characters.contains(&SPACE) {
        characters.push(SPACE);
    }
    let minimum = model_file::RESERVED + characters.len();
    if options.vocab_size < minimum {
        return Err(too_small(options, minimum));
    }
    let words = of_known(words, &characters);
    Ok((words, characters))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_begin_with_spaces_and_hold_one_class() {
        let mut words = Vec::new();
        marked_words("the mill's  3rd\nday 漢字", &mut |word| words.push(word.to_owned()));
        assert_eq!(words, ["▁the", "▁mill", "'", "s", "▁", "▁3", "rd", "\n", "day", "▁漢字"]);
    }

    #[test]
    fn rare_characters_divide_words() {
        let words = Counts::from([("aab".to_owned(), 10), ("axa".to_owned(), 1)]);
        assert_eq!(alphabet(&words, 1.0), ['a', 'b', 'x']);
        let common = alphabet(&words, 0.9);
        assert_eq!(common, ['a', 'b']);
        assert_eq!(of_known(words, &common), Counts::from([("a".to_owned(), 2), ("aab".to_owned(), 10)]));
    }
}
