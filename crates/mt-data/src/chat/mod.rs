//! Chat templates, which turn messages into the text that a chat model continues.
//!
//! Templates are written in Jinja and rendered in the environment of the transformers library.

mod compiled;
mod generation;
mod json;
mod known;

use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::ops::Range;
use std::path::Path;

use chrono::{DateTime, FixedOffset, Local, NaiveDateTime};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind};
use minijinja_contrib::pycompat::unknown_method_callback;
use serde_json::{Map, Value as Json, json};

use crate::error::{DataError, Result};
use crate::files::replace;
use crate::tokenizer::{SPECIAL_TOKENS_MAP_FILE, TOKENIZER_CONFIG_FILE, text_of};

use compiled::{Compiled, Form};

/// The files that may hold a directory's template, in order of precedence. `tokenizer_config.json` comes last.
const TEMPLATE_FILES: [&str; 2] = ["chat_template.jinja", "chat_template.json"];
/// The file with the time that templates see when they render training data.
const TIME_FILE: &str = "chat_template_time.txt";
/// In a directory with several templates, the names of the general one and of the one for tools.
const DEFAULT: &str = "default";
const FOR_TOOLS: &str = "tool_use";
/// The names of a message's reasoning. Templates read the first one.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Message {
    /// The speaker: `system`, `user`, `assistant`, or another role that the template knows.
    pub role: String,
    /// The text of the message.
    pub content: String,
}

/// A chat template, which turns a conversation into the text that a model reads.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    /// The template's name in messages, in backticks.
    name: String,
    /// Templates by name. A single template is named [`DEFAULT`].
    sources: Vec<(String, String)>,
    /// The special tokens by role, such as `bos_token`.
    special: Map<String, Json>,
    /// The time that the template sees; `None` for the time of rendering.
    now: Option<DateTime<FixedOffset>>,
    /// The parsed templates.
    compiled: Compiled,
}

impl ChatTemplate {
    /// Everything that determines what the template renders.
    pub(crate) fn identity(&self) -> Json {
        json!([self.sources, self.special, self.now.map(|now| now.to_rfc3339())])
    }

