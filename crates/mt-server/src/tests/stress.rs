//! Many clients at once: patient ones, slow ones, ones that go, and ones that send garbage.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use super::script::{Running, Scripted};
use crate::ServerEvent;

const ANSWER: &str = "an answer of some length, ä❤ included";

/// A number that an environment variable sets: `STRESS_CLIENTS` and `STRESS_SECONDS`.
fn setting(name: &str, default: usize) -> usize {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(default)
}

async fn send(address: SocketAddr, body: &[u8]) -> std::io::Result<TcpStream> {
    let mut stream = TcpStream::connect(address).await?;
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: test\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(body).await?;
    Ok(stream)
}

/// One client's request. Returns whether a complete answer was due and has arrived.
async fn visit(address: SocketAddr, kind: usize) -> std::io::Result<Option<bool>> {
    let body = json!({ "prompt": "p", "max_tokens": 100, "stream": true }).to_string();
    match kind % 4 {
        // A client that goes in the middle of an answer.
        0 => {
            let mut stream = send(address, body.as_bytes()).await?;
            let mut some = [0; 64];
            stream.read_exact(&mut some).await?;
            Ok(None)
        }
        // Garbage, which is answered.
        1 => {
            let mut stream = send(address, b"{\"prompt\": [1e99").await?;
            let mut reply = String::new();
            stream.read_to_string(&mut reply).await?;
            Ok(Some(reply.starts_with("HTTP/1.1 400 ")))
        }
        // A slow reader and a patient one.
        kind => {
            let mut stream = send(address, body.as_bytes()).await?;
            let mut reply = Vec::new();
            let mut some = vec![0; if kind == 2 { 100 } else { 65536 }];
            loop {
                let read = stream.read(&mut some).await?;
                if read == 0 {
                    break;
                }
                reply.extend_from_slice(&some[..read]);
                if kind == 2 {
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
            }
            let reply = String::from_utf8_lossy(&reply);
            let texts = reply.lines().filter_map(|line| line.strip_prefix("data: {"));
            let text: String = texts
                .filter_map(|line| serde_json::from_str::<serde_json::Value>(&format!("{{{line}")).ok())
                .filter_map(|event| event["choices"][0]["text"].as_str().map(str::to_owned))
                .collect();
            Ok(Some(text == ANSWER && reply.contains("data: [DONE]")))
        }
    }
}

#[test]
fn many_clients_are_served() {
    let (clients, seconds) = (setting("STRESS_CLIENTS", 200), setting("STRESS_SECONDS", 2));
    let server = Running::start(Scripted { pause: Duration::from_millis(1), ..Scripted::new(ANSWER) });
    let address = server.address;
    let until = Instant::now() + Duration::from_secs(seconds as u64);
    let (complete, broken, worst) =
        (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)), AtomicUsize::new(0));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let tasks: Vec<_> = (0..clients)
            .map(|kind| {
                let (complete, broken) = (complete.clone(), broken.clone());
                tokio::spawn(async move {
                    while Instant::now() < until {
                        match visit(address, kind).await {
                            Ok(Some(true)) => complete.fetch_add(1, Ordering::SeqCst),
                            Ok(None) => 0,
                            Ok(Some(false)) | Err(_) => broken.fetch_add(1, Ordering::SeqCst),
                        };
                    }
                })
            })
            .collect();
        while Instant::now() < until {
            let asked = Instant::now();
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream
                .write_all(b"GET /health HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n")
                .await
                .unwrap();
            let mut reply = String::new();
            stream.read_to_string(&mut reply).await.unwrap();
            assert!(reply.starts_with("HTTP/1.1 200 "), "{reply}");
            worst.fetch_max(asked.elapsed().as_millis() as usize, Ordering::SeqCst);
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        for task in tasks {
            task.await.unwrap();
        }
    });
    let (complete, broken) = (complete.load(Ordering::SeqCst), broken.load(Ordering::SeqCst));
    assert!(broken == 0 && complete > clients / 4, "{complete} complete, {broken} broken");
    // All requests have ended, those of clients that have gone, too.
    let metrics = || server.get("/load").json()["server_load"].as_u64().unwrap();
    for _ in 0..500 {
        if metrics() == 0 {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(metrics(), 0);
    let answered = |event: &&ServerEvent| matches!(event, ServerEvent::Answered { .. });
    let num_answered = server.events.lock().unwrap().iter().filter(answered).count();
    assert_eq!(num_answered, server.generator.submitted.lock().unwrap().len());
    println!("{complete} answers; /health within {} ms", worst.load(Ordering::SeqCst));
}
