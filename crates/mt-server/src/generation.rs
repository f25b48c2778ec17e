//! One request to the engine: from its events to the text of its answers.

use std::{
    collections::VecDeque,
    future::{Future, poll_fn},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::{Duration, Instant},
};

use mt_engine::{
    FinishReason,
    serve::{AnswerEvent, GenerationRequest, TokenLogProbability},
};
use tokio::time::Sleep;

use crate::{
    app::{App, Call, Phase},
    error::{ApiError, Result},
    generator::AnswerStream,
    metrics::Measured,
    parameters::Parameters,
    server::ServerEvent,
    text::{AnswerText, StopStrings},
};

/// Something new about a request.
#[derive(Debug)]
pub enum Piece {
    /// The prompt has been read.
    Prompt { log_probabilities: Vec<Option<TokenLogProbability>> },
    /// A token of an answer, and the text that is certain with it.
    Text { answer: usize, text: String, token: TokenLogProbability },
    /// The end of an answer, and its last text.
    End { answer: usize, text: String, finish: Finish, stop: Option<StopReason> },
}

/// The stop string or stop token of the request at which an answer ended. EOS of the model's own has none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopReason {
    Text(String),
    Token(u32),
}

impl StopReason {
    /// vLLM's `stop_reason`.
    pub fn json(stop: Option<&Self>) -> serde_json::Value {
        match stop {
            None => serde_json::Value::Null,
            Some(Self::Text(text)) => text.as_str().into(),
            Some(Self::Token(token)) => (*token).into(),
        }
    }
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// An end-of-sequence token, a stop token or a stop string.
    Stop,
    /// Its maximum length.
    Length,
}

impl Finish {
    /// The reason in OpenAI's words.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
        }
    }
}

/// A request in progress. Dropping it cancels the request.
pub struct Generation {
    app: Arc<App>,
    call: Call,
    /// `None` after the last event.
    stream: Option<Box<dyn AnswerStream>>,
    /// The texts of answers that have not ended.
    texts: Vec<Option<AnswerText>>,
    /// The stop tokens of the request.
    stop_tokens: Vec<u32>,
    queue: VecDeque<Piece>,
    time: Duration,
    deadline: Pin<Box<Sleep>>,
    shutdown: Pin<Box<dyn Future<Output = ()> + Send>>,
    measured: Measured,
    outcome: &'static str,
    pub num_prompt_tokens: usize,
    pub num_cached_tokens: usize,
    pub num_answer_tokens: usize,
}

impl Generation {
    /// Puts a request to the engine.
    ///
    /// # Errors
    /// The request is wrong, too many requests wait, or the server is shutting down.
    pub fn start(
        app: &Arc<App>,
        call: &Call,
        request: GenerationRequest,
        parameters: &Parameters,
    ) -> Result<Self> {
        let stops = StopStrings::new(parameters.stops.clone(), parameters.keep_stop);
        let text = || {
            let skip = parameters.skip_special_tokens;
            let min_tokens = request.limits.min_tokens;
            Some(AnswerText::after(&request.prompt, &app.served.tokenizer, skip, stops.clone(), min_tokens))
        };
        let texts: Vec<_> = (0..request.num_answers).map(|_| text()).collect();
        let num_prompt_tokens = request.prompt.len();
        if app.log_prompts {
            let prompt = app.served.tokenizer.decode(&request.prompt, false).unwrap_or_default();
            app.report(ServerEvent::Prompt { id: call.id.clone(), prompt });
        }
        let measured =
            Measured { started: Instant::now(), waited: Duration::ZERO, first: None, last: None, most: 0 };
        let mut phase = app.phase.subscribe();
        let time = app.limits.answer_time;
        app.admit(num_prompt_tokens)?;
        let mut generation = Self {
            app: app.clone(),
            call: call.clone(),
            stream: None,
            texts,
            stop_tokens: parameters.stop_tokens.clone(),
            queue: VecDeque::new(),
            time,
            deadline: Box::pin(tokio::time::sleep(time)),
            shutdown: Box::pin(async move {
                // The sender lives as long as the server.
                let _ = phase.wait_for(|phase| *phase == Phase::Ended).await;
            }),
            measured,
            outcome: "refused",
            num_prompt_tokens,
            num_cached_tokens: 0,
            num_answer_tokens: 0,
        };
        generation.stream = Some(app.generator.submit(request)?);
        generation.outcome = "cancelled";
        Ok(generation)
    }

    /// The next piece; `None` after the last one.
    ///
    /// # Errors
    /// The engine fails, the time is over, or the server is shutting down.
    pub async fn next(&mut self) -> Result<Option<Piece>> {
        poll_fn(|context| self.poll_next(context)).await
    }

    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<Piece>>> {
        loop {
            if let Some(piece) = self.queue.pop_front() {
                return Poll::Ready(Ok(Some(piece)));
            }
            if self.texts.iter().all(Option::is_none) {
                self.stream = None;
                return Poll::Ready(Ok(None));
            }
            // A slow client can have events left when the time of accepted requests is over.
            if *self.app.phase.borrow() == Phase::Ended {
                return Poll::Ready(Err(self.fail(ApiError::shutting_down())));
            }
            let Some(stream) = &mut self.stream else { return Poll::Ready(Ok(None)) };
            match stream.poll_next(context) {
                Poll::Ready(Some(event)) => {
                    if let Err(error) = self.receive(event) {
                        return Poll::Ready(Err(self.fail(error)));
                    }
                }
                Poll::Ready(None) => {
                    let error = ApiError::internal("the engine ended before the answer was complete");
                    return Poll::Ready(Err(self.fail(error)));
                }
                Poll::Pending => {
                    if self.deadline.as_mut().poll(context).is_ready() {
                        let error = ApiError::timeout(self.time.as_secs());
                        return Poll::Ready(Err(self.fail(error)));
                    }
                    if self.shutdown.as_mut().poll(context).is_ready() {
                        return Poll::Ready(Err(self.fail(ApiError::shutting_down())));
                    }
                    return Poll::Pending;
                }
            }
        }
    }

