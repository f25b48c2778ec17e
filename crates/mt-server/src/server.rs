//! A server from its start to its end.

use std::{
    io,
    net::{SocketAddr, TcpListener, TcpStream},
    os::fd::OwnedFd,
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use mt_data::{ChatTemplate, Tokenizer};
use mt_engine::serve::Pooling;
use tokio::{
    net::TcpSocket,
    runtime,
    signal::unix::{SignalKind, signal},
    sync::{Notify, oneshot},
};

use crate::{
    access::ApiKeys,
    app::{App, Phase, router},
    connections::{self, Routes},
    error::ApiError,
    fields::Fields,
    generator::Generator,
    limits::ServerLimits,
};

/// The connections that may wait to be accepted. A client that finds no room tries again only after a second, and the 128
/// of the standard library are few for clients that all come back at once.
const WAITING_CONNECTIONS: u32 = 4096;
/// The time in which connections may close after the last answer.
const CLOSING: Duration = Duration::from_secs(2);

/// An adapter of the model, as clients know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedAdapter {
    /// The name in requests and answers.
    pub name: String,
    /// The path of the adapter.
    pub root: String,
}

/// A model with its tokenizer, as clients know it.
pub struct ServedModel {
    /// The name in requests and answers.
    pub name: String,
    /// The path of the weights, which is another name of the model.
    pub root: String,
    /// The adapters that requests choose by name.
    pub adapters: Vec<NamedAdapter>,
    /// How texts become vectors unless requests tell.
    pub pooling: Pooling,
    /// The length of these vectors.
    pub embedding_size: usize,
    pub tokenizer: Arc<Tokenizer>,
    /// Begins conversations that have no system message of their own.
    pub system: Option<String>,
    /// Turns messages into prompts; without it, the model only continues texts.
    pub template: Option<ChatTemplate>,
    /// The directory of the tokenizer's files.
    pub tokenizer_directory: Option<PathBuf>,
    /// Whether texts begin with BOS.
    pub add_bos: bool,
    /// The tokens that end an answer.
    pub end_tokens: Vec<u32>,
    pub vocab_size: usize,
    /// The maximum length of a prompt with its answer, in tokens.
    pub max_length: usize,
    /// The maximum length of a prompt, in tokens.
    pub max_prompt: usize,
}

impl ServedModel {
    /// The adapter that a request chooses by its field `model`; `None` for the base.
    ///
    /// # Errors
    /// The server does not have the model.
    pub fn adapter(&self, fields: &Fields) -> Result<Option<&NamedAdapter>, ApiError> {
        let Some(name) = fields.text("model")? else { return Ok(None) };
        if name == self.name || name == self.root {
            return Ok(None);
        }
        self.adapters.iter().find(|adapter| adapter.name == name).map(Some).ok_or_else(|| {
            let names = self.adapters.iter().map(|adapter| adapter.name.as_str());
            let names: Vec<String> =
                [self.name.as_str()].into_iter().chain(names).map(|n| format!("`{n}`")).collect();
            let message = format!("the model `{name}` does not exist; this server has {}", names.join(", "));
            let error = ApiError { parameter: Some("model".to_owned()), ..ApiError::not_found(message) };
            error.with_code("model_not_found")
        })
    }

    /// The name of the model with an adapter or without.
    pub fn name_of(&self, adapter: Option<&str>) -> String {
        adapter.unwrap_or(&self.name).to_owned()
    }
}

/// An event for the server's log.
#[derive(Clone, Debug, PartialEq)]
pub enum ServerEvent {
    /// The server accepts connections.
    Listening { address: SocketAddr },
    /// The head of a response is ready.
    Responded { id: String, method: String, path: String, status: u16, seconds: f64 },
    /// A request to the engine has ended.
    Answered {
        id: String,
        num_prompt_tokens: usize,
        num_answer_tokens: usize,
        seconds: f64,
        outcome: &'static str,
    },
    /// The text of a prompt, if the log has prompts.
    Prompt { id: String, prompt: String },
    /// The server refuses connections beyond this number.
    Full { max_connections: usize },
    /// A signal has arrived: accepted requests finish.
    Draining { num_active: usize },
    /// The requests that did not finish in time.
    Ended { num_failed: usize },
}

