//! New instructions after the example of given ones (Self-Instruct, Wang et al., 2023).

use std::fmt::Write;

use crate::seeds::{Draws, key};

/// How new instructions are requested and chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct InstructionRules {
    /// The number of examples in a request.
    pub examples: usize,
    /// The most examples that are new instructions themselves.
    pub new_examples: usize,
    /// The ROUGE-L F-measure with a known instruction from which on a new one is a repetition.
    pub similarity: f64,
    /// The least and the most words of an instruction.
    pub words: [usize; 2],
    pub seed: u64,
}

impl Default for InstructionRules {
    /// The settings of Self-Instruct.
    fn default() -> Self {
        Self { examples: 8, new_examples: 2, similarity: 0.7, words: [3, 150], seed: 0 }
    }
}

/// The reason why an instruction is not new or not usable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Refused {
    /// It has too few or too many words.
    Length,
    /// It begins with a punctuation mark.
    Beginning,
    /// It is about something else than text.
    NotText,
    /// It resembles a known instruction.
    Similar,
}

impl Refused {
    /// The reason in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Length => "too short or too long",
            Self::Beginning => "begin with a punctuation mark",
            Self::NotText => "not about text",
            Self::Similar => "similar to known ones",
        }
    }
}

/// Words of tasks that a model of text cannot do.
const NOT_TEXT: [&str; 18] = [
    "image",
    "images",
    "graph",
    "graphs",
    "picture",
    "pictures",
    "photo",
    "photos",
    "map",
    "maps",
    "draw",
    "plot",
    "video",
    "videos",
    "audio",
    "music",
    "flowchart",
    "diagram",
];

/// The line before the examples.
const BEGIN: &str =
    "The following tasks for an assistant differ from each other in subject, form and wording.";

/// Known instructions, and new ones.
#[derive(Clone, Debug)]
pub struct InstructionPool {
    rules: InstructionRules,
    instructions: Vec<String>,
    /// The words of each instruction.
    words: Vec<Vec<String>>,
    num_given: usize,
}

impl InstructionPool {
    /// A pool with the given instructions.
    pub fn new(given: Vec<String>, rules: InstructionRules) -> Self {
        let words = given.iter().map(|text| words_of(text)).collect();
        Self { rules, num_given: given.len(), instructions: given, words }
    }

    /// The new instructions.
    pub fn new_instructions(&self) -> &[String] {
        &self.instructions[self.num_given..]
    }

    /// A request for further instructions: a list of examples and the number of the next one. Its examples follow from the
    /// seed, the round and the number of the request in its round.
    pub fn request(&self, round: u64, number: u64) -> String {
        let mut draws = Draws::new(key(&[self.rules.seed, round, number]));
        let (num_new, most) = (self.instructions.len() - self.num_given, self.rules.examples.max(1));
        let new = self.rules.new_examples.min(num_new).min(most - 1);
        let given = (most - new).min(self.num_given);
        let mut chosen: Vec<usize> = drawn(&mut draws, self.num_given, given);
        chosen.extend(drawn(&mut draws, num_new, new).into_iter().map(|index| self.num_given + index));
        let order = drawn(&mut draws, chosen.len(), chosen.len());
        let mut text = format!("{BEGIN}\n\n");
        for (place, index) in order.iter().enumerate() {
            let instruction = self.instructions[chosen[*index]].trim().replace('\n', " ");
            let _ = writeln!(text, "{}. {instruction}", place + 1);
        }
        let _ = write!(text, "{}.", chosen.len() + 1);
        text
    }

    /// The instructions in a model's continuation of a request. The last one of a continuation that reached its length is
    /// incomplete and left out.
    pub fn read(continuation: &str, is_complete: bool) -> Vec<String> {
        let mut found: Vec<String> = Vec::new();
        for line in continuation.lines() {
            match after_number(line) {
                Some(rest) => found.push(rest.trim().to_owned()),
                None => match found.last_mut() {
                    Some(last) => *last = format!("{last}\n{}", line.trim_end()),
                    None => found.push(line.trim().to_owned()),
                },
            }
        }
        if !is_complete {
            found.pop();
        }
        found.iter().map(|text| text.trim().to_owned()).filter(|text| !text.is_empty()).collect()
    }

    /// Adds a new instruction.
    ///
    /// # Errors
    /// The reason why it is refused.
    pub fn add(&mut self, instruction: &str) -> Result<(), Refused> {
        let words = words_of(instruction);
        let [least, most] = self.rules.words;
        if !(least..=most).contains(&words.len()) {
            return Err(Refused::Length);
        }
        if instruction.trim_start().starts_with(|first: char| first.is_ascii_punctuation()) {
            return Err(Refused::Beginning);
        }
        if words.iter().any(|word| NOT_TEXT.contains(&word.as_str())) {
            return Err(Refused::NotText);
        }
        if self.words.iter().any(|known| rouge(&words, known) >= self.rules.similarity) {
            return Err(Refused::Similar);
        }
        self.instructions.push(instruction.trim().to_owned());
        self.words.push(words);
        Ok(())
    }
}

