//! The rules that FineWeb adds (Penedo et al. 2024, section 3.6).

use serde::{Deserialize, Serialize};

use super::gopher::repeated;
use super::{Finding, over, under};
use crate::words::{ends_sentence, words};

/// Thresholds on the lines of a document.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FineWeb {
    /// The least share of lines that end with the end of a sentence.
    pub min_terminal_lines: f64,
    /// The most lines of at most `short_line` characters.
    pub max_short_lines: f64,
    pub short_line: usize,
    /// The most characters in lines that repeat an earlier one.
    pub max_duplicate_characters: f64,
    /// The most line ends for each word.
    pub max_line_ends_per_word: f64,
}

impl Default for FineWeb {
    fn default() -> Self {
        Self {
            min_terminal_lines: 0.12,
            max_short_lines: 0.67,
            short_line: 30,
            max_duplicate_characters: 0.01,
            max_line_ends_per_word: 0.3,
        }
    }
}

impl FineWeb {
    /// The rule that removes a document.
    pub fn check(&self, text: &str) -> Option<Finding> {
        let lines: Vec<&str> = text.split('\n').filter(|line| !line.trim().is_empty()).collect();
        if lines.is_empty() {
            return Some(Finding::new("empty", 0.0, 0.0));
        }
        let total = lines.len() as f64;
        let share = |is: &dyn Fn(&str) -> bool| lines.iter().filter(|line| is(line)).count() as f64 / total;
        under("terminal_lines", share(&|line| line.ends_with(ends_sentence)), self.min_terminal_lines)
            .or_else(|| {
                let is_short = |line: &str| line.chars().nth(self.short_line).is_none();
                over("short_lines", share(&is_short), self.max_short_lines)
            })
            .or_else(|| {
                let (_, _, characters) = repeated(lines.iter().copied());
                let length = text.chars().filter(|character| *character != '\n').count();
                over("duplicate_characters", characters as f64 / length as f64, self.max_duplicate_characters)
            })
            .or_else(|| {
                let ends = text.bytes().filter(|byte| *byte == b'\n').count();
                over("line_ends", ends as f64 / words(text).len() as f64, self.max_line_ends_per_word)
            })
    }
}
