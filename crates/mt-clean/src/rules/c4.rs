//! The rules of C4 (Raffel et al. 2020, section 2.2, and the program that made it).

use std::sync::LazyLock;

use regex::Regex;
use serde::{Deserialize, Serialize};

use super::{Finding, under};
use crate::words::{lines, sentences};

static CITATION: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(r"\[[0-9]*\]|\[edit\]|\[citation needed\]").expect("the pattern is well-formed")
});

const POLICIES: [&str; 6] =
    ["terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies"];

/// Lines without the end of a sentence, too short ones and notices are removed from documents; documents with few sentences
/// and pages of code are removed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct C4 {
    pub min_sentences: usize,
    pub min_words_per_line: usize,
    pub max_word_length: usize,
    /// Whether lines must end with `.`, `?`, `!` or a quotation mark.
    pub needs_terminal_marks: bool,
    /// Whether marks such as `[1]` and `[edit]` are removed.
    pub removes_citations: bool,
    pub removes_lorem_ipsum: bool,
    pub removes_javascript_lines: bool,
    pub removes_curly_brackets: bool,
    pub removes_policy_lines: bool,
}

impl Default for C4 {
    fn default() -> Self {
        Self {
            min_sentences: 5,
            min_words_per_line: 3,
            max_word_length: 1000,
            needs_terminal_marks: true,
            removes_citations: true,
            removes_lorem_ipsum: true,
            removes_javascript_lines: true,
            removes_curly_brackets: true,
            removes_policy_lines: true,
        }
    }
}

impl C4 {
    /// The text with the lines that remain, or the rule that removes the document.
    ///
    /// # Errors
    /// The rule.
    pub fn apply(&self, text: &str) -> Result<String, Finding> {
        let (mut kept, mut count) = (String::with_capacity(text.len()), 0);
        for line in lines(text) {
            let trimmed = line.trim();
            let (mut num_words, mut is_long) = (0, false);
            for word in trimmed.split_whitespace() {
                num_words += 1;
                is_long |= word.len() > self.max_word_length && word.chars().count() > self.max_word_length;
            }
            if is_long {
                continue;
            }
            let line = match self.removes_citations && trimmed.contains('[') {
                true => CITATION.replace_all(trimmed, ""),
                false => trimmed.into(),
            };
            let ends = line.ends_with(['.', '?', '!', '"', '\'']) && !line.ends_with("...");
            if self.needs_terminal_marks && !ends || num_words < self.min_words_per_line {
                continue;
            }
            let lower = line.to_lowercase();
            if self.removes_lorem_ipsum && lower.contains("lorem ipsum") {
                return Err(Finding::new("lorem_ipsum", 1.0, 0.0));
            }
            if self.removes_javascript_lines && lower.contains("javascript") {
                continue;
            }
            if self.removes_curly_brackets && line.contains('{') {
                return Err(Finding::new("curly_bracket", 1.0, 0.0));
            }
            if self.removes_policy_lines && POLICIES.iter().any(|policy| lower.contains(policy)) {
                continue;
            }
            count += sentences(&line);
            if !kept.is_empty() {
                kept.push('\n');
            }
            kept.push_str(&line);
        }
        match under("too_few_sentences", count as f64, self.min_sentences as f64) {
            Some(finding) => Err(finding),
            None => Ok(kept.trim().to_owned()),
        }
    }
}
