//! Answers to other prompts, from which KTO estimates how far a model has moved (Ethayarajh et al., 2024).

use crate::batch::TextRows;
use crate::batch::arrays::{INPUTS, INPUTS_POSITION, INPUTS_SEGMENTATION, TARGETS, TARGETS_SEGMENTATION};
use crate::stream::Position;
use crate::{Batch, BatchSource, HeldOut, NamedArray, Result};

/// Training batches of judged answers, whose rows have a second sequence: the prompt with the answer of the row before it.
/// The first row takes the answer of the last one.
pub struct MismatchedSource<S>(S);

impl<S: BatchSource> MismatchedSource<S> {
    /// Adds the second sequences to batches of judged answers.
    pub fn new(inner: S) -> Self {
        Self(inner)
    }
}

impl<S: BatchSource> BatchSource for MismatchedSource<S> {
    fn next_batch(&mut self) -> Result<Option<Batch>> {
        Ok(self.0.next_batch()?.map(|batch| with_mismatched(&batch)))
    }

    fn set_batch_rows(&mut self, rows: usize) -> Result<()> {
        self.0.set_batch_rows(rows)
    }

    fn position(&self) -> Position {
        self.0.position()
    }

    fn seek(&mut self, position: &Position) -> Result<()> {
        self.0.seek(position)
    }
}

/// Held-out batches with second sequences, as [`MismatchedSource`] adds them.
pub struct MismatchedHeldOut(Box<dyn HeldOut>);

impl MismatchedHeldOut {
    /// Adds the second sequences to batches of judged answers.
    pub fn new(inner: Box<dyn HeldOut>) -> Self {
        Self(inner)
    }
}

impl HeldOut for MismatchedHeldOut {
    fn batches(&self) -> Result<Box<dyn Iterator<Item = Result<Batch>>>> {
        Ok(Box::new(self.0.batches()?.map(|batch| batch.map(|batch| with_mismatched(&batch)))))
    }
}

/// A row's prompt and answer.
struct Judged {
    prompt: Vec<i32>,
    answer: Vec<i32>,
}

/// The batch with a second sequence in each row that is not padding.
fn with_mismatched(batch: &Batch) -> Batch {
    let length = batch.integers(INPUTS).len() / batch.rows.max(1);
    let rows: Vec<(usize, Judged)> =
        (0..batch.rows).filter_map(|row| Some((row, judged(batch, row, length)?))).collect();
    let mut both = TextRows::padding(batch.rows, 2, length, 0);
    for (index, (row, own)) in rows.iter().enumerate() {
        let (_, before) = &rows[(index + rows.len() - 1) % rows.len()];
        for (sequence, answer) in [&own.answer, &before.answer].into_iter().enumerate() {
            let mut tokens = [&own.prompt[..], answer].concat();
            tokens.truncate(length + 1);
            let first = own.prompt.len();
            both.write_segment((*row, sequence), 0, 1, &tokens, |pair| pair + 1 >= first);
        }
    }
    let replaced = both.into_batch();
    let names = [INPUTS, INPUTS_POSITION, INPUTS_SEGMENTATION, TARGETS, TARGETS_SEGMENTATION];
    let of = |given: &NamedArray| match replaced.array(given.name).filter(|_| names.contains(&given.name)) {
        Some(values) => NamedArray { name: given.name, values: values.clone() },
        None => given.clone(),
    };
    Batch { arrays: batch.arrays.iter().map(of).collect(), ..*batch }
}

/// The prompt and the answer of a row; none if it is padding.
fn judged(batch: &Batch, row: usize, length: usize) -> Option<Judged> {
    let own = row * length..(row + 1) * length;
    let of = |name: &str| &batch.integers(name)[own.clone()];
    let filled = of(INPUTS_SEGMENTATION).iter().filter(|segment| **segment != 0).count();
    let first = of(TARGETS_SEGMENTATION).iter().position(|segment| *segment != 0)?;
    let (prompt, answer) = (of(INPUTS)[..=first].to_vec(), of(TARGETS)[first..filled].to_vec());
    Some(Judged { prompt, answer })
}
