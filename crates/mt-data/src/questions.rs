//! Questions of arithmetic that the program generates, for the quick start of reinforcement learning.
//!
//! The questions ask for the largest of three different digits. A model that has learned to repeat letters
//! ([`crate::instructions`]) does not know the answers, but gives right ones now and then. The set of the digits decides whether
//! a question is held out, so that no held-out question has the digits of one in training.

use std::{collections::HashSet, io::Write, path::Path};

use serde_json::json;

use crate::{error::Result, files::replace, instructions::Instruction, random::key, repository::Split};

/// The number of questions in the training set and in the held-out set.
const TRAINING: usize = 500;
const HELD_OUT: usize = 100;
/// One set of digits of this many is held out.
const HELD_OUT_SHARE: u64 = 6;

/// The questions of a split, each once. They are always the same.
pub fn questions(split: Split) -> Vec<Instruction> {
    let wanted = match split {
        Split::Train => TRAINING,
        Split::Evaluation => HELD_OUT,
    };
    let (mut seen, mut chosen) = (HashSet::new(), Vec::with_capacity(wanted));
    // There are 720 questions, so that draws find most of them soon.
    for index in 0..100 * TRAINING as u64 {
        if chosen.len() == wanted {
            break;
        }
        let random = key(&[u64::from_le_bytes(*b"question"), index]);
        let digits: [u8; 3] = std::array::from_fn(|place| (random >> (16 * place)) as u8 % 10);
        let mut sorted = digits;
        sorted.sort_unstable();
        let is_distinct = sorted[0] < sorted[1] && sorted[1] < sorted[2];
        let is_held_out = key(&sorted.map(u64::from)).is_multiple_of(HELD_OUT_SHARE);
        if is_distinct && is_held_out == (split == Split::Evaluation) && seen.insert(digits) {
            let [a, b, c] = digits;
            chosen.push(Instruction {
                question: format!("Largest of {a} {b} {c}"),
                answer: sorted[2].to_string(),
            });
        }
    }
    chosen
}

/// Writes questions as prompts with their answers, one JSON object with `prompt` and `answer` per line, atomically.
///
/// # Errors
/// The file cannot be written.
pub fn save_prompts(path: &Path, questions: &[Instruction]) -> Result<()> {
    replace(path, |file| {
        for Instruction { question, answer } in questions {
            let prompt = json!([{"role": "user", "content": question}]);
            writeln!(file, "{}", json!({"prompt": prompt, "answer": answer}))?;
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn held_out_questions_have_digits_of_their_own() {
        let of = |split| -> (Vec<Instruction>, HashSet<Vec<char>>) {
            let made = questions(split);
            let digits = |made: &Instruction| {
                let mut digits: Vec<char> = made.question.chars().filter(char::is_ascii_digit).collect();
                digits.sort_unstable();
                assert_eq!(made.answer, digits[2].to_string(), "{made:?}");
                digits
            };
            let sets = made.iter().map(digits).collect();
            (made, sets)
        };
        let ((train, one), (held_out, other)) = (of(Split::Train), of(Split::Evaluation));
        assert_eq!((train.len(), held_out.len()), (TRAINING, HELD_OUT));
        assert!(one.is_disjoint(&other) && other.len() > 10, "{}", other.len());
        assert_eq!(train, questions(Split::Train));
    }
}
