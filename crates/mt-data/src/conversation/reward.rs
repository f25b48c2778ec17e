//! Answers with rewards: whole ones, of which one is preferred, and the judged steps of one.

use std::sync::atomic::Ordering;

use serde_json::{Map, Value};

use super::{
    ASSISTANT, AddedEnds, ConversationColumns, Conversations, as_messages, check_answers, check_text, spans,
    tools, value, without_template,
};
use crate::tokenizer::{EncodedDocument, Tokenizer};

/// The columns of answers with rewards.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RewardColumns {
    /// One answer, or the chosen and the rejected one. Without a column of prompts, answers include them. A margin is the
    /// least difference of both rewards.
    Answers { prompt: Option<String>, answers: Vec<String>, margin: Option<String> },
    /// A prompt, the steps of its answer and their labels. Without a column of labels, all steps count as wrong.
    Steps {
        prompt: String,
        steps: String,
        labels: Option<String>,
        /// The text after each step. The reward of a step is that of its last token.
        separator: String,
        last_only: bool,
    },
}

impl RewardColumns {
    /// The columns of pairs in the order of a configuration: prompt, chosen and rejected answer, or the two answers. `None` for
    /// another number of columns.
    pub fn of_pairs(columns: &[String], margin: Option<String>) -> Option<Self> {
        let (prompt, answers) = match columns {
            [_, _] => (None, columns),
            [prompt, answers @ ..] if answers.len() == 2 => (Some(prompt.clone()), answers),
            _ => return None,
        };
        Some(Self::Answers { prompt, answers: answers.to_vec(), margin })
    }

    /// The columns of steps: prompt, steps and labels. `None` for another number of columns.
    pub fn of_steps(columns: &[String], separator: &str, last_only: bool) -> Option<Self> {
        let [prompt, steps, labels] = columns else { return None };
        let (prompt, steps, labels) = (prompt.clone(), steps.clone(), Some(labels.clone()));
        Some(Self::Steps { prompt, steps, labels, separator: separator.to_owned(), last_only })
    }
}

impl Conversations {
    /// Answers with rewards in these columns.
    pub fn with_rewards(columns: RewardColumns, template: Option<crate::ChatTemplate>) -> Self {
        Self::new(ConversationColumns::Rewards(columns), template, false)
    }

    /// The tokens of a record of answers with rewards. A token with a loss is the target of the position at which a reward
    /// is read; the last token of a sequence is only a target. An example that does not fit has no tokens.
    pub(super) fn encode_rewards(
        &self,
        columns: &RewardColumns,
        record: &Map<String, Value>,
        tokenizer: &Tokenizer,
        adds: AddedEnds,
        max_tokens: usize,
    ) -> Result<EncodedDocument, String> {
        let (sequences, label) = match columns {
            RewardColumns::Answers { prompt, answers, margin } => {
                let prompt =
                    prompt.as_deref().map(|column| Ok::<_, String>((value(record, column)?, column)));
                let prompt = prompt.transpose()?;
                let encode = |column: &String| {
                    let answer = (value(record, column)?, column.as_str());
                    self.whole_answer(prompt, answer, record, tokenizer, adds).map(judged_at_end)
                };
                let margin =
                    margin.as_deref().map_or(Ok(0.0), |column| margin_of(value(record, column)?, column));
                (answers.iter().map(encode).collect::<Result<Vec<_>, _>>()?, margin?)
            }
            RewardColumns::Steps { .. } => (vec![steps_of(columns, record, tokenizer, adds)?], 0.0),
        };
        self.counts.read.fetch_add(1, Ordering::Relaxed);
        if sequences.iter().any(|sequence| sequence.tokens.len() > max_tokens) {
            // The reward of an answer without its end would be that of another answer.
            self.counts.left_out.fetch_add(1, Ordering::Relaxed);
            return Ok(EncodedDocument::default());
        }
        let mut sequences = sequences.into_iter();
        let first = sequences.next().unwrap_or_default();
        Ok(EncodedDocument { second: sequences.next().map(Box::new), label, ..first })
    }

