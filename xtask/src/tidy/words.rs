//! Phrases that the repository's prose avoids, in comments and in Markdown.
//!
//! The check covers comment lines and Markdown outside of code. It reads whole paragraphs, so a phrase is found across
//! a line break, and ignores code spans. Comments behind code on the same line and messages in string literals are not
//! read.

use std::collections::BTreeSet;

use super::{Finding, allowances};
use crate::repository::Repository;

/// Files with prose that is yet to be rewritten. The list may only shrink: a listed file without findings is a finding.
const ALLOWED: &str = include_str!("allowances/words.txt");
const ALLOWED_PATH: &str = "xtask/src/tidy/allowances/words.txt";

/// Phrases in lower case, with a remedy each.
const PHRASES: &[(&str, &str)] = &[
    ("what there", "name the things that exist"),
    ("what else", "name the other things"),
    ("of what", "name the thing"),
    ("that which", "name the thing"),
    ("whoever", "name the caller, the user or the thread"),
    ("asked for", "write `requested`, or say which key or argument requests it"),
    ("is asked", "write `requested`, or say who reads the value"),
    ("are asked", "write `requested`, or say who reads the value"),
    ("asks for nothing", "say that the value requests no feature"),
    ("means nothing", "write `has no effect`"),
    ("nothing asks", "say which code would request it"),
    ("is said", "say which text states it"),
    ("are said", "say which text states it"),
    ("told", "write `receives`, `distinguishes` or `reports`"),
    ("not there", "write `missing` or `absent`"),
    ("at hand", "say where it is: resident, cached, available"),
    ("so many", "give the number or its name"),
    ("likeliest", "write `most probable` or `greedy`"),
    ("dealt", "write `distributed` or `assigned`"),
    ("passed over", "write `skipped`"),
    ("heeded", "write `applies` or `is read`"),
    ("be it", "write `even if`"),
    ("as it were", "remove it"),
    ("besides.", "write `also`, or `in addition to` with its object"),
    ("besides,", "write `also`, or `in addition to` with its object"),
    ("besides;", "write `also`, or `in addition to` with its object"),
    ("besides:", "write `also`, or `in addition to` with its object"),
];

/// First words of a sentence, with a remedy each.
const BEGINNINGS: &[(&str, &str)] = &[
    ("What", "begin with a concrete noun instead of a clause"),
    ("Of", "begin with the subject of the sentence"),
    ("Besides", "write `Also`, or begin with the subject"),
];

/// Participles that an inversion puts first, as in "Written are".
const PARTICIPLES: &[&str] = &[
    "Built", "Drawn", "Found", "Given", "Kept", "Known", "Left", "Lost", "Made", "Meant", "Read", "Seen",
    "Sent", "Shown", "Spoken", "Taken", "Thrown", "Told", "Written",
];

/// Words that look like participles and are nouns.
const NOUNS: &[&str] = &["Bed", "Embed", "Feed", "Need", "Seed", "Shed", "Speed"];

/// The text of consecutive lines, with code spans blanked.
struct Paragraph {
    text: String,
    /// The offset in `text` at which each line begins, with the line's number.
    lines: Vec<(usize, usize)>,
}

impl Paragraph {
    fn line_at(&self, offset: usize) -> usize {
        self.lines.iter().rev().find(|(start, _)| *start <= offset).map_or(1, |(_, line)| *line)
    }
}

pub(super) fn check(repository: &Repository) -> Vec<Finding> {
    check_except(repository, ALLOWED)
}

/// Checks all files except the listed ones, and that each listed file still has findings.
fn check_except(repository: &Repository, allowed: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut unlisted: BTreeSet<&str> = allowances::entries(allowed).map(|(_, path)| path).collect();
    for file in &repository.files {
        let mut found = Vec::new();
        for paragraph in paragraphs(&file.path, &file.text) {
            check_phrases(&file.path, &paragraph, &mut found);
            check_beginnings(&file.path, &paragraph, &mut found);
        }
        // The findings of a listed file are not reported.
        if found.is_empty() || !unlisted.remove(file.path.as_str()) {
            findings.append(&mut found);
        }
    }
    for (line, path) in allowances::entries(allowed).filter(|(_, path)| unlisted.contains(path)) {
        findings.push(allowances::superfluous(ALLOWED_PATH, line, path));
    }
    findings
}

