//! The fields of a request's body, read with their types and bounds.

use std::{cell::RefCell, collections::BTreeSet, ops::RangeInclusive};

use serde_json::{Map, Value};

use crate::{
    bodies::BodyRoom,
    error::{ApiError, Result},
};

/// The fields of a JSON object. Absent fields and fields with `null` are the same. Each field is read at most once by
/// name, and [`Fields::finish`] refuses the fields that were not read.
pub struct Fields {
    values: Map<String, Value>,
    read: RefCell<BTreeSet<&'static str>>,
    /// The memory of the body counts until the fields are dropped.
    _room: Option<BodyRoom>,
}

impl Fields {
    /// The fields of a body.
    ///
    /// # Errors
    /// The body is not a JSON object.
    pub fn parse(body: &[u8]) -> Result<Self> {
        match serde_json::from_slice(body) {
            Ok(Value::Object(values)) => Ok(Self::of(values)),
            Ok(_) => Err(ApiError::invalid("the request's body is not a JSON object")),
            Err(error) => Err(ApiError::invalid(format!("the request's body is not JSON: {error}"))),
        }
    }

    pub fn of(values: Map<String, Value>) -> Self {
        Self { values, read: RefCell::default(), _room: None }
    }

    /// The fields, whose body counts until they are dropped.
    pub fn held_by(self, room: BodyRoom) -> Self {
        Self { _room: Some(room), ..self }
    }

    /// A field's value, if it is not `null`.
    pub fn value(&self, name: &'static str) -> Option<&Value> {
        self.read.borrow_mut().insert(name);
        self.values.get(name).filter(|value| !value.is_null())
    }

    /// Marks fields as known that have no effect, such as names of users.
    pub fn ignore(&self, names: &[&'static str]) {
        self.read.borrow_mut().extend(names);
    }

    pub fn text(&self, name: &'static str) -> Result<Option<&str>> {
        self.typed(name, "a text", Value::as_str)
    }

    pub fn flag(&self, name: &'static str) -> Result<Option<bool>> {
        self.typed(name, "true or false", Value::as_bool)
    }

    pub fn object(&self, name: &'static str) -> Result<Option<&Map<String, Value>>> {
        self.typed(name, "an object", Value::as_object)
    }

    pub fn list(&self, name: &'static str) -> Result<Option<&Vec<Value>>> {
        self.typed(name, "a list", Value::as_array)
    }

    pub fn number(&self, name: &'static str, bounds: RangeInclusive<f64>) -> Result<Option<f64>> {
        let Some(number) = self.typed(name, "a number", Value::as_f64)? else { return Ok(None) };
        if bounds.contains(&number) {
            return Ok(Some(number));
        }
        Err(out_of_bounds(name, &number, bounds.start(), bounds.end(), *bounds.end() == f64::MAX))
    }

    pub fn integer(&self, name: &'static str, bounds: RangeInclusive<i64>) -> Result<Option<i64>> {
        let Some(number) = self.typed(name, "an integer", as_integer)? else { return Ok(None) };
        if bounds.contains(&number) {
            return Ok(Some(number));
        }
        Err(out_of_bounds(name, &number, bounds.start(), bounds.end(), *bounds.end() == i64::MAX))
    }

    /// A count of at least `least`.
    pub fn count(&self, name: &'static str, least: usize) -> Result<Option<usize>> {
        let number = self.integer(name, i64::try_from(least).unwrap_or(i64::MAX)..=i64::MAX)?;
        Ok(number.map(|number| usize::try_from(number).unwrap_or(usize::MAX)))
    }

    /// A text, or a list of texts.
    pub fn texts(&self, name: &'static str) -> Result<Vec<String>> {
        let wrong = || ApiError::field(name, format!("`{name}` is neither a text nor a list of texts"));
        match self.value(name) {
            None => Ok(Vec::new()),
            Some(Value::String(text)) => Ok(vec![text.clone()]),
            Some(Value::Array(list)) => {
                let texts: Option<Vec<String>> =
                    list.iter().map(|value| value.as_str().map(str::to_owned)).collect();
                texts.ok_or_else(wrong)
            }
            Some(_) => Err(wrong()),
        }
    }

    /// A list of token ids below `vocab_size`.
    pub fn tokens(&self, name: &'static str, vocab_size: usize) -> Result<Option<Vec<u32>>> {
        let Some(list) = self.list(name)? else { return Ok(None) };
        list.iter().map(|value| token_of(name, value, vocab_size)).collect::<Result<_>>().map(Some)
    }

    /// Refuses the fields that were not read.
    ///
    /// # Errors
    /// The request has an unknown field.
    pub fn finish(&self) -> Result<()> {
        let read = self.read.borrow();
        let unknown =
            self.values.iter().find(|(name, value)| !value.is_null() && !read.contains(name.as_str()));
        match unknown {
            None => Ok(()),
            Some((name, _)) => {
                let error = ApiError::field(name, format!("unknown parameter: `{name}`"));
                Err(error.with_code("unknown_parameter"))
            }
        }
    }

    fn typed<'a, T>(
        &'a self,
        name: &'static str,
        kind: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.value(name) else { return Ok(None) };
        match read(value) {
            Some(value) => Ok(Some(value)),
            None => Err(ApiError::field(name, format!("`{name}` is not {kind}")).with_code("invalid_type")),
        }
    }
}

