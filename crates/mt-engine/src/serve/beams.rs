//! Beam search: several continuations of a text side by side, of which the most probable ones survive each token.
//!
//! The rules are those of transformers: as many candidates are ranked as leave enough of them when all stop tokens are
//! among them; a candidate that ends counts only if it is among the best `width`; and a finished text's score is the sum of
//! its log-probabilities, divided by a power of its length.

use super::{
    AnswerEvent, TokenLogProbability,
    scheduler::SequenceId,
    steps::Steps,
    worker::{Answer, Worker},
};
use crate::{EngineError, FinishReason};

/// A beam search.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BeamSearch {
    /// The number of texts that are continued side by side.
    pub width: usize,
    /// The power of its length by which the score of a text is divided. 0 compares sums of log-probabilities; larger values
    /// favor longer texts.
    pub length_penalty: f64,
    pub ending: BeamEnding,
}

/// When a beam search ends, if its texts do not reach their maximum length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BeamEnding {
    /// If the best text in progress would not be among the finished ones if it ended now.
    #[default]
    NoBetterNow,
    /// As soon as `width` texts are finished.
    EnoughFinished,
    /// If the best text in progress could not be among the finished ones at the maximum length, either.
    NoBetterEver,
}

impl BeamSearch {
    /// A search whose scores are means of log-probabilities.
    pub const fn new(width: usize) -> Self {
        Self { width, length_penalty: 1.0, ending: BeamEnding::NoBetterNow }
    }

    /// The number of most probable continuations that each text needs.
    pub(super) fn num_candidates(&self, num_stop_tokens: usize) -> usize {
        self.width * (1 + num_stop_tokens).max(2)
    }
}

/// A text, as far as it differs from the prompt.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Text {
    pub tokens: Vec<TokenLogProbability>,
    /// The sum of log-probabilities, or a finished text's score.
    pub score: f32,
    /// Whether it ends with a stop token, which is not among its tokens.
    pub is_stopped: bool,
}

/// The texts of a search.
#[derive(Clone, Debug)]
pub(super) struct Beams {
    search: BeamSearch,
    /// The maximum number of tokens.
    limit: usize,
    /// The number of most probable tokens to report beside each token.
    num_top: usize,
    length: usize,
    /// In descending order of scores.
    pub running: Vec<Text>,
    finished: Vec<Text>,
}

/// A text that goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Survivor {
    /// Its text before the last token, by its place among those that ran.
    pub parent: usize,
    pub token: u32,
}

impl Beams {
    pub fn new(search: BeamSearch, limit: usize, num_top: usize) -> Self {
        Self { search, limit, num_top, length: 0, running: vec![Text::default()], finished: Vec::new() }
    }

    /// Continues all texts with the most probable of their candidates, which are in descending order of log-probabilities.
    /// Returns the texts that go on, in the order of [`Self::running`]; none at the end of the search.
    pub fn advance(&mut self, candidates: &[Vec<(u32, f32)>], stop: &[u32]) -> Vec<Survivor> {
        let mut ranked: Vec<(usize, u32, f32, f32)> = candidates
            .iter()
            .enumerate()
            .flat_map(|(parent, candidates)| {
                let before = self.running[parent].score;
                candidates.iter().map(move |(token, score)| (parent, *token, *score, before + score))
            })
            .collect();
        ranked.sort_by(|a, b| b.3.total_cmp(&a.3).then((a.0, a.1).cmp(&(b.0, b.1))));
        ranked.truncate(self.search.num_candidates(stop.len()));
        self.length += 1;
        let is_last = self.length >= self.limit;
        let (mut survivors, mut running) = (Vec::new(), Vec::new());
        for (rank, (parent, token, score, sum)) in ranked.into_iter().enumerate() {
            let is_stopped = stop.contains(&token);
            let mut text = Text { score: sum, is_stopped, ..self.running[parent].clone() };
            if !is_stopped {
                let top = candidates[parent].iter().take(self.num_top).copied().collect();
                text.tokens.push(TokenLogProbability { token, log_probability: score, top });
            }
            if is_stopped || is_last {
                if rank < self.search.width {
                    text.score = sum / self.penalty(self.length);
                    self.finished.push(text);
                }
            } else if survivors.len() < self.search.width {
                survivors.push(Survivor { parent, token });
                running.push(text);
            }
        }
        // Equal scores stay in the order in which they were found.
        self.finished.sort_by(|a, b| b.score.total_cmp(&a.score));
        self.finished.truncate(self.search.width);
        self.running = running;
        if self.has_ended() {
            survivors.clear();
            self.running.clear();
        }
        survivors
    }

    fn penalty(&self, length: usize) -> f32 {
        (length as f64).powf(self.search.length_penalty) as f32
    }

    fn has_ended(&self) -> bool {
        let (Some(best), true) = (self.running.first(), self.finished.len() >= self.search.width) else {
            return self.running.is_empty();
        };
        let is_ever = self.search.ending == BeamEnding::NoBetterEver && self.search.length_penalty > 0.0;
        let possible = best.score / self.penalty(if is_ever { self.limit } else { self.length });
        let worst = self.finished.last().map_or(f32::NEG_INFINITY, |text| text.score);
        // A search of width 1 takes the most probable token each time.
        self.search.width == 1 || self.search.ending == BeamEnding::EnoughFinished || possible <= worst
    }

    /// The best `count` texts at the end of the search.
    pub fn into_best(self, count: usize) -> impl Iterator<Item = Text> {
        self.finished.into_iter().take(count)
    }
}

