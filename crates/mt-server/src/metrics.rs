//! Counters and histograms in Prometheus' text format, with vLLM's names.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use mt_engine::serve::{EngineMetrics, STEP_TOKENS};

/// The bounds of histograms of seconds until something happens, of seconds of whole requests, and of tokens.
const FIRST: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0,
];
const BETWEEN: &[f64] =
    &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0];
const WHOLE: &[f64] = &[
    0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
    240.0, 480.0, 960.0,
];
const TOKENS: &[f64] = &[
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0, 20000.0, 50000.0,
    100_000.0,
];

/// The times of one request.
#[derive(Clone, Copy, Debug)]
pub struct Measured {
    pub started: Instant,
    /// The time in the queue.
    pub waited: Duration,
    pub first: Option<Instant>,
    pub last: Option<Instant>,
    /// The number of tokens of all answers.
    pub most: usize,
}

/// The counts since the server started.
#[derive(Default)]
pub struct Metrics {
    counts: Mutex<Counts>,
}

#[derive(Default)]
struct Counts {
    prompt_tokens: u64,
    cached_tokens: u64,
    generated_tokens: u64,
    finished: BTreeMap<&'static str, u64>,
    histograms: BTreeMap<&'static str, Histogram<'static>>,
}

impl Metrics {
    fn with(&self, change: impl FnOnce(&mut Counts)) {
        change(&mut self.counts.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// A prompt has been read.
    pub fn prompt(&self, tokens: usize, cached: usize) {
        self.with(|counts| {
            counts.prompt_tokens += tokens as u64;
            counts.cached_tokens += cached as u64;
            counts.observe("request_prompt_tokens", TOKENS, tokens as f64);
        });
    }

    /// The first tokens of a prompt have been read after this time.
    pub fn waited(&self, time: Duration) {
        self.with(|counts| counts.observe("request_queue_time_seconds", WHOLE, time.as_secs_f64()));
    }

    /// A token has arrived.
    pub fn token(&self, measured: &mut Measured) {
        let now = Instant::now();
        self.with(|counts| {
            counts.generated_tokens += 1;
            match measured.last {
                None => {
                    let seconds = (now - measured.started).as_secs_f64();
                    counts.observe("time_to_first_token_seconds", FIRST, seconds);
                }
                Some(last) => {
                    counts.observe("inter_token_latency_seconds", BETWEEN, (now - last).as_secs_f64());
                }
            }
        });
        measured.first.get_or_insert(now);
        measured.last = Some(now);
    }

    /// An answer has ended.
    pub fn finished(&self, reason: &'static str) {
        self.with(|counts| *counts.finished.entry(reason).or_default() += 1);
    }

    /// A request has ended.
    pub fn ended(&self, measured: &Measured) {
        let now = Instant::now();
        self.with(|counts| {
            counts.observe("e2e_request_latency_seconds", WHOLE, (now - measured.started).as_secs_f64());
            let (Some(first), Some(last)) = (measured.first, measured.last) else { return };
            let decoding = (last - first).as_secs_f64();
            counts.observe("request_generation_tokens", TOKENS, measured.most as f64);
            let begun = measured.started + measured.waited;
            let of_engine = |until: Instant| until.saturating_duration_since(begun).as_secs_f64();
            counts.observe("request_prefill_time_seconds", WHOLE, of_engine(first));
            counts.observe("request_decode_time_seconds", WHOLE, decoding);
            counts.observe("request_inference_time_seconds", WHOLE, of_engine(last));
            if measured.most > 1 {
                let each = decoding / (measured.most - 1) as f64;
                counts.observe("request_time_per_output_token_seconds", BETWEEN, each);
            }
        });
    }

    /// The text that Prometheus reads.
    pub fn text(&self, model: &str, engine: &EngineMetrics) -> String {
        let labels = format!("model_name=\"{}\",engine=\"0\"", escaped(model));
        let mut page = Page { text: String::new(), labels };
        let used = engine.used_pages as f64 / engine.total_pages.max(1) as f64;
        page.single(
            "num_requests_running",
            "gauge",
            "Requests that are being answered",
            engine.running as f64,
        );
        page.single("num_requests_waiting", "gauge", "Requests in the queue", engine.waiting as f64);
        page.single("kv_cache_usage_perc", "gauge", "The fraction of the cache's pages in use", used);
        page.head("cache_config_info", "gauge", "The configuration of the cache");
        let pages = format!(",num_gpu_blocks=\"{}\"", engine.total_pages);
        page.line("cache_config_info", &pages, 1.0);
        page.adapters(engine);
        page.steps(engine);
        self.with(|counts| {
            for (name, help, value) in [
                ("prompt_tokens_total", "Tokens of prompts", counts.prompt_tokens),
                (
                    "prompt_tokens_cached_total",
                    "Tokens of prompts from the prefix cache",
                    counts.cached_tokens,
                ),
                ("generation_tokens_total", "Tokens of answers", counts.generated_tokens),
                ("num_preemptions_total", "Requests that were put back", engine.preemptions),
                ("prefix_cache_queries_total", "Tokens looked up in the prefix cache", engine.prompt_tokens),
                ("prefix_cache_hits_total", "Tokens found in the prefix cache", engine.cached_prompt_tokens),
            ] {
                page.single(name, "counter", help, value as f64);
            }
            page.speculation(engine);
            page.head("request_success_total", "counter", "Answers by the reason of their end");
            for reason in ["stop", "length", "abort"] {
                let count = counts.finished.get(reason).copied().unwrap_or_default();
                page.line("request_success_total", &format!(",finished_reason=\"{reason}\""), count as f64);
            }
            for (name, bounds, help) in HISTOGRAMS {
                let empty = Histogram::new(bounds);
                page.histogram(name, help, counts.histograms.get(name).unwrap_or(&empty));
            }
        });
        page.text
    }
}

/// A label's value.
fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

const HISTOGRAMS: &[(&str, &[f64], &str)] = &[
    ("time_to_first_token_seconds", FIRST, "Time until the first token"),
    ("inter_token_latency_seconds", BETWEEN, "Time between tokens"),
    ("request_time_per_output_token_seconds", BETWEEN, "Mean time between the tokens of a request"),
    ("e2e_request_latency_seconds", WHOLE, "Time from arrival to end"),
    ("request_queue_time_seconds", WHOLE, "Time in the queue"),
    ("request_prefill_time_seconds", WHOLE, "Time from the queue to the first token"),
    ("request_decode_time_seconds", WHOLE, "Time from the first token to the last"),
    ("request_inference_time_seconds", WHOLE, "Time from the queue to the last token"),
    ("request_prompt_tokens", TOKENS, "Tokens of a prompt"),
    ("request_generation_tokens", TOKENS, "Tokens of a request's answers"),
];

impl Counts {
    fn observe(&mut self, name: &'static str, bounds: &'static [f64], value: f64) {
        self.histograms.entry(name).or_insert_with(|| Histogram::new(bounds)).observe(value);
    }
}

struct Histogram<'a> {
    bounds: &'a [f64],
    /// The observations in each range; the last one has no upper bound.
    counts: Vec<u64>,
    sum: f64,
}

impl<'a> Histogram<'a> {
    fn new(bounds: &'a [f64]) -> Self {
        Self { bounds, counts: vec![0; bounds.len() + 1], sum: 0.0 }
    }

