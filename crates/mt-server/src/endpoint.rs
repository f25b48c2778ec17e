//! The common course of the routes that answer with generated text.

use std::{future::Future, sync::Arc};

use axum::{
    body::Body,
    extract::{Extension, State},
    http::Response,
};
use serde_json::Value;

use crate::{
    app::{App, Call, work},
    error::{ApiError, Result},
    fields::Fields,
    sse::{self, Events, Gone},
};

/// A route that answers with generated text: the answer in progress.
pub trait Endpoint: Sized + Send + 'static {
    /// A request that has been read and checked.
    type Asked: Send + 'static;

    /// Reads the fields of a request.
    ///
    /// # Errors
    /// A field is wrong.
    fn read(app: &App, fields: &Fields) -> Result<Self::Asked>;

    /// Puts a request to the engine.
    ///
    /// # Errors
    /// The request is wrong, or the server cannot accept it.
    fn start(app: &Arc<App>, call: &Call, asked: Self::Asked) -> impl Future<Output = Result<Self>> + Send;

    /// Whether the answer is sent as a stream of events.
    fn is_streamed(&self) -> bool;

    /// Sends the answer as events. Errors become events, too.
    ///
    /// # Errors
    /// The client has gone.
    fn send(self, events: &Events) -> impl Future<Output = Result<(), Gone>> + Send;

    /// The whole answer.
    ///
    /// # Errors
    /// The engine fails, the time is over, or the server is shutting down.
    fn collect(self) -> impl Future<Output = Result<Response<Body>>> + Send;

    /// The body of a response with an error.
    fn error_body(error: &ApiError) -> Value {
        error.body()
    }
}

/// Handles a request to a route.
pub async fn handle<E: Endpoint>(
    State(app): State<Arc<App>>,
    Extension(call): Extension<Call>,
    body: Body,
) -> Response<Body> {
    match answer::<E>(app, call, body).await {
        Ok(response) => response,
        Err(error) => error.response(&E::error_body(&error)),
    }
}

async fn answer<E: Endpoint>(app: Arc<App>, call: Call, body: Body) -> Result<Response<Body>> {
    let fields = app.fields(body).await?;
    let read = {
        let app = app.clone();
        move || E::read(&app, &fields)
    };
    let asked = work(read).await?;
    let answer = E::start(&app, &call, asked).await?;
    if !answer.is_streamed() {
        return answer.collect().await;
    }
    // A client that reads slowly must not hold its answer for longer than the answer may take.
    let time = app.limits.answer_time + app.limits.write_time;
    Ok(sse::stream(time, |events| async move {
        // The client has gone.
        let _ = answer.send(&events).await;
    }))
}
