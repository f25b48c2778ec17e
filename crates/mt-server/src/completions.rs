//! `POST /v1/completions`.

use std::sync::Arc;

use axum::{body::Body, http::Response};
use mt_engine::serve::{GenerationRequest, TokenLogProbability};
use serde_json::{Value, json};

use crate::{
    app::{App, Call, now, ok},
    endpoint::Endpoint,
    error::{ApiError, Result},
    fields::{Fields, token_of},
    generation::{Finish, Generation, Piece, StopReason, Usage, next_of},
    log_probabilities::TokenLists,
    models::tokens_of_text,
    parameters::{Parameters, check_top},
    sse::{Events, Gone},
};

/// The number of tokens of an answer unless the request sets it, as OpenAI documents.
const DEFAULT_MAX_TOKENS: usize = 16;

/// A request that has been read.
pub struct Asked {
    prompts: Vec<Vec<u32>>,
    parameters: Parameters,
    echo: bool,
    streaming: Streaming,
}

/// How a stream reports usage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Streaming {
    pub stream: bool,
    /// A last event without choices has the usage.
    pub include_usage: bool,
    /// Every event has the usage so far.
    pub continuous_usage: bool,
}

impl Streaming {
    /// Reads `stream` and `stream_options`.
    ///
    /// # Errors
    /// A value is wrong.
    pub fn read(fields: &Fields) -> Result<Self> {
        let stream = fields.flag("stream")?.unwrap_or(false);
        let Some(options) = fields.object("stream_options")? else {
            return Ok(Self { stream, ..Self::default() });
        };
        if !stream {
            return Err(ApiError::field("stream_options", "`stream_options` needs `stream`"));
        }
        let options = Fields::of(options.clone());
        options.ignore(&["include_obfuscation"]);
        let include_usage = options.flag("include_usage")?.unwrap_or(false);
        let continuous_usage = options.flag("continuous_usage_stats")?.unwrap_or(false);
        options.finish()?;
        Ok(Self { stream, include_usage, continuous_usage: include_usage && continuous_usage })
    }
}

fn read(app: &App, fields: &Fields) -> Result<Asked> {
    app.check_model(fields)?;
    let mut parameters = Parameters::read(fields, &app.served, app.limits.max_answers)?;
    if fields.value("suffix").is_some_and(|suffix| suffix != "") {
        let message = "`suffix` is not available: the model continues texts and does not fill gaps";
        return Err(ApiError::field("suffix", message).with_code("unsupported_parameter"));
    }
    let max_tokens = fields.count("max_tokens", 0)?.unwrap_or(DEFAULT_MAX_TOKENS);
    parameters = parameters.with_max_tokens("max_tokens", Some(max_tokens))?;
    parameters.log_probabilities = fields.count("logprobs", 0)?.map(check_top("logprobs")).transpose()?;
    let echo = fields.flag("echo")?.unwrap_or(false);
    if echo {
        parameters.prompt_log_probabilities =
            parameters.prompt_log_probabilities.or(parameters.log_probabilities);
    }
    let adds = fields.flag("add_special_tokens")?;
    let streaming = Streaming::read(fields)?;
    let prompts = prompts(app, fields, "prompt", adds)?;
    if prompts.len() * parameters.num_answers > app.limits.max_answers {
        let message = format!(
            "{} prompts with `n` {} are more than the {} answers of one request",
            prompts.len(),
            parameters.num_answers,
            app.limits.max_answers
        );
        return Err(ApiError::field("prompt", message).with_code("invalid_value"));
    }
    fields.finish()?;
    Ok(Asked { prompts, parameters, echo, streaming })
}

/// The texts of the field `name`: a text, texts, token ids, or lists of token ids.
pub fn prompts(app: &App, fields: &Fields, name: &'static str, adds: Option<bool>) -> Result<Vec<Vec<u32>>> {
    let vocab_size = app.served.vocab_size;
    let wrong = || {
        let message = format!("`{name}` is not a text, a list of texts, token ids, or lists of token ids");
        ApiError::field(name, message)
    };
    let tokens = |list: &[Value]| -> Result<Vec<u32>> {
        list.iter().map(|value| token_of(name, value, vocab_size)).collect()
    };
    match fields.value(name) {
        None => {
            let message = format!("the request has no `{name}`");
            Err(ApiError::field(name, message).with_code("missing_parameter"))
        }
        Some(Value::String(text)) => Ok(vec![tokens_of_text(app, text, adds)?]),
        Some(Value::Array(list)) if list.is_empty() => {
            Err(ApiError::field(name, format!("`{name}` is an empty list")))
        }
        Some(Value::Array(list)) if list.iter().all(Value::is_number) => Ok(vec![tokens(list)?]),
        Some(Value::Array(list)) => list
            .iter()
            .map(|prompt| match prompt {
                Value::String(text) => tokens_of_text(app, text, adds),
                Value::Array(list) => tokens(list),
                _ => Err(wrong()),
            })
            .collect(),
        Some(_) => Err(wrong()),
    }
}