    fn observe(&mut self, value: f64) {
        let range = self.bounds.partition_point(|bound| *bound < value);
        self.counts[range] += 1;
        self.sum += value;
    }
}

/// A page of metrics.
struct Page {
    text: String,
    labels: String,
}

impl Page {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        // Writing to a text does not fail.
        let _ = write!(self.text, "# HELP vllm:{name} {help}.\n# TYPE vllm:{name} {kind}\n");
    }

    fn line(&mut self, name: &str, labels: &str, value: f64) {
        let _ = writeln!(self.text, "vllm:{name}{{{}{labels}}} {value}", self.labels);
    }

    fn single(&mut self, name: &str, kind: &str, help: &str, value: f64) {
        self.head(name, kind, help);
        self.line(name, "", value);
    }

    /// The counts of speculative decoding, if the engine speculates. The mean number of tokens of a verification is 1 more
    /// than that of accepted tokens.
    fn speculation(&mut self, engine: &EngineMetrics) {
        if engine.accepted_by_place.is_empty() {
            return;
        }
        for (name, help, value) in [
            ("num_drafts_total", "Verifications of drafted tokens", engine.drafts),
            ("num_draft_tokens_total", "Drafted tokens", engine.drafted_tokens),
            ("num_accepted_tokens_total", "Drafted tokens that were accepted", engine.accepted_tokens),
        ] {
            self.single(&format!("spec_decode_{name}"), "counter", help, value as f64);
        }
        let name = "spec_decode_num_accepted_tokens_per_pos_total";
        self.head(name, "counter", "Accepted tokens by their position among the drafted ones");
        for (position, count) in engine.accepted_by_place.iter().enumerate() {
            self.line(name, &format!(",position=\"{position}\""), *count as f64);
        }
    }