/// The server cannot run.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    #[error("cannot start the server")]
    Start(#[source] io::Error),
    #[error("the server fails")]
    Run(#[source] io::Error),
}

/// A server of one model.
pub struct Server {
    pub served: ServedModel,
    pub generator: Arc<dyn Generator>,
    pub limits: ServerLimits,
    pub keys: ApiKeys,
    /// Whether events have the text of prompts.
    pub log_prompts: bool,
    pub reporter: Arc<dyn Fn(ServerEvent) + Send + Sync>,
}

impl Server {
    /// Serves until SIGTERM or SIGINT, and lets accepted requests finish, unless a second signal ends them.
    ///
    /// # Errors
    /// The listener or the signals cannot be used.
    pub fn run_until_signal(self, listener: TcpListener) -> Result<(), ServerError> {
        let again = Arc::new(Notify::new());
        let hurry = again.clone();
        let stop = async move {
            let streams = signal(SignalKind::terminate()).and_then(|terminate| {
                signal(SignalKind::interrupt()).map(|interrupt| (terminate, interrupt))
            });
            let (mut terminate, mut interrupt) = streams?;
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            tokio::spawn(async move {
                tokio::select! {
                    _ = terminate.recv() => {}
                    _ = interrupt.recv() => {}
                }
                again.notify_one();
            });
            Ok(())
        };
        self.run_until(listener, stop, async move { hurry.notified().await })
    }

    /// Serves until `stop` is ready, and lets accepted requests finish.
    ///
    /// # Errors
    /// The listener cannot be used, or `stop` fails.
    pub fn run(
        self,
        listener: TcpListener,
        stop: impl Future<Output = io::Result<()>>,
    ) -> Result<(), ServerError> {
        self.run_until(listener, stop, std::future::pending())
    }

    /// As [`Self::run`]; requests that have not finished when `hurry` is ready fail.
    pub(crate) fn run_until(
        self,
        listener: TcpListener,
        stop: impl Future<Output = io::Result<()>>,
        hurry: impl Future<Output = ()>,
    ) -> Result<(), ServerError> {
        let threads = std::thread::available_parallelism().map_or(2, |number| number.get().clamp(2, 8));
        let workers = runtime::Builder::new_multi_thread()
            .worker_threads(threads)
            // Work on a processor waits here for one, so that more threads would only take memory.
            .max_blocking_threads(2 * threads + 2)
            .thread_name("server")
            .enable_all()
            .build()
            .map_err(ServerError::Start)?;
        // Connections, and the routes by which operators watch the server, have this thread to themselves, so that no
        // work on answers delays them.
        let front =
            runtime::Builder::new_current_thread().enable_all().build().map_err(ServerError::Start)?;
        let served = front.block_on(self.serve(listener, stop, hurry, workers.handle().clone()));
        // Tasks of clients that do not close their connections end here.
        workers.shutdown_background();
        front.shutdown_background();
        served
    }

    async fn serve(
        self,
        listener: TcpListener,
        stop: impl Future<Output = io::Result<()>>,
        hurry: impl Future<Output = ()>,
        workers: runtime::Handle,
    ) -> Result<(), ServerError> {
        let Self { served, generator, limits, keys, log_prompts, reporter } = self;
        let drain_time = limits.drain_time;
        let app = Arc::new(App::new(served, generator, limits, keys, log_prompts, reporter));
        let listener = with_long_queue(listener).map_err(ServerError::Start)?;
        let address = listener.local_addr().map_err(ServerError::Start)?;
        let (closed, close) = oneshot::channel::<()>();
        let close = async {
            // A dropped sender closes, too.
            let _ = close.await;
        };
        let routes = Routes::new(router(app.clone()), workers);
        let serving = tokio::spawn(connections::serve(listener, app.clone(), routes, close));
        app.report(ServerEvent::Listening { address });
        stop.await.map_err(ServerError::Run)?;
        drain(&app, drain_time, hurry).await;
        drop(closed);
        // Some clients keep their connections open.
        let _ = tokio::time::timeout(CLOSING, serving).await;
        Ok(())
    }
}

/// The listener with a longer queue of connections.
fn with_long_queue(listener: TcpListener) -> io::Result<tokio::net::TcpListener> {
    listener.set_nonblocking(true)?;
    // The standard library has no other way to listen again.
    let socket = TcpSocket::from_std_stream(TcpStream::from(OwnedFd::from(listener)));
    socket.listen(WAITING_CONNECTIONS)
}

/// Lets accepted requests finish within a time, and until `hurry` is ready; then they fail.
async fn drain(app: &Arc<App>, time: Duration, hurry: impl Future<Output = ()>) {
    app.report(ServerEvent::Draining { num_active: app.num_active() });
    app.phase.send_replace(Phase::Draining);
    let generator = app.generator.clone();
    let drained = tokio::task::spawn_blocking(move || generator.drain());
    let all_ended = async {
        while app.num_active() > 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        // The engine has nothing to do any more.
        let _ = drained.await;
    };
    tokio::select! {
        () = all_ended => {}
        () = tokio::time::sleep(time) => {}
        () = hurry => {}
    }
    let num_failed = app.num_active();
    app.phase.send_replace(Phase::Ended);
    app.report(ServerEvent::Ended { num_failed });
}
