//! Prompts, and the tokens that the model receives for them.

use std::{fs, path::Path};

use mt_config::DecodeGroup;
use mt_data::{ChatTemplate, DataError, Message, Tokenizer};
use mt_engine::encode_prompt;

use crate::failure::Failure;

/// A prompt as written, and as tokens.
pub struct Prompt {
    pub text: String,
    pub tokens: Vec<u32>,
    /// Whether it is a message of a conversation, or the source of an encoder, rather than a text to continue.
    pub is_message: bool,
}

/// Placeholder messages, rendered to find the text that the template places after a message.
const QUESTION: &str = "Zyzzyva";
const ANSWER: &str = "Quagga";

/// A chat template and its effect.
pub struct Chat {
    template: ChatTemplate,
    /// The template's origin, for messages.
    source: String,
    system: Option<String>,
    /// Whether the user requested it.
    is_asked: bool,
    /// The text after a user message; a prompt that contains it is already in the template's format.
    behind_question: String,
    /// The tokens after an assistant message.
    behind_answer: Vec<u32>,
}

impl Chat {
    /// The template for the prompts, if any. Unless the user decides, the tokenizer's template is used if it ends
    /// answers with one of the model's end-of-sequence tokens: some base models also come with a template.
    ///
    /// # Errors
    /// A template is requested but missing, or it cannot be read.
    pub fn find(
        group: &DecodeGroup,
        tokenizer: &Tokenizer,
        directory: Option<&Path>,
    ) -> Result<Option<Self>, Failure> {
        if group.use_chat_template == Some(false) {
            return Ok(None);
        }
        let is_named = group.chat_template.is_some() || group.chat_template_path.is_some();
        let is_asked = is_named || group.use_chat_template == Some(true) || group.system_prompt.is_some();
        let Some((template, source)) = Self::template(group, directory)? else {
            return if is_asked { Err(no_template(tokenizer)) } else { Ok(None) };
        };
        let system = group.system_prompt.clone();
        let around = Self::around(&template, tokenizer);
        let is_known = around.is_ok();
        let (behind_question, behind_answer) = around.unwrap_or_default();
        let chat = Self { template, source, system, is_asked, behind_question, behind_answer };
        let ends = chat.behind_answer.iter().any(|token| tokenizer.end_ids().contains(token));
        if is_asked || (is_known && ends) {
            return Ok(Some(chat));
        }
        say!(
            "note: prompts are continued as they are, since the model does not end answers with the token that the chat \
             template of {} writes; `use_chat_template=true` uses the template",
            chat.source
        );
        Ok(None)
    }

    /// The template that the user or the tokenizer's files give, without a decision whether prompts need it.
    ///
    /// # Errors
    /// The template cannot be read.
    pub fn available(
        group: &DecodeGroup,
        tokenizer: &Tokenizer,
        directory: Option<&Path>,
    ) -> Result<Option<Self>, Failure> {
        if group.use_chat_template == Some(false) {
            return Ok(None);
        }
        let is_asked = group.use_chat_template == Some(true);
        let Some((template, source)) = Self::template(group, directory)? else {
            return if is_asked { Err(no_template(tokenizer)) } else { Ok(None) };
        };
        let system = group.system_prompt.clone();
        let (behind_question, behind_answer) = Self::around(&template, tokenizer).unwrap_or_default();
        Ok(Some(Self { template, source, system, is_asked, behind_question, behind_answer }))
    }

    /// The template.
    pub fn template_of(&self) -> &ChatTemplate {
        &self.template
    }

    /// The template alone.
    pub fn into_template(self) -> ChatTemplate {
        self.template
    }

    fn template(
        group: &DecodeGroup,
        directory: Option<&Path>,
    ) -> Result<Option<(ChatTemplate, String)>, DataError> {
        // Special tokens come from the directory's files.
        let Some(directory) = directory else { return Ok(None) };
        if let Some(file) = &group.chat_template_path {
            let template = ChatTemplate::load_file(file, directory)?;
            return Ok(Some((template, format!("`{}`", file.display()))));
        }
        if let Some(text) = &group.chat_template {
            let template = ChatTemplate::from_text("chat_template", text, directory)?;
            return Ok(Some((template, "`chat_template`".to_owned())));
        }
        let template = ChatTemplate::load(directory)?;
        Ok(template.map(|template| (template, format!("`{}`", directory.display()))))
    }

    /// The text that the template places after a user message, and the tokens after an assistant message.
    fn around(template: &ChatTemplate, tokenizer: &Tokenizer) -> Result<(String, Vec<u32>), DataError> {
        let message = |role: &str, content: &str| Message { role: role.into(), content: content.into() };
        let behind = |text: String, content: &str| match text.rsplit_once(content) {
            Some((_, behind)) => behind.trim().to_owned(),
            None => String::new(),
        };
        let asked = template.render(&[message("user", QUESTION)], true, None)?;
        let turns = [message("user", QUESTION), message("assistant", ANSWER)];
        let answered = behind(template.render(&turns, false, None)?, ANSWER);
        Ok((behind(asked, QUESTION), tokenizer.encode_with_special_tokens(&answered)?))
    }