fn requests(app: &App, asked: &Asked) -> Result<Vec<GenerationRequest>> {
    let parameters = &asked.parameters;
    asked
        .prompts
        .iter()
        .map(|prompt| {
            let filters = match &parameters.grammar {
                Some((grammar, field)) => app.filters(grammar, field, None, parameters.num_answers)?,
                None => Vec::new(),
            };
            Ok(GenerationRequest {
                prompt: prompt.clone(),
                num_answers: parameters.num_answers,
                choice: parameters.choice.clone(),
                limits: parameters.limits.clone(),
                log_probabilities: parameters.log_probabilities,
                prompt_log_probabilities: parameters.prompt_log_probabilities,
                filters,
                adapter: parameters.adapter.clone(),
                pooling: None,
            })
        })
        .collect()
}

/// The answers in progress.
pub struct Answers {
    app: Arc<App>,
    asked: Asked,
    generations: Vec<Generation>,
    id: String,
    created: u64,
}

/// One answer so far.
#[derive(Default)]
struct Choice {
    /// Whether it tells about the prompt.
    begins: bool,
    text: String,
    lists: TokenLists,
    token_ids: Vec<u32>,
    prompt_log_probabilities: Value,
    finish: Option<Finish>,
    stop: Option<StopReason>,
}

impl Endpoint for Answers {
    type Asked = (Asked, Vec<GenerationRequest>);

    fn read(app: &App, fields: &Fields) -> Result<Self::Asked> {
        let asked = read(app, fields)?;
        let requests = requests(app, &asked)?;
        Ok((asked, requests))
    }

    async fn start(app: &Arc<App>, call: &Call, (asked, requests): Self::Asked) -> Result<Self> {
        let generations = requests
            .into_iter()
            .map(|request| Generation::start(app, call, request, &asked.parameters))
            .collect::<Result<Vec<_>>>()?;
        Ok(Self { id: app.new_id("cmpl"), app: app.clone(), asked, generations, created: now() })
    }

    fn is_streamed(&self) -> bool {
        self.asked.streaming.stream
    }

    async fn collect(mut self) -> Result<Response<Body>> {
        let each = self.asked.parameters.num_answers;
        let mut choices: Vec<Choice> =
            (0..each * self.generations.len()).map(|_| Choice::default()).collect();
        while let Some((prompt, piece)) = next_of(&mut self.generations).await? {
            match piece {
                Piece::Prompt { log_probabilities } => {
                    for choice in &mut choices[prompt * each..][..each] {
                        *choice = self.begin(prompt, &log_probabilities)?;
                    }
                }
                Piece::Text { answer, text, token } => {
                    self.push(&mut choices[prompt * each + answer], &text, &token);
                }
                Piece::End { answer, text, finish, stop } => {
                    let choice = &mut choices[prompt * each + answer];
                    choice.text += &text;
                    (choice.finish, choice.stop) = (Some(finish), stop);
                }
            }
        }
        let usage = Usage::of(&self.generations);
        let choices = choices.iter_mut().enumerate();
        let choices: Vec<Value> = choices.map(|(index, choice)| self.choice(index, choice, true)).collect();
        let mut body = self.body(choices);
        body["usage"] = usage.json();
        Ok(ok(&body))
    }

    async fn send(mut self, events: &Events) -> Result<(), Gone> {
        let each = self.asked.parameters.num_answers;
        let mut lists: Vec<TokenLists> =
            (0..each * self.generations.len()).map(|_| TokenLists::default()).collect();
        loop {
            let next = match next_of(&mut self.generations).await {
                Ok(next) => next,
                Err(error) => {
                    events.data(&error.body()).await?;
                    return events.done().await;
                }
            };
            let Some((prompt, piece)) = next else { break };
            let mut choice = Choice::default();
            let answer = match piece {
                Piece::Prompt { log_probabilities } => {
                    for answer in 0..each {
                        let index = prompt * each + answer;
                        let begun = self.begin(prompt, &log_probabilities);
                        let Ok(mut begun) = begun else { continue };
                        lists[index] = TokenLists::at(begun.lists.offset());
                        if self.begins_streams() {
                            self.event(events, index, &mut begun).await?;
                        }
                    }
                    continue;
                }
                Piece::Text { answer, text, token } => {
                    choice.lists = std::mem::take(&mut lists[prompt * each + answer]);
                    self.push(&mut choice, &text, &token);
                    answer
                }
                Piece::End { answer, text, finish, stop } => {
                    choice.text = text;
                    (choice.finish, choice.stop) = (Some(finish), stop);
                    answer
                }
            };
            let index = prompt * each + answer;
            self.event(events, index, &mut choice).await?;
            if choice.finish.is_none() {
                lists[index] = TokenLists::at(choice.lists.offset());
            }
        }
        if self.asked.streaming.include_usage {
            let mut body = self.body(Vec::new());
            body["usage"] = Usage::of(&self.generations).json();
            events.data(&body).await?;
        }
        events.done().await
    }
}