    /// The adapters in use, if the server has adapters: a constant value whose labels matter, and whose latest time counts.
    fn adapters(&mut self, engine: &EngineMetrics) {
        if engine.max_adapters == 0 {
            return;
        }
        let name = "lora_requests_info";
        self.head(name, "gauge", "The adapters of requests, at the time that is the value");
        let list =
            |names: &BTreeSet<String>| names.iter().map(|name| escaped(name)).collect::<Vec<_>>().join(",");
        let labels = format!(
            ",max_lora=\"{}\",running_lora_adapters=\"{}\",waiting_lora_adapters=\"{}\"",
            engine.max_adapters,
            list(&engine.running_adapters),
            list(&engine.waiting_adapters)
        );
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
        self.line(name, &labels, now.as_secs_f64());
    }

    /// The tokens of steps.
    fn steps(&mut self, engine: &EngineMetrics) {
        let bounds: Vec<f64> = STEP_TOKENS.iter().map(|bound| *bound as f64).collect();
        let histogram =
            Histogram { bounds: &bounds, counts: engine.steps.to_vec(), sum: engine.step_tokens as f64 };
        self.histogram("iteration_tokens_total", "Tokens that a step reads", &histogram);
    }

    fn histogram(&mut self, name: &str, help: &str, histogram: &Histogram<'_>) {
        self.head(name, "histogram", help);
        let mut total = 0;
        let bounds = histogram.bounds.iter().map(ToString::to_string).chain(["+Inf".to_owned()]);
        for (bound, count) in bounds.zip(&histogram.counts) {
            total += count;
            self.line(&format!("{name}_bucket"), &format!(",le=\"{bound}\""), total as f64);
        }
        self.line(&format!("{name}_sum"), "", histogram.sum);
        self.line(&format!("{name}_count"), "", total as f64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speculation_and_adapters_are_counted() {
        let silent = Metrics::default().text("a", &EngineMetrics::default());
        assert!(!silent.contains("spec_decode"), "{silent}");
        let engine = EngineMetrics {
            drafts: 5,
            drafted_tokens: 10,
            accepted_tokens: 4,
            accepted_by_place: vec![3, 1],
            max_adapters: 2,
            running_adapters: ["x".to_owned(), "y\"".to_owned()].into(),
            ..EngineMetrics::default()
        };
        let text = Metrics::default().text("a", &engine);
        let adapters = "vllm:lora_requests_info{model_name=\"a\",engine=\"0\",max_lora=\"2\",running_lora_adapters=\"x,y\\\"\",waiting_lora_adapters=\"\"} ";
        assert!(text.lines().any(|line| line.starts_with(adapters)), "{adapters} is missing in\n{text}");
        for line in [
            "vllm:spec_decode_num_drafts_total{model_name=\"a\",engine=\"0\"} 5",
            "vllm:spec_decode_num_draft_tokens_total{model_name=\"a\",engine=\"0\"} 10",
            "vllm:spec_decode_num_accepted_tokens_total{model_name=\"a\",engine=\"0\"} 4",
            "vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name=\"a\",engine=\"0\",position=\"1\"} 1",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is missing in\n{text}");
        }
    }

    #[test]
    fn histograms_are_cumulative() {
        let metrics = Metrics::default();
        for tokens in [1, 2, 3, 200_000] {
            metrics.prompt(tokens, 1);
        }
        metrics.finished("stop");
        let text = metrics
            .text("a\"b", &EngineMetrics { used_pages: 1, total_pages: 4, ..EngineMetrics::default() });
        for line in [
            "vllm:request_prompt_tokens_bucket{model_name=\"a\\\"b\",engine=\"0\",le=\"1\"} 1",
            "vllm:request_prompt_tokens_bucket{model_name=\"a\\\"b\",engine=\"0\",le=\"5\"} 3",
            "vllm:request_prompt_tokens_bucket{model_name=\"a\\\"b\",engine=\"0\",le=\"+Inf\"} 4",
            "vllm:request_prompt_tokens_sum{model_name=\"a\\\"b\",engine=\"0\"} 200006",
            "vllm:prompt_tokens_cached_total{model_name=\"a\\\"b\",engine=\"0\"} 4",
            "vllm:kv_cache_usage_perc{model_name=\"a\\\"b\",engine=\"0\"} 0.25",
            "vllm:request_success_total{model_name=\"a\\\"b\",engine=\"0\",finished_reason=\"stop\"} 1",
            "# TYPE vllm:time_to_first_token_seconds histogram",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is missing in\n{text}");
        }
    }
}
