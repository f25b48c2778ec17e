//! Prompts whose greedy answers are certain.

use serde_json::{Value, json};

use crate::http;

/// The number of prompts.
const NUMBER: usize = 48;
/// The difference of log-probabilities below which rounding could choose another token.
const MARGIN: f64 = 1e-3;
/// The length of answers.
const ANSWER: usize = 24;

/// A prompt with its answer.
#[derive(Clone, Debug)]
pub struct Question {
    /// The request's body, without `stream`.
    pub body: Value,
    pub answer: String,
    pub num_tokens: u64,
}

/// All prompts, and the model.
#[derive(Debug)]
pub struct Questions {
    pub model: String,
    pub max_length: u64,
    pub questions: Vec<Question>,
}

/// Asks an idle server for the answers.
pub async fn ask(address: &str) -> Result<Questions, String> {
    let models = http::request(address, "GET", "/v1/models", b"").await?.json()?;
    let described = &models["data"][0];
    let model = described["id"].as_str().ok_or_else(|| format!("no model in {models}"))?.to_owned();
    let max_length = described["max_model_len"].as_u64().ok_or("the server gives no length")?;
    let mut questions = Vec::new();
    for number in 0..4 * NUMBER {
        // Prompts of 2 words to most of the context, of which some share their beginnings.
        let words = 2 + number * number % (max_length as usize / 8).clamp(3, 60);
        let text: Vec<String> =
            (0..words).map(|word| format!("{}", (number % 7) * 31 + word * word)).collect();
        let body =
            json!({ "model": model, "prompt": text.join(" "), "max_tokens": ANSWER, "temperature": 0 });
        let mut scored = body.clone();
        scored["logprobs"] = json!(2);
        let reply =
            http::request(address, "POST", "/v1/completions", scored.to_string().as_bytes()).await?.json()?;
        let choice = &reply["choices"][0];
        let Some(top) = choice["logprobs"]["top_logprobs"].as_array() else {
            return Err(format!("no log-probabilities in {reply}"));
        };
        let is_certain = |top: &Value| {
            let mut values: Vec<f64> =
                top.as_object().into_iter().flatten().filter_map(|(_, value)| value.as_f64()).collect();
            values.sort_by(f64::total_cmp);
            values.len() < 2 || values[values.len() - 1] - values[values.len() - 2] > MARGIN
        };
        if top.iter().all(is_certain) {
            let answer = choice["text"].as_str().unwrap_or_default().to_owned();
            let num_tokens = reply["usage"]["completion_tokens"].as_u64().unwrap_or(0);
            questions.push(Question { body, answer, num_tokens });
        }
        if questions.len() == NUMBER {
            break;
        }
    }
    if questions.len() < 8 {
        return Err(format!("only {} prompts have certain answers", questions.len()));
    }
    Ok(Questions { model, max_length, questions })
}
