//! The reward model that judges the answers of a run in training.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    path::Path,
    sync::Arc,
};

use mt_config::RewardType;
use mt_data::{Conversations, RewardColumns};
use mt_engine::{LOGITS_PROGRAM, LoadedModel, ScoredSizes, Scorer, load_on};
use mt_models::hugging_face::is_hugging_face;
use mt_rl::{
    RlError,
    rewards::{Judged, RewardModel},
};
use mt_runtime::CompileSettings;
use mt_train::Trainer;
use serde_json::{Value, json};

use crate::{
    commands::{
        report_loaded,
        reward::{self, RewardModelText},
    },
    failure::Failure,
};

/// The most answers that are scored at once.
const ROWS: usize = 16;

/// The shortest rows for which a program is compiled. Other lengths are powers of two.
const SHORTEST: usize = 32;

/// The columns in which an answer is encoded.
const PROMPT: &str = "prompt";
const COMPLETION: &str = "completion";

/// A reward model on the devices of a trainer.
struct AnswerRewards {
    loaded: Arc<LoadedModel>,
    text: RewardModelText,
    form: Conversations,
    compile: CompileSettings,
    /// The columns of training and held-out records that hold the prompt.
    prompt_columns: [String; 2],
    /// By the length of rows.
    scorers: BTreeMap<usize, Scorer<Arc<LoadedModel>>>,
}

/// Loads the reward model at `path` onto the devices of a trainer.
///
/// # Errors
/// There is no reward model of whole answers, or it cannot be read.
pub fn load(trainer: &Trainer, path: &Path) -> Result<Box<dyn RewardModel>, RlError> {
    let open = || -> Result<AnswerRewards, Failure> {
        let key = if is_hugging_face(path) { "hf_model_path" } else { "load_parameters_path" };
        let mut text = RewardModelText::open(vec![format!("{key}={}", path.display())])?;
        if text.load.model.reward_type == RewardType::Process {
            return Err(Failure::user(
                "it judges the steps of answers, and answers of a run have no steps\n\
                 hint: train a model of whole answers with `reward.reward_type=outcome`",
            ));
        }
        let plan = trainer.plan();
        let loaded = load_on(&text.load, trainer.runtime(), plan.sampler_placement())?;
        report_loaded(&loaded.skipped, &loaded.notices, None);
        let columns = RewardColumns::Answers {
            prompt: Some(PROMPT.to_owned()),
            answers: vec![COMPLETION.to_owned()],
            margin: None,
        };
        let data = &plan.settings().data;
        let first = |columns: Vec<String>| columns.into_iter().next().unwrap_or_default();
        Ok(AnswerRewards {
            form: Conversations::with_rewards(columns, text.template.take()),
            compile: CompileSettings::of(&text.load.debug, &[LOGITS_PROGRAM]),
            loaded: Arc::new(loaded),
            text,
            prompt_columns: [first(data.train_columns()), first(data.eval_columns())],
            scorers: BTreeMap::new(),
        })
    };
    let made = open().map_err(|failure| match failure.into_parts() {
        (reason, true) => {
            RlError::Unusable { place: format!("`reward_model_path={}`", path.display()), reason }
        }
        (reason, false) => RlError::Model(reason.into()),
    })?;
    Ok(Box::new(made))
}

impl AnswerRewards {
    /// The tokens of a prompt with its answer, as `maxtext reward score` reads them.
    fn tokens(&self, answer: &Judged<'_>) -> Result<Vec<u32>, String> {
        let given = self.prompt_columns.iter().find_map(|column| answer.columns.get(column));
        let completion = match given {
            Some(Value::Array(_)) => json!([{"role": "assistant", "content": answer.completion}]),
            _ => answer.completion.into(),
        };
        let prompt = given.cloned().unwrap_or_else(|| answer.prompt.into());
        let record = json!({PROMPT: prompt, COMPLETION: completion}).to_string();
        let most = self.text.load.model.max_target_length;
        // Behind the last token is one that the model does not see.
        let document = self.form.encode(&record, &self.text.tokenizer, self.text.adds, most + 1)?;
        match document.tokens.split_last() {
            Some((_, seen)) if !seen.is_empty() => {
                Ok(seen.iter().map(|token| token.cast_unsigned()).collect())
            }
            _ => Err(format!("prompt and answer have more than the {most} tokens of the reward model")),
        }
    }

    /// The rewards of rows of tokens, which are no more than [`ROWS`].
    fn scores(&mut self, rows: &[Vec<u32>]) -> Result<Vec<f64>, Failure> {
        let longest = rows.iter().map(Vec::len).max().unwrap_or(1);
        let most = self.text.load.model.max_target_length;
        let length = longest.next_power_of_two().max(SHORTEST).min(most.max(longest));
        let scorer = match self.scorers.entry(length) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(place) => {
                let sizes = ScoredSizes { rows: ROWS, length, source: 0 };
                place.insert(Scorer::new(self.loaded.clone(), sizes, false, &self.compile)?)
            }
        };
        let scores = scorer.score(rows.into())?.logits;
        let (count, values) = (scores.dims()[2], scores.to_f64());
        let reward = |(row, tokens): (usize, &Vec<u32>)| {
            let from = (row * length + tokens.len() - 1) * count;
            reward::Judged::of(&values[from..from + count]).reward
        };
        Ok(rows.iter().enumerate().map(reward).collect())
    }
}

impl RewardModel for AnswerRewards {
    fn rewards(&mut self, answers: &[Judged<'_>]) -> Result<Vec<Result<f64, String>>, RlError> {
        let mut made: Vec<Result<f64, String>> = Vec::with_capacity(answers.len());
        for answers in answers.chunks(ROWS) {
            let tokens: Vec<Result<Vec<u32>, String>> =
                answers.iter().map(|answer| self.tokens(answer)).collect();
            let rows: Vec<Vec<u32>> = tokens.iter().flatten().cloned().collect();
            let scores = if rows.is_empty() { Vec::new() } else { self.scores(&rows).map_err(failed)? };
            let mut scores = scores.into_iter();
            let reward = |tokens: Result<Vec<u32>, String>| {
                tokens.map(|_| scores.next().expect("one for each row of tokens"))
            };
            made.extend(tokens.into_iter().map(reward));
        }
        Ok(made)
    }
}

fn failed(failure: Failure) -> RlError {
    RlError::Model(failure.into_parts().0.into())
}
