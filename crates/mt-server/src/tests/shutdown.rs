//! The end of a server.

use std::time::Duration;

use serde_json::{Value, json};

use super::script::{Running, Scripted, Settings};
use crate::ServerLimits;

fn begun(answer: &str, drain: Duration) -> (Running, super::client::Client) {
    let generator = Scripted { pause: Duration::from_millis(10), ..Scripted::new(answer) };
    let limits = ServerLimits { drain_time: drain, ..ServerLimits::default() };
    let mut server = Running::with(generator, Settings { limits, ..Settings::default() });
    let mut client = server.client();
    let body = json!({ "prompt": "a", "max_tokens": 900, "stream": true }).to_string();
    client.send("POST", "/v1/completions", &[], body.as_bytes());
    client.head();
    client.chunk();
    server.stop();
    (server, client)
}

fn rest(client: &mut super::client::Client) -> String {
    let mut text = String::new();
    loop {
        let chunk = client.chunk();
        if chunk.is_empty() {
            return text;
        }
        text += &String::from_utf8(chunk).unwrap();
    }
}

#[test]
fn accepted_requests_finish() {
    let (mut server, mut client) = begun(&"word ".repeat(10), Duration::from_secs(20));
    // The signal takes a moment to arrive.
    let refused = (0..100).any(|_| {
        std::thread::sleep(Duration::from_millis(2));
        server.get("/health").status == 503
    });
    assert!(refused);
    let reply = server.post("/v1/completions", &json!({ "prompt": "a" }));
    assert_eq!((reply.status, reply.header("retry-after")), (503, Some("1")), "{}", reply.body);
    let text = rest(&mut client);
    assert!(text.ends_with("data: [DONE]\n\n") && text.contains("\"stop\""), "{text}");
    server.join();
}

#[test]
fn requests_beyond_the_limit_fail() {
    let (mut server, mut client) = begun(&"word ".repeat(180), Duration::from_millis(100));
    assert_fails(&mut client);
    server.join();
}

#[test]
fn a_second_signal_ends_requests() {
    let (mut server, mut client) = begun(&"word ".repeat(180), Duration::from_secs(60));
    server.hurry();
    assert_fails(&mut client);
    server.join();
}

/// Checks that an answer ends with the error object.
fn assert_fails(client: &mut super::client::Client) {
    let text = rest(client);
    let error = text.split("\n\n").filter_map(|block| block.strip_prefix("data: {\"error\"")).count();
    assert_eq!(error, 1, "{text}");
    let last: Value = serde_json::from_str(
        text.lines().rfind(|line| line.starts_with("data: {")).unwrap().trim_start_matches("data: "),
    )
    .unwrap();
    assert_eq!(last["error"]["code"], "shutting_down");
}
