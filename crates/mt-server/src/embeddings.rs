//! `POST /v1/embeddings`.

use std::{
    future::poll_fn,
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{
    body::Body,
    extract::{Extension, State},
    http::Response,
};
use mt_engine::serve::{AnswerEvent, GenerationRequest, Pooling};
use serde_json::{Value, json};
use tokio::time::Instant as Deadline;

use crate::{
    app::{App, Call, Phase, now, ok, work},
    completions::prompts,
    error::{ApiError, Result},
    fields::Fields,
    generator::AnswerStream,
    server::ServerEvent,
};

/// The texts of a request, as OpenAI documents.
const MAX_TEXTS: usize = 2048;
/// The texts that a request has in the engine at once, so that it leaves room for others.
const WINDOW: usize = 64;

/// The names of poolings in requests and on the command line.
const POOLINGS: [(&str, Pooling); 2] = [("last", Pooling::Last), ("mean", Pooling::Mean)];

/// The pooling of a name.
pub fn pooling_of(name: &str) -> Option<Pooling> {
    POOLINGS.into_iter().find(|(known, _)| known.eq_ignore_ascii_case(name)).map(|(_, pooling)| pooling)
}

/// A request that has been read.
struct Asked {
    texts: Vec<Vec<u32>>,
    adapter: Option<String>,
    pooling: Pooling,
    /// Whether vectors have the length 1.
    normalizes: bool,
    /// The number of leading elements that are wanted.
    size: usize,
    is_base64: bool,
}

/// Answers a request.
pub async fn handle(
    State(app): State<Arc<App>>,
    Extension(call): Extension<Call>,
    body: Body,
) -> Result<Response<Body>> {
    let fields = app.fields(body).await?;
    let asked = work({
        let app = app.clone();
        move || read(&app, &fields)
    })
    .await?;
    let longest = asked.texts.iter().map(Vec::len).max().unwrap_or(0);
    app.admit(longest)?;
    let mut run = Run { app, call, started: Instant::now(), num_tokens: 0, outcome: "failed" };
    let mut data = Vec::with_capacity(asked.texts.len());
    for texts in asked.texts.chunks(WINDOW) {
        for vector in run.vectors(texts, &asked).await? {
            let embedding = encoded(&finished(vector, &asked), asked.is_base64);
            data.push(json!({ "object": "embedding", "index": data.len(), "embedding": embedding }));
        }
    }
    run.outcome = "stop";
    Ok(ok(&json!({
        "id": run.app.new_id("embd"),
        "object": "list",
        "created": now(),
        "model": run.app.served.name_of(asked.adapter.as_deref()),
        "data": data,
        "usage": { "prompt_tokens": run.num_tokens, "total_tokens": run.num_tokens },
    })))
}

fn read(app: &App, fields: &Fields) -> Result<Asked> {
    let served = &app.served;
    let adapter = served.adapter(fields)?.map(|adapter| adapter.name.clone());
    fields.ignore(&["user", "request_id", "priority"]);
    let is_base64 = match fields.text("encoding_format")? {
        None | Some("float") => false,
        Some("base64") => true,
        Some(other) => {
            let message = format!("`encoding_format` is `{other}`, but it has to be `float` or `base64`");
            return Err(ApiError::field("encoding_format", message).with_code("invalid_value"));
        }
    };
    let pooling = match fields.text("pooling")? {
        None => served.pooling,
        Some(name) => pooling_of(name).ok_or_else(|| {
            let message = format!("`pooling` is `{name}`, but it has to be `last` or `mean`");
            ApiError::field("pooling", message).with_code("invalid_value")
        })?,
    };
    let normalizes = fields.flag("normalize")?.unwrap_or(true);
    let most = i64::try_from(served.embedding_size).unwrap_or(i64::MAX);
    let size = fields.integer("dimensions", 1..=most)?;
    let adds = fields.flag("add_special_tokens")?;
    let texts = prompts(app, fields, "input", adds)?;
    if texts.len() > MAX_TEXTS {
        let message = format!("`input` has {} texts, but a request has at most {MAX_TEXTS}", texts.len());
        return Err(ApiError::field("input", message).with_code("invalid_value"));
    }
    if let Some(index) = texts.iter().position(Vec::is_empty) {
        return Err(ApiError::field("input", format!("text {} of `input` has no token", index + 1)));
    }
    fields.finish()?;
    let size = size.map_or(served.embedding_size, |size| usize::try_from(size).unwrap_or(usize::MAX));
    Ok(Asked { texts, adapter, pooling, normalizes, size, is_base64 })
}

/// A request in progress. Dropping it cancels the request.
struct Run {
    app: Arc<App>,
    call: Call,
    started: Instant,
    num_tokens: usize,
    outcome: &'static str,
}

impl Run {
    /// The vectors of some texts, which the engine reads together.
    async fn vectors(&mut self, texts: &[Vec<u32>], asked: &Asked) -> Result<Vec<Vec<f32>>> {
        let submit = |tokens: &Vec<u32>| {
            let request = GenerationRequest {
                adapter: asked.adapter.clone(),
                ..GenerationRequest::pooled(tokens.clone(), asked.pooling)
            };
            Ok(self.app.generator.submit(request)?)
        };
        let streams: Vec<Box<dyn AnswerStream>> = texts.iter().map(submit).collect::<Result<_>>()?;
        let mut vectors = Vec::with_capacity(texts.len());
        for (mut stream, tokens) in streams.into_iter().zip(texts) {
            vectors.push(self.vector(&mut *stream).await?);
            self.num_tokens += tokens.len();
            self.app.metrics.prompt(tokens.len(), 0);
        }
        Ok(vectors)
    }

    async fn vector(&self, stream: &mut dyn AnswerStream) -> Result<Vec<f32>> {
        let time = self.app.limits.answer_time;
        let left = time.checked_sub(self.started.elapsed()).unwrap_or(Duration::ZERO);
        let mut phase = self.app.phase.subscribe();
        let ended = async move {
            // The sender lives as long as the server.
            let _ = phase.wait_for(|phase| *phase == Phase::Ended).await;
        };
        tokio::pin!(ended);
        loop {
            let event = tokio::select! {
                event = poll_fn(|context| stream.poll_next(context)) => event,
                () = tokio::time::sleep_until(Deadline::now() + left) => {
                    return Err(ApiError::timeout(time.as_secs()));
                }
                () = &mut ended => return Err(ApiError::shutting_down()),
            };
            match event {
                Some(AnswerEvent::Pooled { values }) => return Ok(values),
                Some(AnswerEvent::Failed(error)) => return Err(error.into()),
                Some(_) => {}
                None => return Err(ApiError::internal("the engine ended before the text was read")),
            }
        }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.app.end();
        self.app.report(ServerEvent::Answered {
            id: self.call.id.clone(),
            num_prompt_tokens: self.num_tokens,
            num_answer_tokens: 0,
            seconds: self.started.elapsed().as_secs_f64(),
            outcome: self.outcome,
        });
    }
}

/// The wanted elements of a vector, divided by their Euclidean norm unless the request wants them as they are.
fn finished(mut vector: Vec<f32>, asked: &Asked) -> Vec<f32> {
    vector.truncate(asked.size);
    if asked.normalizes {
        let norm = vector.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt();
        // The vector of zeros stays what it is.
        let norm = norm.max(1e-12);
        vector.iter_mut().for_each(|value| *value = (f64::from(*value) / norm) as f32);
    }
    vector
}

/// A vector as a list of numbers, or as its bytes.
fn encoded(vector: &[f32], is_base64: bool) -> Value {
    if is_base64 {
        let bytes: Vec<u8> = vector.iter().flat_map(|value| value.to_le_bytes()).collect();
        return Value::String(base64(&bytes));
    }
    // The shortest decimal number that reads as the same `f32`.
    vector.iter().map(|value| json!(value.to_string().parse::<f64>().unwrap_or(f64::NAN))).collect()
}

/// Bytes in base 64 (RFC 4648) with padding.
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let of = |index: usize| u32::from(group.get(index).copied().unwrap_or(0));
        let bits = of(0) << 16 | of(1) << 8 | of(2);
        for digit in 0..4 {
            let is_given = digit <= group.len();
            let index = (bits >> (18 - 6 * digit) & 63) as usize;
            text.push(if is_given { char::from(DIGITS[index]) } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_written_in_base_64() {
        // The examples of RFC 4648.
        for (bytes, text) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("fooba", "Zm9vYmE="),
        ] {
            assert_eq!(base64(bytes.as_bytes()), text);
        }
    }
}
