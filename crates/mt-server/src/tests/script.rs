//! A generator that answers from a script, and a server with it.

use std::{
    io,
    net::{SocketAddr, TcpListener},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    thread::JoinHandle,
    time::Duration,
};

use mt_data::{ChatTemplate, Tokenizer};
use mt_engine::{
    FinishReason,
    serve::{
        AnswerEvent, EngineMetrics, GenerationRequest, Pooling, SubmitError, TokenChoice, TokenLogProbability,
    },
};
use tokio::sync::{mpsc, oneshot};

use super::client::{Client, Reply};
use crate::{AnswerStream, ApiKeys, Generator, NamedAdapter, ServedModel, Server, ServerEvent, ServerLimits};

/// A request that has arrived.
#[derive(Clone, Debug)]
pub struct Submitted {
    pub prompt: String,
    pub choice: TokenChoice,
    pub max_new_tokens: Option<usize>,
    pub stop_tokens: Vec<u32>,
    pub num_filters: usize,
    pub adapter: Option<String>,
}

/// Answers every request with the bytes of a text, which filters may cut. Every answer of a request is the same.
pub struct Scripted {
    pub answer: String,
    /// The time before each token.
    pub pause: Duration,
    pub submitted: Mutex<Vec<Submitted>>,
    /// The requests that were dropped before their ends.
    pub cancelled: Arc<AtomicUsize>,
    pub tokenizer: Arc<Tokenizer>,
    /// The answers that were ended alone.
    pub ended: Arc<Mutex<Vec<usize>>>,
    /// Whether the queue is full.
    pub is_full: bool,
    /// Whether the engine has failed.
    pub has_failed: bool,
    /// The time for which each request keeps its thread.
    pub stall: Duration,
}

impl Scripted {
    pub fn new(answer: &str) -> Self {
        Self {
            answer: answer.to_owned(),
            pause: Duration::ZERO,
            submitted: Mutex::default(),
            cancelled: Arc::default(),
            tokenizer: Arc::new(Tokenizer::bytes()),
            ended: Arc::default(),
            is_full: false,
            has_failed: false,
            stall: Duration::ZERO,
        }
    }
}

fn scored(token: u32, top: Option<usize>) -> TokenLogProbability {
    let top = (0..top.unwrap_or(0)).map(|rank| (token + rank as u32, -0.5 - rank as f32)).collect();
    TokenLogProbability { token, log_probability: -0.5, top }
}

impl Generator for Scripted {
    fn submit(&self, mut request: GenerationRequest) -> Result<Box<dyn AnswerStream>, SubmitError> {
        std::thread::sleep(self.stall);
        if self.is_full {
            return Err(SubmitError::QueueFull { waiting: 1 });
        }
        self.submitted.lock().unwrap().push(Submitted {
            prompt: self.tokenizer.decode(&request.prompt, false).unwrap(),
            choice: request.choice.clone(),
            max_new_tokens: request.limits.max_new_tokens,
            stop_tokens: request.limits.stop_tokens.clone(),
            num_filters: request.filters.len(),
            adapter: request.adapter.clone(),
        });
        if let Some(pooling) = request.pooling {
            return Ok(Box::new(Events::pooled(&request.prompt, pooling)));
        }
        let tokens = self.tokenizer.encode(&self.answer, false, false).unwrap();
        let (sender, receiver) = mpsc::channel(1);
        let (pause, cancelled) = (self.pause, self.cancelled.clone());
        tokio::spawn(async move {
            let most = request.limits.max_new_tokens.unwrap_or(usize::MAX);
            let log_probabilities = match request.prompt_log_probabilities {
                Some(top) => {
                    let later = request.prompt.iter().skip(1).map(|token| Some(scored(*token, Some(top))));
                    [None].into_iter().chain(later).collect()
                }
                None => Vec::new(),
            };
            let waited = Duration::from_millis(1);
            let mut events = vec![AnswerEvent::Prompt { cached: 0, waited, log_probabilities }];
            for answer in 0..request.num_answers {
                let (mut reason, mut stop_token) = (FinishReason::Stop, None);
                for (index, token) in tokens.iter().enumerate() {
                    if index == most || request.limits.stop_tokens.contains(token) {
                        if index == most {
                            reason = FinishReason::Length;
                        } else {
                            stop_token = Some(*token);
                        }
                        break;
                    }
                    let mut goes_on = true;
                    if let Some(filter) = request.filters.get_mut(answer) {
                        let mut allowed = vec![0_u32; 9];
                        filter.allowed(&mut allowed);
                        if allowed[*token as usize / 32] >> (token % 32) & 1 == 0 {
                            break;
                        }
                        goes_on = filter.accept(*token);
                    }
                    events.push(AnswerEvent::Token {
                        answer,
                        token: scored(*token, request.log_probabilities),
                    });
                    if !goes_on {
                        break;
                    }
                }
                events.push(AnswerEvent::Finished { answer, reason, stop_token });
            }
            for event in events {
                if !pause.is_zero() {
                    tokio::time::sleep(pause).await;
                }
                if sender.send(event).await.is_err() {
                    cancelled.fetch_add(1, Ordering::SeqCst);
                    return;
                }
            }
        });
        Ok(Box::new(Events { receiver, ended: self.ended.clone() }))
    }

