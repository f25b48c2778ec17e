//! The model that writes data.

use std::{collections::HashSet, io::IsTerminal, ops::ControlFlow};

use mt_config::{DecodeConfig, Request as ConfigRequest};
use mt_data::{Dataset, Message, RecordFormat, Source};
use mt_engine::{FinishReason, Limits, Loaded, Request, SamplingOptions, encode_prompt};
use mt_rl::{PromptForm, PromptSet, key};
use serde_json::Value;

use crate::{
    arguments::Generated,
    commands::decode::{self, Chat, FoundTokenizer},
    failure::Failure,
};

/// The prompts that are done before a record of the progress is written.
pub const CHUNK: usize = 64;

/// A model with its tokenizer and its sampling.
pub struct Writer {
    loaded: Loaded,
    chat: Option<Chat>,
    system: String,
    add_bos: bool,
    limits: Limits,
    sampling: SamplingOptions,
}

/// An answer of the model.
#[derive(Clone, Debug)]
pub struct Written {
    pub text: String,
    /// The number of its tokens.
    pub tokens: usize,
    /// Whether the model ended it.
    pub is_complete: bool,
}

/// The draws of an answer.
#[derive(Clone, Copy, Debug)]
pub enum Draw {
    /// The most probable tokens.
    Best,
    /// By the temperature of the configuration; the number distinguishes kinds of answers.
    Sampled(u64),
}

impl Writer {
    /// Loads the model that keys name.
    ///
    /// # Errors
    /// The keys name no model that continues texts, or it cannot be loaded.
    pub fn open(keys: Vec<String>, max_tokens: Option<usize>) -> Result<Self, Failure> {
        // Without a strategy of the user, answers are drawn by the model's probabilities.
        let given = mt_config::Config::resolve(&ConfigRequest::from_process(keys.clone()))?;
        let is_given = given.entry("decode_sampling_strategy").origin.is_given();
        let (config, source) = decode::configure(keys)?;
        let decode = DecodeConfig::from_config(&config)?;
        if decode.model.decoder_block.has_encoder() {
            return Err(Failure::user(
                "the model has an encoder, and data is written by models that continue texts\n\
                 hint: name a model without an encoder",
            ));
        }
        let FoundTokenizer { tokenizer, directory } =
            source.tokenizer(&decode.tokenizer, &decode.checkpoint)?;
        let chat = Chat::find(&decode.decode, &tokenizer, directory.as_deref())?;
        let add_bos = source.begins_texts(&decode.tokenizer, &tokenizer);
        let mut stop: Vec<u32> = tokenizer.end_ids().iter().copied().collect();
        stop.extend(chat.as_ref().and_then(|chat| chat.end(&tokenizer)));
        let sampling = match is_given {
            true => SamplingOptions::from_config(&decode.decode),
            false => SamplingOptions {
                temperature: decode.decode.decode_sampling_temperature,
                seed: decode.decode.decode_seed,
                ..SamplingOptions::GREEDY
            },
        };
        let loaded = decode::load_speculating(&decode, tokenizer, None)?;
        decode::report_loading(&loaded);
        Ok(Self {
            loaded,
            chat,
            system: decode.decode.system_prompt.clone().unwrap_or_default(),
            add_bos,
            limits: Limits { max_new_tokens: max_tokens, stop },
            sampling,
        })
    }

    /// Refuses models without a chat template.
    ///
    /// # Errors
    /// There is no template. `purpose` says for what one is needed.
    pub fn need_chat(&self, purpose: &str) -> Result<(), Failure> {
        match self.chat {
            Some(_) => Ok(()),
            None => Err(Failure::user(format!(
                "{purpose} are conversations, but the model has no chat template\n\
                 hint: name a model that follows instructions, or the template with `chat_template_path`"
            ))),
        }
    }

    /// The prompts of files, as the model receives them.
    ///
    /// # Errors
    /// No file is named, or a record holds no prompt.
    pub fn prompts(&self, generated: &Generated) -> Result<PromptSet, Failure> {
        let files = generated.prompts.as_deref().ok_or_else(|| {
            Failure::user("no file of prompts is named\nhint: write `--prompts prompts.jsonl`")
        })?;
        let format = match files.trim_end().ends_with(".parquet") {
            true => RecordFormat::Parquet,
            false => RecordFormat::JsonLines,
        };
        let files = files.split(',').map(|file| file.trim().to_owned()).collect();
        let dataset = Dataset::open(&Source::Records { files, format, columns: Vec::new() })?;
        let (prompt, answer) = generated.columns();
        let bounds = self.loaded.prompt_bounds();
        let form = PromptForm {
            prompt_column: &prompt,
            answer_column: answer.as_deref(),
            template: self.chat.as_ref().map(Chat::template_of),
            system_prompt: &self.system,
            add_bos: self.add_bos,
            tokenizer: &self.loaded.tokenizer,
            max_tokens: bounds.max_prefill_length.min(bounds.max_target_length - 1),
        };
        let set = PromptSet::read(&dataset, &form).map_err(mt_train::TrainError::from)?;
        if set.left_out > 0 {
            let (left_out, most) = (set.left_out, form.max_tokens);
            say!("note: {left_out} prompts are left out: they have more than {most} tokens");
        }
        Ok(set)
    }