    /// The tokens of a prompt with its answer. Texts are joined as they are.
    fn whole_answer(
        &self,
        prompt: Option<(&Value, &str)>,
        (answer, of_answer): (&Value, &str),
        record: &Map<String, Value>,
        tokenizer: &Tokenizer,
        adds: AddedEnds,
    ) -> Result<EncodedDocument, String> {
        let document = match (&self.template, prompt, answer) {
            (_, None, Value::String(answer)) => {
                check_text(answer, of_answer)?;
                tokenizer.encode_document(answer, adds.bos, adds.eos)
            }
            (_, Some((Value::String(prompt), _)), Value::String(answer)) => {
                check_text(answer, of_answer)?;
                tokenizer.encode_document(&format!("{prompt}{answer}"), adds.bos, adds.eos)
            }
            (None, prompt, answer) => {
                let answer = (answer, of_answer);
                return Err(without_template(prompt.unwrap_or(answer), answer));
            }
            (Some(template), prompt, answer) => {
                let mut messages = match prompt {
                    Some((prompt, column)) => as_messages(prompt, "user", column)?,
                    None => Vec::new(),
                };
                let answer = as_messages(answer, ASSISTANT, of_answer)?;
                check_answers(&answer, of_answer)?;
                messages.extend(answer);
                tokenizer.encode_rendered(&spans::render(template, &messages, &tools(record)?, false)?)
            }
        };
        document.map_err(|error| error.to_string())
    }
}

/// The sequence with a reward at its last token.
fn judged_at_end(document: EncodedDocument) -> EncodedDocument {
    let last = document.tokens.len();
    with_rewards(document, |index| index + 1 == last)
}

/// The sequence with rewards at these tokens. The last token is repeated, as the target of the last position.
fn with_rewards(mut document: EncodedDocument, is_judged: impl Fn(usize) -> bool) -> EncodedDocument {
    document.trained = std::iter::once(false).chain((0..document.tokens.len()).map(is_judged)).collect();
    document.tokens.extend(document.tokens.last().copied());
    document.bytes.push(0);
    document
}

/// The tokens of a prompt and the steps of its answer, as TRL joins them: each step is followed by the separator, whose last
/// token has the step's label.
fn steps_of(
    columns: &RewardColumns,
    record: &Map<String, Value>,
    tokenizer: &Tokenizer,
    adds: AddedEnds,
) -> Result<EncodedDocument, String> {
    let RewardColumns::Steps { prompt, steps, labels, separator, last_only } = columns else {
        unreachable!("other columns hold whole answers")
    };
    let Value::String(text) = value(record, prompt)? else {
        return Err(format!("column `{prompt}` does not hold a text"));
    };
    let texts = list_of(value(record, steps)?, steps, "texts", Value::as_str)?;
    if texts.is_empty() {
        return Err(format!("column `{steps}` holds no step"));
    }
    let classes = match labels {
        Some(column) => {
            list_of(value(record, column)?, column, "labels, `true` or `false`, or 1 or 0", class_of)?
        }
        None => vec![0; texts.len()],
    };
    if classes.len() != texts.len() {
        return Err(format!(
            "column `{steps}` holds {} steps, but column `{}` {} labels",
            texts.len(),
            labels.as_deref().unwrap_or_default(),
            classes.len()
        ));
    }
    let plain = |text: &str| tokenizer.encode_document(text, false, false).map_err(|error| error.to_string());
    let mut document = tokenizer.encode_document(text, adds.bos, false).map_err(|error| error.to_string())?;
    let end = plain(separator)?;
    let mut ends = Vec::new();
    for (index, text) in texts.iter().enumerate() {
        if text.trim().is_empty() {
            return Err(format!("step {index} in column `{steps}` is empty"));
        }
        let step = plain(text)?;
        document.tokens.extend([step.tokens, end.tokens.clone()].concat());
        document.bytes.extend([step.bytes, end.bytes.clone()].concat());
        ends.push(document.tokens.len() - 1);
    }
    let mut of_tokens = vec![0; document.tokens.len() + 1];
    for (end, class) in ends.iter().zip(classes) {
        of_tokens[end + 1] = class;
    }
    if *last_only {
        ends.drain(..ends.len() - 1);
    }
    let document = with_rewards(document, |index| ends.contains(&index));
    Ok(EncodedDocument { classes: of_tokens, ..document })
}

/// The elements of a list.
fn list_of<'a, T>(
    value: &'a Value,
    column: &str,
    of: &str,
    read: impl Fn(&'a Value) -> Option<T>,
) -> Result<Vec<T>, String> {
    let elements = value.as_array().and_then(|list| list.iter().map(read).collect());
    elements.ok_or_else(|| format!("column `{column}` does not hold a list of {of}"))
}

/// Whether a step is right: 1 or 0.
fn class_of(label: &Value) -> Option<i32> {
    match label {
        Value::Bool(is_right) => Some(i32::from(*is_right)),
        Value::Number(number) if number.as_f64() == Some(1.0) => Some(1),
        Value::Number(number) if number.as_f64() == Some(0.0) => Some(0),
        _ => None,
    }
}

fn margin_of(margin: &Value, column: &str) -> Result<f32, String> {
    let number = margin.as_f64().map(|number| number as f32).filter(|number| number.is_finite());
    number.ok_or_else(|| format!("column `{column}` holds `{margin}`, not a number"))
}