impl Answers {
    /// Whether the prompt has an event of its own in streams.
    fn begins_streams(&self) -> bool {
        let Parameters { prompt_log_probabilities, return_token_ids, .. } = &self.asked.parameters;
        self.asked.echo || prompt_log_probabilities.is_some() || *return_token_ids
    }

    /// An empty answer, or with `echo` one that begins with the prompt.
    fn begin(&self, prompt: usize, found: &[Option<TokenLogProbability>]) -> Result<Choice> {
        let mut choice = Choice { begins: true, ..Choice::default() };
        let tokenizer = &self.app.served.tokenizer;
        let parameters = &self.asked.parameters;
        let tokens = &self.asked.prompts[prompt];
        let skips = parameters.skip_special_tokens;
        if self.asked.echo {
            choice.text = tokenizer.decode(tokens, skips)?;
            if parameters.log_probabilities.is_some() {
                for (index, token) in tokens.iter().enumerate() {
                    choice.lists.push(tokenizer, *token, found.get(index).and_then(Option::as_ref), skips);
                }
            }
        }
        if parameters.prompt_log_probabilities.is_some() && !found.is_empty() {
            choice.prompt_log_probabilities =
                tokens.iter().zip(found).map(|(_, found)| prompt_entry(&self.app, found.as_ref())).collect();
        }
        Ok(choice)
    }

    fn push(&self, choice: &mut Choice, text: &str, token: &TokenLogProbability) {
        choice.text += text;
        choice.token_ids.push(token.token);
        if self.asked.parameters.log_probabilities.is_some() {
            let skips = self.asked.parameters.skip_special_tokens;
            choice.lists.push(&self.app.served.tokenizer, token.token, Some(token), skips);
        }
    }

    async fn event(&mut self, events: &Events, index: usize, choice: &mut Choice) -> Result<(), Gone> {
        let choice = self.choice(index, choice, false);
        let mut body = self.body(vec![choice]);
        if self.asked.streaming.continuous_usage {
            body["usage"] = Usage::of(&self.generations).json();
        } else if self.asked.streaming.include_usage {
            body["usage"] = Value::Null;
        }
        events.data(&body).await
    }

    fn choice(&self, index: usize, choice: &mut Choice, is_whole: bool) -> Value {
        let lists =
            if choice.lists.is_empty() && (!is_whole || self.asked.parameters.log_probabilities.is_none()) {
                Value::Null
            } else {
                choice.lists.take()
            };
        let mut object = json!({
            "index": index,
            "text": choice.text,
            "logprobs": lists,
            "finish_reason": choice.finish.map(Finish::name),
            "stop_reason": StopReason::json(choice.stop.as_ref()),
        });
        if !choice.prompt_log_probabilities.is_null() {
            object["prompt_logprobs"] = choice.prompt_log_probabilities.take();
        }
        if self.asked.parameters.return_token_ids {
            object["token_ids"] = json!(choice.token_ids);
            if choice.begins {
                object["prompt_token_ids"] =
                    json!(self.asked.prompts[index / self.asked.parameters.num_answers]);
            }
        }
        object
    }

    fn body(&self, choices: Vec<Value>) -> Value {
        json!({
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.app.served.name_of(self.asked.parameters.adapter.as_deref()),
            "choices": choices,
        })
    }
}

/// vLLM's entry of `prompt_logprobs`: from token ids to log-probabilities.
pub fn prompt_entry(app: &App, found: Option<&TokenLogProbability>) -> Value {
    let Some(found) = found else { return Value::Null };
    let mut entry = serde_json::Map::new();
    let ranked = found.top.iter().enumerate().map(|(rank, (token, log))| (*token, *log, Some(rank + 1)));
    for (token, log, rank) in ranked.chain([(found.token, found.log_probability, None)]) {
        entry.entry(token.to_string()).or_insert_with(|| {
            json!({
                "logprob": log.max(-9999.0),
                "rank": rank,
                "decoded_token": crate::log_probabilities::token_text(&app.served.tokenizer, token),
            })
        });
    }
    Value::Object(entry)
}
