//! Parsed templates. A data set renders one template for every record, and parsing a long one takes longer than rendering
//! a conversation with it.

use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

use minijinja::{Environment, Error, Value};

use super::generation;

/// The treatment of a template's `{% generation %}` blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// They only group text.
    Plain,
    /// Their text is rendered between marks. A template without blocks does not have this form.
    Marked,
}

/// The parsed forms of templates, by the text of the template. Clones share them.
#[derive(Clone, Default)]
pub(super) struct Compiled {
    forms: Arc<RwLock<Vec<(Form, String, Option<Parsed>)>>>,
}

/// A parsed template in its environment.
#[derive(Clone)]
pub(super) struct Parsed {
    environment: Arc<Environment<'static>>,
}

/// The name of the only template in an environment.
const NAME: &str = "chat template";

impl fmt::Debug for Compiled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Compiled")
    }
}

impl Compiled {
    /// A form of the template `source`, parsed in a new environment on first use; `None` if it does not have the form.
    ///
    /// # Errors
    /// The template has a syntax error.
    pub fn parsed(
        &self,
        form: Form,
        source: &str,
        environment: impl FnOnce() -> Result<Environment<'static>, Error>,
    ) -> Result<Option<Parsed>, Error> {
        let forms = self.forms.read().unwrap_or_else(PoisonError::into_inner);
        let known = forms.iter().find(|(known, text, _)| (*known, text.as_str()) == (form, source));
        if let Some((_, _, parsed)) = known {
            return Ok(parsed.clone());
        }
        drop(forms);
        let text = match form {
            Form::Plain => Some(generation::unmarked(source)),
            Form::Marked => generation::marked(source),
        };
        let parse = |text: String| -> Result<Parsed, Error> {
            let mut environment = environment()?;
            environment.add_template_owned(NAME, text)?;
            Ok(Parsed { environment: Arc::new(environment) })
        };
        let parsed = text.map(parse).transpose()?;
        let mut forms = self.forms.write().unwrap_or_else(PoisonError::into_inner);
        forms.push((form, source.to_owned(), parsed.clone()));
        Ok(parsed)
    }
}

impl Parsed {
    /// Renders the template.
    ///
    /// # Errors
    /// The template fails.
    pub fn render(&self, context: Value) -> Result<String, Error> {
        self.environment.get_template(NAME)?.render(context)
    }
}
