//! Prompts of a run: their tokens and expected answers, in the order of training.

use std::sync::Arc;

use mt_data::{
    Batch, BatchSource, ChatTemplate, DataError, Dataset, NamedArray, Permutation, Position, Tokenizer,
};
use mt_shape::{DType, HostArray};
use serde_json::{Map, Value, json};

use crate::{RlError, position::StepPosition, seeds::key};

/// The array of the numbers of a batch's prompts: `i32[prompts]`.
pub const PROMPTS: &str = "prompts";

/// The mark before the final answer in the answers of GSM8K.
const FINAL: &str = "####";

/// How records become prompts.
pub struct PromptForm<'a> {
    pub prompt_column: &'a str,
    pub answer_column: Option<&'a str>,
    /// Renders prompts as conversations. Without one, prompts are texts.
    pub template: Option<&'a ChatTemplate>,
    /// The system message of conversations; empty for none.
    pub system_prompt: &'a str,
    pub add_bos: bool,
    pub tokenizer: &'a Tokenizer,
    /// Longer prompts are left out.
    pub max_tokens: usize,
}

/// A prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Prompt {
    pub text: String,
    pub tokens: Vec<u32>,
    /// The expected answer.
    pub answer: Option<String>,
    /// The record.
    pub columns: Map<String, Value>,
}

/// The prompts of a data set.
#[derive(Clone, Debug)]
pub struct PromptSet {
    pub prompts: Vec<Prompt>,
    /// The number of prompts that were too long.
    pub left_out: u64,
    fingerprint: String,
}

impl PromptSet {
    /// Reads all records of a data set.
    ///
    /// # Errors
    /// A record cannot be read, or has no prompt; or all prompts are too long.
    pub fn read(dataset: &Dataset, form: &PromptForm<'_>) -> Result<Self, RlError> {
        let (mut prompts, mut left_out) = (Vec::new(), 0);
        for (index, record) in dataset.documents().enumerate() {
            let prompt = read(&record?, form)
                .map_err(|reason| RlError::Unusable { place: dataset.place(index as u64), reason })?;
            match prompt.tokens.len() <= form.max_tokens {
                true => prompts.push(prompt),
                false => left_out += 1,
            }
        }
        if prompts.is_empty() {
            return Err(RlError::TooFew(format!(
                "all {left_out} prompts of {} have more than {} tokens\nhint: raise `max_prefill_predict_length`",
                dataset.name(),
                form.max_tokens
            )));
        }
        Ok(Self { prompts, left_out, fingerprint: dataset.fingerprint().to_owned() })
    }

    /// The number of the first prompt without an expected answer.
    pub fn without_answer(&self) -> Option<usize> {
        self.prompts.iter().position(|prompt| prompt.answer.is_none())
    }
}

/// A record as a prompt, or the reason why it is none.
fn read(record: &str, form: &PromptForm<'_>) -> Result<Prompt, String> {
    let columns: Map<String, Value> =
        serde_json::from_str(record).map_err(|error| format!("is no JSON object: {error}"))?;
    let given = columns.get(form.prompt_column).unwrap_or(&Value::Null);
    let mut messages = match given {
        Value::String(text) => vec![json!({"role": "user", "content": text})],
        Value::Array(messages) if !messages.is_empty() => messages.clone(),
        _ => return Err(format!("`{}` is neither a text nor a list of messages", form.prompt_column)),
    };
    let (text, tokens) = match (form.template, given) {
        (None, Value::String(text)) => {
            let tokens =
                form.tokenizer.encode(text, form.add_bos, false).map_err(|error| error.to_string())?;
            (text.clone(), tokens)
        }
        (None, _) => {
            return Err(format!(
                "`{}` holds messages, but the tokenizer has no chat template\nhint: name one with \
                 `chat_template_path`",
                form.prompt_column
            ));
        }
        (Some(template), _) => {
            if !form.system_prompt.is_empty() {
                messages.insert(0, json!({"role": "system", "content": form.system_prompt}));
            }
            let variables = Map::from_iter([("add_generation_prompt".to_owned(), true.into())]);
            let text = template.render_with(messages.into(), variables).map_err(|error| error.to_string())?;
            let tokens =
                form.tokenizer.encode_with_special_tokens(&text).map_err(|error| error.to_string())?;
            (text, tokens)
        }
    };
    if tokens.is_empty() {
        return Err(format!("`{}` has no token", form.prompt_column));
    }
    let answer = form.answer_column.and_then(|column| match columns.get(column) {
        None | Some(Value::Null) => None,
        Some(Value::String(text)) => {
            Some(text.rsplit_once(FINAL).map_or(text.as_str(), |(_, answer)| answer.trim()).to_owned())
        }
        Some(other) => Some(other.to_string()),
    });
    Ok(Prompt { text, tokens, answer, columns })
}

