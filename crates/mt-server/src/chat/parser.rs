//! Reasoning, content and tool calls in the text of an answer, as it arrives.

use std::collections::VecDeque;

use serde_json::Value;

use super::{
    format::{Calls, Format, opens_thinking},
    harmony::Harmony,
    tools::{self, ToolCall},
};
use crate::text::length_of_begun;

/// New text of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Delta {
    Reasoning(String),
    Content(String),
    Call(ToolCall),
}

/// Parses the text of one answer.
pub enum ChatParser {
    Harmony(Harmony),
    Tagged(Tagged),
}

impl ChatParser {
    /// A parser of an answer to a rendered conversation. Calls are parsed if the request has tools.
    pub fn new(format: Format, prompt: &str, tools: &[Value]) -> Self {
        match format {
            Format::Harmony => Self::Harmony(Harmony::new(prompt)),
            Format::Tagged { calls, thinks } => {
                let state = if thinks && opens_thinking(prompt) { State::Thinking } else { State::Start };
                let calls = if tools.is_empty() { Calls::None } else { calls };
                let tools = tools.to_vec();
                Self::Tagged(Tagged {
                    calls,
                    thinks,
                    tools,
                    state,
                    held: String::new(),
                    found: VecDeque::new(),
                })
            }
        }
    }

    /// Adds text, and returns what it completes.
    pub fn push(&mut self, text: &str) -> Vec<Delta> {
        let deltas = match self {
            Self::Harmony(parser) => parser.push(text),
            Self::Tagged(parser) => parser.push(text),
        };
        joined(deltas)
    }

    /// Whether the next text belongs to reasoning.
    pub fn is_reasoning(&self) -> bool {
        match self {
            Self::Harmony(parser) => parser.is_reasoning(),
            Self::Tagged(parser) => matches!(parser.state, State::Thinking | State::Reasoning),
        }
    }

    /// The rest of the answer, at its end.
    pub fn finish(&mut self) -> Vec<Delta> {
        let deltas = match self {
            Self::Harmony(parser) => parser.finish(),
            Self::Tagged(parser) => parser.finish(),
        };
        joined(deltas)
    }
}

/// Joins neighboring texts, and drops empty ones.
fn joined(deltas: Vec<Delta>) -> Vec<Delta> {
    let mut found: Vec<Delta> = Vec::new();
    for delta in deltas {
        match (found.last_mut(), delta) {
            (_, Delta::Reasoning(text) | Delta::Content(text)) if text.is_empty() => {}
            (Some(Delta::Reasoning(last)), Delta::Reasoning(text)) => *last += &text,
            (Some(Delta::Content(last)), Delta::Content(text)) => *last += &text,
            (_, delta) => found.push(delta),
        }
    }
    found
}

const THINK: &str = "<think>";
const THOUGHT: &str = "</think>";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Only white space so far.
    Start,
    /// After the mark of reasoning, before text other than white space.
    Thinking,
    Reasoning,
    /// After reasoning, before content other than white space.
    Between,
    Content,
    /// Within calls, up to the closing mark or the end.
    Call,
    /// After a call.
    AfterCall,
}

/// Parses forms with tags.
pub struct Tagged {
    calls: Calls,
    thinks: bool,
    tools: Vec<Value>,
    state: State,
    held: String,
    found: VecDeque<Delta>,
}

impl Tagged {
    fn push(&mut self, text: &str) -> Vec<Delta> {
        self.held += text;
        while self.step() {}
        self.found.drain(..).collect()
    }

    fn finish(&mut self) -> Vec<Delta> {
        while self.step() {}
        let rest = std::mem::take(&mut self.held);
        match self.state {
            State::Thinking | State::Reasoning => self.found.push_back(Delta::Reasoning(rest)),
            State::Call => self.call(&rest, false),
            State::AfterCall if rest.trim().is_empty() => {}
            State::Between | State::Start if rest.trim().is_empty() => {}
            _ => self.found.push_back(Delta::Content(rest)),
        }
        self.found.drain(..).collect()
    }

    /// The marks around calls.
    fn marks(&self) -> Option<(&'static str, Option<&'static str>)> {
        match self.calls {
            Calls::None => None,
            Calls::Tagged => Some(("<tool_call>", Some("</tool_call>"))),
            Calls::Json => Some(("<|python_tag|>", None)),
            Calls::DeepSeek => Some(("<｜tool▁calls▁begin｜>", Some("<｜tool▁calls▁end｜>"))),
            Calls::Mistral => Some(("[TOOL_CALLS]", None)),
        }
    }

