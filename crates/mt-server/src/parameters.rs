//! The sampling parameters of all routes.

use std::collections::BTreeSet;

use mt_data::Tokenizer;
use mt_engine::serve::{AnswerLimits, TokenChoice};
use serde_json::Value;

use crate::{
    beams::with_beams,
    error::{ApiError, Result},
    fields::{Fields, shortened, token_of},
    grammar::Grammar,
    server::ServedModel,
};

/// The maximum number of most probable tokens beside each token.
pub const MAX_TOP: usize = 20;
/// The maximum number of stop strings, and the maximum length of one in bytes.
const MAX_STOPS: usize = 32;
const MAX_STOP_LENGTH: usize = 4096;

/// The parameters of a request for answers.
#[derive(Clone, Debug, PartialEq)]
pub struct Parameters {
    pub choice: TokenChoice,
    pub limits: AnswerLimits,
    pub num_answers: usize,
    pub stops: Vec<String>,
    /// The stop tokens that the request names.
    pub stop_tokens: Vec<u32>,
    /// Whether a stop string belongs to the answer.
    pub keep_stop: bool,
    pub skip_special_tokens: bool,
    pub log_probabilities: Option<usize>,
    pub prompt_log_probabilities: Option<usize>,
    /// The format of answers, and the field that names it.
    pub grammar: Option<(Grammar, &'static str)>,
    pub return_token_ids: bool,
    /// The adapter by its name; `None` for the base.
    pub adapter: Option<String>,
}

/// Fields without effect that clients send.
const IGNORED: &[&str] = &[
    "user",
    "metadata",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "request_id",
    "model",
];

impl Parameters {
    /// Reads the parameters that the routes of OpenAI share. Routes read their own fields in addition.
    ///
    /// # Errors
    /// A value has a wrong type or is out of bounds, or it requests an unavailable feature.
    pub fn read(fields: &Fields, served: &ServedModel, max_answers: usize) -> Result<Self> {
        fields.ignore(IGNORED);
        refuse_unavailable(fields)?;
        let vocab_size = served.vocab_size;
        let num_answers = fields.count("n", 1)?.unwrap_or(1);
        if num_answers > max_answers {
            let message = format!("`n` is {num_answers}, but the server gives at most {max_answers} answers");
            return Err(ApiError::field("n", message).with_code("invalid_value"));
        }
        if let Some(best_of) = fields.count("best_of", 1)?.filter(|best_of| *best_of != num_answers) {
            let message = format!(
                "`best_of` is {best_of}, but the server returns every answer that it generates; use `n` and choose"
            );
            return Err(ApiError::field("best_of", message).with_code("unsupported_parameter"));
        }
        let limits = limits(fields, served)?;
        let choice = with_beams(fields, choice(fields, served)?, num_answers)?;
        Ok(Self {
            choice,
            num_answers,
            stops: stops(fields)?,
            stop_tokens: fields.tokens("stop_token_ids", vocab_size)?.unwrap_or_default(),
            keep_stop: fields.flag("include_stop_str_in_output")?.unwrap_or(false),
            skip_special_tokens: fields.flag("skip_special_tokens")?.unwrap_or(true),
            log_probabilities: None,
            prompt_log_probabilities: fields
                .count("prompt_logprobs", 0)?
                .map(check_top("prompt_logprobs"))
                .transpose()?,
            adapter: served.adapter(fields)?.map(|adapter| adapter.name.clone()),
            grammar: grammar(fields)?,
            return_token_ids: fields.flag("return_token_ids")?.unwrap_or(false),
            limits: AnswerLimits {
                stop_tokens: limits
                    .stop_tokens
                    .into_iter()
                    .filter(|token| (*token as usize) < vocab_size)
                    .collect(),
                ..limits
            },
        })
    }

