//! The forms in which models write reasoning and tool calls.

use mt_data::ChatTemplate;
use serde_json::{Value, json};

use crate::{
    error::{ApiError, Result},
    grammar::Grammar,
};

/// The form of a family's tool calls, recognized by the marks in its chat template.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Calls {
    /// The template defines no tool calls.
    None,
    /// `<tool_call>` around a JSON object, or around `<function=…>` with `<parameter=…>`: Hermes, Qwen.
    Tagged,
    /// A JSON object with `name` and `parameters`: Llama 3.1 and later.
    Json,
    /// `<｜tool▁calls▁begin｜>`: DeepSeek.
    DeepSeek,
    /// `[TOOL_CALLS]` and a list of objects: Mistral.
    Mistral,
}

/// The form of a family's answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Channels with headers: gpt-oss.
    Harmony,
    Tagged {
        calls: Calls,
        /// Whether answers may begin with `<think>`.
        thinks: bool,
    },
}

impl Format {
    /// The form that a chat template defines.
    pub fn of(template: &ChatTemplate) -> Self {
        let has = |text: &str| template.mentions(text);
        if has("<|channel|>") {
            return Self::Harmony;
        }
        let calls = if has("<｜tool▁calls▁begin｜>") {
            Calls::DeepSeek
        } else if has("[TOOL_CALLS]") {
            Calls::Mistral
        } else if has("<tool_call>") {
            Calls::Tagged
        } else if has("<|python_tag|>") || (has("\"parameters\"") && has("<|eot_id|>")) {
            Calls::Json
        } else {
            Calls::None
        };
        Self::Tagged { calls, thinks: has("<think>") || has("</think>") }
    }

    /// Whether the template defines tool calls.
    pub fn has_calls(self) -> bool {
        self != Self::Tagged { calls: Calls::None, thinks: true }
            && self != Self::Tagged { calls: Calls::None, thinks: false }
    }

    /// Whether marks of the form are special tokens, which the text must show.
    pub fn has_special_marks(self) -> bool {
        match self {
            Self::Harmony => true,
            Self::Tagged { calls, thinks } => thinks || !matches!(calls, Calls::None | Calls::Tagged),
        }
    }

    /// The text up to which an answer is free if its end has a given format. `prompt` is the rendered conversation.
    pub fn free_until(self, prompt: &str) -> Option<&'static str> {
        match self {
            Self::Harmony => Some("<|channel|>final<|message|>"),
            Self::Tagged { thinks: true, .. } if opens_thinking(prompt) => Some("</think>"),
            Self::Tagged { .. } => None,
        }
    }

    /// A grammar that forces calls of some tools.
    ///
    /// # Errors
    /// The form has no grammar.
    pub fn forced_calls(self, tools: &[Value], parallel: bool) -> Result<Grammar> {
        let arguments = match self {
            Self::Tagged { calls: Calls::Tagged | Calls::Mistral, .. } => "arguments",
            Self::Tagged { calls: Calls::Json, .. } => "parameters",
            _ => {
                let message =
                    "`tool_choice` cannot force calls with this model's form of tool calls; use `auto`";
                return Err(ApiError::field("tool_choice", message).with_code("unsupported_value"));
            }
        };
        let call = |tool: &Value| {
            let function = &tool["function"];
            let parameters = match &function["parameters"] {
                Value::Null => json!({ "type": "object" }),
                parameters => parameters.clone(),
            };
            json!({
                "type": "object",
                "properties": { "name": { "const": function["name"] }, arguments: parameters },
                "required": ["name", arguments],
                "additionalProperties": false,
            })
        };
        let calls: Vec<Value> = tools.iter().map(call).collect();
        let one = match &calls[..] {
            [call] => call.clone(),
            _ => json!({ "anyOf": calls }),
        };
        let more = if parallel { "+" } else { "" };
        let one = Grammar::with_bounded_space(one);
        Ok(match self {
            Self::Tagged { calls: Calls::Tagged, .. } => Grammar::Lark(format!(
                "start: tagged{more}\ntagged: \"<tool_call>\\n\" call \"\\n</tool_call>\" /\\n?/\ncall: %json {one}\n"
            )),
            Self::Tagged { calls: Calls::Mistral, .. } => {
                let mut list = json!({ "type": "array", "items": one, "minItems": 1 });
                if !parallel {
                    list["maxItems"] = json!(1);
                }
                let list = Grammar::with_bounded_space(list);
                Grammar::Lark(format!("start: \"[TOOL_CALLS]\" calls\ncalls: %json {list}\n"))
            }
            _ => Grammar::JsonSchema(one),
        })
    }
}

/// Whether a prompt ends within reasoning.
pub fn opens_thinking(prompt: &str) -> bool {
    match (prompt.rfind("<think>"), prompt.rfind("</think>")) {
        // Earlier turns of a conversation do not count: nothing but white space follows.
        (Some(open), close) => close.is_none_or(|close| close < open) && prompt[open + 7..].trim().is_empty(),
        (None, _) => false,
    }
}
