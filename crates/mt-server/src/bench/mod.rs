//! The load generator of `bench serve`: measures a server of OpenAI's interface as its clients see it.

mod client;
mod measure;

use std::{
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use tokio::{sync::Semaphore, task::JoinSet};

use client::Address;
use measure::Observed;
pub use measure::{LoadReport, Quantiles};

/// The text whose tokens make up prompts.
const TEXT: &str = "The quick brown fox jumps over the lazy dog while the engineer measures how long a server takes \
                    to answer 0123456789 requests of several clients at once, and notes each result in a table.";

/// A load on a server.
#[derive(Clone, Debug, PartialEq)]
pub struct Load {
    /// Such as `http://127.0.0.1:8000`.
    pub url: String,
    pub api_key: Option<String>,
    /// The model's name; by default the first one of the server.
    pub model: Option<String>,
    pub num_requests: usize,
    pub prompt_tokens: usize,
    pub answer_tokens: usize,
    pub arrival: Arrival,
    pub seed: u64,
}

/// When requests begin.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arrival {
    /// A number of clients, each of which sends a request as soon as it has the answer to the last one.
    Concurrency(usize),
    /// Requests each second, at random times with this mean.
    Rate(f64),
}

/// A load cannot be put on a server.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    #[error("`{url}` is no address of a server\nhint: write it as `http://127.0.0.1:8000`")]
    Url { url: String },
    #[error("cannot reach `{url}`: {source}\nhint: start the server first: `maxtext serve …`")]
    Unreachable { url: String, source: io::Error },
    #[error("`{route}` answers with the status {status}: {message}")]
    Refused { route: &'static str, status: u16, message: String },
    #[error("`{route}` gives an unexpected answer: {message}")]
    Unexpected { route: &'static str, message: String },
    #[error("all {number} requests failed; the first with: {message}")]
    AllFailed { number: usize, message: String },
    #[error("cannot start the load generator")]
    Start(#[source] io::Error),
}

impl BenchError {
    /// Whether the user's input is wrong.
    pub fn is_user_error(&self) -> bool {
        matches!(self, Self::Url { .. } | Self::Unreachable { .. })
    }
}

/// Puts loads on a server, one after another.
///
/// # Errors
/// The server cannot be reached, or answers no request.
pub fn run(loads: &[Load], mut report: impl FnMut(&LoadReport)) -> Result<Vec<LoadReport>, BenchError> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(BenchError::Start)?;
    runtime.block_on(async {
        let mut reports = Vec::new();
        for load in loads {
            let found = put(load).await?;
            report(&found);
            reports.push(found);
        }
        Ok(reports)
    })
}

async fn put(load: &Load) -> Result<LoadReport, BenchError> {
    let address = Arc::new(Address::parse(&load.url, load.api_key.clone())?);
    let model = match &load.model {
        Some(model) => model.clone(),
        None => first_model(&address).await?,
    };
    let tokens = tokens(&address, &model).await?;
    let mut random = Random(load.seed);
    let mut body = |_| {
        let prompt: Vec<u32> =
            (0..load.prompt_tokens).map(|_| tokens[(random.next() % tokens.len() as u64) as usize]).collect();
        json!({
            "model": model,
            "prompt": prompt,
            "max_tokens": load.answer_tokens,
            "ignore_eos": true,
            "temperature": 0,
            "stream": true,
            "stream_options": { "include_usage": true },
        })
    };
    let bodies: Vec<Value> = (0..load.num_requests).map(&mut body).collect();
    let started = Instant::now();
    let mut tasks = JoinSet::new();
    let places = match load.arrival {
        Arrival::Concurrency(number) => number,
        Arrival::Rate(_) => Semaphore::MAX_PERMITS,
    };
    let places = Arc::new(Semaphore::new(places));
    let mut due = started;
    for body in bodies {
        if let Arrival::Rate(rate) = load.arrival {
            due += Duration::from_secs_f64(-(1.0 - random.uniform()).ln() / rate);
            tokio::time::sleep_until(due.into()).await;
        }
        // The semaphore is never closed.
        let Ok(place) = places.clone().acquire_owned().await else { break };
        let address = address.clone();
        tasks.spawn(async move {
            let observed = client::stream(&address, "/v1/completions", &body).await;
            drop(place);
            observed
        });
    }
    let observed: Vec<Result<Observed, String>> = tasks.join_all().await;
    let seconds = started.elapsed().as_secs_f64();
    let first = observed.iter().find_map(|found| found.as_ref().err());
    if let (Some(message), true) = (first, observed.iter().all(Result::is_err)) {
        return Err(BenchError::AllFailed { number: observed.len(), message: message.clone() });
    }
    Ok(LoadReport::new(load.arrival, seconds, &observed))
}

async fn first_model(address: &Address) -> Result<String, BenchError> {
    let route = "/v1/models";
    let found = client::request(address, "GET", route, None).await?;
    let name = found["data"][0]["id"].as_str().map(str::to_owned);
    name.ok_or_else(|| BenchError::Unexpected { route, message: found.to_string() })
}

/// Tokens that the model knows.
async fn tokens(address: &Address, model: &str) -> Result<Vec<u32>, BenchError> {
    let route = "/tokenize";
    let body = json!({ "model": model, "prompt": TEXT, "add_special_tokens": false });
    let found = client::request(address, "POST", route, Some(&body)).await?;
    let tokens: Option<Vec<u32>> = found["tokens"].as_array().and_then(|tokens| {
        tokens.iter().map(|token| token.as_u64().and_then(|token| u32::try_from(token).ok())).collect()
    });
    let tokens = tokens.filter(|tokens| !tokens.is_empty());
    tokens.ok_or_else(|| BenchError::Unexpected { route, message: found.to_string() })
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let value = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        value ^ (value >> 31)
    }

    fn uniform(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }
}
