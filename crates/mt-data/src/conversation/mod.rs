//! Conversations for fine-tuning: records to tokens, and the tokens that have a loss.

mod preference;
mod reward;
mod spans;

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use crate::chat::ChatTemplate;
use crate::source::hex;
use crate::tokenizer::{EncodedDocument, Tokenizer};

pub use reward::RewardColumns;
use spans::assistant_spans;

/// The reason why an example teaches nothing.
const WITHOUT_LOSS: &str = "no token has a loss: the chat template writes no text of the assistant, or not within its \
     `{% generation %}` blocks";
/// The role whose messages are answers.
const ASSISTANT: &str = "assistant";
/// The column of a record that lists the tools of its conversation.
const TOOLS: &str = "tools";

/// The columns of a record that hold its conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ConversationColumns {
    /// A list of messages, each an object with `role` and `content`.
    Messages(String),
    /// A prompt and its answer, each a text or a list of messages.
    Pair { prompt: String, answer: String },
    /// A prompt and two answers, each a text or a list of messages. Without a column of prompts, the prompt is the
    /// common beginning of both answers.
    Preference { prompt: Option<String>, chosen: String, rejected: String },
    /// A prompt, its answer, and whether the answer is desirable.
    Judged { prompt: String, answer: String, verdict: String },
    /// Answers with rewards.
    Rewards(RewardColumns),
}

impl ConversationColumns {
    /// The columns in the order of a configuration: that of the messages, or those of prompt and answer. `None` for
    /// another number of columns.
    pub fn of(columns: &[String]) -> Option<Self> {
        match columns {
            [messages] => Some(Self::Messages(messages.clone())),
            [prompt, answer] => Some(Self::Pair { prompt: prompt.clone(), answer: answer.clone() }),
            _ => None,
        }
    }

    /// The columns of preference pairs: prompt, chosen and rejected answer, or the two answers. `None` for another
    /// number of columns.
    pub fn of_pairs(columns: &[String]) -> Option<Self> {
        match columns {
            [chosen, rejected] => {
                Some(Self::Preference { prompt: None, chosen: chosen.clone(), rejected: rejected.clone() })
            }
            [prompt, chosen, rejected] => Some(Self::Preference {
                prompt: Some(prompt.clone()),
                chosen: chosen.clone(),
                rejected: rejected.clone(),
            }),
            _ => None,
        }
    }

    /// The columns of judged answers: prompt, answer and verdict. `None` for another number of columns.
    pub fn of_judged(columns: &[String]) -> Option<Self> {
        match columns {
            [prompt, answer, verdict] => Some(Self::Judged {
                prompt: prompt.clone(),
                answer: answer.clone(),
                verdict: verdict.clone(),
            }),
            _ => None,
        }
    }
}

/// The most tokens of a prompt of preference data, whose end is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PromptLimit {
    pub tokens: usize,
    /// Whether all prompts are cut, or only those of examples that do not fit a row.
    pub always: bool,
}

/// Whether a text without a chat template begins with BOS and ends with EOS, if the tokenizer has them. Templates write
/// both themselves.
#[derive(Debug, Clone, Copy)]
pub struct AddedEnds {
    pub bos: bool,
    pub eos: bool,
}

/// How records become tokens.
#[derive(Debug)]
pub struct Conversations {
    columns: ConversationColumns,
    template: Option<ChatTemplate>,
    /// The known family whose template this is, to which marks around answers have been added.
    family: Option<&'static str>,
    /// Whether only answers have a loss; otherwise all tokens do.
    answers_only: bool,
    /// The most tokens of a prompt of preference data.
    prompts: Option<PromptLimit>,
    counts: ExampleCounts,
}

/// The numbers of examples that have been tokenized so far. Data is tokenized ahead of its use.
#[derive(Debug, Default)]
pub struct ExampleCounts {
    read: AtomicU64,
    shortened: AtomicU64,
    left_out: AtomicU64,
}

impl ExampleCounts {
    /// All examples.
    pub fn read(&self) -> u64 {
        self.read.load(Ordering::Relaxed)
    }

    /// The examples whose ends were cut.
    pub fn shortened(&self) -> u64 {
        self.shortened.load(Ordering::Relaxed)
    }

    /// Forgets the examples so far, such as those of a pass before training.
    pub fn forget(&self) {
        for count in [&self.read, &self.shortened, &self.left_out] {
            count.store(0, Ordering::Relaxed);
        }
    }

    /// The examples that were left out, because no token with a loss would have been left after the cut.
    pub fn left_out(&self) -> u64 {
        self.left_out.load(Ordering::Relaxed)
    }
}

/// Two forms are equal if they turn every record into the same tokens.
impl PartialEq for Conversations {
    fn eq(&self, other: &Self) -> bool {
        self.fingerprint() == other.fingerprint()
    }
}

