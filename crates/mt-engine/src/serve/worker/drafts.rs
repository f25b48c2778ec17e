//! Answers whose next tokens are drafted and verified together.

use super::{SequenceId, StepRow, Steps, Worker, choices, row};
use crate::{
    EngineError,
    serve::{ngrams::drafts_from_text, speculation::SpeculationMethod, steps::Drafts},
};

impl<S: Steps> Worker<S> {
    /// Runs a step that verifies the drafts of sequences and chooses a token behind those that are accepted.
    pub(super) fn verify(&mut self, ids: &[SequenceId]) -> Result<(), EngineError> {
        if ids.is_empty() {
            return Ok(());
        }
        let last = |id: &SequenceId| {
            let sequence = self.scheduler.sequence(*id);
            row(sequence, sequence.cached..sequence.cached + 1)
        };
        let rows: Vec<StepRow<'_>> = ids.iter().map(last).collect();
        let drafts = |id: &SequenceId| match self.answers[id].drafts.as_slice() {
            [] => Drafts::Own(self.scheduler.sequence(*id).num_drafts),
            drafts => Drafts::Tokens(drafts),
        };
        let drafts: Vec<Drafts<'_>> = ids.iter().map(drafts).collect();
        let choices = choices(&self.requests, &self.answers, ids);
        let chosen = self.steps.verify(&rows, &drafts, &choices)?;
        self.shared.count(|metrics| {
            for (drafts, tokens) in drafts.iter().zip(&chosen) {
                metrics.count_drafts(drafts.count(), tokens.len() - 1);
            }
        });
        let mut drafted = self.steps.take_drafts().into_iter();
        for (id, tokens) in ids.iter().zip(chosen) {
            for token in tokens {
                // An answer may end before the last accepted token.
                if self.answers.contains_key(id) {
                    self.shared.count(|metrics| metrics.generated_tokens += 1);
                    self.has_started(*id);
                    self.receive(*id, token)?;
                }
            }
            self.draft(*id, drafted.next().unwrap_or_default());
        }
        Ok(())
    }

    /// Prepares the drafts that the next step verifies for a sequence: `drafted` ones, or those of its own text.
    pub(super) fn draft(&mut self, id: SequenceId, drafted: Vec<u32>) {
        let Some(speculation) = &self.options.speculation else { return };
        let Some(answer) = self.answers.get_mut(&id) else { return };
        self.scheduler.roll_back(id);
        let request = &self.requests[&answer.request];
        // A search chooses among all texts.
        if request.search.is_some() {
            return;
        }
        // The last token of an answer is chosen behind the drafts. Filters know the next token alone.
        let most = speculation.num_tokens.min(request.limit - answer.num_tokens - 1);
        let is_free =
            answer.filter.is_none() && answer.num_tokens >= request.accepted.request.limits.min_tokens;
        let most = if is_free { most } else { 0 };
        let num_choices = self.options.num_choices;
        let text = &self.scheduler.sequence(id).tokens;
        answer.drafts = match speculation.method {
            SpeculationMethod::NGrams { shortest, longest } => {
                let drafts = drafts_from_text(text, shortest, longest, most).iter().copied();
                // Prompts may have tokens that answers cannot have.
                drafts.take_while(|token| (*token as usize) < num_choices).collect()
            }
            _ => drafted.into_iter().take(most).collect(),
        };
        let num_drafts = match speculation.method {
            SpeculationMethod::Model(_) => most,
            _ => answer.drafts.len(),
        };
        let rest = request.limit - answer.num_tokens - 1 - num_drafts;
        self.scheduler.set_drafts(id, num_drafts, self.options.num_ahead().min(rest));
    }
}
