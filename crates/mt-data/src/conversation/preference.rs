//! Preference data: pairs of a chosen and a rejected answer, and single judged answers.

use std::sync::atomic::Ordering;

use serde_json::{Map, Value};

use super::{
    ASSISTANT, AddedEnds, ConversationColumns, Conversations, PromptLimit, as_messages, check_answers,
    check_text, spans, tools, value, without_template,
};
use crate::tokenizer::{EncodedDocument, Tokenizer};

/// An answer with its prompt.
struct Answer {
    document: EncodedDocument,
    /// The tokens before the answer.
    prompt: usize,
}

/// A prompt and one answer to it, with the columns that hold them.
struct Asked<'a> {
    prompt: &'a Value,
    answer: &'a Value,
    columns: [&'a str; 2],
}

impl Conversations {
    /// The tokens of a record of preference data, at most `max_tokens` in each sequence. An example without a token for
    /// an answer has no tokens.
    pub(super) fn encode_preference(
        &self,
        record: &Map<String, Value>,
        tokenizer: &Tokenizer,
        adds: AddedEnds,
        max_tokens: usize,
    ) -> Result<EncodedDocument, String> {
        let (answers, label) = match &self.columns {
            ConversationColumns::Judged { prompt, answer, verdict } => {
                let asked = Asked {
                    prompt: value(record, prompt)?,
                    answer: value(record, answer)?,
                    columns: [prompt, answer],
                };
                let (answer, prompt) = self.tokens_of(&asked, record, tokenizer, adds)?;
                let prompt = shared(&answer, &prompt);
                (vec![Answer { document: answer, prompt }], label_of(value(record, verdict)?, verdict)?)
            }
            ConversationColumns::Preference { prompt, chosen, rejected } => {
                let parted = match prompt {
                    Some(prompt) => {
                        [value(record, prompt)?, value(record, chosen)?, value(record, rejected)?]
                            .map(Value::clone)
                    }
                    None => common_prompt(record, [chosen, rejected])?,
                };
                let name = prompt.as_deref().unwrap_or(chosen);
                let asked = |answer: usize, column| {
                    let asked =
                        Asked { prompt: &parted[0], answer: &parted[answer], columns: [name, column] };
                    self.tokens_of(&asked, record, tokenizer, adds)
                };
                let (chosen, asked_for) = asked(1, chosen.as_str())?;
                let (rejected, _) = asked(2, rejected.as_str())?;
                // Both answers begin behind the same prompt.
                let prompt = shared(&chosen, &asked_for).min(shared(&rejected, &asked_for));
                let answers = [chosen, rejected].map(|document| Answer { document, prompt });
                (answers.into(), 0.0)
            }
            _ => unreachable!("other columns hold conversations"),
        };
        Ok(self.fitted(answers, label, max_tokens))
    }

    /// The tokens of a prompt with its answer, and those of the prompt alone.
    fn tokens_of(
        &self,
        asked: &Asked<'_>,
        record: &Map<String, Value>,
        tokenizer: &Tokenizer,
        adds: AddedEnds,
    ) -> Result<(EncodedDocument, EncodedDocument), String> {
        let [of_prompt, of_answer] = asked.columns;
        let (whole, prompt) = match (&self.template, asked.prompt, asked.answer) {
            (_, Value::String(prompt), Value::String(answer)) => {
                check_text(answer, of_answer)?;
                let whole = format!("{prompt}{answer}");
                (
                    tokenizer.encode_document(&whole, adds.bos, adds.eos),
                    tokenizer.encode_document(prompt, adds.bos, false),
                )
            }
            (None, prompt, answer) => {
                return Err(without_template((prompt, of_prompt), (answer, of_answer)));
            }
            (Some(template), prompt, answer) => {
                let prompt = as_messages(prompt, "user", of_prompt)?;
                let answer = as_messages(answer, ASSISTANT, of_answer)?;
                check_answers(&answer, of_answer)?;
                let tools = tools(record)?;
                let whole = spans::render(template, &[&prompt[..], &answer].concat(), &tools, false)?;
                let asked = spans::render(template, &prompt, &tools, true)?;
                spans::shared_prefix(template, &prompt, &tools, &asked, &whole)?;
                (tokenizer.encode_rendered(&whole), tokenizer.encode_rendered(&asked))
            }
        };
        let text = |error: crate::DataError| error.to_string();
        Ok((whole.map_err(text)?, prompt.map_err(text)?))
    }

