//! The clients: patient, slow and rude ones.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::{
    http,
    mutation::{Corpus, Random},
    questions::{Question, Questions},
};

/// The behavior of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    Patient,
    /// Reads a few bytes at a time.
    Slow,
    /// Goes in the middle of an answer.
    Gone,
    /// Sends damaged bodies.
    Damaged,
    /// Sends what is not HTTP, or only a beginning.
    Garbage,
}

impl Kind {
    /// Half of the clients are patient.
    pub fn of(number: usize) -> Self {
        match number % 8 {
            0..4 => Self::Patient,
            4 => Self::Slow,
            5 => Self::Gone,
            6 => Self::Damaged,
            _ => Self::Garbage,
        }
    }
}

/// The outcomes of all requests.
#[derive(Default)]
pub struct Tally {
    counts: Mutex<BTreeMap<(Kind, &'static str), u64>>,
    failures: Mutex<Vec<String>>,
}

impl Tally {
    fn count(&self, kind: Kind, outcome: &'static str) {
        *self.counts.lock().unwrap_or_else(PoisonError::into_inner).entry((kind, outcome)).or_default() += 1;
    }

    fn fail(&self, kind: Kind, message: String) {
        self.count(kind, "broken");
        let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        if failures.len() < 10 {
            failures.push(format!("{kind:?}: {message}"));
        }
    }

    pub fn report(&self) -> Value {
        let counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        counts
            .iter()
            .map(|((kind, outcome), count)| (format!("{kind:?} {outcome}").to_lowercase(), json!(count)))
            .collect()
    }

    /// The broken requirements.
    pub fn problems(&self) -> Vec<String> {
        let mut problems = self.failures.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        for kind in [Kind::Patient, Kind::Slow, Kind::Gone, Kind::Damaged, Kind::Garbage] {
            if !counts
                .iter()
                .any(|((found, outcome), count)| *found == kind && *outcome != "refused" && *count > 0)
            {
                problems.push(format!("no request of {kind:?} clients was answered"));
            }
        }
        problems
    }
}

/// Sends one request after another.
pub async fn visit_until(
    until: Instant,
    address: String,
    kind: Kind,
    number: u64,
    questions: Arc<Questions>,
    tally: Arc<Tally>,
) {
    let mut random = Random(number.wrapping_mul(0x1234_5678_9abc_def1));
    let corpus = Corpus::default();
    // Clients arrive during the first seconds.
    tokio::time::sleep(Duration::from_millis(random.below(3000) as u64)).await;
    while Instant::now() < until {
        let question = &questions.questions[random.below(questions.questions.len())];
        let visited = match kind {
            Kind::Patient => ask(&address, question, &mut random, 64 << 10, Duration::ZERO).await,
            Kind::Slow => ask(&address, question, &mut random, 100, Duration::from_millis(20)).await,
            Kind::Gone => go(&address, question, &mut random).await,
            Kind::Damaged => send_damaged(&address, &corpus, &mut random).await,
            Kind::Garbage => send_garbage(&address, &mut random).await,
        };
        match visited {
            Ok("refused") => {
                tally.count(kind, "refused");
                tokio::time::sleep(Duration::from_millis(1000 + random.below(500) as u64)).await;
            }
            Ok(outcome) => tally.count(kind, outcome),
            Err(message) => tally.fail(kind, message),
        }
        if kind == Kind::Damaged || kind == Kind::Garbage {
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }
}

/// Asks a question, and checks the answer.
async fn ask(
    address: &str,
    question: &Question,
    random: &mut Random,
    size: usize,
    pause: Duration,
) -> Result<&'static str, String> {
    let is_streamed = random.below(2) == 0;
    let mut body = question.body.clone();
    body["stream"] = json!(is_streamed);
    if is_streamed {
        body["stream_options"] = json!({ "include_usage": true });
    }
    let stream = http::send(address, "POST", "/v1/completions", body.to_string().as_bytes()).await?;
    let reply = http::receive(stream, size, pause).await?;
    if reply.status == 429 {
        return Ok("refused");
    }
    if reply.status != 200 {
        return Err(format!("status {}: {}", reply.status, reply.text()));
    }
    let (text, usage) = if is_streamed {
        let (events, is_complete) = reply.events()?;
        if !is_complete {
            return Err(format!("a stream without its end: {}", reply.text()));
        }
        let text: String = events.iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect();
        (text, events.last().map(|event| event["usage"].clone()).unwrap_or_default())
    } else {
        let answer = reply.json()?;
        (answer["choices"][0]["text"].as_str().unwrap_or_default().to_owned(), answer["usage"].clone())
    };
    if text != question.answer || usage["completion_tokens"] != question.num_tokens {
        return Err(format!(
            "{:?} is answered with {text:?} ({usage}), not {:?}",
            question.body["prompt"], question.answer
        ));
    }
    Ok("complete")
}

/// Goes after the first bytes of an answer, or before.
async fn go(address: &str, question: &Question, random: &mut Random) -> Result<&'static str, String> {
    let mut body = question.body.clone();
    body["stream"] = json!(true);
    body["max_tokens"] = json!(200);
    body["ignore_eos"] = json!(true);
    let mut stream = http::send(address, "POST", "/v1/completions", body.to_string().as_bytes()).await?;
    let mut some = vec![0; random.below(600)];
    // A short read, or an error of a busy server, is as good.
    let _ = tokio::time::timeout(Duration::from_secs(60), stream.read_exact(&mut some)).await;
    Ok("gone")
}

async fn send_damaged(address: &str, corpus: &Corpus, random: &mut Random) -> Result<&'static str, String> {
    let (route, body) = corpus.damaged(random);
    let reply = http::request(address, "POST", route, &body).await?;
    match reply.status {
        // Streams are JSON in events.
        200 => Ok("answered"),
        429 => Ok("refused"),
        400 | 404 | 413 if reply.json()?["error"]["message"].is_string() => Ok("refuted"),
        status => Err(format!("{route} {}: {status} {}", String::from_utf8_lossy(&body), reply.text())),
    }
}

async fn send_garbage(address: &str, random: &mut Random) -> Result<&'static str, String> {
    let mut stream = TcpStream::connect(address).await.map_err(|error| error.to_string())?;
    let beginnings: [&[u8]; 6] = [
        b"\x16\x03\x01\x02\x00\x01\x00\x01",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{\"prompt\":",
        b"GET /health HTTP/1.1\r\nhost: x\r\nx-slow:",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"",
    ];
    let mut bytes = beginnings[random.below(beginnings.len())].to_vec();
    (0..random.below(200)).for_each(|_| bytes.push(random.next() as u8));
    // The server may close the connection at any byte.
    let _ = stream.write_all(&bytes).await;
    let mut some = [0; 1024];
    let wait = Duration::from_millis(random.below(5000) as u64);
    let _ = tokio::time::timeout(wait, stream.read(&mut some)).await;
    Ok("sent")
}
