//! Batches whose answers the model in training gives itself.

use crate::{
    Batch,
    batch::{
        TextRows,
        arrays::{INPUTS, INPUTS_SEGMENTATION, TARGETS, TARGETS_SEGMENTATION},
    },
    random::{key, uniform},
};

/// The steps in which a student answers prompts itself, and the sampling of its answers. Both follow from the seed and the
/// step, so that resuming is exact.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StudentAnswers {
    /// The share of steps.
    pub share: f64,
    /// 0 selects the most probable token.
    pub temperature: f64,
    /// The most tokens of an answer.
    pub max_tokens: usize,
    pub seed: u64,
}

impl StudentAnswers {
    /// Whether the student answers in `step`.
    pub fn is_due(&self, step: u64) -> bool {
        uniform(key(&[self.seed, step, 0])) < self.share
    }

    /// The seed of the answers of `step`.
    pub fn sampling_seed(&self, step: u64) -> u64 {
        key(&[self.seed, step, 1])
    }
}

/// The prompts of a batch of conversations, each alone in its row: all tokens before the last answer. Rows without an answer
/// have an empty prompt.
///
/// # Panics
/// The batch does not consist of rows of text.
pub fn prompts(batch: &Batch) -> Vec<Vec<u32>> {
    let rows = rows(batch, INPUTS).zip(rows(batch, TARGETS_SEGMENTATION));
    let prompt = |(inputs, trained): (&[i32], &[i32])| -> Vec<u32> {
        let Some(last) = trained.iter().rposition(|segment| *segment != 0) else { return Vec::new() };
        let before = trained[..last].iter().rposition(|segment| *segment == 0);
        let first = before.map_or(0, |before| before + 1);
        inputs[..=first].iter().map(|token| token.cast_unsigned()).collect()
    };
    rows.map(prompt).collect()
}

/// The last target of each row that has a loss.
pub fn last_targets(batch: &Batch) -> Vec<u32> {
    let rows = rows(batch, TARGETS).zip(rows(batch, TARGETS_SEGMENTATION));
    let last = |(targets, trained): (&[i32], &[i32])| {
        trained.iter().rposition(|segment| *segment != 0).map(|last| targets[last].cast_unsigned())
    };
    rows.filter_map(last).collect()
}

/// The batch with other answers to its [`prompts`]. A row whose answer is empty keeps its own. Padding is `pad`.
pub fn with_answers(batch: &Batch, prompts: &[Vec<u32>], answers: &[Vec<u32>], pad: u32) -> Batch {
    let length = batch.integers(INPUTS).len() / batch.rows.max(1);
    let mut made = TextRows::padding(batch.rows, 1, length, pad.cast_signed());
    for row in 0..batch.rows {
        let (prompt, answer) = (&prompts[row], &answers[row]);
        let of_row = |name: &str| &batch.integers(name)[row * length..][..length];
        if answer.is_empty() {
            let (inputs, targets) = (of_row(INPUTS), of_row(TARGETS));
            let present = of_row(INPUTS_SEGMENTATION).iter().filter(|segment| **segment != 0).count();
            let tokens: Vec<i32> =
                inputs[..present].iter().chain(targets[..present].last()).copied().collect();
            let trained = of_row(TARGETS_SEGMENTATION);
            made.write_segment((row, 0), 0, 1, &tokens, |offset| trained[offset] != 0);
            continue;
        }
        let tokens: Vec<i32> = prompt.iter().chain(answer).map(|token| token.cast_signed()).collect();
        let tokens = &tokens[..tokens.len().min(length + 1)];
        made.write_segment((row, 0), 0, 1, tokens, |offset| offset + 1 >= prompt.len());
    }
    made.into_batch()
}

fn rows<'a>(batch: &'a Batch, name: &str) -> impl Iterator<Item = &'a [i32]> {
    let values = batch.integers(name);
    values.chunks((values.len() / batch.rows.max(1)).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A row of tokens, with a loss for those from `first` on.
    fn row(rows: &mut TextRows, row: usize, tokens: &[i32], trained: impl Fn(usize) -> bool) {
        rows.write_segment((row, 0), 0, 1, tokens, trained);
    }

    #[test]
    fn answers_replace_the_last_ones() {
        let mut given = TextRows::padding(4, 1, 6, 0);
        row(&mut given, 0, &[1, 2, 3, 4, 5], |offset| offset >= 2);
        // Two answers, of which the second is replaced.
        row(&mut given, 1, &[1, 2, 3, 4, 5, 6], |offset| [0, 3].contains(&offset));
        row(&mut given, 2, &[7, 8, 9], |offset| offset == 1);
        let batch = given.into_batch();
        let found = prompts(&batch);
        assert_eq!(found, [vec![1, 2, 3], vec![1, 2, 3, 4], vec![7, 8], vec![]]);
        assert_eq!(last_targets(&batch), [5, 5, 9]);
        let answers = [vec![9, 9], vec![8, 7, 6, 5, 4], vec![], vec![]];
        let made = with_answers(&batch, &found, &answers, 0);
        let mut expected = TextRows::padding(4, 1, 6, 0);
        row(&mut expected, 0, &[1, 2, 3, 9, 9], |offset| offset >= 2);
        row(&mut expected, 1, &[1, 2, 3, 4, 8, 7, 6], |offset| offset >= 3);
        row(&mut expected, 2, &[7, 8, 9], |offset| offset == 1);
        assert_eq!(made, expected.into_batch());
    }

    #[test]
    fn steps_are_drawn_by_their_share() {
        let steps = |share: f64, seed: u64| -> Vec<bool> {
            let answers = StudentAnswers { share, temperature: 1.0, max_tokens: 1, seed };
            (0..1000).map(|step| answers.is_due(step)).collect()
        };
        let count = |steps: &[bool]| steps.iter().filter(|is_due| **is_due).count();
        assert_eq!((count(&steps(0.0, 1)), count(&steps(1.0, 1))), (0, 1000));
        assert!((250..350).contains(&count(&steps(0.3, 1))), "{}", count(&steps(0.3, 1)));
        assert_eq!(steps(0.3, 1), steps(0.3, 1));
        assert_ne!(steps(0.3, 1), steps(0.3, 2));
    }
}
