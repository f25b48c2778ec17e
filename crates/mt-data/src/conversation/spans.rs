//! The stretches of a rendered conversation that the assistant writes.

use std::ops::Range;

use serde_json::{Map, Value, json};

use super::ASSISTANT;
use crate::chat::ChatTemplate;

/// The reason why answers cannot be distinguished from the rest.
pub(super) const CHANGES_PROMPTS: &str = "the chat template renders the conversation before an answer otherwise than with \
     it, as templates do that leave out earlier reasoning, so the answer's tokens cannot be distinguished from the rest\n\
     hint: use a template with `{% generation %}` around answers, split the conversation into several with one answer \
     each, or train on all tokens (`sft_train_on_completion_only=false`)";

/// The reason why answers of a template without roles cannot be learned.
const WITHOUT_ROLES: &str = "the chat template renders messages of all roles alike, so that answers cannot be distinguished \
     from the rest\nhint: let it write `message.role`, or enclose answers in `{% generation %}` and `{% endgeneration %}`";

/// Renders messages. `tools` is a list or null.
pub(super) fn render(
    template: &ChatTemplate,
    messages: &[Value],
    tools: &Value,
    add_generation_prompt: bool,
) -> Result<String, String> {
    let rendered = template.render_with(json!(messages), variables(tools, add_generation_prompt));
    rendered.map_err(|error| error.to_string())
}

fn variables(tools: &Value, add_generation_prompt: bool) -> Map<String, Value> {
    let mut variables = Map::new();
    variables.insert("add_generation_prompt".into(), json!(add_generation_prompt));
    variables.insert("tools".into(), tools.clone());
    variables
}

/// The number of bytes that a conversation shares with the prompt for its next answer, `asked`. Some templates end prompts
/// with the beginning of a thought that they leave out of whole conversations.
pub(super) fn shared_prefix(
    template: &ChatTemplate,
    prompt: &[Value],
    tools: &Value,
    asked: &str,
    whole: &str,
) -> Result<usize, String> {
    let shared = asked.char_indices().zip(whole.chars()).find(|((_, own), other)| own != other);
    let shared = shared.map_or(asked.len().min(whole.len()), |((at, _), _)| at);
    let is_kept = shared == asked.len() || shared >= render(template, prompt, tools, false)?.len();
    if is_kept { Ok(shared) } else { Err(CHANGES_PROMPTS.to_owned()) }
}

/// Renders a conversation, and finds the bytes of its answers where the template marks them.
pub(super) fn marked(
    template: &ChatTemplate,
    messages: &[Value],
    tools: &Value,
) -> Result<Option<(String, Vec<Range<usize>>)>, String> {
    let marked = template.render_marked(json!(messages), variables(tools, false));
    marked.map_err(|error| error.to_string())
}

/// Renders a conversation, and finds the bytes of its answers, each with the text that ends it: where the template marks
/// them, or else by rendering the conversation before and up to each answer.
pub(super) fn assistant_spans(
    template: &ChatTemplate,
    messages: &[Value],
    tools: &Value,
) -> Result<(String, Vec<Range<usize>>), String> {
    if let Some(marked) = marked(template, messages, tools)? {
        return Ok(marked);
    }
    let text = render(template, messages, tools, false)?;
    if has_no_roles(template, messages, tools, &text) {
        return Err(WITHOUT_ROLES.to_owned());
    }
    let mut answers = Vec::new();
    for (index, _) in messages.iter().enumerate().filter(|(_, message)| message["role"] == ASSISTANT) {
        let asked = render(template, &messages[..index], tools, true)?;
        let with = render(template, &messages[..=index], tools, false)?;
        if !text.starts_with(&with) {
            return Err(CHANGES_PROMPTS.to_owned());
        }
        answers.push(shared_prefix(template, &messages[..index], tools, &asked, &with)?..with.len());
    }
    Ok((text, answers))
}

/// Whether a conversation renders as `text` also with one role for all messages. Templates that refuse such messages know roles.
fn has_no_roles(template: &ChatTemplate, messages: &[Value], tools: &Value, text: &str) -> bool {
    let speaker = "user";
    let has_others = messages.iter().any(|message| message["role"] == speaker);
    let by_one = messages.iter().cloned().map(|mut message| {
        message["role"] = speaker.into();
        message
    });
    has_others && render(template, &by_one.collect::<Vec<_>>(), tools, false).is_ok_and(|other| other == text)
}
