//! Damaged bodies for as long as one likes: every answer has the form of its interface, and nothing panics or hangs.
//!
//! `FUZZ_SECONDS` sets the time of all runs together. With `FUZZ_STATE`, a file keeps the number of the next body and the
//! time so far, and the next run goes on there.

use std::{
    fs,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use axum::{
    body::Body,
    http::{Method, Request, StatusCode, header},
};
use http_body_util::BodyExt;
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;
use serde_json::{Value, json};

use super::{
    mutation::{Corpus, Random},
    script::{Scripted, served},
};
use crate::{
    ApiKeys, ServerLimits,
    app::{App, router},
};

/// The time in which every body is answered, on a machine that does other work.
const PATIENCE: Duration = Duration::from_secs(30);

/// The progress of all runs.
struct Progress {
    file: Option<PathBuf>,
    next: u64,
    time: Duration,
    slowest: Duration,
}

impl Progress {
    fn read() -> Self {
        let file = std::env::var_os("FUZZ_STATE").map(PathBuf::from);
        let text = file.as_ref().and_then(|file| fs::read_to_string(file).ok()).unwrap_or_default();
        let state: Value = serde_json::from_str(&text).unwrap_or_default();
        let seconds = |name: &str| Duration::from_secs_f64(state[name].as_f64().unwrap_or(0.0));
        Self {
            file,
            next: state["bodies"].as_u64().unwrap_or(0),
            time: seconds("seconds"),
            slowest: seconds("slowest_seconds"),
        }
    }

    /// Takes note of a body.
    fn add(&mut self, time: Duration) {
        self.next += 1;
        // A process that was stopped for a while has not worked.
        self.time += time.min(PATIENCE);
        self.slowest = self.slowest.max(time);
    }

    fn write(&self) {
        let Some(file) = &self.file else { return };
        let state = json!({
            "bodies": self.next,
            "seconds": self.time.as_secs_f64(),
            "slowest_seconds": self.slowest.as_secs_f64(),
        });
        fs::write(file, format!("{state:#}\n")).unwrap();
    }
}

fn check(route: &str, body: &[u8], status: StatusCode, kind: &str, text: &str) {
    let shown = || format!("{route} {}: {status} {text}", String::from_utf8_lossy(body));
    assert!(matches!(status.as_u16(), 200 | 400 | 404 | 413), "{}", shown());
    if kind.starts_with("text/event-stream") {
        let last = text.trim_end().rsplit("\n\n").next().unwrap_or_default();
        let ends = ["data: [DONE]", "event: message_stop", "event: error", "event: response."];
        assert!(ends.iter().any(|end| last.starts_with(end)), "{}", shown());
        return;
    }
    assert_eq!(kind, "application/json", "{}", shown());
    let found: Value = serde_json::from_str(text).unwrap_or_else(|_| panic!("{}", shown()));
    assert!(status == 200 || found["error"]["message"].is_string(), "{}", shown());
}

#[test]
fn damaged_bodies_are_answered() {
    static PANICS: AtomicUsize = AtomicUsize::new(0);
    // Tasks that panic end their streams silently, so that the panics themselves are counted.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if panic.location().is_some_and(|location| !location.file().contains("src/tests/")) {
            PANICS.fetch_add(1, Ordering::SeqCst);
        }
        hook(panic);
    }));
    let limit = std::env::var("FUZZ_SECONDS").ok().and_then(|seconds| seconds.parse().ok()).unwrap_or(2.0);
    let limit = Duration::from_secs_f64(limit);
    let generator =
        Arc::new(Scripted::new("{\"a\": 5, \"b\": \"x\"}</think> word <tool_call>\n{\"name\": \"look\""));
    let served = served(generator.tokenizer.clone(), true);
    let app = App::new(
        served,
        generator.clone(),
        ServerLimits::default(),
        ApiKeys::default(),
        true,
        Arc::new(|_| {}),
    );
    let app = Arc::new(app);
    let service = TowerToHyperService::new(router(app.clone()));
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(1).build().unwrap();
    let corpus = Corpus::default();
    let mut progress = Progress::read();
    let (mut saved, mut statuses) = (Instant::now(), std::collections::BTreeMap::new());
    while progress.time < limit {
        let (route, body) = corpus.damaged(&mut Random(progress.next));
        let asked = Instant::now();
        let ask = || {
            let request = Request::builder().method(Method::POST).uri(route);
            let request = request.body(Body::from(body.clone())).unwrap();
            let service = &service;
            runtime.block_on(async move {
                let answered = async {
                    let response = service.call(request).await.unwrap();
                    let kind = response.headers()[header::CONTENT_TYPE].to_str().unwrap().to_owned();
                    let status = response.status();
                    let bytes = response.into_body().collect().await.unwrap().to_bytes();
                    (status, kind, String::from_utf8(bytes.to_vec()).unwrap())
                };
                tokio::time::timeout(PATIENCE, answered).await
            })
        };
        // The first time may have run out while the process was stopped.
        let answered = ask().or_else(|_| ask());
        let shown = || format!("body {}: {route} {}", progress.next, String::from_utf8_lossy(&body));
        let (status, kind, text) = answered.unwrap_or_else(|_| panic!("no answer to {}", shown()));
        assert_eq!(PANICS.load(Ordering::SeqCst), 0, "a panic by {}", shown());
        check(route, &body, status, &kind, &text);
        *statuses.entry(status.as_u16()).or_insert(0_u64) += 1;
        progress.add(asked.elapsed());
        generator.submitted.lock().unwrap().clear();
        if saved.elapsed() > Duration::from_secs(10) {
            progress.write();
            saved = Instant::now();
        }
    }
    progress.write();
    // Tasks go on only while the runtime is in use.
    runtime.block_on(async {
        for _ in 0..500 {
            if app.num_active() > 0 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
    });
    assert_eq!(app.num_active(), 0);
    let (bodies, seconds) = (progress.next, progress.time.as_secs());
    println!(
        "{bodies} bodies in {seconds} s, the slowest in {:?}; in this run {statuses:?}",
        progress.slowest
    );
}