    /// The tokens of a conversation up to the next answer. Without a chat template, its texts follow each other.
    pub fn tokens(&self, messages: &[Message]) -> Result<Vec<u32>, Failure> {
        match &self.chat {
            Some(chat) => Ok(chat.tokens(messages, &self.loaded.tokenizer)?),
            None => {
                let texts: Vec<&str> = messages.iter().map(|message| message.content.as_str()).collect();
                Ok(encode_prompt(&self.loaded.tokenizer, &texts.join("\n\n"), self.add_bos)?)
            }
        }
    }

    /// The answers to prompts; `None` where a prompt leaves no room for one. The number beside a prompt decides its
    /// draws.
    pub fn answers(&self, asked: &[(Vec<u32>, u64)], draw: Draw) -> Result<Vec<Option<Written>>, Failure> {
        let bounds = self.loaded.prompt_bounds();
        let most = bounds.max_prefill_length.min(bounds.max_target_length - 1);
        let fits = |(_, (tokens, _)): &(usize, &(Vec<u32>, u64))| (1..=most).contains(&tokens.len());
        let fitting: Vec<(usize, &(Vec<u32>, u64))> = asked.iter().enumerate().filter(fits).collect();
        let request = |(_, (tokens, sample)): &(usize, &(Vec<u32>, u64))| Request {
            prompt: tokens.clone(),
            sample: *sample,
        };
        let requests: Vec<Request> = fitting.iter().map(request).collect();
        let options = match draw {
            Draw::Best => SamplingOptions::GREEDY,
            Draw::Sampled(kind) => {
                SamplingOptions { seed: key(&[self.sampling.seed, kind]), ..self.sampling }
            }
        };
        let mut made = vec![None; asked.len()];
        if requests.is_empty() {
            return Ok(made);
        }
        let session = self.loaded.session()?;
        let generation =
            session.generate(&requests, &options, &self.limits, |_| ControlFlow::Continue(()))?;
        let known = self.loaded.tokenizer.vocab_size();
        for ((place, _), row) in fitting.into_iter().zip(generation.rows) {
            // The model may have more tokens than the tokenizer.
            let tokens: Vec<u32> =
                row.tokens.iter().copied().filter(|token| (*token as usize) < known).collect();
            made[place] = Some(Written {
                text: self.loaded.tokenizer.decode(&tokens, true)?.trim().to_owned(),
                tokens: row.tokens.len(),
                is_complete: row.finish == FinishReason::Stop,
            });
        }
        Ok(made)
    }
}

/// A message of the user.
pub fn user(content: impl Into<String>) -> Message {
    Message { role: "user".to_owned(), content: content.into() }
}

/// A message of the assistant.
pub fn assistant(content: impl Into<String>) -> Message {
    Message { role: "assistant".to_owned(), content: content.into() }
}

/// The messages of a prompt.
pub fn messages_of(prompt: &Value) -> Vec<Message> {
    let of = |message: &Value, key: &str| message[key].as_str().unwrap_or_default().to_owned();
    match prompt {
        Value::Array(messages) => messages
            .iter()
            .map(|message| Message { role: of(message, "role"), content: of(message, "content") })
            .collect(),
        text => vec![user(text.as_str().unwrap_or_default())],
    }
}

/// The places of texts that differ from all earlier ones.
pub fn distinct<'a>(texts: impl IntoIterator<Item = &'a str>) -> Vec<usize> {
    let mut seen = HashSet::new();
    texts.into_iter().enumerate().filter(|(_, text)| seen.insert(*text)).map(|(place, _)| place).collect()
}

/// Shows how much is done on a terminal.
pub fn show_progress(done: u64, all: u64, what: &str) {
    if std::io::stderr().is_terminal() {
        say_inline!("\r{done} of {all} {what}");
        if done >= all {
            say_inline!("\r\x1b[K");
        }
    }
}