/// Several of the numbers below `size`, each once, in a random order.
fn drawn(draws: &mut Draws, size: usize, count: usize) -> Vec<usize> {
    let mut numbers: Vec<usize> = (0..size).collect();
    for place in 0..count.min(size) {
        let other = place + draws.below((size - place) as u64) as usize;
        numbers.swap(place, other);
    }
    numbers.truncate(count);
    numbers
}

/// The text behind the number at the beginning of a line, such as `9. ` or `Task 9: `.
fn after_number(line: &str) -> Option<&str> {
    let line = line.trim_start();
    let line = line.strip_prefix("Task ").unwrap_or(line);
    let rest = line.trim_start_matches(|digit: char| digit.is_ascii_digit());
    if rest.len() == line.len() {
        return None;
    }
    rest.strip_prefix(['.', ':', ')'])
}

/// The words of a text in lower case, as ROUGE counts them.
fn words_of(text: &str) -> Vec<String> {
    let words = text.split(|letter: char| !letter.is_alphanumeric());
    words.filter(|word| !word.is_empty()).map(str::to_lowercase).collect()
}

/// The F-measure of ROUGE-L: the harmonic mean of the shares that the longest common subsequence has of both texts.
fn rouge(one: &[String], other: &[String]) -> f64 {
    if one.is_empty() || other.is_empty() {
        return 0.0;
    }
    let mut lengths = vec![0_usize; other.len() + 1];
    for word in one {
        let mut diagonal = 0;
        for (place, known) in other.iter().enumerate() {
            let above = lengths[place + 1];
            lengths[place + 1] = if word == known { diagonal + 1 } else { lengths[place].max(above) };
            diagonal = above;
        }
    }
    let common = lengths[other.len()] as f64;
    2.0 * common / (one.len() + other.len()) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool() -> InstructionPool {
        let given =
            ["Name three rivers in Europe.", "Translate the sentence into French.", "Sort these words."];
        InstructionPool::new(given.map(str::to_owned).to_vec(), InstructionRules::default())
    }

    #[test]
    fn similarity_is_that_of_rouge() {
        // Values of the Python package `rouge_score` 0.1.2, `rougeL`, without a stemmer.
        for (one, other, expected) in [
            ("Name three rivers in Europe.", "Name three rivers in Europe", 1.0),
            ("the cat sat on the mat", "the cat lay on a mat", 0.666_666_666_666_666_6),
            ("police killed the gunman", "the gunman killed police", 0.5),
            ("Name three rivers in Europe.", "Name five long rivers in Northern Asia!", 0.5),
            ("a b c", "d e", 0.0),
        ] {
            let found = rouge(&words_of(one), &words_of(other));
            assert!((found - expected).abs() < 1e-12, "{one:?}, {other:?}: {found}");
        }
    }

    #[test]
    fn requests_are_lists_of_examples() {
        let mut pool = pool();
        let request = pool.request(0, 0);
        assert_eq!(request, pool.request(0, 0));
        assert!((1..9).any(|number| pool.request(0, number) != request));
        assert!(request.starts_with(BEGIN) && request.ends_with("\n4."), "{request}");
        assert!(
            pool.instructions.iter().all(|instruction| request.contains(instruction.as_str())),
            "{request}"
        );
        pool.add("Explain why the sky looks blue at noon.").unwrap();
        let with_new = pool.request(1, 0);
        assert!(with_new.contains("the sky") && with_new.ends_with("\n5."), "{with_new}");
    }

    #[test]
    fn continuations_are_read() {
        let text = " Count the vowels.\n10. Write a poem\nabout rain.\n\n11. Unfin";
        let complete = ["Count the vowels.", "Write a poem\nabout rain.", "Unfin"];
        assert_eq!(InstructionPool::read(text, true), complete);
        assert_eq!(InstructionPool::read(text, false), complete[..2]);
        assert_eq!(
            InstructionPool::read("9. Repeat a word.\nTask 10: Add.", true),
            ["Repeat a word.", "Add."]
        );
        assert!(InstructionPool::read("", true).is_empty());
    }

    #[test]
    fn only_new_instructions_are_added() {
        let mut pool = pool();
        for (instruction, expected) in [
            ("Name three rivers in Asia.", Err(Refused::Similar)),
            ("Add.", Err(Refused::Length)),
            ("... and so on and on", Err(Refused::Beginning)),
            ("Draw a picture of a house.", Err(Refused::NotText)),
            ("Explain photosynthesis to a child.", Ok(())),
            ("Explain photosynthesis to a child!", Err(Refused::Similar)),
        ] {
            assert_eq!(pool.add(instruction), expected, "{instruction}");
        }
        assert_eq!(pool.new_instructions(), ["Explain photosynthesis to a child."]);
    }
}