    /// Writes the template into a directory, where [`ChatTemplate::load`] finds it.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn save(&self, directory: &Path) -> Result<()> {
        let [text_file, json_file] = TEMPLATE_FILES.map(|name| directory.join(name));
        if let [(_, text)] = &self.sources[..] {
            return replace(&text_file, |file| file.write_all(text.as_bytes()));
        }
        let named = |(name, text): &(String, String)| json!({ "name": name, "template": text });
        let content = json!({ "chat_template": self.sources.iter().map(named).collect::<Vec<_>>() });
        if text_file.exists() {
            // It would be found first.
            fs::remove_file(&text_file).map_err(DataError::io("remove", &text_file))?;
        }
        replace(&json_file, |file| file.write_all(content.to_string().as_bytes()))
    }

    /// The template, which sees the same time whenever this directory is used: that of the first use, which a file keeps.
    ///
    /// # Errors
    /// The file cannot be read or written, or holds no time.
    pub fn at_first_use_in(self, directory: &Path) -> Result<Self> {
        let path = directory.join(TIME_FILE);
        if !path.exists() {
            let now = Local::now().format("%Y-%m-%dT%H:%M:%S").to_string();
            replace(&path, |file| file.write_all(now.as_bytes()))?;
        }
        let time = fs::read_to_string(&path).map_err(DataError::io("read", &path))?;
        self.at(time.trim())
    }

    /// The template of a Hugging Face directory, or `None` without one: `chat_template.jinja`, or `chat_template` of
    /// `chat_template.json` or `tokenizer_config.json`, which is a text or a list of named texts.
    /// `tokenizer_config.json` and `special_tokens_map.json` name the special tokens.
    ///
    /// # Errors
    /// A file cannot be read or is malformed.
    pub fn load(directory: &Path) -> Result<Option<Self>> {
        let config_file = directory.join(TOKENIZER_CONFIG_FILE);
        let config = read_object(&config_file)?.unwrap_or_default();
        for file in TEMPLATE_FILES.map(|name| directory.join(name)) {
            if file.is_file() {
                return Self::load_file(&file, directory).map(Some);
            }
        }
        let sources = match config.get("chat_template") {
            None | Some(Json::Null) => return Ok(None),
            Some(template) => sources(template),
        };
        let name = format!("`{}`", config_file.display());
        let invalid = "is neither a text nor a list of texts with names";
        let sources = sources.ok_or_else(|| problem(&name, invalid.into()))?;
        Ok(Some(Self {
            name,
            sources,
            special: special_tokens(directory)?,
            now: None,
            compiled: Compiled::default(),
        }))
    }

    /// The template in a file: Jinja text, or JSON with a `chat_template`. The special tokens are those of the
    /// tokenizer in `directory`.
    ///
    /// # Errors
    /// A file cannot be read or is malformed.
    pub fn load_file(file: &Path, directory: &Path) -> Result<Self> {
        let name = format!("`{}`", file.display());
        let text = fs::read_to_string(file).map_err(DataError::io("read", file))?;
        let sources = if file.extension().is_some_and(|extension| extension == "json") {
            let content: Json = serde_json::from_str(&text)
                .map_err(|error| problem(&name, format!("is not JSON: {error}")))?;
            let sources = content.get("chat_template").and_then(sources);
            sources.ok_or_else(|| problem(&name, "has no text in `chat_template`".into()))?
        } else {
            vec![(DEFAULT.into(), text)]
        };
        Ok(Self {
            name,
            sources,
            special: special_tokens(directory)?,
            now: None,
            compiled: Compiled::default(),
        })
    }

    /// A template from its text. Messages call it `name`. The special tokens are those of the tokenizer in `directory`.
    ///
    /// # Errors
    /// A file cannot be read or is malformed.
    pub fn from_text(name: &str, text: &str, directory: &Path) -> Result<Self> {
        let sources = vec![(DEFAULT.to_string(), text.to_string())];
        Ok(Self {
            name: format!("`{name}`"),
            sources,
            special: special_tokens(directory)?,
            now: None,
            compiled: Compiled::default(),
        })
    }

    /// The template's name in messages, in backticks.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Whether one of the templates contains a text, such as the mark of a tool call.
    pub fn mentions(&self, text: &str) -> bool {
        self.sources.iter().any(|(_, source)| source.contains(text))
    }

    /// Fixes the time that the template sees, such as `2024-07-06T09:05:03`.
    ///
    /// # Errors
    /// The text is not a time in this notation.
    pub fn at(self, time: &str) -> Result<Self> {
        let now: NaiveDateTime = time.parse().map_err(|_| {
            DataError::Options(format!("`{time}` is not a time\nhint: write it as `2024-07-06T09:05:03`"))
        })?;
        Ok(Self { now: Some(now.and_utc().fixed_offset()), compiled: Compiled::default(), ..self })
    }

    /// The template with which answers are learned, and the family of models that it is known from: if the template is
    /// the one that a known family publishes, which marks no answers, marks are added (`known.rs`).
    pub(crate) fn for_answers(&self) -> Option<(Self, &'static str)> {
        let mut family = None;
        let mut marked = |(name, source): &(String, String)| {
            let known = known::marked(source);
            family = family.or(known.as_ref().map(|(family, _)| *family));
            (name.clone(), known.map_or_else(|| source.clone(), |(_, text)| text))
        };
        let sources = self.sources.iter().map(&mut marked).collect();
        family.map(|family| (Self { sources, compiled: Compiled::default(), ..self.clone() }, family))
    }

    /// Renders messages; see [`ChatTemplate::render_with`]. The result spells out special tokens, which
    /// [`crate::Tokenizer::encode_with_special_tokens`] converts to their ids.
    ///
    /// # Errors
    /// The template is faulty or rejects the messages.
    pub fn render(
        &self,
        messages: &[Message],
        add_generation_prompt: bool,
        tools: Option<&Json>,
    ) -> Result<String> {
        let mut variables = Map::new();
        variables.insert("add_generation_prompt".into(), json!(add_generation_prompt));
        variables.insert("tools".into(), tools.cloned().unwrap_or_default());
        self.render_with(json!(messages), variables)
    }

    /// Renders `messages`, a list of objects with `role`, `content` and other keys that the template reads, with
    /// `variables` such as `tools`, `documents` and `add_generation_prompt`.
    ///
    /// # Errors
    /// The template is faulty or rejects the messages.
    pub fn render_with(&self, messages: Json, variables: Map<String, Json>) -> Result<String> {
        self.render_form(Form::Plain, messages, variables).map(Option::unwrap_or_default)
    }

    /// [`ChatTemplate::render_with`], and the byte ranges of the text within `{% generation %}` blocks, which mark the
    /// assistant's answers. `None` if the template has no such block.
    ///
    /// # Errors
    /// The template is faulty or rejects the messages.
    pub(crate) fn render_marked(
        &self,
        messages: Json,
        variables: Map<String, Json>,
    ) -> Result<Option<(String, Vec<Range<usize>>)>> {
        let rendered = self.render_form(Form::Marked, messages, variables)?;
        let found = rendered.map(|text| {
            let found = generation::find(&text);
            found.ok_or_else(|| problem(&self.name, "nests `{% generation %}` blocks".into()))
        });
        found.transpose()
    }

    /// Renders a form of the template, if the template has it.
    fn render_form(
        &self,
        form: Form,
        mut messages: Json,
        variables: Map<String, Json>,
    ) -> Result<Option<String>> {
        for message in messages.as_array_mut().into_iter().flatten().filter_map(Json::as_object_mut) {
            // Programs write `null` for absent values, which few templates expect.
            message.retain(|_, value| !value.is_null());
            name_reasoning(message);
        }
        let mut context = self.special.clone();
        context.extend([
            ("tools".to_string(), Json::Null),
            ("documents".to_string(), Json::Null),
            ("add_generation_prompt".to_string(), Json::Bool(false)),
        ]);
        context.extend(variables);
        context.insert("messages".into(), messages);
        let has_tools = !context["tools"].is_null();
        let source = self.source(has_tools)?;
        let parsed = self.compiled.parsed(form, source, || environment(self.now));
        let Some(parsed) = parsed.map_err(|error| self.failure(&error))? else { return Ok(None) };
        let text = parsed.render(Value::from(Serde(context)));
        text.map(Some).map_err(|error| self.failure(&error))
    }

    /// The template to render, chosen like the transformers library does.
    fn source(&self, has_tools: bool) -> Result<&str> {
        let find = |wanted: &str| {
            self.sources.iter().find(|(name, _)| name == wanted).map(|(_, source)| source.as_str())
        };
        let found = has_tools.then(|| find(FOR_TOOLS)).flatten().or_else(|| find(DEFAULT));
        found.ok_or_else(|| {
            let names: Vec<String> = self.sources.iter().map(|(name, _)| format!("`{name}`")).collect();
            problem(&self.name, format!("has no `{DEFAULT}`; it has {}", names.join(", ")))
        })
    }

    fn failure(&self, error: &Error) -> DataError {
        // An error inside an included block or a macro is reported at the call; the innermost error is the cause.
        let mut cause = error;
        while let Some(source) =
            std::error::Error::source(cause).and_then(|source| source.downcast_ref::<Error>())
        {
            cause = source;
        }
        let line = cause.line().or(error.line()).map(|line| format!(", line {line}")).unwrap_or_default();
        let reason = match (cause.kind(), cause.detail()) {
            (ErrorKind::InvalidOperation, Some(detail)) => detail.to_string(),
            (kind, Some(detail)) => format!("{kind}: {detail}"),
            (kind, None) => kind.to_string(),
        };
        problem(&self.name, format!("fails{line}: {reason}"))
    }
}