impl Conversations {
    /// Conversations in these columns. Without a template, pairs of texts are joined as they are. If answers are to be
    /// found in lists of messages, the templates of known families get marks around them.
    pub fn new(columns: ConversationColumns, template: Option<ChatTemplate>, answers_only: bool) -> Self {
        let finds_answers = answers_only && matches!(columns, ConversationColumns::Messages(_));
        let marked = template.as_ref().filter(|_| finds_answers).and_then(ChatTemplate::for_answers);
        let (template, family) = match marked {
            Some((marked, family)) => (Some(marked), Some(family)),
            None => (template, None),
        };
        Self { columns, template, family, answers_only, prompts: None, counts: ExampleCounts::default() }
    }

    /// Preference data in these columns.
    pub fn preference(
        columns: ConversationColumns,
        template: Option<ChatTemplate>,
        prompts: PromptLimit,
    ) -> Self {
        Self { prompts: Some(prompts), ..Self::new(columns, template, true) }
    }

    /// The known family of models to whose template marks around answers have been added.
    pub fn marked_family(&self) -> Option<&'static str> {
        self.family
    }

    /// The name of the chat template, if its `{% generation %}` blocks leave out the token that ends an answer: the last
    /// token of a marked answer is no special one, white space aside.
    pub fn unlearned_end(&self, tokenizer: &Tokenizer) -> Option<&str> {
        let finds_answers = self.answers_only && matches!(self.columns, ConversationColumns::Messages(_));
        let template = self.template.as_ref().filter(|_| finds_answers)?;
        // Some templates end an answer with the text that begins the next message.
        let roles = ["user", ASSISTANT, "user"];
        let messages = roles.map(|role| json!({"role": role, "content": "text"}));
        // A template that refuses these messages may know others.
        let (text, answers) = spans::marked(template, &messages, &Value::Null).ok()??;
        let document = tokenizer.encode_rendered(&text).ok()?;
        let trained = within(&document, &answers);
        let learned = document.tokens.iter().zip(trained).filter(|(_, is_trained)| *is_trained);
        let mut ids = learned.map(|(token, _)| token.cast_unsigned()).rev();
        let is_blank = |id: &u32| {
            tokenizer.token_bytes(*id).is_some_and(|bytes| bytes.iter().all(u8::is_ascii_whitespace))
        };
        let last = ids.find(|id| !is_blank(id))?;
        (!tokenizer.is_special(last)).then(|| template.name())
    }

    /// The numbers of examples that have been tokenized.
    pub fn counts(&self) -> &ExampleCounts {
        &self.counts
    }

    /// A hash of everything that determines the tokens of a record, other than the tokenizer.
    pub(crate) fn fingerprint(&self) -> String {
        let columns = match &self.columns {
            ConversationColumns::Messages(column) => json!([column]),
            ConversationColumns::Pair { prompt, answer } => json!([prompt, answer]),
            ConversationColumns::Preference { prompt, chosen, rejected } => {
                json!({"prompt": prompt, "chosen": chosen, "rejected": rejected})
            }
            ConversationColumns::Judged { prompt, answer, verdict } => {
                json!({"prompt": prompt, "answer": answer, "verdict": verdict})
            }
            ConversationColumns::Rewards(RewardColumns::Answers { prompt, answers, margin }) => {
                json!({"prompt": prompt, "rewarded": answers, "margin": margin})
            }
            ConversationColumns::Rewards(RewardColumns::Steps {
                prompt,
                steps,
                labels,
                separator,
                last_only,
            }) => {
                json!({"prompt": prompt, "steps": [steps, labels, separator], "last_only": last_only})
            }
        };
        let template = self.template.as_ref().map(ChatTemplate::identity);
        let mut settings = vec![columns, json!(template), json!(self.answers_only)];
        settings.extend(self.prompts.map(|limit| json!([limit.tokens, limit.always])));
        hex(&Sha256::digest(Value::from(settings).to_string())[..16])
    }

    /// The tokens of a record, at most `max_tokens`. An example whose answers would be cut away entirely has no tokens.
    ///
    /// # Errors
    /// The reason why the record is no conversation, or why its answers cannot be distinguished from the rest.
    pub fn encode(
        &self,
        record: &str,
        tokenizer: &Tokenizer,
        adds: AddedEnds,
        max_tokens: usize,
    ) -> Result<EncodedDocument, String> {
        let record: Value =
            serde_json::from_str(record).map_err(|error| format!("is not a JSON object: {error}"))?;
        let Value::Object(record) = without_nulls(record) else {
            return Err("is not a JSON object".to_owned());
        };
        let document = match &self.columns {
            ConversationColumns::Messages(column) => self.encode_messages(&record, column, tokenizer)?,
            ConversationColumns::Pair { prompt, answer } => {
                self.encode_pair(&record, [prompt, answer], tokenizer, adds)?
            }
            ConversationColumns::Preference { .. } | ConversationColumns::Judged { .. } => {
                return self.encode_preference(&record, tokenizer, adds, max_tokens);
            }
            ConversationColumns::Rewards(columns) => {
                return self.encode_rewards(columns, &record, tokenizer, adds, max_tokens);
            }
        };
        self.cut(document, max_tokens)
    }

    /// Cuts a conversation to `max_tokens`, and counts it.
    fn cut(&self, mut document: EncodedDocument, max_tokens: usize) -> Result<EncodedDocument, String> {
        // The first token is only an input.
        let has_loss =
            |document: &EncodedDocument| (1..document.tokens.len()).any(|target| document.is_trained(target));
        if !has_loss(&document) {
            return Err(WITHOUT_LOSS.to_owned());
        }
        self.counts.read.fetch_add(1, Ordering::Relaxed);
        if document.tokens.len() > max_tokens {
            document.tokens.truncate(max_tokens);
            document.bytes.truncate(max_tokens);
            document.trained.truncate(max_tokens);
            if !has_loss(&document) {
                self.counts.left_out.fetch_add(1, Ordering::Relaxed);
                return Ok(EncodedDocument::default());
            }
            self.counts.shortened.fetch_add(1, Ordering::Relaxed);
        }
        Ok(document)
    }

    fn encode_messages(
        &self,
        record: &Map<String, Value>,
        column: &str,
        tokenizer: &Tokenizer,
    ) -> Result<EncodedDocument, String> {
        let template = self.template.as_ref().ok_or_else(|| {
            format!(
                "column `{column}` holds messages, but the tokenizer has no chat template\nhint: name one with \
                 `chat_template_path`"
            )
        })?;
        let messages = messages(value(record, column)?, column)?;
        let tools = tools(record)?;
        if !self.answers_only {
            let text = spans::render(template, &messages, &tools, false)?;
            return tokenizer.encode_rendered(&text).map_err(|error| error.to_string());
        }
        check_answers(&messages, column)?;
        let (text, answers) = assistant_spans(template, &messages, &tools)?;
        let mut document = tokenizer.encode_rendered(&text).map_err(|error| error.to_string())?;
        document.trained = within(&document, &answers);
        Ok(document)
    }

    fn encode_pair(
        &self,
        record: &Map<String, Value>,
        columns: [&str; 2],
        tokenizer: &Tokenizer,
        adds: AddedEnds,
    ) -> Result<EncodedDocument, String> {
        let [prompt, answer] = [value(record, columns[0])?, value(record, columns[1])?];
        let (document, prompt) = match (&self.template, prompt, answer) {
            (None, Value::String(prompt), Value::String(answer)) => {
                if self.answers_only {
                    check_text(answer, columns[1])?;
                }
                let whole = format!("{prompt}{answer}");
                let document = tokenizer.encode_document(&whole, adds.bos, adds.eos);
                (document, tokenizer.encode_document(prompt, adds.bos, false))
            }
            (None, prompt, answer) => {
                return Err(without_template((prompt, columns[0]), (answer, columns[1])));
            }
            (Some(template), prompt, answer) => {
                let prompt = as_messages(prompt, "user", columns[0])?;
                let answer = as_messages(answer, ASSISTANT, columns[1])?;
                let tools = tools(record)?;
                let whole = spans::render(template, &[&prompt[..], &answer].concat(), &tools, false)?;
                if !self.answers_only {
                    return tokenizer.encode_rendered(&whole).map_err(|error| error.to_string());
                }
                check_answers(&answer, columns[1])?;
                let asked = spans::render(template, &prompt, &tools, true)?;
                spans::shared_prefix(template, &prompt, &tools, &asked, &whole)?;
                (tokenizer.encode_rendered(&whole), tokenizer.encode_rendered(&asked))
            }
        };
        let mut document = document.map_err(|error| error.to_string())?;
        let prompt = prompt.map_err(|error| error.to_string())?;
        if self.answers_only {
            document.trained = after(&document, &prompt);
        }
        Ok(document)
    }
}

