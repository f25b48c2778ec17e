//! SIGTERM while requests run: those that are done in time are complete, and the others end with an error object.

use std::{
    process::Command,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use tokio::{io::AsyncReadExt, task::JoinSet};

use crate::{Options, http, questions::Questions};

/// The numbers of short and of long requests.
const SHORT: usize = 16;
const LONG: usize = 240;
/// The tokens of the short ones' answers, which last until the signal and are done soon after it.
const SHORT_LENGTH: u64 = 64;

/// Ends the server, and checks what its clients see.
pub async fn check(options: &Options, questions: &Questions) -> Result<Value, String> {
    let mut tasks = JoinSet::new();
    for number in 0..SHORT + LONG {
        let (address, drain) = (options.address.clone(), options.drain_seconds);
        let length = if number < SHORT { SHORT_LENGTH } else { questions.max_length - 8 };
        let is_streamed = number < SHORT || number % 4 != 0;
        let body = json!({
            "model": questions.model, "prompt": "1 2", "max_tokens": length, "ignore_eos": true, "temperature": 0,
            "stream": is_streamed, "n": if number < SHORT { 1 } else { 8 },
        });
        let stream = http::send(&address, "POST", "/v1/completions", body.to_string().as_bytes()).await?;
        if number < SHORT {
            // The engine has the short ones before the others, so that they are done in time.
            stream.readable().await.map_err(|error| error.to_string())?;
        }
        tasks.spawn(async move { (number < SHORT, finish(stream, is_streamed, drain).await) });
    }
    // All are accepted.
    for _ in 0..600 {
        let load = http::request(&options.address, "GET", "/load", b"").await?.json()?;
        if load["server_load"].as_u64().is_some_and(|load| load as usize >= LONG / 2) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let started = Instant::now();
    let killed = Command::new("kill").arg("-TERM").arg(options.pid.to_string()).status();
    if !killed.is_ok_and(|status| status.success()) {
        return Err(format!("cannot end the process {}", options.pid));
    }
    let refused = refused(&options.address).await?;
    let (mut complete, mut ended) = (0, 0);
    while let Some(done) = tasks.join_next().await {
        let (is_short, outcome) = done.map_err(|error| error.to_string())?;
        match outcome? {
            true => complete += 1,
            false if is_short => return Err("a short request was not finished".to_owned()),
            false => ended += 1,
        }
    }
    let seconds = started.elapsed().as_secs_f64();
    for _ in 0..100 {
        if !std::path::Path::new(&format!("/proc/{}", options.pid)).exists() || is_zombie(options.pid) {
            let limit = options.drain_seconds as f64 + 5.0;
            if seconds > limit {
                return Err(format!("the server took {seconds:.1} s to end, more than {limit} s"));
            }
            return Ok(json!({
                "complete": complete, "ended_with_an_error": ended, "new_requests": refused, "seconds": seconds,
            }));
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    Err("the process is still there".to_owned())
}

/// Reads a response. `true` if it is complete, `false` if it is or ends with an error object.
async fn finish(mut stream: tokio::net::TcpStream, is_streamed: bool, drain: u64) -> Result<bool, String> {
    let mut bytes = Vec::new();
    let read = tokio::time::timeout(Duration::from_secs(drain + 60), stream.read_to_end(&mut bytes)).await;
    read.map_err(|_| "a response does not end".to_owned())?.map_err(|error| error.to_string())?;
    let text = String::from_utf8_lossy(&bytes);
    let has_error = text.contains("\"code\":\"shutting_down\"");
    let end = if is_streamed { "data: [DONE]" } else { "\"finish_reason\":\"length\"" };
    match (text.contains(end), has_error) {
        (true, false) => Ok(true),
        (_, true) => Ok(false),
        (false, false) => {
            let end = text.char_indices().rev().nth(300).map_or(0, |(place, _)| place);
            Err(format!("a response ends without a word: {:?}", &text[end..]))
        }
    }
}

/// The response to a new request after the signal: the error object, or no connection any more.
async fn refused(address: &str) -> Result<&'static str, String> {
    let body = json!({ "prompt": "1", "max_tokens": 1 }).to_string();
    for _ in 0..100 {
        match http::request(address, "POST", "/v1/completions", body.as_bytes()).await {
            Err(_) => return Ok("no connection"),
            Ok(reply) if reply.status == 503 && reply.json()?["error"]["code"] == "shutting_down" => {
                return Ok("503 with the error object");
            }
            // The signal takes a moment.
            Ok(reply) if reply.status == 200 || reply.status == 429 => {}
            Ok(reply) => return Err(format!("a new request gets {}: {}", reply.status, reply.text())),
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Err("new requests are still accepted".to_owned())
}

fn is_zombie(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    status.lines().any(|line| line.starts_with("State:") && line.contains('Z'))
}
