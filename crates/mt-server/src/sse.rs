//! Server-sent events.

use std::{
    convert::Infallible,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    body::{Body, Bytes},
    http::{HeaderValue, Response, header},
};
use hyper::body::Frame;
use serde_json::Value;
use tokio::sync::mpsc;

/// The events that may wait for a slow client. The engine's own queue holds the rest.
const WAITING: usize = 64;

/// The sending end of a stream of events.
#[derive(Clone)]
pub struct Events {
    sender: mpsc::Sender<Bytes>,
}

/// The client has gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gone;

impl Events {
    /// Sends data without a name, as OpenAI does.
    ///
    /// # Errors
    /// The client has gone.
    pub async fn data(&self, data: &Value) -> Result<(), Gone> {
        self.raw(format!("data: {data}\n\n")).await
    }

    /// Sends a named event, as Anthropic and OpenAI's responses do.
    ///
    /// # Errors
    /// The client has gone.
    pub async fn named(&self, name: &str, data: &Value) -> Result<(), Gone> {
        self.raw(format!("event: {name}\ndata: {data}\n\n")).await
    }

    /// Sends the mark of the end of OpenAI's streams.
    ///
    /// # Errors
    /// The client has gone.
    pub async fn done(&self) -> Result<(), Gone> {
        self.raw("data: [DONE]\n\n".to_owned()).await
    }

    /// Waits until the client has gone.
    pub async fn gone(&self) {
        self.sender.closed().await;
    }

    async fn raw(&self, text: String) -> Result<(), Gone> {
        self.sender.send(Bytes::from(text)).await.map_err(|_| Gone)
    }
}

/// A response with a stream of events, which `produce` sends in a task of its own. The task ends when the client goes, and
/// in any case after `time`.
pub fn stream<F>(time: Duration, produce: impl FnOnce(Events) -> F) -> Response<Body>
where
    F: Future<Output = ()> + Send + 'static,
{
    let (sender, receiver) = mpsc::channel(WAITING);
    let events = Events { sender };
    let watched = events.clone();
    let work = produce(events);
    tokio::spawn(async move {
        tokio::select! {
            () = work => {}
            () = watched.gone() => {}
            () = tokio::time::sleep(time) => {}
        }
    });
    let mut response = Response::new(Body::new(EventBody { receiver }));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Proxies such as nginx would hold events back.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

struct EventBody {
    receiver: mpsc::Receiver<Bytes>,
}

impl hyper::body::Body for EventBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let next = self.receiver.poll_recv(context);
        next.map(|data| data.map(|data| Ok(Frame::data(data))))
    }
}
