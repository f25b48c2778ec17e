//! The rules of Gopher (Rae et al. 2021, Table A1 and Appendix A.1.1).

use serde::{Deserialize, Serialize};

use super::{Finding, over, under};
use crate::hashing::{Counts, Seen, hash, rolled};
use crate::words::{is_mark, lines, words};

/// Thresholds on repetition: shares of a document's lines, paragraphs and characters.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GopherRepetition {
    /// The most lines that repeat an earlier one, and the most characters of such lines.
    pub duplicate_lines: f64,
    pub duplicate_line_characters: f64,
    /// The same for paragraphs.
    pub duplicate_paragraphs: f64,
    pub duplicate_paragraph_characters: f64,
    /// For numbers of words, the most characters in the n-gram that occurs most often.
    pub top_n_grams: Vec<(usize, f64)>,
    /// For numbers of words, the most characters in n-grams that occurred before.
    pub duplicate_n_grams: Vec<(usize, f64)>,
}

impl Default for GopherRepetition {
    fn default() -> Self {
        Self {
            duplicate_lines: 0.3,
            duplicate_line_characters: 0.2,
            duplicate_paragraphs: 0.3,
            duplicate_paragraph_characters: 0.2,
            top_n_grams: vec![(2, 0.2), (3, 0.18), (4, 0.16)],
            duplicate_n_grams: vec![(5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.10)],
        }
    }
}

/// The numbers of repeated elements and of their characters.
pub(super) fn repeated<'a>(elements: impl Iterator<Item = &'a str>) -> (usize, usize, usize) {
    let (mut seen, mut total, mut count, mut characters) = (Seen::default(), 0, 0, 0);
    for element in elements {
        total += 1;
        if !seen.insert(hash(element)) {
            count += 1;
            characters += element.chars().count();
        }
    }
    (total, count, characters)
}

/// The pieces of a text between runs of at least `least` line ends.
fn divided(text: &str, least: usize) -> Vec<&str> {
    let (mut pieces, mut start, mut at) = (Vec::new(), 0, 0);
    let bytes = text.as_bytes();
    while at < bytes.len() {
        let run = bytes[at..].iter().take_while(|byte| **byte == b'\n').count();
        if run >= least {
            pieces.push(&text[start..at]);
            start = at + run;
        }
        at += run.max(1);
    }
    pieces.push(&text[start..]);
    pieces
}

impl GopherRepetition {
    /// The rule that removes a document.
    pub fn check(&self, text: &str) -> Option<Finding> {
        if text.is_empty() {
            return Some(Finding::new("empty", 0.0, 0.0));
        }
        let length = text.chars().count() as f64;
        let (total, count, characters) = repeated(divided(text.trim(), 2).into_iter());
        over("duplicate_paragraphs", count as f64 / total as f64, self.duplicate_paragraphs)
            .or_else(|| {
                let share = characters as f64 / length;
                over("duplicate_paragraph_characters", share, self.duplicate_paragraph_characters)
            })
            .or_else(|| {
                let (total, count, characters) = repeated(divided(text, 1).into_iter());
                over("duplicate_lines", count as f64 / total as f64, self.duplicate_lines).or_else(|| {
                    over(
                        "duplicate_line_characters",
                        characters as f64 / length,
                        self.duplicate_line_characters,
                    )
                })
            })
            .or_else(|| self.check_n_grams(text, length))
    }

    fn check_n_grams(&self, text: &str, length: f64) -> Option<Finding> {
        let words = words(text);
        let hashes: Vec<u64> = words.iter().map(|word| hash(word)).collect();
        // The characters of the words before each one.
        let mut before = Vec::with_capacity(words.len() + 1);
        before.push(0);
        for word in &words {
            before.push(before[before.len() - 1] + word.chars().count());
        }
        for (n, most) in &self.top_n_grams {
            if words.len() < *n || *n == 0 {
                continue;
            }
            let mut counts = Counts::default();
            let mut top = (0, 0);
            for (place, gram) in rolled(&hashes, *n).into_iter().enumerate() {
                counts.entry(gram).or_insert((0_usize, place)).0 += 1;
            }
            for (count, first) in counts.into_values() {
                // The first of those that are equally frequent, as in the reference.
                if count > top.0 || count == top.0 && first < top.1 {
                    top = (count, first);
                }
            }
            let characters = before[top.1 + n] - before[top.1] + n - 1;
            let found =
                over(TOP_NAMES[(*n).min(TOP_NAMES.len() - 1)], (characters * top.0) as f64 / length, *most);
            if found.is_some() {
                return found;
            }
        }
        for (n, most) in &self.duplicate_n_grams {
            if *n == 0 {
                continue;
            }
            let grams = rolled(&hashes, *n);
            let (mut seen, mut characters, mut place) = (Seen::default(), 0, 0);
            while place < grams.len() {
                if seen.insert(grams[place]) {
                    place += 1;
                } else {
                    characters += before[place + n] - before[place];
                    place += n;
                }
            }
            let name = DUPLICATE_NAMES[(*n).min(DUPLICATE_NAMES.len() - 1)];
            let found = over(name, characters as f64 / length, *most);
            if found.is_some() {
                return found;
            }
        }
        None
    }
}

