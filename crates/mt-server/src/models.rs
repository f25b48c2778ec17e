//! The routes about the model and its tokenizer.

use std::sync::Arc;

use axum::{
    body::Body,
    extract::{Path, State},
    http::Response,
};
use mt_engine::encode_prompt;
use serde_json::{Value, json};

use crate::{
    app::{App, now, ok, work},
    chat::ChatInput,
    error::{ApiError, Result},
    log_probabilities::token_text,
    server::NamedAdapter,
};

/// The model itself, or its adapter.
fn described(app: &App, adapter: Option<&NamedAdapter>) -> Value {
    let served = &app.served;
    json!({
        "id": adapter.map_or(&served.name, |adapter| &adapter.name),
        "object": "model",
        "created": now(),
        "owned_by": "maxtext",
        "root": adapter.map_or(&served.root, |adapter| &adapter.root),
        "parent": adapter.map(|_| &served.name),
        "max_model_len": served.max_length,
    })
}

/// `GET /v1/models`.
pub async fn list(State(app): State<Arc<App>>) -> Response<Body> {
    let adapters = app.served.adapters.iter().map(|adapter| described(&app, Some(adapter)));
    let all: Vec<Value> = [described(&app, None)].into_iter().chain(adapters).collect();
    ok(&json!({ "object": "list", "data": all }))
}

/// `GET /v1/models/NAME`.
pub async fn one(State(app): State<Arc<App>>, Path(name): Path<String>) -> Result<Response<Body>> {
    // Paths begin with a slash, which the route takes.
    if name == app.served.name || name == app.served.root.trim_start_matches('/') {
        return Ok(ok(&described(&app, None)));
    }
    if let Some(adapter) = app.served.adapters.iter().find(|adapter| adapter.name == name) {
        return Ok(ok(&described(&app, Some(adapter))));
    }
    Err(ApiError::not_found(format!("the model `{name}` does not exist")).with_code("model_not_found"))
}

/// `POST /tokenize`.
pub async fn tokenize(State(app): State<Arc<App>>, body: Body) -> Result<Response<Body>> {
    let fields = app.fields(body).await?;
    work(move || {
        app.check_model(&fields)?;
        let served = &app.served;
        let with_texts = fields.flag("return_token_strs")?.unwrap_or(false);
        let adds = fields.flag("add_special_tokens")?;
        let tokens = if fields.value("messages").is_some() {
            ChatInput::of_tokenize(&fields, served)?.render(served)?.tokens
        } else {
            let Some(prompt) = fields.text("prompt")? else {
                return Err(ApiError::field("prompt", "the request has neither `prompt` nor `messages`"));
            };
            served.tokenizer.encode(prompt, adds.unwrap_or(served.add_bos), false)?
        };
        fields.finish()?;
        let texts = with_texts.then(|| {
            let texts = tokens.iter().map(|token| token_text(&served.tokenizer, *token));
            texts.collect::<Vec<_>>()
        });
        Ok(ok(&json!({
            "count": tokens.len(),
            "max_model_len": served.max_length,
            "tokens": tokens,
            "token_strs": texts,
        })))
    })
    .await
}

/// `POST /detokenize`.
pub async fn detokenize(State(app): State<Arc<App>>, body: Body) -> Result<Response<Body>> {
    let fields = app.fields(body).await?;
    app.check_model(&fields)?;
    let tokens = fields.tokens("tokens", app.served.tokenizer.vocab_size())?;
    let Some(tokens) = tokens else {
        return Err(ApiError::field("tokens", "the request has no `tokens`"));
    };
    fields.finish()?;
    Ok(ok(&json!({ "prompt": app.served.tokenizer.decode(&tokens, false)? })))
}

/// The tokens of a text to continue.
pub fn tokens_of_text(app: &App, text: &str, add_bos: Option<bool>) -> Result<Vec<u32>> {
    let served = &app.served;
    Ok(encode_prompt(&served.tokenizer, text, add_bos.unwrap_or(served.add_bos))?)
}