fn problem(template: &str, problem: String) -> DataError {
    DataError::ChatTemplate { template: template.into(), problem }
}

fn read_object(file: &Path) -> Result<Option<Map<String, Json>>> {
    match fs::read(file) {
        Ok(bytes) => {
            let invalid = |error: serde_json::Error| DataError::Tokenizer {
                path: file.into(),
                reason: error.to_string(),
                hint: "",
            };
            serde_json::from_slice(&bytes).map(Some).map_err(invalid)
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(DataError::io("read", file)(error)),
    }
}

/// The templates of a JSON value: a text is a single template, a list holds names and texts.
fn sources(template: &Json) -> Option<Vec<(String, String)>> {
    let named = |entry: &Json| {
        let text = |key| entry.get(key).and_then(Json::as_str).map(str::to_string);
        Some((text("name")?, text("template")?))
    };
    match template {
        Json::String(text) => Some(vec![(DEFAULT.into(), text.clone())]),
        Json::Array(entries) => entries.iter().map(named).collect(),
        _ => None,
    }
}

/// The texts of the special tokens that a tokenizer's files name.
fn special_tokens(directory: &Path) -> Result<Map<String, Json>> {
    let mut special = Map::new();
    for name in [SPECIAL_TOKENS_MAP_FILE, TOKENIZER_CONFIG_FILE] {
        for (key, token) in read_object(&directory.join(name))?.unwrap_or_default() {
            if let Some(text) = text_of(&token).filter(|_| key.ends_with("_token")) {
                special.insert(key, json!(text));
            }
        }
    }
    Ok(special)
}

/// Stores a message's reasoning under all names that templates read.
fn name_reasoning(message: &mut Map<String, Json>) {
    let reasoning = REASONING.iter().find_map(|name| message.get(*name));
    if let Some(reasoning) = reasoning.cloned() {
        message.entry("thinking").or_insert_with(|| reasoning.clone());
        message.insert(REASONING[0].into(), reasoning);
    }
}

fn environment(now: Option<DateTime<FixedOffset>>) -> std::result::Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_unknown_method_callback(unknown_method_callback);
    environment.add_filter("tojson", to_json);
    environment.add_function("raise_exception", |message: String| -> std::result::Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_function("strftime_now", move |format: &str| {
        strftime(now.unwrap_or_else(|| Local::now().fixed_offset()), format)
    });
    // In Python, strings and mappings are sequences too, and so are Jinja's undefined values.
    environment.add_test("sequence", |value: &Value| {
        use ValueKind::{Map, Seq, String, Undefined};
        matches!(value.kind(), Seq | String | Map | Undefined)
    });
    environment.add_test("iterable", |value: &Value| {
        use ValueKind::{Iterable, Map, Seq, String, Undefined};
        matches!(value.kind(), Seq | String | Map | Undefined | Iterable)
    });
    Ok(environment)
}

/// `tojson` as transformers defines it, like Python's `json.dumps`: nothing is escaped for HTML, and separators contain
/// spaces.
fn to_json(value: &Value, options: Kwargs) -> std::result::Result<String, Error> {
    let style = json::Style {
        ensure_ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or_default(),
        indent: match options.get::<Option<Value>>("indent")? {
            Some(indent) if !indent.is_none() => Some(match indent.as_str() {
                Some(text) => text.to_string(),
                None => " ".repeat(usize::try_from(indent.clone()).unwrap_or_default()),
            }),
            _ => None,
        },
        separators: match options.get::<Option<Vec<String>>>("separators")? {
            None => None,
            Some(separators) => Some(<[String; 2]>::try_from(separators).map_err(|_| {
                Error::new(
                    ErrorKind::InvalidOperation,
                    "`separators` must be two texts, for items and for keys",
                )
            })?),
        },
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or_default(),
    };
    options.assert_all_used()?;
    json::dump(value, &style)
}

fn strftime(time: DateTime<FixedOffset>, format: &str) -> std::result::Result<String, Error> {
    let mut text = String::new();
    write!(text, "{}", time.format(format))
        .map_err(|_| Error::new(ErrorKind::InvalidOperation, format!("`{format}` is not a date format")))?;
    Ok(text)
}
