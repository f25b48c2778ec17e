//! Phrases that the repository's prose avoids, and words that have one meaning in it.
//!
//! The check covers comments, messages and Markdown. It reads whole paragraphs, so a phrase is found across a line
//! break, and ignores code spans.

use std::collections::BTreeSet;

use super::{
    Finding, allowances,
    prose::{Paragraph, paragraphs},
};
use crate::repository::Repository;

/// Files with prose that is yet to be rewritten. The list may only shrink: a listed file without findings is a finding.
const ALLOWED: &str = include_str!("allowances/words.txt");
/// This file, whose literals are the phrases.
const OWN_PATH: &str = "xtask/src/tidy/words.rs";
const ALLOWED_PATH: &str = "xtask/src/tidy/allowances/words.txt";

/// The remedy for `source` as a directory of weights.
const WEIGHTS: &str = "write `path`, `checkpoint` or `published model`: sources hold documents or code, and encoders read \
                       them";

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
    // Kernels are programs for a processor, activations are tensors, and plans are those of runs.
    ("published kernel", "write `weight`: kernels are programs for a processor"),
    ("published kernels", "write `weights`: kernels are programs for a processor"),
    ("router's kernel", "write `weight`: kernels are programs for a processor"),
    ("kernel's input axes", "write `weight`: kernels are programs for a processor"),
    ("kernel's output axes", "write `weight`: kernels are programs for a processor"),
    ("kernel of a linear map", "write `weight`: kernels are programs for a processor"),
    ("kernel of a convolution", "write `filter`: kernels are programs for a processor"),
    ("kernel of a depthwise", "write `filter`: kernels are programs for a processor"),
    ("kernels of depthwise", "write `filters`: kernels are programs for a processor"),
    ("kernel for each convolution", "write `filter`: kernels are programs for a processor"),
    ("convolutions in one kernel", "write `filter`: kernels are programs for a processor"),
    ("blockwise kernel", "write `blockwise attention`: kernels are programs for a processor"),
    ("convolution kernel", "write `filter`: kernels are programs for a processor"),
    ("kernels of keys", "write `weights`: kernels are programs for a processor"),
    ("kernels of queries", "write `weights`: kernels are programs for a processor"),
    ("activation of gates", "write `activation function`: activations are tensors"),
    ("activation of the gate", "write `activation function`: activations are tensors"),
    ("plans the printing", "write `orders` or `groups`: a plan is that of a run"),
    ("plan of the graph", "name the steps: a plan is that of a run"),
    ("layout of layers", "write `order` or `segments`: a layout is that of data in memory or files"),
    ("layout of the mesh", "write `order of devices`: a layout is that of data in memory or files"),
    ("source of the loss", "name the objective: sources hold documents or code, and encoders read them"),
    ("source device", "write `sending device`: sources hold documents or code, and encoders read them"),
    ("source of the weights", WEIGHTS),
    ("source of its weights", WEIGHTS),
    ("source of the parameters", WEIGHTS),
    ("source of its parameters", WEIGHTS),
    ("source of the initial parameters", WEIGHTS),
    ("sources of a run", WEIGHTS),
    ("sources of the run", WEIGHTS),
    ("run's sources", WEIGHTS),
    ("source of keys", "write `the tensors from which keys are computed`"),
    ("attention kernel is dense", "write `attention is dense`: kernels are programs for a processor"),
    ("query kernel", "write `weight`: kernels are programs for a processor"),
    ("query kernels", "write `weights`: kernels are programs for a processor"),
    ("activation between", "write `activation function`: activations are tensors"),
    ("planned otherwise", "write `grouped` or `ordered`: a plan is that of a run"),
];

/// Phrases in which `part` and `parts` are good English or mean the mixer or feed-forward part of a layer, in lower
/// case. A phrase with a space at its end continues with any word.
const PARTS: &[&str] = &[
    "layer part",
    "layer parts",
    "feed-forward part",
    "feed-forward parts",
    "part of a layer",
    "parts of a layer",
    "parts of layers",
    "layer's part",
    "layer's parts",
    "take part",
    "takes part",
    "is part of ",
    "are part of ",
    "no part of ",
    "not part of ",
    "and part of ",
    // A line of `/proc/cpuinfo`.
    "cpu part",
];

