//! Extraction of the text in a line of JSON.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;

use serde::de::{DeserializeSeed, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

use crate::files;

/// The reason why a line has no text.
#[derive(Debug, PartialEq)]
pub(super) enum JsonProblem {
    Syntax(String),
    /// The existing columns.
    Missing(String),
    Type(&'static str),
    /// Token ids, segments and positions that contradict each other.
    Row(String),
}

/// The lists of integers under `columns` of the JSON object in a line; the first one exists.
pub(super) fn integers_under(line: &str, columns: &[String; 3]) -> Result<[Vec<i32>; 3], JsonProblem> {
    let mut deserializer = serde_json::Deserializer::from_str(line);
    let held = Integers(columns).deserialize(&mut deserializer);
    let held = held.and_then(|held| deserializer.end().map(|()| held));
    match held {
        Ok([Some(tokens), segments, positions]) => {
            Ok([tokens, segments.unwrap_or_default(), positions.unwrap_or_default()])
        }
        Ok(_) => Err(JsonProblem::Missing(self::columns(line))),
        Err(error) if error.is_data() => Err(JsonProblem::Type("no list of token ids of 32 bits")),
        Err(error) => Err(JsonProblem::Syntax(syntax(line, &error))),
    }
}

/// Reads lists of integers of an object.
struct Integers<'a>(&'a [String; 3]);

impl<'de> DeserializeSeed<'de> for Integers<'_> {
    type Value = [Option<Vec<i32>>; 3];

    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Integers<'_> {
    type Value = [Option<Vec<i32>>; 3];

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Self::Value, A::Error> {
        let mut lists = [None, None, None];
        while let Some(key) = entries.next_key::<Cow<'de, str>>()? {
            match self.0.iter().position(|column| *column == key) {
                Some(place) => lists[place] = Some(entries.next_value()?),
                None => _ = entries.next_value::<IgnoredAny>()?,
            }
        }
        Ok(lists)
    }
}

/// The text under `column` of the JSON object in a line. `a.b` is the key `b` of the object under `a`.
pub(super) fn text_under(line: &str, column: &str) -> Result<String, JsonProblem> {
    let mut deserializer = serde_json::Deserializer::from_str(line);
    let held = Under(Some(column)).deserialize(&mut deserializer);
    let held = held.and_then(|held| deserializer.end().map(|()| held));
    match held.map_err(|error| JsonProblem::Syntax(syntax(line, &error)))? {
        Held::Text(text) => Ok(text),
        Held::Other(kind) => Err(JsonProblem::Type(kind)),
        Held::Nothing => Err(JsonProblem::Missing(columns(line))),
        Held::NoObject(kind) => {
            let hint = "\nhint: each line must be a JSON object of its own, such as `{\"text\": \"…\"}`";
            Err(JsonProblem::Syntax(format!("holds {kind}, not a JSON object{hint}")))
        }
    }
}

/// The JSON object in a line, which has all of `columns` as keys. The error names the column that is missing.
pub(super) fn record_with(line: &str, columns: &[String]) -> Result<String, (String, JsonProblem)> {
    let first = columns.first().cloned().unwrap_or_default();
    match serde_json::from_str::<HashMap<String, IgnoredAny>>(line) {
        Ok(fields) => match columns.iter().find(|column| !fields.contains_key(*column)) {
            None => Ok(line.to_owned()),
            Some(missing) => Err((missing.clone(), JsonProblem::Missing(self::columns(line)))),
        },
        // The same messages as for lines with one text.
        Err(error) => match text_under(line, &first) {
            Err(problem @ JsonProblem::Syntax(_)) => Err((first, problem)),
            _ => Err((first, JsonProblem::Syntax(syntax(line, &error)))),
        },
    }
}

fn syntax(line: &str, error: &serde_json::Error) -> String {
    let hint = if matches!(line.trim(), "[" | "{") || line.trim_start().starts_with('[') {
        "\nhint: each line must be a JSON object of its own; write an indented file or an array as JSON lines, for \
         example with `jq -c .[]`"
    } else {
        "\nhint: correct or remove the line; each must be one JSON object, such as `{\"text\": \"…\"}`"
    };
    // The parser reports `line 1`, which would contradict the line number in the file.
    let reason = error.to_string();
    let reason = reason.split(" at line ").next().unwrap_or(&reason).to_string();
    format!("not valid JSON at column {}: {reason}{hint}", error.column())
}

fn columns(line: &str) -> String {
    match serde_json::from_str(line) {
        Ok(Value::Object(object)) if !object.is_empty() => {
            files::quoted(&object.keys().collect::<Vec<&String>>())
        }
        _ => "no column".into(),
    }
}

/// The contents of a value under a column.
enum Held {
    Text(String),
    /// A value of another type.
    Other(&'static str),
    /// An object without the column.
    Nothing,
    /// The value that should contain the column is not an object.
    NoObject(&'static str),
}

/// Finds the column in a value; without a column, takes the value itself. Other values are skipped without being
/// stored.
struct Under<'a>(Option<&'a str>);

impl Under<'_> {
    fn other(&self, kind: &'static str) -> Held {
        if self.0.is_some() { Held::NoObject(kind) } else { Held::Other(kind) }
    }
}

