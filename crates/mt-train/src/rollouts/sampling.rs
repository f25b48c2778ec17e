//! Batches of answers that the model in training samples itself.
//!
//! The data of such a run are prompts. Between the data and a step, this module samples answers with the parameters of the
//! trainer, has them judged, and computes their advantages. Everything follows from the seed and the number of the batch,
//! so that a resumed run continues exactly.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    sync::Arc,
    time::Instant,
};

use mt_config::{RlGroup, RolloutGroup};
use mt_data::{Batch, Tokenizer};
use mt_rl::{
    BatchRules, Finish, PROMPTS, Prompt, PromptOrder, PromptSet, Rollout, RolloutBatch, RolloutLog, RowShape,
    key,
    rewards::{Judge, Judged, Verdict},
};
use mt_runtime::Executable;

use super::{reward_settings, rules};
use crate::{
    TrainError, Trainer,
    answers::{AnswerRequest, AnswerSampling, Generator, GivenAnswer},
    data::RunPrompts,
    events::{self, Observer},
    metrics::names,
    run::TrainOptions,
};

/// The file of a run's rollouts, in its directory.
const ROLLOUTS: &str = "rollouts/rollouts.jsonl";

/// A metric of the host.
pub(crate) type HostMetric = (String, f64);

/// The sampling of a run.
pub(crate) struct Sampling {
    keys: RlGroup,
    pub(super) settings: RolloutGroup,
    rules: BatchRules,
    shape: RowShape,
    train: Arc<PromptSet>,
    pub(super) held_out: Option<Arc<PromptSet>>,
    order: PromptOrder,
    judge: Judge,
    generator: Box<dyn Generator>,
    tokenizer: Arc<Tokenizer>,
    log: RolloutLog,
    log_path: PathBuf,
    pub(super) directory: PathBuf,
    /// The program of [`Trainer::scores`].
    scores: Option<(usize, Executable)>,
    /// The present batch of answers, with its number.
    current: Option<(u64, RolloutBatch)>,
    observer: Observer,
    /// The failures of a reward process that have been reported.
    reported: u64,
}

/// An answer with its text and its verdict.
pub(super) struct Sampled {
    pub answer: GivenAnswer,
    pub text: String,
    pub finish: Finish,
    pub verdict: Verdict,
}

impl Sampling {
    /// The sampling that the data of a run requests.
    ///
    /// # Errors
    /// The caller has passed no generator, or the file of rollouts cannot be opened.
    pub fn of(
        trainer: &Trainer,
        options: &TrainOptions,
        (prompts, tokenizer): (Option<RunPrompts>, Option<Arc<Tokenizer>>),
        run_directory: &Path,
    ) -> Result<Option<Self>, TrainError> {
        let Some(RunPrompts { train, held_out, order }) = prompts else { return Ok(None) };
        let (Some(make), Some(tokenizer)) = (&options.generator, tokenizer) else {
            return Err(TrainError::NoGenerator);
        };
        let settings = trainer.plan().settings();
        let keys = settings.rl.clone();
        let step = trainer.steps_done();
        // In the middle of a batch, its answers are those of the file.
        let next = step.div_ceil(order.steps());
        let log_path = run_directory.join(ROLLOUTS);
        let rewards = reward_settings(&keys, &settings.rollouts);
        Ok(Some(Self {
            rules: rules(&keys),
            shape: RowShape {
                length: settings.data.max_target_length,
                pad: tokenizer.pad_id(),
                vocab_size: settings.data.vocab_size,
            },
            settings: settings.rollouts.clone(),
            judge: Judge::new(rewards),
            generator: make(trainer),
            log: RolloutLog::open(&log_path, next)?,
            log_path,
            directory: run_directory.to_owned(),
            scores: None,
            current: None,
            observer: options.observer.clone(),
            reported: 0,
            keys,
            train,
            held_out,
            order,
            tokenizer,
        }))
    }

    /// The rows of `step`, from the numbers of its prompts, and what is measured of their answers.
    pub fn batch(
        &mut self,
        trainer: &Trainer,
        prompts: &Batch,
        step: u64,
    ) -> Result<(Batch, Vec<HostMetric>), TrainError> {
        let (number, within) = (step / self.order.steps(), step % self.order.steps());
        let mut measured = Vec::new();
        if self.current.as_ref().is_none_or(|(known, _)| *known != number) {
            let batch = match within {
                0 => self.sample(trainer, prompts, number, &mut measured)?,
                _ => self.recorded(prompts, (number, step))?,
            };
            // A resumed run has recorded them with the first step of the batch.
            if within == 0 {
                measured.extend(batch.metrics());
            }
            self.current = Some((number, batch));
        }
        let (_, batch) = self.current.as_ref().expect("it has just been set");
        let first = within as usize % self.order.mini_batches * self.order.rows;
        let rows = batch.rows(first..first + self.order.rows, self.shape)?;
        let named = measured.into_iter().map(|(name, value)| match name.starts_with(names::PERFORMANCE) {
            true => (name, value),
            false => (format!("{}{name}", names::TRAINING), value),
        });
        Ok((rows, named.collect()))
    }

