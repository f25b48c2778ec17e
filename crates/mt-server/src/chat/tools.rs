//! Tool calls in the words of model families.

use serde_json::{Map, Value};

/// A call of a tool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCall {
    pub name: String,
    /// The arguments as JSON text.
    pub arguments: String,
}

/// Calls as JSON: an object, a list of objects, or objects with semicolons or white space between them. An object has
/// `name` and `arguments` or `parameters`.
pub fn json(body: &str) -> Option<Vec<ToolCall>> {
    let mut calls = Vec::new();
    let mut rest = body.trim();
    while !rest.is_empty() {
        let mut values = serde_json::Deserializer::from_str(rest).into_iter::<Value>();
        match values.next()?.ok()? {
            Value::Array(list) => {
                for value in &list {
                    calls.push(call(value)?);
                }
            }
            value => calls.push(call(&value)?),
        }
        rest = rest[values.byte_offset()..].trim_start_matches([';', ',', ' ', '\n', '\r', '\t']);
    }
    (!calls.is_empty()).then_some(calls)
}

fn call(value: &Value) -> Option<ToolCall> {
    let object = value.as_object()?;
    // Some models wrap the call as OpenAI does.
    let object = object.get("function").and_then(Value::as_object).unwrap_or(object);
    let name = object.get("name")?.as_str()?.to_owned();
    let arguments = match object.get("arguments").or_else(|| object.get("parameters")) {
        None | Some(Value::Null) => "{}".to_owned(),
        Some(Value::String(text)) => text.clone(),
        Some(value) => value.to_string(),
    };
    Some(ToolCall { name, arguments })
}

/// Calls as `<function=NAME>` with `<parameter=NAME>` in it. A parameter is a text if its schema says so, and otherwise
/// JSON if it is.
pub fn xml(body: &str, tools: &[Value]) -> Option<Vec<ToolCall>> {
    let mut calls = Vec::new();
    for part in body.split("<function=").skip(1) {
        let (name, rest) = part.split_once('>')?;
        let described = tools.iter().map(|tool| &tool["function"]).find(|function| function["name"] == name);
        let properties = described.map(|function| &function["parameters"]["properties"]);
        let mut arguments = Map::new();
        for parameter in rest.split("<parameter=").skip(1) {
            let (key, value) = parameter.split_once('>')?;
            let value = value.split("</parameter>").next()?;
            let value = value.strip_prefix('\n').unwrap_or(value);
            let value = value.strip_suffix('\n').unwrap_or(value);
            let is_text = properties.is_some_and(|properties| properties[key]["type"] == "string");
            let parsed = if is_text { None } else { serde_json::from_str(value).ok() };
            arguments.insert(key.to_owned(), parsed.unwrap_or_else(|| Value::from(value)));
        }
        calls.push(ToolCall { name: name.to_owned(), arguments: Value::Object(arguments).to_string() });
    }
    (!calls.is_empty()).then_some(calls)
}

/// Calls of DeepSeek: `function<｜tool▁sep｜>NAME` and a block of JSON, or `NAME<｜tool▁sep｜>` and JSON.
pub fn deep_seek(body: &str) -> Option<Vec<ToolCall>> {
    let mut calls = Vec::new();
    for part in body.split("<｜tool▁call▁begin｜>").skip(1) {
        let part = part.split("<｜tool▁call▁end｜>").next()?;
        let (first, second) = part.split_once("<｜tool▁sep｜>")?;
        let (name, arguments) = match second.split_once("```json") {
            Some((name, block)) => (name, block.split("```").next()?),
            None => (first, second),
        };
        calls.push(ToolCall { name: name.trim().to_owned(), arguments: arguments.trim().to_owned() });
    }
    (!calls.is_empty()).then_some(calls)
}