    fn metrics(&self) -> EngineMetrics {
        EngineMetrics { running: 1, used_pages: 1, total_pages: 2, ..EngineMetrics::default() }
    }

    fn failure(&self) -> Option<String> {
        self.has_failed.then(|| "out of luck".to_owned())
    }

    fn drain(&self) {}
}

struct Events {
    receiver: mpsc::Receiver<AnswerEvent>,
    ended: Arc<Mutex<Vec<usize>>>,
}

impl Events {
    /// The vector of a text: its last token or the mean of its tokens, and its length.
    fn pooled(tokens: &[u32], pooling: Pooling) -> Self {
        let length = tokens.len() as f32;
        let first = match pooling {
            Pooling::Last => tokens[tokens.len() - 1] as f32,
            Pooling::Mean => tokens.iter().sum::<u32>() as f32 / length,
        };
        let (sender, receiver) = mpsc::channel(1);
        sender.try_send(AnswerEvent::Pooled { values: vec![first, length] }).unwrap();
        Self { receiver, ended: Arc::default() }
    }
}

impl AnswerStream for Events {
    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<AnswerEvent>> {
        self.receiver.poll_recv(context)
    }

    fn end(&mut self, answer: usize) {
        self.ended.lock().unwrap().push(answer);
    }
}

/// A template with reasoning and Hermes' tool calls, as Qwen 3 has them.
const TEMPLATE: &str = "{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}\
{%- for message in messages %}<{{ message.role }}>{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}{% for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}\n{% endfor %}\
{%- if add_generation_prompt %}<assistant>{% endif %}";

pub fn served(tokenizer: Arc<Tokenizer>, with_template: bool) -> ServedModel {
    let directory = tempfile::tempdir().unwrap();
    let template = ChatTemplate::from_text("test", TEMPLATE, directory.path()).unwrap();
    ServedModel {
        name: "tiny".to_owned(),
        root: "/models/tiny".to_owned(),
        adapters: vec![NamedAdapter { name: "tuned".to_owned(), root: "/adapters/tuned".to_owned() }],
        pooling: Pooling::Last,
        embedding_size: 2,
        tokenizer,
        template: with_template.then_some(template),
        system: None,
        tokenizer_directory: None,
        add_bos: false,
        end_tokens: vec![2],
        vocab_size: 259,
        max_length: 1024,
        max_prompt: 1000,
    }
}

/// A running server.
pub struct Running {
    pub address: SocketAddr,
    pub generator: Arc<Scripted>,
    pub events: Arc<Mutex<Vec<ServerEvent>>>,
    stop: Option<oneshot::Sender<()>>,
    hurry: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// The settings of a server.
#[derive(Default)]
pub struct Settings {
    pub limits: ServerLimits,
    pub keys: &'static str,
    pub log_prompts: bool,
    pub no_template: bool,
}

impl Running {
    pub fn start(generator: Scripted) -> Self {
        Self::with(generator, Settings::default())
    }

    pub fn with(generator: Scripted, settings: Settings) -> Self {
        let generator = Arc::new(generator);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel();
        let (hurry, hurried) = oneshot::channel();
        let events = Arc::new(Mutex::new(Vec::new()));
        let server = Server {
            served: served(generator.tokenizer.clone(), !settings.no_template),
            generator: generator.clone(),
            limits: settings.limits,
            keys: ApiKeys::parse(settings.keys),
            log_prompts: settings.log_prompts,
            reporter: Arc::new({
                let events = events.clone();
                move |event| events.lock().unwrap().push(event)
            }),
        };
        let thread = std::thread::spawn(move || {
            let stop = async {
                let _ = stopped.await;
                Ok::<(), io::Error>(())
            };
            let hurry = async {
                if hurried.await.is_err() {
                    std::future::pending::<()>().await;
                }
            };
            server.run_until(listener, stop, hurry).unwrap();
        });
        Self { address, generator, events, stop: Some(stop), hurry: Some(hurry), thread: Some(thread) }
    }

    pub fn client(&self) -> Client {
        Client::connect(self.address)
    }

    pub fn post(&self, path: &str, body: &serde_json::Value) -> Reply {
        self.client().post(path, body)
    }

    pub fn get(&self, path: &str) -> Reply {
        self.client().request("GET", path, &[], b"")
    }

    /// Begins the end of the server.
    pub fn stop(&mut self) {
        self.stop.take();
    }

    /// Ends the requests that a server still answers after [`Self::stop`].
    pub fn hurry(&mut self) {
        self.hurry.take().unwrap().send(()).unwrap();
    }

    /// Waits until the server has ended.
    pub fn join(&mut self) {
        self.stop();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop();
        if let Some(thread) = self.thread.take() {
            // A failed test reports its own error.
            let _ = thread.join();
        }
    }
}