fn check_phrases(path: &str, paragraph: &Paragraph, findings: &mut Vec<Finding>) {
    let text = paragraph.text.to_ascii_lowercase();
    for (phrase, remedy) in PHRASES {
        for (start, _) in text.match_indices(phrase) {
            let before = text[..start].chars().next_back();
            let after = text[start + phrase.len()..].chars().next();
            let is_word = |character: Option<char>| character.is_some_and(char::is_alphanumeric);
            let continues = is_word(after) && phrase.ends_with(char::is_alphabetic);
            if !is_word(before) && !continues {
                let message = format!("the phrase \"{phrase}\": {remedy}");
                findings.push(Finding::new(path, paragraph.line_at(start), message));
            }
        }
    }
}

fn check_beginnings(path: &str, paragraph: &Paragraph, findings: &mut Vec<Finding>) {
    for (start, sentence) in sentences(&paragraph.text) {
        let mut words = sentence.split(' ').map(|word| word.trim_matches(['*', '_']));
        let first = words.next().unwrap_or_default();
        let second = words.next().unwrap_or_default();
        let remedy = if is_participle(first) && ["is", "are", "was", "were"].contains(&second) {
            Some("begin with the subject instead of the participle")
        } else {
            let of_list = BEGINNINGS.iter().find(|(word, _)| *word == first);
            of_list.filter(|_| !second.is_empty() && !sentence.ends_with('?')).map(|(_, remedy)| *remedy)
        };
        if let Some(remedy) = remedy {
            let message = format!("a sentence begins with \"{first} {second}\": {remedy}");
            findings.push(Finding::new(path, paragraph.line_at(start), message));
        }
    }
}

fn is_participle(word: &str) -> bool {
    let is_regular = word.starts_with(|first: char| first.is_ascii_uppercase()) && word.ends_with("ed");
    PARTICIPLES.contains(&word) || is_regular && !NOUNS.contains(&word)
}

/// The sentences and table cells of a paragraph with their offsets, without opening markup.
fn sentences(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let offset = text.len() - rest.len();
        let end = rest.match_indices(['.', '!', '?', '|']).map(|(index, _)| index + 1);
        let end = end.into_iter().find(|end| rest[*end..].starts_with([' ', ')'])).unwrap_or(rest.len());
        let sentence = &rest[..end];
        rest = &rest[end..];
        let trimmed = sentence.trim_start_matches([' ', ')', '(', '*', '_', '"', '\'']);
        Some((offset + sentence.len() - trimmed.len(), trimmed))
    })
}

/// The paragraphs of a file: of a Rust file its comments, of a Markdown file its text outside of code blocks.
fn paragraphs(path: &str, text: &str) -> Vec<Paragraph> {
    let is_rust = path.ends_with(".rs");
    if !is_rust && !path.ends_with(".md") {
        return Vec::new();
    }
    let mut paragraphs: Vec<Paragraph> = Vec::new();
    let (mut in_code, mut is_open) = (false, false);
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        let content = if is_rust { comment(line) } else { Some(line) };
        let Some(content) = content else {
            (in_code, is_open) = (false, false);
            continue;
        };
        if content.starts_with("```") {
            in_code = !in_code;
        }
        if in_code || content.is_empty() || content.starts_with("```") || content.starts_with('#') {
            is_open = false;
            continue;
        }
        let item = content.trim_start_matches(['-', '|', ' ']);
        let begins = item.len() < content.len();
        match paragraphs.last_mut() {
            Some(paragraph) if is_open && !begins => {
                paragraph.text.push(' ');
                paragraph.lines.push((paragraph.text.len(), index + 1));
                paragraph.text.push_str(item);
            }
            _ => paragraphs.push(Paragraph { text: item.to_owned(), lines: vec![(0, index + 1)] }),
        }
        is_open = true;
    }
    for paragraph in &mut paragraphs {
        blank_code(&mut paragraph.text);
    }
    paragraphs
}