impl<'de> DeserializeSeed<'de> for Under<'_> {
    type Value = Held;

    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<Held, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Under<'_> {
    type Value = Held;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a JSON value")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Held, E> {
        Ok(if self.0.is_some() { Held::NoObject("a string") } else { Held::Text(text.to_owned()) })
    }

    fn visit_unit<E: Error>(self) -> Result<Held, E> {
        Ok(self.other("null"))
    }

    fn visit_bool<E: Error>(self, _: bool) -> Result<Held, E> {
        Ok(self.other("a truth value"))
    }

    fn visit_i64<E: Error>(self, _: i64) -> Result<Held, E> {
        Ok(self.other("a number"))
    }

    fn visit_u64<E: Error>(self, _: u64) -> Result<Held, E> {
        Ok(self.other("a number"))
    }

    fn visit_f64<E: Error>(self, _: f64) -> Result<Held, E> {
        Ok(self.other("a number"))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Held, A::Error> {
        while items.next_element::<IgnoredAny>()?.is_some() {}
        Ok(self.other("a list"))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Held, A::Error> {
        let Some(column) = self.0 else {
            while entries.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
            return Ok(Held::Other("an object"));
        };
        let nested = column.split_once('.');
        let (mut direct, mut inner) = (None, None);
        while let Some(key) = entries.next_key::<String>()? {
            match nested {
                _ if key == column => direct = Some(entries.next_value_seed(Under(None))?),
                Some((head, rest)) if key == head => {
                    inner = Some(entries.next_value_seed(Under(Some(rest)))?)
                }
                _ => _ = entries.next_value::<IgnoredAny>()?,
            }
        }
        // An inner value that is not an object lacks the column as well.
        let inner = inner.filter(|held| !matches!(held, Held::NoObject(_)));
        Ok(direct.or(inner).unwrap_or(Held::Nothing))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(line: &str, column: &str, expected: Result<&str, JsonProblem>) {
        assert_eq!(text_under(line, column), expected.map(str::to_owned), "{line}");
    }

    fn missing(columns: &str) -> Result<&'static str, JsonProblem> {
        Err(JsonProblem::Missing(columns.to_owned()))
    }

    #[test]
    fn texts_are_found() {
        check(r#"{"id": 3, "text": "a\u00e4\n", "more": [1, {"text": 2}]}"#, "text", Ok("aä\n"));
        check(r#"{"a": {"b": {"c": "deep"}}}"#, "a.b.c", Ok("deep"));
        check(r#"{"a": {"b": "inside"}, "a.b": "direct"}"#, "a.b", Ok("direct"));
        check(r#"{"text": ""}"#, "text", Ok(""));
    }

    #[test]
    fn lists_of_integers_are_found() {
        let columns = ["ids", "ids_segmentation", "ids_position"].map(str::to_owned);
        let lists = |line| integers_under(line, &columns);
        let both = lists(r#"{"ids_segmentation": [1, 2], "a": {"ids": [3]}, "ids": [5, -6]}"#);
        assert_eq!(both, Ok([vec![5, -6], vec![1, 2], vec![]]));
        assert_eq!(lists(r#"{"id": [1]}"#), Err(JsonProblem::Missing("`id`".into())));
        for wrong in
            [r#"{"ids": "1 2"}"#, r#"{"ids": [1.5]}"#, r#"{"ids": [2147483648]}"#, r#"{"ids": null}"#]
        {
            assert_eq!(lists(wrong), Err(JsonProblem::Type("no list of token ids of 32 bits")), "{wrong}");
        }
        assert!(matches!(lists(r#"{"ids": [1,"#), Err(JsonProblem::Syntax(_))));
    }

    #[test]
    fn what_is_no_text_is_named() {
        for (value, kind) in [
            ("12", "a number"),
            ("-1.5e3", "a number"),
            ("null", "null"),
            ("true", "a truth value"),
            ("[\"a\"]", "a list"),
            ("{\"a\": 1}", "an object"),
        ] {
            check(&format!("{{\"text\": {value}}}"), "text", Err(JsonProblem::Type(kind)));
        }
        check(r#"{"body": "a", "id": 1}"#, "text", missing("`body`, `id`"));
        check("{}", "text", missing("no column"));
        check(r#"{"a": "b"}"#, "a.b", missing("`a`"));
        let syntax = |line: &str, start: &str| match text_under(line, "text") {
            Err(JsonProblem::Syntax(reason)) => assert!(reason.starts_with(start), "{reason}"),
            other => panic!("{other:?}"),
        };
        syntax("[1, 2]", "holds a list, not a JSON object\nhint: ");
        syntax("3", "holds a number, not a JSON object");
        syntax(r#"{"text": "#, "not valid JSON at column ");
        syntax(r#"{"text": "a"} {}"#, "not valid JSON at column ");
    }
}