/// A token id.
///
/// # Errors
/// The value is not an integer, or not below `vocab_size`.
pub fn token_of(name: &str, value: &Value, vocab_size: usize) -> Result<u32> {
    let token = as_integer(value).and_then(|token| u32::try_from(token).ok());
    token.filter(|token| (*token as usize) < vocab_size).ok_or_else(|| {
        let value = shortened(value);
        ApiError::field(name, format!("`{name}` has `{value}`, which is no token id below {vocab_size}"))
    })
}

/// The start of a value for a message.
pub fn shortened(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

/// Adds to a text.
pub fn append(text: &mut Value, new: &str) {
    match text {
        Value::String(text) => text.push_str(new),
        other => *other = Value::from(new),
    }
}

/// An integer, which may be written as a float such as `5.0`.
fn as_integer(value: &Value) -> Option<i64> {
    let whole = |number: f64| (number.fract() == 0.0 && number.abs() < 9e15).then_some(number as i64);
    value.as_i64().or_else(|| value.as_f64().and_then(whole))
}

fn out_of_bounds<T: std::fmt::Display>(
    name: &str,
    value: &T,
    least: &T,
    most: &T,
    is_open: bool,
) -> ApiError {
    let bounds = if is_open { format!("at least {least}") } else { format!("between {least} and {most}") };
    ApiError::field(name, format!("`{name}` is {value}, but it has to be {bounds}"))
        .with_code("invalid_value")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn fields(value: Value) -> Fields {
        Fields::parse(value.to_string().as_bytes()).unwrap()
    }

    #[test]
    fn values_have_types_and_bounds() {
        let given = fields(json!({ "a": 1.5, "b": 3.0, "c": null, "d": ["x"], "e": [1, 2] }));
        assert_eq!(given.number("a", 0.0..=2.0).unwrap(), Some(1.5));
        assert_eq!(given.integer("b", 0..=3).unwrap(), Some(3));
        assert_eq!(given.integer("c", 0..=3).unwrap(), None);
        assert_eq!(given.texts("d").unwrap(), ["x"]);
        assert_eq!(given.tokens("e", 3).unwrap(), Some(vec![1, 2]));
        given.finish().unwrap();
        let message = |result: Result<Option<i64>>| result.unwrap_err().message;
        assert_eq!(message(given.integer("b", 0..=2)), "`b` is 3, but it has to be between 0 and 2");
        assert_eq!(message(given.integer("a", 0..=2)), "`a` is not an integer");
        assert_eq!(message(given.integer("b", 4..=i64::MAX)), "`b` is 3, but it has to be at least 4");
        assert_eq!(given.tokens("e", 2).unwrap_err().message, "`e` has `2`, which is no token id below 2");
    }

    #[test]
    fn unread_fields_are_refused() {
        let given = fields(json!({ "known": 1, "temprature": 1, "gone": null }));
        given.value("known");
        let error = given.finish().unwrap_err();
        assert_eq!(error.message, "unknown parameter: `temprature`");
        assert_eq!(error.parameter.as_deref(), Some("temprature"));
        assert!(Fields::parse(b"[]").is_err() && Fields::parse(b"{").is_err());
    }
}