    /// Consumes held text up to the next mark. `false` if more text is needed.
    fn step(&mut self) -> bool {
        match self.state {
            State::Start => self.start(),
            State::Thinking => {
                let trimmed = self.held.trim_start().to_owned();
                let has_begun = !trimmed.is_empty();
                self.held = trimmed;
                has_begun && self.go(State::Reasoning)
            }
            State::Reasoning => match self.upto(THOUGHT, Delta::Reasoning) {
                true => self.go(State::Between),
                false => false,
            },
            State::Between | State::AfterCall => {
                let trimmed = self.held.trim_start();
                if trimmed.is_empty() {
                    return false;
                }
                self.held = trimmed.to_owned();
                self.begin_content()
            }
            State::Content => match self.marks() {
                Some((open, _)) => match self.upto(open, Delta::Content) {
                    true => self.go(State::Call),
                    false => false,
                },
                None => {
                    let text = std::mem::take(&mut self.held);
                    self.found.push_back(Delta::Content(text));
                    false
                }
            },
            State::Call => {
                let Some((_, Some(close))) = self.marks() else { return false };
                let Some(at) = self.held.find(close) else { return false };
                let body = self.held[..at].to_owned();
                self.held.drain(..at + close.len());
                self.call(&body, true);
                self.go(State::AfterCall)
            }
        }
    }

    fn start(&mut self) -> bool {
        let trimmed = self.held.trim_start();
        if trimmed.is_empty() {
            return false;
        }
        if self.thinks {
            if let Some(rest) = trimmed.strip_prefix(THINK) {
                self.held = rest.to_owned();
                return self.go(State::Thinking);
            }
            if THINK.starts_with(trimmed) {
                return false;
            }
        }
        let is_object = self.calls == Calls::Json && trimmed.starts_with('{');
        let begins_call = match self.marks() {
            Some((open, _)) if trimmed.starts_with(open) => true,
            Some((open, _)) if open.starts_with(trimmed) => return false,
            _ => is_object,
        };
        if begins_call {
            // White space before a call is no content.
            self.held = trimmed.to_owned();
        }
        self.begin_content()
    }

    /// Content begins, or a call.
    fn begin_content(&mut self) -> bool {
        if self.calls == Calls::Json && self.held.starts_with('{') {
            return self.go(State::Call);
        }
        if let Some((open, _)) = self.marks() {
            if let Some(rest) = self.held.strip_prefix(open) {
                self.held = rest.to_owned();
                return self.go(State::Call);
            }
            if open.starts_with(&self.held) {
                return false;
            }
        }
        self.go(State::Content)
    }

    fn go(&mut self, state: State) -> bool {
        self.state = state;
        true
    }

    /// Emits the held text up to a mark. Without the mark, emits all text that cannot begin it, and returns `false`.
    fn upto(&mut self, mark: &str, delta: impl Fn(String) -> Delta) -> bool {
        if let Some(at) = self.held.find(mark) {
            let text = self.held[..at].trim_end().to_owned();
            self.held.drain(..at + mark.len());
            self.found.push_back(delta(text));
            return true;
        }
        // White space before a mark does not belong to the text.
        let begun = length_of_begun(&self.held, mark);
        let end = self.held[..self.held.len() - begun].trim_end().len();
        let rest = self.held.split_off(end);
        let text = std::mem::replace(&mut self.held, rest);
        self.found.push_back(delta(text));
        false
    }