    fn fail(&mut self, error: ApiError) -> ApiError {
        self.stream = None;
        self.outcome = "failed";
        error
    }

    fn receive(&mut self, event: AnswerEvent) -> Result<()> {
        match event {
            AnswerEvent::Prompt { cached, waited, log_probabilities } => {
                self.num_cached_tokens = cached;
                self.measured.waited = waited;
                self.app.metrics.prompt(self.num_prompt_tokens, cached);
                self.app.metrics.waited(waited);
                self.queue.push_back(Piece::Prompt { log_probabilities });
            }
            AnswerEvent::Token { answer, token } => {
                let Some(Some(text)) = self.texts.get_mut(answer) else { return Ok(()) };
                self.num_answer_tokens += 1;
                self.app.metrics.token(&mut self.measured);
                let (new, ends) = text.push(token.token)?;
                let stop = text.found_stop().map(|stop| StopReason::Text(stop.to_owned()));
                self.queue.push_back(Piece::Text { answer, text: new, token });
                if ends {
                    self.stream.iter_mut().for_each(|stream| stream.end(answer));
                    self.end(answer, String::new(), Finish::Stop, stop);
                }
            }
            AnswerEvent::Finished { answer, reason, stop_token } => {
                let Some(Some(text)) = self.texts.get_mut(answer) else { return Ok(()) };
                let last = text.finish()?;
                let finish = match reason {
                    // The last text may complete a stop string.
                    FinishReason::Length if text.found_stop().is_some() => Finish::Stop,
                    FinishReason::Length => Finish::Length,
                    FinishReason::Stop => Finish::Stop,
                    FinishReason::Cancelled => return Err(ApiError::shutting_down()),
                };
                let token = stop_token.filter(|token| self.stop_tokens.contains(token));
                let stop = text.found_stop().map(|stop| StopReason::Text(stop.to_owned()));
                self.end(answer, last, finish, stop.or(token.map(StopReason::Token)));
            }
            AnswerEvent::Pooled { .. } => unreachable!("the request asks for answers"),
            AnswerEvent::Failed(error) => return Err(error.into()),
        }
        Ok(())
    }

    fn end(&mut self, answer: usize, text: String, finish: Finish, stop: Option<StopReason>) {
        self.texts[answer] = None;
        self.app.metrics.finished(finish.name());
        if self.texts.iter().all(Option::is_none) {
            self.outcome = finish.name();
        }
        self.queue.push_back(Piece::End { answer, text, finish, stop });
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        // Dropping the stream first lets the engine free the request's memory before others are admitted.
        self.stream = None;
        self.app.end();
        if self.outcome == "cancelled" {
            self.app.metrics.finished("abort");
        }
        self.measured.most = self.num_answer_tokens;
        if self.outcome != "refused" {
            self.app.metrics.ended(&self.measured);
        }
        self.app.report(ServerEvent::Answered {
            id: self.call.id.clone(),
            num_prompt_tokens: self.num_prompt_tokens,
            num_answer_tokens: self.num_answer_tokens,
            seconds: self.measured.started.elapsed().as_secs_f64(),
            outcome: self.outcome,
        });
    }
}

/// The next piece of any of some requests, with the request's index; `None` after the last piece of all.
///
/// # Errors
/// One of the requests fails.
pub async fn next_of(generations: &mut [Generation]) -> Result<Option<(usize, Piece)>> {
    poll_fn(|context| {
        let mut all_ended = true;
        for (index, generation) in generations.iter_mut().enumerate() {
            match generation.poll_next(context) {
                Poll::Ready(Ok(Some(piece))) => return Poll::Ready(Ok(Some((index, piece)))),
                Poll::Ready(Ok(None)) => {}
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Pending => all_ended = false,
            }
        }
        if all_ended { Poll::Ready(Ok(None)) } else { Poll::Pending }
    })
    .await
}

/// The numbers of tokens of some requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub prompt: usize,
    pub cached: usize,
    pub answer: usize,
    /// The tokens of answers that are reasoning.
    pub reasoning: usize,
}

impl Usage {
    pub fn of(generations: &[Generation]) -> Self {
        Self {
            prompt: generations.iter().map(|generation| generation.num_prompt_tokens).sum(),
            cached: generations.iter().map(|generation| generation.num_cached_tokens).sum(),
            answer: generations.iter().map(|generation| generation.num_answer_tokens).sum(),
            reasoning: 0,
        }
    }

    /// OpenAI's object.
    pub fn json(self) -> serde_json::Value {
        let mut usage = serde_json::json!({
            "prompt_tokens": self.prompt,
            "completion_tokens": self.answer,
            "total_tokens": self.prompt + self.answer,
            "prompt_tokens_details": { "cached_tokens": self.cached },
        });
        if self.reasoning > 0 {
            usage["completion_tokens_details"] = serde_json::json!({ "reasoning_tokens": self.reasoning });
        }
        usage
    }
}
