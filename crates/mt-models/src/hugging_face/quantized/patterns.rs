//! Patterns that name modules in `quantization_config`.

use fancy_regex::Regex;

/// A pattern for names of modules.
#[derive(Debug)]
pub struct Pattern {
    text: String,
    form: Form,
}

#[derive(Debug)]
enum Form {
    /// The name of a module, of one that contains it, or the end of its name.
    Around,
    /// The name of a module.
    Exact,
    /// The class of modules, such as `Linear`.
    Class,
    /// An expression for the beginning of the name, and perhaps the end of it.
    Regex(Regex, Option<String>),
}

/// How closely a pattern describes a module; the closest one counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Closeness {
    Class,
    Regex,
    Exact,
}

impl Pattern {
    /// A pattern in the language of transformers: an expression for the beginning of a name up to a dot, or a name's end.
    ///
    /// # Errors
    /// The text is no regular expression.
    pub fn of_transformers(text: &str) -> Result<Self, fancy_regex::Error> {
        let is_plain = text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte));
        let form = if is_plain {
            // Lists of hundreds of plain names are common. Their dots are dots, though an expression means any character.
            Form::Around
        } else {
            Form::Regex(Regex::new(&format!(r"^(?:{text})(?:(?<=\.)|(?=\.|$))"))?, Some(text.to_owned()))
        };
        Ok(Self { text: text.to_owned(), form })
    }

    /// A pattern in the language of compressed-tensors: a name, or `re:` with an expression for its beginning.
    ///
    /// # Errors
    /// The text is no regular expression.
    pub fn of_compressed(text: &str) -> Result<Self, fancy_regex::Error> {
        let form = match text.strip_prefix("re:") {
            Some(regex) => Form::Regex(Regex::new(&format!("^(?:{regex})"))?, None),
            None => Form::Exact,
        };
        Ok(Self { text: text.to_owned(), form })
    }

    /// As [`Self::of_compressed`], for the targets of a group, which may also be classes of modules.
    ///
    /// # Errors
    /// The text is no regular expression.
    pub fn of_target(text: &str) -> Result<Self, fancy_regex::Error> {
        let is_class = text.starts_with(|first: char| first.is_ascii_uppercase()) && !text.contains('.');
        let form = if is_class { Form::Class } else { Self::of_compressed(text)?.form };
        Ok(Self { text: text.to_owned(), form })
    }

    /// The pattern as written.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Whether the pattern describes a module.
    pub fn matches(&self, module: &str) -> bool {
        self.closeness(module).is_some()
    }

    /// How closely the pattern describes a module; `None` if it does not.
    pub fn closeness(&self, module: &str) -> Option<Closeness> {
        let text = self.text.as_str();
        let (is_match, closeness) = match &self.form {
            // All quantized modules are linear maps.
            Form::Class => (true, Closeness::Class),
            Form::Exact => (text == module, Closeness::Exact),
            Form::Around => {
                let rest = module.strip_prefix(text);
                let is_before =
                    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.') || text.ends_with('.'));
                (is_before || module.ends_with(text), Closeness::Exact)
            }
            Form::Regex(regex, end) => {
                // An expression that takes too long describes no module.
                let is_match = regex.is_match(module).unwrap_or(false);
                (is_match || end.as_ref().is_some_and(|end| module.ends_with(end)), Closeness::Regex)
            }
        };
        is_match.then_some(closeness)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_of_transformers_end_at_dots() {
        let check = |pattern: &str, module: &str, expected: bool| {
            let made = Pattern::of_transformers(pattern).unwrap();
            assert_eq!(made.matches(module), expected, "{pattern} {module}");
        };
        check("layer.1", "layer.1.attn", true);
        check("layer.1", "layer.11.attn", false);
        check("model.layers.*.self_attn", "model.layers.11.self_attn.q_proj", true);
        check("model.layers.*.mlp.router", "model.layers.1.mlp.experts", false);
        check("model.layers.*.mlp.gate", "model.layers.0.mlp.gate", true);
        check("model.layers.*.mlp.gate", "model.layers.0.mlp.gate_proj", false);
        check("model.layers.0.mlp.gate", "model.layers.0.mlp.gate_proj", false);
        check("lm_head", "lm_head", true);
        check("fc1", "model.decoder.layers.23.fc1", true);
        check("vision.", "vision.tower", true);
        assert!(Pattern::of_transformers("(").is_err());
    }

    #[test]
    fn patterns_of_compressed_tensors_are_names_or_expressions() {
        let check = |pattern: &str, module: &str, expected: Option<Closeness>| {
            let made = Pattern::of_target(pattern).unwrap();
            assert_eq!(made.closeness(module), expected, "{pattern} {module}");
        };
        check("Linear", "model.layers.0.mlp.experts.3.up_proj", Some(Closeness::Class));
        check("lm_head", "lm_head", Some(Closeness::Exact));
        check("lm_head", "model.lm_head", None);
        check("re:.*self_attn.*", "model.layers.0.self_attn.o_proj", Some(Closeness::Regex));
        let dense = r"re:.*mlp\.(gate|up|gate_up|down)_proj.*";
        check(dense, "model.layers.0.mlp.gate_proj", Some(Closeness::Regex));
        check(dense, "model.layers.1.mlp.experts.0.gate_proj", None);
        check("re:mlp", "model.mlp", None);
        check("re:^(?!.*experts).*", "model.layers.0.mlp.experts.1.up_proj", None);
        assert_eq!(Pattern::of_compressed("Linear").unwrap().closeness("model.up_proj"), None);
        assert!(Pattern::of_target("re:(").is_err());
    }
}