/// The reason why values that are not both texts have no tokens without a template.
fn without_template((prompt, of_prompt): (&Value, &str), (answer, of_answer): (&Value, &str)) -> String {
    for (value, column) in [(prompt, of_prompt), (answer, of_answer)] {
        if !value.is_string() && !value.is_array() {
            return neither(column);
        }
    }
    let columns = match of_prompt == of_answer {
        true => format!("column `{of_answer}` holds"),
        false => format!("columns `{of_prompt}` and `{of_answer}` hold"),
    };
    format!(
        "{columns} messages, but the tokenizer has no chat template\nhint: name one with `chat_template_path`"
    )
}

/// The tokens of a rendered conversation that overlap its answers, which are ranges of bytes.
fn within(document: &EncodedDocument, answers: &[Range<usize>]) -> Vec<bool> {
    let (mut start, mut is_before_within) = (0, false);
    let is_within = |bytes: &u32| {
        let token = start..start + *bytes as usize;
        start = token.end;
        // A token without bytes continues the character of the token before it.
        if !token.is_empty() {
            is_before_within =
                answers.iter().any(|answer| token.start < answer.end && token.end > answer.start);
        }
        is_before_within
    };
    document.bytes.iter().map(is_within).collect()
}

/// The tokens behind those that a document shares with its prompt. A token that reaches from the prompt into the answer
/// belongs to the answer.
fn after(document: &EncodedDocument, prompt: &EncodedDocument) -> Vec<bool> {
    let shared = document.tokens.iter().zip(&prompt.tokens).take_while(|(own, asked)| own == asked).count();
    (0..document.tokens.len()).map(|index| index >= shared).collect()
}

