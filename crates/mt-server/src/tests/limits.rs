//! Clients that are too slow, too many or too large.

use std::{
    io::{Read, Write},
    net::TcpStream,
    time::{Duration, Instant},
};

use serde_json::json;

use super::script::{Running, Scripted, Settings};
use crate::{ServerEvent, ServerLimits};

fn with(limits: ServerLimits) -> Running {
    Running::with(Scripted::new("x"), Settings { limits, ..Settings::default() })
}

/// Sends a beginning, and returns what the server answers until it closes the connection.
fn begin(server: &Running, beginning: &str) -> String {
    let mut stream = TcpStream::connect(server.address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream.write_all(beginning.as_bytes()).unwrap();
    let mut reply = Vec::new();
    // A connection with unread bytes is reset.
    let _ = stream.read_to_end(&mut reply);
    String::from_utf8(reply).unwrap()
}

#[test]
fn slow_heads_end_their_connections() {
    let server = with(ServerLimits { head_time: Duration::from_millis(200), ..ServerLimits::default() });
    let started = Instant::now();
    for beginning in
        ["", "GET /health HTTP/1.1\r\nhost:", "POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-a: b\r\n"]
    {
        assert_eq!(begin(&server, beginning), "", "{beginning}");
    }
    // A head that never ends, a byte at a time.
    let mut stream = TcpStream::connect(server.address).unwrap();
    let byte_by_byte = Instant::now();
    stream.write_all(b"GET / HTTP/1.1\r\nx: ").unwrap();
    while stream.write_all(b"y").is_ok() && byte_by_byte.elapsed() < Duration::from_secs(20) {
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(started.elapsed() < Duration::from_secs(15), "{:?}", started.elapsed());
    assert_eq!(server.get("/health").status, 200);
}

#[test]
fn slow_bodies_are_refused() {
    let server = with(ServerLimits { body_time: Duration::from_millis(200), ..ServerLimits::default() });
    let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 100\r\n\r\n{\"prompt\":";
    let reply = begin(&server, head);
    assert!(reply.starts_with("HTTP/1.1 408 ") && reply.contains("did not arrive within"), "{reply}");
    assert_eq!(server.post("/v1/completions", &json!({ "prompt": "a" })).status, 200);
}

#[test]
fn large_heads_are_refused() {
    let server = with(ServerLimits { max_head: 16 << 10, ..ServerLimits::default() });
    let long = format!("GET /health HTTP/1.1\r\nhost: x\r\nx-long: {}\r\n\r\n", "y".repeat(20 << 10));
    assert!(begin(&server, &long).starts_with("HTTP/1.1 431 "));
    let many: String = (0..200).map(|number| format!("x-{number}: y\r\n")).collect();
    assert!(begin(&server, &format!("GET /health HTTP/1.1\r\n{many}\r\n")).starts_with("HTTP/1.1 431 "));
    let fits = format!(
        "GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-long: {}\r\n\r\n",
        "y".repeat(12 << 10)
    );
    assert!(begin(&server, &fits).starts_with("HTTP/1.1 200 "));
    for garbage in ["\r\n\r\n\u{1}\u{2}", "GET\r\n\r\n", "{\"prompt\": 1}\r\n\r\n", "GET / HTTP/9.9\r\n\r\n"]
    {
        let reply = begin(&server, garbage);
        assert!(reply.starts_with("HTTP/1.1 400 "), "{garbage:?}: {reply:?}");
    }
}

#[test]
fn connections_beyond_the_limit_are_refused() {
    let server = with(ServerLimits { max_connections: 2, ..ServerLimits::default() });
    let first = server.client();
    let mut second = server.client();
    assert_eq!(second.request("GET", "/health", &[], b"").status, 200);
    let third = server.get("/health");
    assert_eq!((third.status, third.header("retry-after")), (503, Some("1")), "{}", third.body);
    assert_eq!(third.json()["error"]["code"], "too_many_connections");
    let full = ServerEvent::Full { max_connections: 2 };
    assert!(server.events.lock().unwrap().contains(&full));
    drop(first);
    let has_room = |_| {
        std::thread::sleep(Duration::from_millis(10));
        server.get("/health").status == 200
    };
    assert!((0..500).any(has_room));
}

#[test]
fn bodies_share_their_memory() {
    let server = with(ServerLimits { max_bodies: 1000, max_body: 2000, ..ServerLimits::default() });
    let of = |bytes: usize| json!({ "prompt": "a", "user": "x".repeat(bytes) });
    assert_eq!(server.post("/v1/completions", &of(500)).status, 200);
    let reply = server.post("/v1/completions", &of(1500));
    assert_eq!((reply.status, reply.header("retry-after")), (429, Some("1")), "{}", reply.body);
    assert_eq!(server.post("/v1/completions", &of(3000)).status, 413);
    // A body that does not arrive takes the room of its first bytes.
    let mut waiting = TcpStream::connect(server.address).unwrap();
    write!(
        waiting,
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{}",
        "x".repeat(700)
    )
    .unwrap();
    let is_refused = |_| {
        std::thread::sleep(Duration::from_millis(10));
        server.post("/v1/completions", &of(500)).status == 429
    };
    assert!((0..500).any(is_refused));
    drop(waiting);
    let is_accepted = |_| {
        std::thread::sleep(Duration::from_millis(10));
        server.post("/v1/completions", &of(500)).status == 200
    };
    assert!((0..500).any(is_accepted));
}

#[test]
fn probes_are_answered_while_all_workers_are_busy() {
    let stall = Duration::from_secs(3);
    let server = Running::start(Scripted { stall, ..Scripted::new("x") });
    let body = json!({ "prompt": "a" }).to_string();
    // More requests than threads for them.
    let mut clients: Vec<_> = (0..32).map(|_| server.client()).collect();
    clients.iter_mut().for_each(|client| client.send("POST", "/v1/completions", &[], body.as_bytes()));
    std::thread::sleep(Duration::from_millis(500));
    for path in ["/health", "/ping", "/version", "/load", "/metrics"] {
        let asked = Instant::now();
        assert_eq!(server.get(path).status, 200, "{path}");
        assert!(asked.elapsed() < stall / 3, "{path} took {:?}", asked.elapsed());
    }
    // The connections of other requests are served by the same thread.
    let mut kept = server.client();
    for _ in 0..2 {
        let asked = Instant::now();
        assert_eq!(kept.request("GET", "/health", &[], b"").status, 200);
        assert!(asked.elapsed() < stall / 3, "{:?}", asked.elapsed());
    }
}
