//! Texts whose hidden states are pooled.

use super::{Piece, SequenceId, StepRow, Steps, Worker, row};
use crate::{EngineError, FinishReason, serve::AnswerEvent};

impl<S: Steps> Worker<S> {
    /// Whether the hidden states of a sequence are pooled.
    pub(super) fn pooling_of(&self, sequence: SequenceId) -> bool {
        self.requests[&self.answers[&sequence].request].accepted.request.pooling.is_some()
    }

    /// Reads pieces of texts, and reports the vectors of those that are complete.
    pub(super) fn pool(&mut self, pieces: &[Piece]) -> Result<(), EngineError> {
        let rows: Vec<StepRow<'_>> = pieces
            .iter()
            .map(|piece| {
                let sequence = self.scheduler.sequence(piece.sequence);
                row(sequence, piece.first..piece.first + piece.count)
            })
            .collect();
        let weights: Vec<Vec<f32>> = pieces
            .iter()
            .map(|piece| {
                let request = &self.requests[&self.answers[&piece.sequence].request].accepted.request;
                let pooling = request.pooling.expect("the piece is one of a text to pool");
                pooling.weights(piece.first, piece.count, request.prompt.len())
            })
            .collect();
        let sums = self.steps.pool(&rows, &weights)?;
        for (piece, sums) in pieces.iter().zip(sums) {
            let number = self.answers[&piece.sequence].request;
            let request = self.requests.get_mut(&number).expect("answers belong to requests");
            match piece.first {
                // A text that was put back is read again from its beginning.
                0 => request.pooled = sums,
                _ => request.pooled.iter_mut().zip(sums).for_each(|(sum, value)| *sum += value),
            }
            self.scheduler.has_read(*piece);
            let length = self.requests[&number].accepted.request.prompt.len();
            if piece.first + piece.count == length {
                self.report_pooled(piece.sequence, number);
            }
        }
        Ok(())
    }

    fn report_pooled(&mut self, sequence: SequenceId, number: u64) {
        let request = self.requests.get_mut(&number).expect("answers belong to requests");
        let values = std::mem::take(&mut request.pooled);
        if values.iter().any(|value| value.is_nan()) {
            let position = request.accepted.request.prompt.len();
            return self.fail(number, EngineError::NotANumber { position });
        }
        request.accepted.sender.send(AnswerEvent::Pooled { values });
        self.finish(sequence, FinishReason::Stop, None);
    }
}