    /// Samples the answers of a batch and records them. Prompts whose answers all have the same reward are replaced by
    /// others, as often as the configuration allows.
    fn sample(
        &mut self,
        trainer: &Trainer,
        prompts: &Batch,
        number: u64,
        measured: &mut Vec<HostMetric>,
    ) -> Result<RolloutBatch, TrainError> {
        let samples = self.keys.num_generations;
        let numbers: Vec<usize> = prompts.integers(PROMPTS).iter().map(|number| *number as usize).collect();
        let places: Vec<usize> = (0..numbers.len()).collect();
        let mut rollouts = self.rollouts(trainer, (&places, &numbers), (number, 0), measured)?;
        let mut replaced = 0;
        for round in 1..=self.keys.dynamic_sampling_rounds {
            let is_even = |place: &usize| {
                let group = &rollouts[place * samples..][..samples];
                group.iter().all(|rollout| rollout.reward == group[0].reward)
            };
            let even: Vec<usize> = places.iter().copied().filter(is_even).collect();
            if even.is_empty() {
                break;
            }
            let size = self.train.prompts.len() as u64;
            let other = |place: &usize| {
                (key(&[self.settings.data_shuffle_seed, number, round, *place as u64]) % size) as usize
            };
            let others: Vec<usize> = even.iter().map(other).collect();
            let fresh = self.rollouts(trainer, (&even, &others), (number, round), measured)?;
            for (place, group) in even.iter().zip(fresh.chunks(samples)) {
                rollouts[place * samples..][..samples].clone_from_slice(group);
            }
            replaced += even.len();
        }
        if self.keys.dynamic_sampling_rounds > 0 {
            measured.push((names::REPLACED_PROMPTS.to_owned(), replaced as f64));
        }
        self.score(trainer, &mut rollouts)?;
        let batch = RolloutBatch::new(rollouts, &self.rules)?;
        self.log.append(&batch.rollouts)?;
        self.report_failures();
        Ok(batch)
    }

    /// Judged answers to prompts, at these places of the batch `number`, in a round of sampling.
    fn rollouts(
        &mut self,
        trainer: &Trainer,
        (places, numbers): (&[usize], &[usize]),
        (number, round): (u64, u64),
        measured: &mut Vec<HostMetric>,
    ) -> Result<Vec<Rollout>, TrainError> {
        let train = self.train.clone();
        let chosen: Vec<&Prompt> = numbers.iter().map(|number| &train.prompts[*number]).collect();
        let sampling = AnswerSampling {
            temperature: self.keys.decode_sampling_temperature,
            seed: key(&[self.settings.decode_seed, number, round]),
            top_k: None,
            top_p: None,
            ..self.limits(trainer)
        };
        let samples = self.keys.num_generations;
        let sampled = self.answers(trainer, &chosen, samples, &sampling, measured)?;
        let rollout = |(index, sampled): (usize, Sampled)| {
            let Sampled { answer, text, finish, verdict } = sampled;
            Rollout {
                step: Some(number),
                group: Some(places[index / samples] as u64),
                sample: Some((index % samples) as u64),
                prompt: chosen[index / samples].tokens.clone(),
                completion: answer.tokens,
                log_probabilities: Some(answer.log_probabilities),
                reward: verdict.total,
                rewards: verdict.rewards,
                finish: Some(finish),
                text: Some(text),
                answer: chosen[index / samples].answer.clone(),
                ..Rollout::default()
            }
        };
        Ok(sampled.into_iter().enumerate().map(rollout).collect())
    }

    /// The answers of a batch that an earlier process of the run has sampled.
    fn recorded(&self, prompts: &Batch, (number, step): (u64, u64)) -> Result<RolloutBatch, TrainError> {
        let rollouts = self.log.of_step(number)?;
        let needed = prompts.integers(PROMPTS).len() * self.keys.num_generations;
        if rollouts.len() != needed {
            let (path, found) = (self.log_path.clone(), rollouts.len());
            return Err(TrainError::LostRollouts { step, path, found, needed });
        }
        Ok(RolloutBatch::new(rollouts, &self.rules)?)
    }