const TOP_NAMES: [&str; 12] = [
    "top_n_gram",
    "top_1_gram",
    "top_2_gram",
    "top_3_gram",
    "top_4_gram",
    "top_5_gram",
    "top_6_gram",
    "top_7_gram",
    "top_8_gram",
    "top_9_gram",
    "top_10_gram",
    "top_n_gram",
];
const DUPLICATE_NAMES: [&str; 12] = [
    "duplicate_n_grams",
    "duplicate_1_grams",
    "duplicate_2_grams",
    "duplicate_3_grams",
    "duplicate_4_grams",
    "duplicate_5_grams",
    "duplicate_6_grams",
    "duplicate_7_grams",
    "duplicate_8_grams",
    "duplicate_9_grams",
    "duplicate_10_grams",
    "duplicate_n_grams",
];

/// Thresholds on the words and lines of a document.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GopherQuality {
    pub min_words: usize,
    pub max_words: usize,
    pub min_mean_word_length: f64,
    pub max_mean_word_length: f64,
    /// The most `#`, or ellipses, for each word.
    pub max_symbols_per_word: f64,
    pub max_bullet_lines: f64,
    pub max_ellipsis_lines: f64,
    /// The least share of words with a letter.
    pub min_alphabetic_words: f64,
    /// The least number of different stop words.
    pub min_stop_words: usize,
    pub stop_words: Vec<String>,
}

impl Default for GopherQuality {
    fn default() -> Self {
        let stop_words = ["the", "be", "to", "of", "and", "that", "have", "with"];
        Self {
            min_words: 50,
            max_words: 100_000,
            min_mean_word_length: 3.0,
            max_mean_word_length: 10.0,
            max_symbols_per_word: 0.1,
            max_bullet_lines: 0.9,
            max_ellipsis_lines: 0.3,
            min_alphabetic_words: 0.8,
            min_stop_words: 2,
            stop_words: stop_words.map(str::to_owned).to_vec(),
        }
    }
}

impl GopherQuality {
    /// The rule that removes a document.
    pub fn check(&self, text: &str) -> Option<Finding> {
        let words = words(text);
        let (mut count, mut characters, mut alphabetic) = (0_usize, 0_usize, 0_usize);
        for word in &words {
            if word.bytes().all(|byte| byte.is_ascii_alphabetic()) {
                (count, characters, alphabetic) = (count + 1, characters + word.len(), alphabetic + 1);
                continue;
            }
            alphabetic += usize::from(word.chars().any(char::is_alphabetic));
            if !word.chars().all(is_mark) {
                count += 1;
                characters += word.chars().count();
            }
        }
        let (total, mean) = (words.len() as f64, characters as f64 / count as f64);
        if count < self.min_words || words.is_empty() {
            return Some(Finding::new("too_few_words", count as f64, self.min_words as f64));
        }
        over("too_many_words", count as f64, self.max_words as f64)
            .or_else(|| under("short_words", mean, self.min_mean_word_length))
            .or_else(|| over("long_words", mean, self.max_mean_word_length))
            .or_else(|| over("hashes", text.matches('#').count() as f64 / total, self.max_symbols_per_word))
            .or_else(|| {
                let ellipses = text.matches("...").count() + text.matches('…').count();
                over("ellipses", ellipses as f64 / total, self.max_symbols_per_word)
            })
            .or_else(|| {
                let lines = lines(text);
                let share = |is: &dyn Fn(&str) -> bool| {
                    lines.iter().filter(|line| is(line)).count() as f64 / lines.len() as f64
                };
                let bullets = share(&|line| line.trim_start().starts_with(['•', '-']));
                let ellipses =
                    share(&|line| line.trim_end().ends_with("...") || line.trim_end().ends_with('…'));
                over("bullet_lines", bullets, self.max_bullet_lines)
                    .or_else(|| over("ellipsis_lines", ellipses, self.max_ellipsis_lines))
            })
            .or_else(|| under("alphabetic_words", alphabetic as f64 / total, self.min_alphabetic_words))
            .or_else(|| {
                let is_used = |stop: &&String| words.iter().any(|word| word == stop);
                let used = self.stop_words.iter().filter(is_used).count();
                under("stop_words", used as f64, self.min_stop_words as f64)
            })
    }
}