/// A search with the sequences of its texts.
pub(super) struct OpenSearch {
    pub beams: Beams,
    /// In the order of [`Beams::running`], with their candidates once they are known.
    pub sequences: Vec<SequenceId>,
    pub candidates: Vec<Option<Vec<(u32, f32)>>>,
}

impl<S: Steps> Worker<S> {
    /// Takes note of the candidates of a text. With those of all texts of its search, the best ones go on: a text that
    /// continues in several ways shares its pages with the others, except the last page.
    pub(super) fn receive_candidates(
        &mut self,
        id: SequenceId,
        candidates: Vec<(u32, f32)>,
    ) -> Result<(), EngineError> {
        let (number, num_started) = (self.answers[&id].request, self.answers[&id].num_started);
        let request = self.requests.get_mut(&number).expect("answers belong to requests");
        let search = request.search.as_mut().expect("the request has a search");
        let place = search.sequences.iter().position(|other| *other == id).expect("its text runs");
        // The vocabulary can be larger than that of the tokenizer.
        let num_choices = self.options.num_choices;
        let known = candidates.into_iter().filter(|(token, _)| (*token as usize) < num_choices);
        search.candidates[place] = Some(known.collect());
        if search.candidates.iter().any(Option::is_none) {
            return Ok(());
        }
        let candidates: Vec<_> = search.candidates.drain(..).flatten().collect();
        let survivors = search.beams.advance(&candidates, &request.stop);
        if survivors.is_empty() {
            self.end_search(number);
            return Ok(());
        }
        let before = std::mem::take(&mut search.sequences);
        for (parent, id) in before.iter().enumerate() {
            if survivors.iter().all(|survivor| survivor.parent != parent) {
                self.scheduler.remove(*id);
                self.answers.remove(id);
            }
        }
        let (mut sequences, mut goes_on) = (Vec::new(), vec![false; before.len()]);
        for survivor in &survivors {
            if !std::mem::replace(&mut goes_on[survivor.parent], true) {
                sequences.push(before[survivor.parent]);
                continue;
            }
            let (child, copy) = self.scheduler.fork(before[survivor.parent]);
            if let Some(copy) = copy {
                self.steps.copy(&copy)?;
            }
            let mut answer = Answer::new(number, 0);
            answer.num_started = num_started;
            self.answers.insert(child, answer);
            sequences.push(child);
        }
        for (id, survivor) in sequences.iter().zip(&survivors) {
            self.scheduler.has_chosen(*id, survivor.token);
        }
        let request = self.requests.get_mut(&number).expect("answers belong to requests");
        request.sequences.clone_from(&sequences);
        let search = request.search.as_mut().expect("the request has a search");
        search.candidates = vec![None; sequences.len()];
        search.sequences = sequences;
        Ok(())
    }

    /// Sends the best texts of a search, and closes its request.
    pub(super) fn end_search(&mut self, number: u64) {
        let Some(request) = self.requests.get_mut(&number) else { return };
        let Some(search) = request.search.take() else { return };
        let (sender, count) = (&request.accepted.sender, request.accepted.request.num_answers);
        let mut texts = search.beams.into_best(count);
        for answer in 0..count {
            let text = texts.next().unwrap_or_default();
            for token in text.tokens {
                sender.send(AnswerEvent::Token { answer, token });
            }
            let reason = if text.is_stopped { FinishReason::Stop } else { FinishReason::Length };
            sender.send(AnswerEvent::Finished { answer, reason, stop_token: None });
        }
        self.shared.count(|metrics| metrics.finished += count as u64);
        self.close(number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STOP: u32 = 9;

    /// The tokens and scores of the finished texts of a search whose candidates do not depend on the text.
    fn searched(search: BeamSearch, limit: usize, candidates: &[(u32, f32)]) -> Vec<(Vec<u32>, f32)> {
        let mut beams = Beams::new(search, limit, 0);
        loop {
            let each = vec![candidates.to_vec(); beams.running.len()];
            let survivors = beams.advance(&each, &[STOP]);
            assert_eq!(survivors.len(), beams.running.len());
            if survivors.is_empty() {
                break;
            }
        }
        let tokens = |text: Text| (text.tokens.iter().map(|token| token.token).collect(), text.score);
        beams.into_best(search.width).map(tokens).collect()
    }

    #[test]
    fn the_most_probable_texts_are_found() {
        let search = BeamSearch { length_penalty: 0.0, ..BeamSearch::new(2) };
        let found = searched(search, 3, &[(1, -0.5), (2, -1.0), (3, -4.0), (STOP, -9.0)]);
        assert_eq!(found, [(vec![1, 1, 1], -1.5), (vec![1, 1, 2], -2.0)]);
    }

    #[test]
    fn penalties_favor_longer_texts() {
        let candidates = [(STOP, -0.9), (1, -1.0), (2, -1.1), (3, -9.0)];
        let sums = BeamSearch { length_penalty: 0.0, ..BeamSearch::new(2) };
        assert_eq!(searched(sums, 4, &candidates), [(vec![], -0.9), (vec![1], -1.9)]);
        let longer = BeamSearch { length_penalty: 3.0, ending: BeamEnding::NoBetterEver, ..sums };
        let found = searched(longer, 4, &candidates);
        assert_eq!(found[0].0.len(), 3, "a stop token counts: {found:?}");
        let early = BeamSearch { ending: BeamEnding::EnoughFinished, ..longer };
        assert!(searched(early, 40, &candidates).iter().all(|(tokens, _)| tokens.len() < 4));
    }
}