/// The order of prompts in training.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptOrder {
    /// Rows of a step, which are answers.
    pub rows: usize,
    /// Answers to each prompt.
    pub samples: usize,
    /// The steps into which a batch of answers is cut.
    pub mini_batches: usize,
    /// The number of times that each batch is trained on.
    pub iterations: usize,
    pub shuffle: bool,
    pub seed: u64,
    /// The number of passes over the prompts; `None` for any number.
    pub num_epoch: Option<u64>,
}

impl PromptOrder {
    /// The prompts of a batch.
    pub fn prompts(&self) -> usize {
        self.rows * self.mini_batches / self.samples.max(1)
    }

    /// The steps with one batch.
    pub fn steps(&self) -> u64 {
        (self.mini_batches * self.iterations).max(1) as u64
    }

    /// The numbers of the prompts of batch `number`, among those of a set of `size`; `None` after the last epoch.
    pub fn numbers(&self, size: usize, number: u64) -> Option<Vec<usize>> {
        let (size, count) = (size as u64, self.prompts() as u64);
        let first = number.checked_mul(count)?;
        let end = self.num_epoch.map_or(u64::MAX, |epochs| epochs.saturating_mul(size));
        let prompt = |number: u64| match self.shuffle {
            true => Permutation::new(size, key(&[self.seed, number / size])).apply(number % size),
            false => number % size,
        };
        let is_whole = first.saturating_add(count) <= end;
        is_whole.then(|| (first..first + count).map(|number| prompt(number) as usize).collect())
    }
}

/// The numbers of the prompts of each step. All steps with one batch of answers have the same prompts.
pub struct PromptSource {
    set: Arc<PromptSet>,
    order: PromptOrder,
    step: u64,
}

impl PromptSource {
    /// The prompts of a set from the first step on.
    ///
    /// # Errors
    /// The set has fewer prompts than a batch, and too few epochs to fill one.
    pub fn new(set: Arc<PromptSet>, order: PromptOrder) -> Result<Self, RlError> {
        let (given, needed) = (set.prompts.len() as u64, order.prompts() as u64);
        if order.num_epoch.is_some_and(|epochs| given.saturating_mul(epochs) < needed) {
            return Err(RlError::TooFew(format!(
                "the data has {given} prompts, but a batch has {needed}\nhint: use a smaller `batch_size`, or \
                 `num_epoch=-1`"
            )));
        }
        Ok(Self { set, order, step: 0 })
    }

    fn fingerprint(&self) -> String {
        let PromptOrder { samples, mini_batches, iterations, shuffle, seed, .. } = self.order;
        let order = if shuffle { format!("shuffled by {seed}") } else { "in order".to_owned() };
        format!(
            "{} prompts, {}, {order}, {} × {samples} answers for {mini_batches} × {iterations} steps",
            self.set.prompts.len(),
            self.set.fingerprint,
            self.order.prompts()
        )
    }
}

impl BatchSource for PromptSource {
    fn next_batch(&mut self) -> Result<Option<Batch>, DataError> {
        let number = self.step / self.order.steps();
        let Some(numbers) = self.order.numbers(self.set.prompts.len(), number) else { return Ok(None) };
        self.step += 1;
        let numbers: Vec<i32> = numbers.into_iter().map(|number| number as i32).collect();
        let values =
            HostArray::from_slice(DType::I32, &[numbers.len()], &numbers).expect("one for each prompt");
        let arrays = vec![NamedArray { name: PROMPTS, values: Arc::new(values) }];
        Ok(Some(Batch { rows: numbers.len(), arrays, target_bytes: 0 }))
    }