/// The text of a line that is a comment.
fn comment(line: &str) -> Option<&str> {
    let text = line.strip_prefix("//")?;
    Some(text.trim_start_matches(['/', '!']).trim_start())
}

/// Replaces the contents of code spans by backticks, which keeps all offsets.
fn blank_code(text: &mut String) {
    let mut in_code = false;
    let blanked = text.bytes().map(|byte| {
        in_code ^= byte == b'`';
        if in_code { b'`' } else { byte }
    });
    // Bytes of a longer character are either all inside of a span or all outside.
    *text = String::from_utf8(blanked.collect()).expect("spans begin and end at ASCII characters");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check_text(path: &str, text: &str, expected: &[&str]) {
        let repository = Repository::of(&[(path, text)]);
        let findings: Vec<_> = check_except(&repository, "").iter().map(ToString::to_string).collect();
        let matches = findings.len() == expected.len()
            && findings.iter().zip(expected).all(|(found, start)| found.starts_with(start));
        assert!(matches, "{findings:#?}");
    }

    #[test]
    fn phrases_are_found_in_prose_alone() {
        check_text("a.md", "It takes what there is.", &["a.md:1: the phrase \"what there\""]);
        check_text(
            "a.rs",
            "/// It takes what\n/// there is.\nfn a() {}",
            &["a.rs:1: the phrase \"what there\""],
        );
        check_text("a.rs", "// One.\n// Two are\n//   told.\n", &["a.rs:3: the phrase \"told\""]);
        check_text("a.md", "```\nwhat there is\n```\n`what there is`, untold, toldest\n", &[]);
        check_text("a.rs", "let a = \"what there is\";\n", &[]);
        check_text("a.py", "# what there is\n", &[]);
    }

    #[test]
    fn adverbs_are_found_and_prepositions_are_not() {
        check_text("a.md", "It prints the sum besides.", &["a.md:1: the phrase \"besides.\""]);
        check_text("a.md", "It prints two sums besides the mean.", &[]);
    }

    #[test]
    fn beginnings_of_sentences_are_found() {
        let clause = "a.md:1: a sentence begins with \"What a\"";
        check_text("a.md", "What a step takes is printed.", &[clause]);
        check_text("a.md", "One. *What a* step takes is printed.", &[clause]);
        check_text("a.md", "What a step takes is printed. Two?", &[clause]);
        check_text("a.md", "What is a step? It prints what a step takes.", &[]);
        check_text("a.md", "| a | Of a run the newest |", &["a.md:1: a sentence begins with \"Of a\""]);
        check_text("a.md", "Printed are sums.", &["a.md:1: a sentence begins with \"Printed are\""]);
        check_text("a.md", "Told are sums.", &["a.md:1: the phrase \"told\"", "a.md:1: a sentence begins"]);
        check_text("a.md", "Speed is measured. Unused code is removed.", &[]);
    }

    #[test]
    fn lists_only_shrink() {
        let files = [("a.md", "What there is.\n"), ("b.md", "Sums.\n")];
        let check = |allowed: &str| -> Vec<String> {
            let findings = check_except(&Repository::of(&files), allowed);
            findings.iter().map(|finding| format!("{}:{}", finding.path, finding.line)).collect()
        };
        assert_eq!(check(""), ["a.md:1", "a.md:1"]);
        assert_eq!(check("# Comment.\na.md\n"), Vec::<String>::new());
        assert_eq!(check("a.md\nb.md\nc.md\n"), [format!("{ALLOWED_PATH}:2"), format!("{ALLOWED_PATH}:3")]);
    }
}