/// A value without the fields that are null. Columnar files give all objects of a column the same fields, and templates
/// would write those.
fn without_nulls(value: Value) -> Value {
    match value {
        Value::Array(values) => Value::Array(values.into_iter().map(without_nulls).collect()),
        Value::Object(fields) => {
            let present = fields.into_iter().filter(|(_, field)| !field.is_null());
            Value::Object(present.map(|(name, field)| (name, without_nulls(field))).collect())
        }
        other => other,
    }
}

fn value<'a>(record: &'a Map<String, Value>, column: &str) -> Result<&'a Value, String> {
    record.get(column).filter(|value| !value.is_null()).ok_or_else(|| format!("column `{column}` is empty"))
}

/// The messages of a value: a list of objects, each with a role.
fn messages(value: &Value, column: &str) -> Result<Vec<Value>, String> {
    let example = "a list of messages, such as `[{\"role\": \"user\", \"content\": \"…\"}, …]`";
    let list = value.as_array().ok_or_else(|| format!("column `{column}` does not hold {example}"))?;
    for (index, message) in list.iter().enumerate() {
        if message.get("role").and_then(Value::as_str).is_none() {
            return Err(format!(
                "message {index} in column `{column}` has no `role`; the column holds {example}"
            ));
        }
    }
    Ok(list.clone())
}

/// A text as one message of `role`, or the messages of a list.
fn as_messages(value: &Value, role: &str, column: &str) -> Result<Vec<Value>, String> {
    match value {
        Value::String(text) => Ok(vec![json!({"role": role, "content": text})]),
        Value::Array(_) => messages(value, column),
        _ => Err(neither(column)),
    }
}

fn neither(column: &str) -> String {
    format!("column `{column}` holds neither a text nor a list of messages")
}

fn check_text(answer: &str, column: &str) -> Result<(), String> {
    if answer.trim().is_empty() { Err(format!("the answer in column `{column}` is empty")) } else { Ok(()) }
}

/// Checks that there is an answer, and that none is empty.
fn check_answers(messages: &[Value], column: &str) -> Result<(), String> {
    let mut has_answer = false;
    for (index, message) in messages.iter().enumerate().filter(|(_, message)| message["role"] == ASSISTANT) {
        has_answer = true;
        let is_empty = |value: &Value| match value {
            Value::Null => true,
            Value::String(text) => text.trim().is_empty(),
            Value::Array(list) => list.is_empty(),
            _ => false,
        };
        if is_empty(&message["content"]) && is_empty(&message["tool_calls"]) {
            return Err(format!("the answer in column `{column}`, message {index}, is empty"));
        }
    }
    match has_answer {
        true => Ok(()),
        false => {
            Err(format!("no message in column `{column}` has the role `{ASSISTANT}`, so there is no answer"))
        }
    }
}

/// The tools of a record's conversation: a list, or its JSON text. `null` without tools.
fn tools(record: &Map<String, Value>) -> Result<Value, String> {
    let list = match record.get(TOOLS) {
        Some(Value::String(text)) if !text.trim().is_empty() => {
            serde_json::from_str(text).map_err(|error| format!("column `{TOOLS}` is not JSON: {error}"))?
        }
        None | Some(Value::String(_)) => Value::Null,
        Some(other) => other.clone(),
    };
    match list {
        Value::Null => Ok(Value::Null),
        Value::Array(tools) if tools.is_empty() => Ok(Value::Null),
        Value::Array(_) => Ok(list),
        _ => Err(format!("column `{TOOLS}` does not hold a list of tools, or the JSON text of one")),
    }
}