/// Files about the parts of layers, in which the word needs no attribute.
const ABOUT_PARTS: &[&str] = &[
    "crates/mt-models/src/decoder/",
    "crates/mt-models/src/families/describe.rs",
    "crates/mt-models/src/families/names.rs",
    "crates/mt-models/src/layer_output.rs",
    "crates/mt-nn/src/hyper_connections.rs",
    "docs/decisions/0050-",
    "docs/decisions/0062-",
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

pub(super) fn check(repository: &Repository) -> Vec<Finding> {
    check_except(repository, ALLOWED)
}

/// Checks all files except the listed ones, and that each listed file still has findings.
fn check_except(repository: &Repository, allowed: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut unlisted: BTreeSet<&str> = allowances::entries(allowed).map(|(_, path)| path).collect();
    for file in repository.files.iter().filter(|file| file.path != OWN_PATH) {
        let mut found = Vec::new();
        for paragraph in paragraphs(&file.path, &file.text) {
            check_phrases(&file.path, &paragraph, &mut found);
            check_parts(&file.path, &paragraph, &mut found);
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

/// Finds other meanings of `part` than the part of a layer.
fn check_parts(path: &str, paragraph: &Paragraph, findings: &mut Vec<Finding>) {
    if ABOUT_PARTS.iter().any(|about| path.starts_with(about)) {
        return;
    }
    let text = paragraph.text.to_ascii_lowercase();
    let is_word = |character: char| character.is_alphanumeric() || "_-./".contains(character);
    for (start, _) in text.match_indices("part") {
        let end = start + if text[start..].starts_with("parts") { 5 } else { 4 };
        let is_whole = !text[..start].ends_with(is_word)
            && !text[end..].starts_with(|next: char| next.is_alphanumeric() || next == '_');
        let is_allowed = PARTS.iter().any(|phrase| {
            phrase.match_indices("part").any(|(offset, _)| {
                let begin = start.checked_sub(offset);
                begin.and_then(|begin| text.get(begin..)).is_some_and(|text| text.starts_with(phrase))
            })
        });
        if is_whole && !is_allowed {
            let message = "the word \"part\" for something other than a part of a layer: write `slice`, `shard`, \
                           `share`, `term`, `fragment` or another word for it";
            findings.push(Finding::new(path, paragraph.line_at(start), message));
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
        check_text("a.rs", "let a = \"what there is\";\n", &["a.rs:1: the phrase \"what there\""]);
        check_text("a.rs", "let a = 1; // what there is\n", &["a.rs:1: the phrase \"what there\""]);
        check_text("a.py", "# what there is\n", &[]);
    }

    #[test]
    fn words_have_one_meaning() {
        let check_word = |text: &str, phrase: &str| {
            check_text("a.md", text, &[&format!("a.md:1: the phrase \"{phrase}\"")]);
        };
        check_word("The source of its weights is a directory.", "source of its weights");
        check_word("Checkpoints hold query kernels.", "query kernels");
        check_word("It has an activation between layers.", "activation between");
        check_text(
            "a.md",
            "A data source, the source of an encoder, a CPU kernel, activations between layers.",
            &[],
        );
    }

    #[test]
    fn adverbs_are_found_and_prepositions_are_not() {
        check_text("a.md", "It prints the sum besides.", &["a.md:1: the phrase \"besides.\""]);
        check_text("a.md", "It prints two sums besides the mean.", &[]);
    }

    #[test]
    fn parts_are_those_of_layers() {
        let finding = "a.rs:1: the word \"part\"";
        check_text("a.rs", "// Copies a part of the array.\n", &[finding]);
        check_text("a.rs", "let a = b; // in two parts\n", &[finding]);
        check_text("a.rs", "let a = \"a part is missing\";\n", &[finding]);
        check_text("a.rs", "// The layer's parts take part; it is part of a sum.\n", &[]);
        check_text("a.rs", "// A partial sum, a `part`, `decoder/parts/a.rs` and decoder/parts/a.rs.\n", &[]);
        check_text("crates/mt-models/src/decoder/a.rs", "// Two parts.\n", &[]);
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