    fn set_batch_rows(&mut self, rows: usize) -> Result<(), DataError> {
        self.order.rows = rows;
        Ok(())
    }

    fn position(&self) -> Position {
        StepPosition::stored(self.step, self.fingerprint())
    }

    fn seek(&mut self, position: &Position) -> Result<(), DataError> {
        self.step = StepPosition::step(position, self.fingerprint(), "the list of prompts")?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use mt_data::Source;

    use super::*;

    fn set(lines: &[&str], max_tokens: usize) -> Result<PromptSet, RlError> {
        let tokenizer = Tokenizer::bytes();
        let documents = lines.iter().map(|line| (*line).to_owned()).collect();
        let dataset = Dataset::open(&Source::Memory { name: "list".into(), documents }).unwrap();
        let form = PromptForm {
            prompt_column: "prompt",
            answer_column: Some("answer"),
            template: None,
            system_prompt: "",
            add_bos: true,
            tokenizer: &tokenizer,
            max_tokens,
        };
        PromptSet::read(&dataset, &form)
    }

    #[test]
    fn records_are_prompts_with_answers() {
        let lines = [
            r#"{"prompt":"1+1=","answer":"so #### 2"}"#,
            r#"{"prompt":"2","answer":5,"level":1}"#,
            r#"{"prompt":"a long prompt","answer":"x"}"#,
            r#"{"prompt":"3"}"#,
        ];
        let set = set(&lines, 6).unwrap();
        let answers: Vec<Option<&str>> = set.prompts.iter().map(|prompt| prompt.answer.as_deref()).collect();
        assert_eq!((answers, set.left_out), (vec![Some("2"), Some("5"), None], 1));
        assert_eq!((set.prompts[0].tokens.len(), set.without_answer()), (5, Some(2)));
        assert_eq!(set.prompts[1].columns["level"], 1);
    }

    #[test]
    fn wrong_records_are_refused() {
        for (line, expected) in [
            (r#"{"prompt":3}"#, "neither a text nor a list of messages"),
            (r#"{"other":"x"}"#, "`prompt` is neither"),
            (r#"{"prompt":[{"role":"user","content":"x"}]}"#, "no chat template"),
            (r#"{"prompt":"1234567"}"#, "all 1 prompts of `list` have more than 6 tokens"),
        ] {
            let error = set(&[line], 6).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn steps_with_one_batch_have_the_same_prompts() {
        let lines: Vec<String> = (0..5).map(|number| format!(r#"{{"prompt":"{number}"}}"#)).collect();
        let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
        let set = Arc::new(set(&lines, 9).unwrap());
        let order = PromptOrder {
            rows: 4,
            samples: 4,
            mini_batches: 2,
            iterations: 1,
            shuffle: true,
            seed: 3,
            num_epoch: Some(2),
        };
        let open = |order| PromptSource::new(set.clone(), order).unwrap();
        let steps = |mut source: PromptSource| -> Vec<Vec<i32>> {
            std::iter::from_fn(|| source.next_batch().unwrap())
                .map(|batch| batch.integers(PROMPTS).to_vec())
                .collect()
        };
        let made = steps(open(order));
        assert_eq!(made.len(), 10);
        assert!(made.chunks(2).all(|pair| pair[0] == pair[1]), "{made:?}");
        let mut first: Vec<i32> = made.iter().step_by(2).flatten().copied().take(5).collect();
        first.sort_unstable();
        assert_eq!(first, [0, 1, 2, 3, 4]);
        let mut source = open(order);
        for _ in 0..3 {
            source.next_batch().unwrap();
        }
        let mut resumed = open(order);
        resumed.seek(&source.position()).unwrap();
        assert_eq!(steps(resumed), made[3..]);
        let mut other = open(PromptOrder { seed: 4, ..order });
        assert!(other.seek(&source.position()).is_err());
        let few = PromptOrder { rows: 44, num_epoch: Some(1), ..order };
        assert!(PromptSource::new(set.clone(), few).is_err());
    }
}