    /// The token that the template places after an answer, which ends it even if the model's files name another.
    pub fn end(&self, tokenizer: &Tokenizer) -> Option<u32> {
        let token = *self.behind_answer.first()?;
        // Decoding skips special tokens.
        let is_special = tokenizer.decode(&[token], true).is_ok_and(|text| text.is_empty());
        is_special.then_some(token)
    }

    /// Whether a prompt is a conversation that is already in the template's format.
    fn is_written(&self, prompt: &str) -> bool {
        !self.is_asked && !self.behind_question.is_empty() && prompt.contains(&self.behind_question)
    }

    fn rendered(&self, prompt: &str) -> Result<String, DataError> {
        self.render(&[Message { role: "user".into(), content: prompt.into() }])
    }

    /// The text of a conversation up to the next answer. The system prompt comes first.
    fn render(&self, messages: &[Message]) -> Result<String, DataError> {
        let system = self.system.as_ref();
        let system = system.map(|text| Message { role: "system".into(), content: text.clone() });
        let messages: Vec<Message> = system.into_iter().chain(messages.iter().cloned()).collect();
        self.template.render(&messages, true, None)
    }

    /// The tokens of a conversation up to the next answer.
    ///
    /// # Errors
    /// The template rejects the messages.
    pub fn tokens(&self, messages: &[Message], tokenizer: &Tokenizer) -> Result<Vec<u32>, DataError> {
        tokenizer.encode_with_special_tokens(&self.render(messages)?)
    }
}

fn no_template(tokenizer: &Tokenizer) -> Failure {
    Failure::user(format!(
        "a chat template is requested, but the tokenizer {} has none\n\
         hint: name one with `chat_template_path`, or decode without `use_chat_template` and `system_prompt`",
        tokenizer.name()
    ))
}

/// Refuses requests for a chat template with a model whose prompts are sources.
pub fn refuse_chat_of_sources(group: &DecodeGroup) -> Result<(), Failure> {
    let is_asked = group.use_chat_template == Some(true) || group.system_prompt.is_some();
    if is_asked || group.chat_template_path.is_some() || group.chat_template.is_some() {
        return Err(Failure::user(
            "a chat template is requested, but prompts are sources of an encoder, which no template renders\n\
             hint: leave out `use_chat_template`, `chat_template_path` and `system_prompt`",
        ));
    }
    Ok(())
}

/// The tokens of all prompts, which are sources if the model has an encoder. Notes on standard error report the use of
/// the template.
pub fn encode(
    group: &DecodeGroup,
    tokenizer: &Tokenizer,
    add_bos: bool,
    chat: Option<&Chat>,
    reads_source: bool,
) -> Result<Vec<Prompt>, Failure> {
    let (mut num_messages, mut num_written) = (0, 0);
    let prompts = texts(group)?
        .into_iter()
        .map(|text| {
            let (tokens, is_message) = match chat {
                Some(chat) if chat.is_written(&text) => {
                    num_written += 1;
                    (written(tokenizer, &text, add_bos)?, false)
                }
                Some(chat) => {
                    num_messages += 1;
                    (tokenizer.encode_with_special_tokens(&chat.rendered(&text)?)?, true)
                }
                // Sources end with EOS, as in training.
                None if reads_source => (tokenizer.encode(&text, add_bos, true)?, true),
                None => (encode_prompt(tokenizer, &text, add_bos)?, false),
            };
            Ok(Prompt { text, tokens, is_message })
        })
        .collect::<Result<Vec<_>, Failure>>()?;
    if let Some(chat) = chat {
        if num_messages > 0 {
            let otherwise =
                if chat.is_asked { "" } else { "; `use_chat_template=false` continues them as they are" };
            say!(
                "note: prompts are rendered as messages with the chat template of {}{otherwise}",
                chat.source
            );
        }
        if num_written > 0 {
            say!(
                "note: a prompt that is already in the chat template's format is continued as it is; \
                 `use_chat_template=true` renders it as a message, too"
            );
        }
    }
    Ok(prompts)
}

/// The tokens of a conversation that spells out special tokens.
fn written(tokenizer: &Tokenizer, text: &str, add_bos: bool) -> Result<Vec<u32>, DataError> {
    let mut tokens = tokenizer.encode_with_special_tokens(text)?;
    if let Some(bos) = tokenizer.special().bos.filter(|bos| add_bos && tokens.first() != Some(bos)) {
        tokens.insert(0, bos);
    }
    Ok(tokens)
}

/// The prompts as written.
fn texts(group: &DecodeGroup) -> Result<Vec<String>, Failure> {
    let Some(path) = &group.prompts_file else {
        let one = || vec![group.prompt.clone()];
        return Ok(if group.prompts.is_empty() { one() } else { group.prompts.clone() });
    };
    let text = fs::read_to_string(path).map_err(|error| {
        Failure::user(format!(
            "cannot read the prompts in `{}`: {error}\nhint: `prompts_file` names a text file with a prompt on each line",
            path.display()
        ))
    })?;
    let prompts: Vec<String> = text.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect();
    if prompts.is_empty() {
        return Err(Failure::user(format!(
            "`{}` has no prompt\nhint: write a prompt on each line",
            path.display()
        )));
    }
    Ok(prompts)
}