    /// Cuts prompts and answers to `max_tokens` in all, and counts the example.
    fn fitted(&self, mut answers: Vec<Answer>, label: f32, max_tokens: usize) -> EncodedDocument {
        self.counts.read.fetch_add(1, Ordering::Relaxed);
        let longest = answers.iter().map(|answer| answer.document.tokens.len()).max().unwrap_or_default();
        let prompt = answers.iter().map(|answer| answer.prompt).max().unwrap_or_default();
        let limit = self.prompts.unwrap_or(PromptLimit { tokens: usize::MAX, always: false });
        let is_long = longest > max_tokens || (limit.always && prompt > limit.tokens);
        if is_long {
            answers.iter_mut().for_each(|answer| answer.cut(limit.tokens, max_tokens));
        }
        // The first token of a sequence is never predicted.
        let has_loss = |answer: &Answer| answer.document.tokens.len() > answer.prompt.max(1);
        if !answers.iter().all(has_loss) {
            self.counts.left_out.fetch_add(1, Ordering::Relaxed);
            return EncodedDocument::default();
        }
        self.counts.shortened.fetch_add(u64::from(is_long), Ordering::Relaxed);
        let mut marked = answers.into_iter().map(|Answer { mut document, prompt }| {
            document.trained = (0..document.tokens.len()).map(|index| index >= prompt).collect();
            document
        });
        let first = marked.next().unwrap_or_default();
        EncodedDocument { second: marked.next().map(Box::new), label, ..first }
    }
}

impl Answer {
    /// Keeps the last `max_prompt` tokens of the prompt, and `max_tokens` in all.
    fn cut(&mut self, max_prompt: usize, max_tokens: usize) {
        let surplus = self.prompt.saturating_sub(max_prompt);
        self.prompt -= surplus;
        self.document.tokens.drain(..surplus);
        self.document.bytes.drain(..surplus);
        self.document.tokens.truncate(max_tokens);
        self.document.bytes.truncate(max_tokens);
    }
}

/// The number of tokens that a document shares with its prompt. A token that reaches from the prompt into the answer
/// belongs to the answer.
fn shared(document: &EncodedDocument, prompt: &EncodedDocument) -> usize {
    document.tokens.iter().zip(&prompt.tokens).take_while(|(own, asked)| own == asked).count()
}

/// The common beginning of two answers, which is the prompt, and the rest of each, as TRL separates them: messages one
/// by one, texts by characters, with a space before the difference in the answers.
fn common_prompt(record: &Map<String, Value>, columns: [&str; 2]) -> Result<[Value; 3], String> {
    match columns.map(|column| value(record, column)) {
        [Ok(Value::String(chosen)), Ok(Value::String(rejected))] => {
            let equal =
                chosen.char_indices().zip(rejected.chars()).take_while(|((_, own), other)| own == other);
            let mut end = equal.last().map_or(0, |((at, own), _)| at + own.len_utf8());
            if end < chosen.len().min(rejected.len()) && chosen[..end].ends_with(' ') {
                end -= 1;
            }
            let [prompt, rest, other] = [&chosen[..end], &chosen[end..], &rejected[end..]];
            check_differ(rest.is_empty() || other.is_empty(), columns)?;
            Ok([prompt, rest, other].map(Value::from))
        }
        [Ok(Value::Array(chosen)), Ok(Value::Array(rejected))] => {
            let end = chosen.iter().zip(rejected).take_while(|(own, other)| own == other).count();
            let [prompt, rest, other] = [&chosen[..end], &chosen[end..], &rejected[end..]];
            check_differ(rest.is_empty() || other.is_empty(), columns)?;
            Ok([prompt, rest, other].map(|messages| messages.to_vec().into()))
        }
        [Err(problem), _] | [_, Err(problem)] => Err(problem),
        _ => Err(format!(
            "columns `{}` and `{}` do not both hold texts or lists of messages",
            columns[0], columns[1]
        )),
    }
}

/// Checks that neither answer is the beginning of the other, which would leave nothing to compare.
fn check_differ(one_is_empty: bool, columns: [&str; 2]) -> Result<(), String> {
    if !one_is_empty {
        return Ok(());
    }
    Err(format!(
        "the answer in column `{}` begins with that of `{}`, or the other way round, so that one answer is empty\nhint: \
         state prompts in a column of their own, with `train_data_columns=[prompt,chosen,rejected]`",
        columns[0], columns[1]
    ))
}

/// Whether an answer is desirable: 1 or 0.
fn label_of(verdict: &Value, column: &str) -> Result<f32, String> {
    match verdict {
        Value::Bool(is_desirable) => Ok(f32::from(u8::from(*is_desirable))),
        Value::Number(number) if number.as_f64() == Some(1.0) => Ok(1.0),
        Value::Number(number) if number.as_f64() == Some(0.0) => Ok(0.0),
        other => Err(format!(
            "column `{column}` holds `{other}`, not a verdict\nhint: use `true` or `false`, or 1 or 0"
        )),
    }
}
