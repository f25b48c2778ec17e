//! JSON as Python writes it.

use std::fmt::Write;

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};

/// The arguments of Python's `json.dumps`.
pub(super) struct Style {
    pub ensure_ascii: bool,
    pub indent: Option<String>,
    /// The separators between items, and between key and value.
    pub separators: Option<[String; 2]>,
    pub sort_keys: bool,
}

/// The text of a value.
pub(super) fn dump(value: &Value, style: &Style) -> Result<String, Error> {
    let (item, key) = match (&style.separators, &style.indent) {
        (Some([item, key]), _) => (item.as_str(), key.as_str()),
        (None, Some(_)) => (",", ": "),
        (None, None) => (", ", ": "),
    };
    let mut writer = Writer { text: String::new(), style, item, key };
    writer.value(value, 0)?;
    Ok(writer.text)
}

struct Writer<'a> {
    text: String,
    style: &'a Style,
    item: &'a str,
    key: &'a str,
}

impl Writer<'_> {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => self.text.push_str("null"),
            ValueKind::Bool => self.text.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.number(value),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.list('[', ']', depth, items, |writer, item| writer.value(&item, depth + 1))?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.style.sort_keys {
                    keys.sort();
                }
                self.list('{', '}', depth, keys, |writer, key| {
                    let name = match key.kind() {
                        ValueKind::None => "null".to_string(),
                        ValueKind::Bool => key.to_string().to_lowercase(),
                        _ => key.to_string(),
                    };
                    writer.string(&name);
                    writer.text.push_str(writer.key);
                    writer.value(&value.get_item(&key)?, depth + 1)
                })?;
            }
            kind => {
                let reason = format!("a value of the kind `{kind}` cannot be written as JSON");
                return Err(Error::new(ErrorKind::InvalidOperation, reason));
            }
        }
        Ok(())
    }

    fn list(
        &mut self,
        open: char,
        close: char,
        depth: usize,
        items: Vec<Value>,
        mut write: impl FnMut(&mut Self, Value) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.text.push(open);
        let is_empty = items.is_empty();
        for (index, item) in items.into_iter().enumerate() {
            if index > 0 {
                self.text.push_str(self.item);
            }
            self.new_line(depth + 1);
            write(self, item)?;
        }
        if !is_empty {
            self.new_line(depth);
        }
        self.text.push(close);
        Ok(())
    }

    fn new_line(&mut self, depth: usize) {
        if let Some(indent) = &self.style.indent {
            self.text.push('\n');
            self.text.push_str(&indent.repeat(depth));
        }
    }

    fn number(&mut self, value: &Value) {
        if value.is_integer() {
            self.text.push_str(&value.to_string());
            return;
        }
        let number = f64::try_from(value.clone()).unwrap_or(f64::NAN);
        let text = if number.is_nan() {
            "NaN".to_string()
        } else if number.is_infinite() {
            if number > 0.0 { "Infinity" } else { "-Infinity" }.to_string()
        } else {
            python_float(number)
        };
        self.text.push_str(&text);
    }

    fn string(&mut self, text: &str) {
        self.text.push('"');
        for character in text.chars() {
            match character {
                '"' => self.text.push_str("\\\""),
                '\\' => self.text.push_str("\\\\"),
                '\n' => self.text.push_str("\\n"),
                '\r' => self.text.push_str("\\r"),
                '\t' => self.text.push_str("\\t"),
                '\u{8}' => self.text.push_str("\\b"),
                '\u{c}' => self.text.push_str("\\f"),
                character if character < ' ' || (self.style.ensure_ascii && character > '~') => {
                    for unit in character.encode_utf16(&mut [0; 2]) {
                        write!(self.text, "\\u{unit:04x}").expect("text grows");
                    }
                }
                character => self.text.push(character),
            }
        }
        self.text.push('"');
    }
}

/// Formats a float like Python: Rust writes the same digits and switches to exponents at the same magnitudes, but omits
/// the exponent's sign and leading zero.
fn python_float(number: f64) -> String {
    let text = format!("{number:?}");
    match text.split_once('e') {
        Some((digits, exponent)) => {
            let (sign, size) = match exponent.strip_prefix('-') {
                Some(size) => ('-', size),
                None => ('+', exponent),
            };
            format!("{}e{sign}{size:0>2}", digits.strip_suffix(".0").unwrap_or(digits))
        }
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_written_as_python_does() {
        let cases = [
            (0.0, "0.0"),
            (-1.5, "-1.5"),
            (1e16, "1e+16"),
            (1.25e-7, "1.25e-07"),
            (1e-5, "1e-05"),
            (0.0001, "0.0001"),
            (1e15, "1000000000000000.0"),
            (-2e300, "-2e+300"),
        ];
        for (number, expected) in cases {
            assert_eq!(python_float(number), expected);
        }
    }
}