    /// Adds the log-probabilities by the reference, if rewards need them.
    fn score(&mut self, trainer: &Trainer, rollouts: &mut [Rollout]) -> Result<(), TrainError> {
        if self.rules.penalty.is_none() {
            return Ok(());
        }
        // Advantages are not known yet, and do not matter.
        let unjudged =
            BatchRules { uses_recorded: true, with_old: false, with_sampler: false, ..self.rules.clone() };
        let without = |rollout: &Rollout| Rollout {
            advantage: Some(mt_rl::Advantage::OfAnswer(0.0)),
            ..rollout.clone()
        };
        let rows = RolloutBatch::new(rollouts.iter().map(without).collect(), &unjudged)?;
        let (length, count) = (self.shape.length, self.order.rows);
        for first in (0..rollouts.len()).step_by(count) {
            let batch = rows.rows(first..first + count, self.shape)?;
            let scores = trainer.scores(&mut self.scores, &batch)?.to_f64();
            for (rollout, scores) in rollouts[first..].iter_mut().zip(scores.chunks(length)) {
                let start = rollout.prompt.len() - 1;
                let of_tokens = scores[start..start + rollout.completion.len()].iter();
                let scores = of_tokens.map(|score| *score as f32);
                rollout.reference_log_probabilities = Some(scores.collect());
            }
        }
        Ok(())
    }

    /// The prompts of a batch.
    pub(super) fn batch_prompts(&self) -> usize {
        self.order.prompts()
    }

    /// The limits of answers.
    pub(super) fn limits(&self, trainer: &Trainer) -> AnswerSampling {
        let positions = trainer.plan().model().num_learned_positions().unwrap_or(usize::MAX);
        AnswerSampling {
            temperature: 1.0,
            seed: 0,
            max_tokens: self.keys.completion_length(),
            // The last token of a row is only a target.
            max_length: (self.shape.length + 1).min(positions),
            ends: self.ends(),
            top_k: None,
            top_p: None,
        }
    }

    fn ends(&self) -> BTreeSet<u32> {
        self.tokenizer.end_ids().iter().copied().collect()
    }

    /// Several answers to each prompt, judged.
    pub(super) fn answers(
        &mut self,
        trainer: &Trainer,
        prompts: &[&Prompt],
        samples: usize,
        sampling: &AnswerSampling,
        measured: &mut Vec<HostMetric>,
    ) -> Result<Vec<Sampled>, TrainError> {
        let began = Instant::now();
        let request = |index: usize| AnswerRequest {
            prompt: prompts[index / samples].tokens.clone(),
            sample: index as u64,
        };
        let requests: Vec<AnswerRequest> = (0..prompts.len() * samples).map(request).collect();
        let given = self.generator.answers(trainer.parameters()?, &requests, sampling);
        let given = given.map_err(TrainError::Generation)?;
        add(measured, names::SAMPLING_TIME, began.elapsed().as_secs_f64());
        let began = Instant::now();
        // The model may have more tokens than the tokenizer. All of them are sampled, so that the trainer computes the
        // same probabilities, but the others have no text.
        let known = self.tokenizer.vocab_size();
        let text = |answer: &GivenAnswer| {
            let tokens: Vec<u32> =
                answer.tokens.iter().copied().filter(|token| (*token as usize) < known).collect();
            self.tokenizer.decode(&tokens, true)
        };
        let texts: Vec<String> = given.iter().map(text).collect::<Result<_, _>>()?;
        let judged: Vec<Judged<'_>> = given
            .iter()
            .zip(&texts)
            .enumerate()
            .map(|(index, (answer, text))| {
                let prompt = prompts[index / samples];
                Judged {
                    prompt: &prompt.text,
                    completion: text,
                    answer: prompt.answer.as_deref(),
                    tokens: answer.tokens.len(),
                    columns: &prompt.columns,
                }
            })
            .collect();
        let verdicts = self.judge.judge(&judged)?;
        add(measured, names::REWARD_TIME, began.elapsed().as_secs_f64());
        let ends = &sampling.ends;
        let finish = |answer: &GivenAnswer| match answer.tokens.last().is_some_and(|last| ends.contains(last))
        {
            true => Finish::Stop,
            false => Finish::Length,
        };
        let all = given.into_iter().zip(texts).zip(verdicts);
        let sampled = all.map(|((answer, text), verdict)| {
            let finish = finish(&answer);
            Sampled { answer, text, finish, verdict }
        });
        Ok(sampled.collect())
    }

    /// Reports the first failure of a reward process, and then each time that their number has doubled.
    fn report_failures(&mut self) {
        let Some((count, reason)) = self.judge.failures() else { return };
        if count >= (2 * self.reported).max(1) {
            let text = format!("`reward_command` has failed {count} times; the last time, {reason}");
            events::warn(&self.observer, text);
            self.reported = count;
        }
    }
}

/// Adds to a metric.
fn add(measured: &mut Vec<HostMetric>, name: &str, value: f64) {
    match measured.iter_mut().find(|(known, _)| known == name) {
        Some((_, known)) => *known += value,
        None => measured.push((name.to_owned(), value)),
    }
}
