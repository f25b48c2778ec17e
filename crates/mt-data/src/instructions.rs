//! A small set of questions and answers that the program generates, for the quick start of fine-tuning.
//!
//! The questions ask to repeat or reverse three letters, so an answer follows from its question and from nothing else. A hash of
//! the answer decides whether a question is held out: no held-out answer occurs in the training set. Further questions, which
//! are only trained, ask for the first or the last of three letters and digits: a model that reinforcement learning begins with
//! answers some questions about digits by one of them ([`crate::questions`]).

use std::collections::HashSet;
use std::io::Write;
use std::path::Path;

use serde_json::json;
use sha2::{Digest, Sha256};

use crate::error::Result;
use crate::files::replace;
use crate::random::key;
use crate::repository::Split;

/// A question and its only right answer.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Instruction {
    pub question: String,
    pub answer: String,
}

/// The number of questions in the training set and in the held-out set.
const TRAINING: usize = 20_000;
const HELD_OUT: usize = 128;
/// One of this many answers is held out.
const HELD_OUT_SHARE: u8 = 16;

/// A kind of question.
struct Task {
    question: &'static str,
    /// The symbols of the answer, by their places in the question.
    answer: &'static [usize],
    /// Letters, and with 36 also digits.
    num_symbols: u8,
    /// The number of such questions in eight of training.
    times: usize,
}

const TASKS: &[Task] = &[
    Task { question: "Repeat", answer: &[0, 1, 2], num_symbols: 26, times: 3 },
    Task { question: "Reverse", answer: &[2, 1, 0], num_symbols: 26, times: 3 },
    Task { question: "First of", answer: &[0], num_symbols: 36, times: 1 },
    Task { question: "Last of", answer: &[2], num_symbols: 36, times: 1 },
];

impl Task {
    /// Whether held-out questions ask it. Answers of one symbol cannot be kept from the training set.
    fn is_examined(&self) -> bool {
        self.answer.len() > 1
    }
}

/// The questions of a split, each once. They are always the same.
pub fn instructions(split: Split) -> Vec<Instruction> {
    let wanted = match split {
        Split::Train => TRAINING,
        Split::Evaluation => HELD_OUT,
    };
    let (mut seen, mut chosen) = (HashSet::new(), Vec::with_capacity(wanted));
    for index in 0.. {
        if chosen.len() == wanted {
            break;
        }
        let random = key(&[split as u64, index]);
        let mut asked = TASKS.iter().flat_map(|task| std::iter::repeat_n(task, task.times));
        let task = asked.nth((random >> 32) as usize % 8).expect("there are eight");
        let symbol = |place: usize| match (random >> (8 * place)) as u8 % task.num_symbols {
            letter @ 0..26 => char::from(b'a' + letter),
            digit => char::from(b'0' + digit - 26),
        };
        let spelled = |places: &[usize]| {
            let symbols: Vec<String> = places.iter().map(|place| symbol(*place).to_string()).collect();
            symbols.join(" ")
        };
        let answer = spelled(task.answer);
        let question = format!("{} {}", task.question, spelled(&[0, 1, 2]));
        let is_of_held_out = task.is_examined() && is_held_out(&answer);
        let is_wanted = is_of_held_out == (split == Split::Evaluation);
        if is_wanted && seen.insert(question.clone()) {
            chosen.push(Instruction { question, answer });
        }
    }
    chosen
}

fn is_held_out(answer: &str) -> bool {
    Sha256::digest(answer)[0].is_multiple_of(HELD_OUT_SHARE)
}

/// Writes questions and answers as conversations, one JSON object with `messages` per line, atomically.
///
/// # Errors
/// The file cannot be written.
pub fn save_instructions(path: &Path, instructions: &[Instruction]) -> Result<()> {
    replace(path, |file| {
        for Instruction { question, answer } in instructions {
            let messages = json!([
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]);
            writeln!(file, "{}", json!({ "messages": messages }))?;
        }
        Ok(())
    })
}

/// Writes questions whose answers have three letters, their right answers and a wrong answer to each as preference pairs, one
/// JSON object with `prompt`, `chosen` and `rejected` per line, atomically. A wrong answer has the letters in the other order,
/// or another letter.
///
/// # Errors
/// The file cannot be written.
pub fn save_instruction_pairs(path: &Path, instructions: &[Instruction]) -> Result<()> {
    replace(path, |file| {
        let of_letters = instructions.iter().filter(|instruction| instruction.answer.len() > 1);
        for (index, instruction) in of_letters.enumerate() {
            let message = |role: &str, content: &str| json!([{"role": role, "content": content}]);
            let pair = json!({
                "prompt": message("user", &instruction.question),
                "chosen": message("assistant", &instruction.answer),
                "rejected": message("assistant", &wrong_answer(&instruction.answer, index as u64)),
            });
            writeln!(file, "{pair}")?;
        }
        Ok(())
    })
}

/// The `index`-th wrong answer: the letters of the right one in the other order, or with one replaced.
fn wrong_answer(answer: &str, index: u64) -> String {
    let random = key(&[u64::from_le_bytes(*b"rejected"), index]);
    let reversed: String = answer.chars().rev().collect();
    if random.is_multiple_of(2) && reversed != answer {
        return reversed;
    }
    let place = 2 * ((random >> 8) % 3) as usize;
    let mut letters = answer.as_bytes().to_vec();
    let shift = 1 + (random >> 16) % 25;
    letters[place] = b'a' + (letters[place] - b'a' + shift as u8) % 26;
    letters.into_iter().map(char::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_answers_are_never_right() {
        for (index, instruction) in instructions(Split::Evaluation).iter().enumerate() {
            let wrong = wrong_answer(&instruction.answer, index as u64);
            assert_ne!(wrong, instruction.answer);
            assert_eq!(wrong.len(), instruction.answer.len());
        }
    }

    #[test]
    fn held_out_answers_do_not_occur_in_training() {
        let [training, held_out] = [Split::Train, Split::Evaluation].map(instructions);
        assert_eq!((training.len(), held_out.len()), (TRAINING, HELD_OUT));
        assert_eq!(instructions(Split::Evaluation), held_out);
        let known: HashSet<&str> = training.iter().map(|instruction| instruction.answer.as_str()).collect();
        assert!(held_out.iter().all(|instruction| !known.contains(instruction.answer.as_str())));
        let asked: HashSet<&Instruction> = training.iter().chain(&held_out).collect();
        assert_eq!(asked.len(), TRAINING + HELD_OUT);
        for task in TASKS {
            let asks = |instruction: &&Instruction| instruction.question.starts_with(task.question);
            assert_eq!(held_out.iter().any(|instruction| asks(&instruction)), task.is_examined());
            // Questions that were drawn before are left out, which are more often those about letters.
            let share = training.iter().filter(asks).count() as f64 / TRAINING as f64;
            assert!((share - task.times as f64 / 8.0).abs() < 0.05, "{}: {share}", task.question);
        }
        let digits = training.iter().filter(|instruction| instruction.answer.parse::<u8>().is_ok()).count();
        assert!(digits > TRAINING / 20, "{digits}");
    }
}