    /// Emits the calls in a text, or the text itself if it has none.
    fn call(&mut self, body: &str, is_closed: bool) {
        let calls = match self.calls {
            Calls::DeepSeek => tools::deep_seek(body),
            Calls::Tagged if body.trim_start().starts_with("<function=") => tools::xml(body, &self.tools),
            _ => tools::json(body),
        };
        match calls {
            Some(calls) => self.found.extend(calls.into_iter().map(Delta::Call)),
            None => {
                let (open, close) = self.marks().unwrap_or_default();
                let is_bare = self.calls == Calls::Json;
                let open = if is_bare { "" } else { open };
                let close = close.filter(|_| is_closed).unwrap_or_default();
                self.found.push_back(Delta::Content(format!("{open}{body}{close}")));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn content(text: &str) -> Delta {
        Delta::Content(text.to_owned())
    }

    fn reasoning(text: &str) -> Delta {
        Delta::Reasoning(text.to_owned())
    }

    fn call(name: &str, arguments: &str) -> Delta {
        Delta::Call(ToolCall { name: name.to_owned(), arguments: arguments.to_owned() })
    }

    fn parsed(format: Format, prompt: &str, pieces: &[&str]) -> Vec<Delta> {
        let tool = json!({ "type": "function", "function": { "name": "look", "parameters": {
            "type": "object", "properties": { "count": { "type": "integer" }, "text": { "type": "string" } } } } });
        let mut parser = ChatParser::new(format, prompt, &[tool]);
        let mut found: Vec<Delta> = pieces.iter().flat_map(|piece| parser.push(piece)).collect();
        found.extend(parser.finish());
        joined(found)
    }

    /// Checks a text that arrives whole and character by character.
    #[track_caller]
    fn check(format: Format, prompt: &str, text: &str, expected: &[Delta]) {
        assert_eq!(parsed(format, prompt, &[text]), expected, "whole");
        let characters: Vec<String> = text.chars().map(String::from).collect();
        let characters: Vec<&str> = characters.iter().map(String::as_str).collect();
        assert_eq!(parsed(format, prompt, &characters), expected, "by characters");
    }

    const QWEN: Format = Format::Tagged { calls: Calls::Tagged, thinks: true };
    const LLAMA: Format = Format::Tagged { calls: Calls::Json, thinks: false };
    const DEEP_SEEK: Format = Format::Tagged { calls: Calls::DeepSeek, thinks: true };
    const MISTRAL: Format = Format::Tagged { calls: Calls::Mistral, thinks: false };
    const GEMMA: Format = Format::Tagged { calls: Calls::None, thinks: false };

    #[test]
    fn reasoning_is_separated() {
        check(QWEN, "", "<think>\nwell\n</think>\n\nyes", &[reasoning("well"), content("yes")]);
        check(QWEN, "<think>\n", "well\n</think>\n\nyes", &[reasoning("well"), content("yes")]);
        check(QWEN, "<think>\n\n</think>\n\n", "yes </think>", &[content("yes </think>")]);
        check(QWEN, "", "no thought", &[content("no thought")]);
        check(QWEN, "", "<think>cut", &[reasoning("cut")]);
        check(GEMMA, "", "<think>a</think>", &[content("<think>a</think>")]);
        check(DEEP_SEEK, "<｜Assistant｜><think>\n", "a < b</think>c", &[reasoning("a < b"), content("c")]);
    }

    #[test]
    fn calls_of_hermes_and_qwen_are_parsed() {
        let text = "I look.\n<tool_call>\n{\"name\": \"look\", \"arguments\": {\"count\": 2}}\n</tool_call>";
        check(QWEN, "", text, &[content("I look."), call("look", "{\"count\":2}")]);
        let two = "<tool_call>{\"name\":\"a\",\"arguments\":{}}</tool_call>\n<tool_call>{\"name\":\"b\",\"arguments\":\"{}\"}</tool_call>";
        check(QWEN, "", two, &[call("a", "{}"), call("b", "{}")]);
        check(QWEN, "", "<tool_call>cut", &[content("<tool_call>cut")]);
        check(QWEN, "", "<tool_call>broken</tool_call>", &[content("<tool_call>broken</tool_call>")]);
        let coder = "<tool_call>\n<function=look>\n<parameter=count>\n2\n</parameter>\n<parameter=text>\n2\n</parameter>\n</function>\n</tool_call>";
        check(QWEN, "", coder, &[call("look", "{\"count\":2,\"text\":\"2\"}")]);
    }

    #[test]
    fn calls_of_other_families_are_parsed() {
        let object = "{\"name\": \"look\", \"parameters\": {\"count\": 2}}";
        check(LLAMA, "", object, &[call("look", "{\"count\":2}")]);
        check(
            LLAMA,
            "",
            &format!("<|python_tag|>{object}; {object}"),
            &[call("look", "{\"count\":2}"), call("look", "{\"count\":2}")],
        );
        check(LLAMA, "", "{\"a\": 1}", &[content("{\"a\": 1}")]);
        check(LLAMA, "", "text {x}", &[content("text {x}")]);
        let old = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{\"count\": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
        check(DEEP_SEEK, "", old, &[call("look", "{\"count\": 2}")]);
        let new = "so<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{\"count\": 2}<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
        check(DEEP_SEEK, "", new, &[content("so"), call("look", "{\"count\": 2}")]);
        let list = "[TOOL_CALLS] [{\"name\": \"look\", \"arguments\": {\"count\": 2}}]";
        check(MISTRAL, "", list, &[call("look", "{\"count\":2}")]);
    }

    #[test]
    fn channels_of_harmony_are_parsed() {
        let text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>{\"count\": 2}<|call|>";
        check(
            Format::Harmony,
            "<|start|>assistant",
            text,
            &[reasoning("hm"), call("look", "{\"count\": 2}")],
        );
        let text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes<|return|>";
        check(Format::Harmony, "<|start|>assistant", text, &[reasoning("hm"), content("yes")]);
        let cut = "<|channel|>final<|message|>ye";
        check(Format::Harmony, "<|start|>assistant", cut, &[content("ye")]);
        let recipient = " to=functions.look<|channel|>commentary json<|message|>{}";
        check(Format::Harmony, "<|start|>assistant", recipient, &[call("look", "{}")]);
    }

    proptest! {
        #[test]
        fn pieces_do_not_matter(
            pieces in prop::collection::vec("[ab {}<>/\\n]{0,4}|<think>|</think>|<tool_call>|</tool_call>|<\\|channel\\|>final|<\\|message\\|>", 0..12),
            form in 0..5_usize,
        ) {
            let format = [QWEN, LLAMA, DEEP_SEEK, GEMMA, Format::Harmony][form];
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            prop_assert_eq!(parsed(format, "", &pieces), parsed(format, "", &[&pieces.concat()]));
        }
    }
}
