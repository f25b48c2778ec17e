//! Times of requests, and their statistics.

use std::time::Instant;

use serde_json::{Value, json};

use super::Arrival;

/// The times of one request.
#[derive(Clone, Debug)]
pub struct Observed {
    started: Instant,
    /// The arrivals of tokens.
    arrivals: Vec<Instant>,
    ended: Instant,
    prompt_tokens: u64,
    answer_tokens: u64,
}

impl Observed {
    pub fn begin(started: Instant) -> Self {
        Self { started, arrivals: Vec::new(), ended: started, prompt_tokens: 0, answer_tokens: 0 }
    }

    /// Takes note of an event. Events with a choice bring a token; the last event has the numbers of tokens.
    pub fn receive(&mut self, event: &Value, now: Instant) {
        let choice = &event["choices"][0];
        if choice.is_object() && choice["finish_reason"].is_null() {
            self.arrivals.push(now);
        }
        if let Some(usage) = event["usage"].as_object() {
            let number = |name: &str| usage.get(name).and_then(Value::as_u64).unwrap_or_default();
            (self.prompt_tokens, self.answer_tokens) = (number("prompt_tokens"), number("completion_tokens"));
        }
    }

    pub fn end(&mut self, now: Instant) {
        self.ended = now;
    }
}

/// Quantiles of durations in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Quantiles {
    pub mean: f64,
    pub median: f64,
    pub p90: f64,
    pub p99: f64,
}

impl Quantiles {
    /// Those of some durations in seconds.
    pub fn of(mut seconds: Vec<f64>) -> Self {
        if seconds.is_empty() {
            return Self::default();
        }
        seconds.sort_by(f64::total_cmp);
        let at = |share: f64| {
            let rank = (share * seconds.len() as f64).ceil() as usize;
            seconds[rank.clamp(1, seconds.len()) - 1] * 1e3
        };
        let mean = seconds.iter().sum::<f64>() / seconds.len() as f64 * 1e3;
        Self { mean, median: at(0.5), p90: at(0.9), p99: at(0.99) }
    }

    fn json(self) -> Value {
        json!({ "mean": self.mean, "median": self.median, "p90": self.p90, "p99": self.p99 })
    }
}

/// The measurements of a load.
#[derive(Clone, Debug, PartialEq)]
pub struct LoadReport {
    pub arrival: Arrival,
    pub num_completed: usize,
    pub num_failed: usize,
    pub seconds: f64,
    pub prompt_tokens: u64,
    pub answer_tokens: u64,
    /// The time to the first token.
    pub first_token: Quantiles,
    /// The time between tokens.
    pub inter_token: Quantiles,
    /// The time of whole requests.
    pub whole: Quantiles,
    /// The message of the first request that failed.
    pub failure: Option<String>,
}

impl LoadReport {
    pub(super) fn new(arrival: Arrival, seconds: f64, observed: &[Result<Observed, String>]) -> Self {
        let completed: Vec<&Observed> = observed.iter().filter_map(|found| found.as_ref().ok()).collect();
        let first = |found: &&Observed| Some((*found.arrivals.first()? - found.started).as_secs_f64());
        let between = |found: &&Observed| {
            let pairs = found.arrivals.windows(2);
            pairs.map(|pair| (pair[1] - pair[0]).as_secs_f64()).collect::<Vec<_>>()
        };
        Self {
            arrival,
            num_completed: completed.len(),
            num_failed: observed.len() - completed.len(),
            seconds,
            prompt_tokens: completed.iter().map(|found| found.prompt_tokens).sum(),
            answer_tokens: completed.iter().map(|found| found.answer_tokens).sum(),
            first_token: Quantiles::of(completed.iter().filter_map(first).collect()),
            inter_token: Quantiles::of(completed.iter().flat_map(between).collect()),
            whole: Quantiles::of(
                completed.iter().map(|found| (found.ended - found.started).as_secs_f64()).collect(),
            ),
            failure: observed.iter().find_map(|found| found.as_ref().err().cloned()),
        }
    }

    /// Requests a second.
    pub fn requests_per_second(&self) -> f64 {
        self.num_completed as f64 / self.seconds.max(1e-9)
    }

    /// Tokens of answers a second.
    pub fn tokens_per_second(&self) -> f64 {
        self.answer_tokens as f64 / self.seconds.max(1e-9)
    }

    /// One JSON object. Durations are milliseconds.
    pub fn json(&self) -> Value {
        let (concurrency, rate) = match self.arrival {
            Arrival::Concurrency(number) => (json!(number), Value::Null),
            Arrival::Rate(rate) => (Value::Null, json!(rate)),
        };
        json!({
            "concurrency": concurrency,
            "request_rate": rate,
            "completed": self.num_completed,
            "failed": self.num_failed,
            "failure": self.failure,
            "seconds": self.seconds,
            "prompt_tokens": self.prompt_tokens,
            "answer_tokens": self.answer_tokens,
            "requests_per_second": self.requests_per_second(),
            "answer_tokens_per_second": self.tokens_per_second(),
            "ttft_ms": self.first_token.json(),
            "inter_token_ms": self.inter_token.json(),
            "request_ms": self.whole.json(),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn quantiles_are_observed_values() {
        let quantiles = Quantiles::of((1..=100).map(|value| f64::from(value) / 1e3).collect());
        assert!((quantiles.mean - 50.5).abs() < 1e-9, "{quantiles:?}");
        assert_eq!(
            (quantiles.median.round(), quantiles.p90.round(), quantiles.p99.round()),
            (50.0, 90.0, 99.0)
        );
        assert_eq!(Quantiles::of(Vec::new()), Quantiles::default());
    }

    #[test]
    fn tokens_are_counted_from_events() {
        let started = Instant::now();
        let mut observed = Observed::begin(started);
        let after = |milliseconds| started + Duration::from_millis(milliseconds);
        let token = json!({ "choices": [{ "text": "a", "finish_reason": null }] });
        observed.receive(&token, after(10));
        observed.receive(&token, after(30));
        observed.receive(&json!({ "choices": [{ "text": "", "finish_reason": "length" }] }), after(31));
        observed.receive(
            &json!({ "choices": [], "usage": { "prompt_tokens": 5, "completion_tokens": 2 } }),
            after(31),
        );
        observed.end(after(40));
        let report =
            LoadReport::new(Arrival::Concurrency(1), 2.0, &[Ok(observed), Err("refused".to_owned())]);
        assert_eq!((report.num_completed, report.num_failed), (1, 1));
        assert_eq!((report.prompt_tokens, report.answer_tokens), (5, 2));
        let near = |value: f64, expected: f64| (value - expected).abs() < 1e-6;
        assert!(near(report.first_token.median, 10.0) && near(report.inter_token.median, 20.0));
        assert!(near(report.whole.median, 40.0) && near(report.tokens_per_second(), 1.0));
        assert_eq!(report.json()["failure"], "refused");
    }
}
