//! A small set of questions and answers that the program generates, for the quick start of fine-tuning.
//!
//! The questions ask to repeat or reverse three letters, so an answer follows from its question and from nothing else. A hash of
//! the answer decides whether a question is held out: no held-out answer occurs in the training set.

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
/// Questions, and the order of the letters in their answers.
const TASKS: &[(&str, [usize; 3])] = &[("Repeat {}", [0, 1, 2]), ("Reverse {}", [2, 1, 0])];

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
        let letter = |place: usize| char::from(b'a' + (random >> (8 * place)) as u8 % 26);
        let letters: [char; 3] = std::array::from_fn(letter);
        let (task, order) = TASKS[(random >> 32) as usize % TASKS.len()];
        let spelled = |letters: [char; 3]| letters.map(String::from).join(" ");
        let answer = spelled(order.map(|place| letters[place]));
        let question = task.replace("{}", &spelled(letters));
        let is_wanted = is_held_out(&answer) == (split == Split::Evaluation);
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

/// Writes questions with their right answers and a wrong answer to each as preference pairs, one JSON object with `prompt`,
/// `chosen` and `rejected` per line, atomically. A wrong answer has the letters in the other order, or another letter.
///
/// # Errors
/// The file cannot be written.
pub fn save_instruction_pairs(path: &Path, instructions: &[Instruction]) -> Result<()> {
    replace(path, |file| {
        for (index, instruction) in instructions.iter().enumerate() {
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
        for (task, _) in TASKS {
            let (start, _) = task.split_once("{}").unwrap();
            assert!(held_out.iter().any(|instruction| instruction.question.starts_with(start)));
        }
    }
}