    /// Refuses fields of other routes, which would have no effect on this one.
    ///
    /// # Errors
    /// One of them is set.
    pub fn refuse(fields: &Fields, route: &str, names: &[&'static str]) -> Result<()> {
        match names.iter().find(|name| fields.value(name).is_some()) {
            None => Ok(()),
            Some(name) => {
                let error = ApiError::field(name, format!("`{name}` is not available in `{route}`"));
                Err(error.with_code("unsupported_parameter"))
            }
        }
    }

    /// Sets the maximum number of new tokens.
    ///
    /// # Errors
    /// `min_tokens` is larger.
    pub fn with_max_tokens(mut self, name: &str, max_tokens: Option<usize>) -> Result<Self> {
        let least = self.limits.min_tokens;
        if let Some(most) = max_tokens.filter(|most| *most < least) {
            let message = format!("`min_tokens` is {least}, but `{name}` is {most}");
            return Err(ApiError::field("min_tokens", message).with_code("invalid_value"));
        }
        self.limits.max_new_tokens = max_tokens;
        Ok(self)
    }
}

/// Checks a number of most probable tokens.
pub fn check_top(name: &'static str) -> impl Fn(usize) -> Result<usize> {
    move |number| {
        if number <= MAX_TOP {
            return Ok(number);
        }
        let message = format!("`{name}` is {number}, but at most {MAX_TOP} tokens are reported");
        Err(ApiError::field(name, message).with_code("invalid_value"))
    }
}

fn refuse_unavailable(fields: &Fields) -> Result<()> {
    let refuse = |name: &str, reason: &str| {
        Err(ApiError::field(name, format!("`{name}` is not available: {reason}"))
            .with_code("unsupported_parameter"))
    };
    if fields.integer("priority", i64::MIN..=i64::MAX)?.is_some_and(|priority| priority != 0) {
        return refuse("priority", "requests are served in the order of their arrival");
    }
    if fields.integer("truncate_prompt_tokens", i64::MIN..=i64::MAX)?.is_some() {
        return refuse("truncate_prompt_tokens", "shorten the prompt instead");
    }
    Ok(())
}

fn limits(fields: &Fields, served: &ServedModel) -> Result<AnswerLimits> {
    let ignore_eos = fields.flag("ignore_eos")?.unwrap_or(false);
    let mut stop_tokens: BTreeSet<u32> =
        fields.tokens("stop_token_ids", served.vocab_size)?.unwrap_or_default().into_iter().collect();
    if !ignore_eos {
        stop_tokens.extend(&served.end_tokens);
    }
    Ok(AnswerLimits {
        max_new_tokens: None,
        min_tokens: fields.count("min_tokens", 0)?.unwrap_or(0),
        stop_tokens: stop_tokens.into_iter().collect(),
        ignore_eos,
    })
}

fn choice(fields: &Fields, served: &ServedModel) -> Result<TokenChoice> {
    let top_p = fields.number("top_p", 0.0..=1.0)?.unwrap_or(1.0);
    if top_p == 0.0 {
        return Err(
            ApiError::field("top_p", "`top_p` is 0, but it has to be above 0").with_code("invalid_value")
        );
    }
    let repetition_penalty = fields.number("repetition_penalty", 0.0..=f64::MAX)?.unwrap_or(1.0);
    if repetition_penalty == 0.0 {
        let message = "`repetition_penalty` is 0, but it has to be above 0";
        return Err(ApiError::field("repetition_penalty", message).with_code("invalid_value"));
    }
    // -1 and 0 stand for all tokens, as in vLLM.
    let top_k = fields.integer("top_k", -1..=i64::MAX)?.and_then(|top_k| usize::try_from(top_k).ok());
    let allowed_tokens = fields.tokens("allowed_token_ids", served.vocab_size)?;
    if allowed_tokens.as_ref().is_some_and(Vec::is_empty) {
        return Err(ApiError::field(
            "allowed_token_ids",
            "`allowed_token_ids` is empty, which allows no answer",
        ));
    }
    Ok(TokenChoice {
        temperature: fields.number("temperature", 0.0..=100.0)?.unwrap_or(1.0),
        top_k: top_k.filter(|top_k| *top_k > 0),
        top_p,
        min_p: fields.number("min_p", 0.0..=1.0)?.unwrap_or(0.0),
        repetition_penalty,
        presence_penalty: fields.number("presence_penalty", -2.0..=2.0)?.unwrap_or(0.0),
        frequency_penalty: fields.number("frequency_penalty", -2.0..=2.0)?.unwrap_or(0.0),
        logit_bias: logit_bias(fields, served.vocab_size)?,
        allowed_tokens,
        banned_tokens: banned_tokens(fields, &served.tokenizer)?,
        seed: match fields.value("seed").and_then(Value::as_u64) {
            Some(seed) => Some(seed),
            // Negative seeds are seeds, too.
            None => fields.integer("seed", i64::MIN..=i64::MAX)?.map(i64::cast_unsigned),
        },
        beams: None,
    })
}

fn logit_bias(fields: &Fields, vocab_size: usize) -> Result<Vec<(u32, f32)>> {
    let wrong = |message: String| Err(ApiError::field("logit_bias", message));
    let mut biases = Vec::new();
    for (name, value) in fields.object("logit_bias")?.into_iter().flatten() {
        let Ok(token) = name.parse::<u32>() else {
            let name = shortened(&Value::from(name.as_str()));
            return wrong(format!("`logit_bias` has the key {name}, which is no token id"));
        };
        let token = token_of("logit_bias", &Value::from(token), vocab_size)?;
        match value.as_f64().filter(|bias| (-100.0..=100.0).contains(bias)) {
            Some(bias) => biases.push((token, bias as f32)),
            None => {
                let value = shortened(value);
                return wrong(format!(
                    "`logit_bias` of token {token} is {value}, which is no number from -100 to 100"
                ));
            }
        }
    }
    Ok(biases)
}

/// The tokens of words that must not occur. Each word is one token, with or without a space before it.
fn banned_tokens(fields: &Fields, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
    let mut banned = Vec::new();
    for word in fields.texts("bad_words")? {
        let mut found = false;
        for text in [word.clone(), format!(" {word}")] {
            if let [token] = tokenizer.encode(&text, false, false)?[..] {
                banned.push(token);
                found = true;
            }
        }
        if !found {
            let message = format!("`bad_words` has {word:?}, which is more than one token");
            return Err(ApiError::field("bad_words", message).with_code("unsupported_value"));
        }
    }
    Ok(banned)
}

fn stops(fields: &Fields) -> Result<Vec<String>> {
    check_stops("stop", fields.texts("stop")?)
}

/// Checks stop strings.
pub fn check_stops(name: &str, stops: Vec<String>) -> Result<Vec<String>> {
    if stops.len() > MAX_STOPS {
        return Err(ApiError::field(name, format!("`{name}` has more than {MAX_STOPS} texts")));
    }
    if stops.iter().any(String::is_empty) {
        return Err(ApiError::field(name, format!("`{name}` has an empty text")));
    }
    if stops.iter().any(|stop| stop.len() > MAX_STOP_LENGTH) {
        return Err(ApiError::field(
            name,
            format!("`{name}` has a text of more than {MAX_STOP_LENGTH} bytes"),
        ));
    }
    Ok(stops)
}

/// The format of answers that vLLM's and OpenAI's fields request.
fn grammar(fields: &Fields) -> Result<Option<(Grammar, &'static str)>> {
    let mut found: Vec<(Grammar, &'static str)> = Vec::new();
    if let Some(format) = fields.object("response_format")? {
        found.extend(response_format(format)?.map(|grammar| (grammar, "response_format")));
    }
    if let Some(given) = fields.object("structured_outputs")? {
        let known = Fields::of(given.clone());
        found.extend(structured(
            &known,
            ["json", "regex", "choice", "grammar", "json_object"],
            "structured_outputs",
        )?);
        known.ignore(&[
            "disable_any_whitespace",
            "whitespace_pattern",
            "disable_fallback",
            "disable_additional_properties",
        ]);
        known.finish()?;
    }
    let older = ["guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_json_object"];
    found.extend(structured(fields, older, older[0])?);
    match found.len() {
        0 | 1 => Ok(found.pop()),
        _ => {
            let (first, second) = (found[0].1, found[1].1);
            let message =
                format!("`{first}` and `{second}` both set the format of answers; send one of them");
            Err(ApiError::field(second, message))
        }
    }
}

/// The grammars under names for a schema, a regular expression, texts, a Lark grammar and any object.
fn structured(
    fields: &Fields,
    [schema, regex, choice, lark, object]: [&'static str; 5],
    field: &'static str,
) -> Result<Vec<(Grammar, &'static str)>> {
    let mut found = Vec::new();
    match fields.value(schema) {
        None => {}
        Some(Value::String(text)) => {
            let wrong = |error| ApiError::field(field, format!("`{schema}` is not JSON: {error}"));
            found.push(Grammar::JsonSchema(serde_json::from_str(text).map_err(wrong)?));
        }
        Some(value) => found.push(Grammar::JsonSchema(value.clone())),
    }
    found.extend(fields.text(regex)?.map(|regex| Grammar::Regex(regex.to_owned())));
    let texts = fields.texts(choice)?;
    if !texts.is_empty() {
        found.push(Grammar::choice(&texts));
    } else if fields.value(choice).is_some() {
        return Err(ApiError::field(field, format!("`{choice}` has no text, which allows no answer")));
    }
    found.extend(fields.text(lark)?.map(|lark| Grammar::Lark(lark.to_owned())));
    found.extend(fields.flag(object)?.filter(|wanted| *wanted).map(|_| Grammar::json_object()));
    if found.len() > 1 {
        let names = [schema, regex, choice, lark, object].map(|name| format!("`{name}`")).join(", ");
        return Err(ApiError::field(field, format!("more than one of {names} is set; send one of them")));
    }
    Ok(found.into_iter().map(|grammar| (grammar, field)).collect())
}

/// The grammar of OpenAI's `response_format`, or of `text.format` of its responses.
pub fn response_format(format: &serde_json::Map<String, Value>) -> Result<Option<Grammar>> {
    let name = "response_format";
    let schema_of = |object: &serde_json::Map<String, Value>| match object.get("schema") {
        None | Some(Value::Null) => Ok(Grammar::json_object()),
        Some(schema) => Ok(Grammar::JsonSchema(schema.clone())),
    };
    match format.get("type").and_then(Value::as_str) {
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some(Grammar::json_object())),
        Some("json_schema") => match format.get("json_schema").unwrap_or(&Value::Null) {
            Value::Object(described) => schema_of(described).map(Some),
            // Responses have no object around the schema.
            Value::Null if format.contains_key("schema") => schema_of(format).map(Some),
            _ => Err(ApiError::field(name, "`response_format` of type `json_schema` has no `json_schema`")),
        },
        _ => Err(ApiError::field(
            name,
            "the type of `response_format` has to be `text`, `json_object` or `json_schema`",
        )),
    }
}
