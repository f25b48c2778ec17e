//! The texts of `maxtext chat`, and the arguments of `maxtext serve` and `maxtext bench`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::Settings;

pub const CHAT: &str = "\
Holds a conversation with a model in the terminal.

The keys are those of `decode`. Each line of standard input is a message; the
chat template of the tokenizer turns the conversation into the model's input,
and `system_prompt` begins it. If the context is full, the oldest messages are
forgotten.

Ctrl-C stops an answer, `/reset` begins a new conversation, and Ctrl-D or
`/exit` ends the program.";

pub const CHAT_EXAMPLES: &str = "\
Examples:
  maxtext chat load_parameters_path=maxtext_output/tuned
  maxtext chat hf_model_path=Qwen3-0.6B system_prompt='Be brief.'
  printf 'Hello\\nAnd now?\\n' | maxtext chat load_parameters_path=maxtext_output/tuned";

pub const SERVE: &str = "\
Serves a trained or published model over HTTP, until Ctrl-C or SIGTERM.

The server speaks OpenAI's interface (/v1/completions, /v1/chat/completions,
/v1/responses, /v1/embeddings, /v1/models), Anthropic's (/v1/messages), and
vLLM's /tokenize, /detokenize, /health and /metrics. A chat page is at its root.

The keys are those of `decode` that describe the model; requests set the
sampling. API keys are read from the variable `MAXTEXT_API_KEYS` or from a file,
one on each line; without them, every client is served.";

pub const SERVE_EXAMPLES: &str = "\
Examples:
  maxtext serve load_parameters_path=maxtext_output/first
  maxtext serve hf_model_path=Qwen3-0.6B --port 9000
  maxtext serve hf_model_path=Qwen3-0.6B --adapter sql=adapters/sql
  maxtext serve hf_model_path=Qwen3-0.6B --host 0.0.0.0 --api-key-file keys.txt

See also:
  maxtext bench serve   latency and throughput of a running server";

pub const BENCH_SERVE: &str = "\
Measures a running server: time to the first token, time between tokens, and
throughput, at several numbers of clients or rates of arrival.

Prompts are random tokens of the server's own tokenizer, and answers have the
given length. The server may be of any kind that has /v1/models, /tokenize and
/v1/completions with streams, such as `maxtext serve` and vLLM. The API key is
read from the variable `MAXTEXT_API_KEYS`, whose first line counts.";

pub const BENCH_SERVE_EXAMPLES: &str = "\
Examples:
  maxtext bench serve
  maxtext bench serve --concurrency 1,8,32 --requests 64
  maxtext bench serve --rate 2,4 --prompt-tokens 512 --json";

pub const BENCH_CHECKPOINT: &str = "\
Saves the first state of a run several times, and reads each checkpoint back
while checking every byte, as MaxText's standalone checkpointer does.

The state is that of `maxtext train` with the same keys. The checkpoints go to
the directory of the run, on a disk or in a bucket, which is removed at the end.";

pub const BENCH_CHECKPOINT_EXAMPLES: &str = "\
Examples:
  maxtext bench checkpoint base_emb_dim=1024 base_num_decoder_layers=4
  maxtext bench checkpoint --repeats 5 base_output_directory=s3://bucket/runs";

pub const BENCH_INFERENCE: &str = "\
Times the engine of `serve` and `decode` on a model, without a server: reading
prompts of several lengths, the first tokens of several answers to one prompt,
and the steps in which several answers receive a token each.

The keys are those of `serve` that describe the model and the cache, and
MaxText's `inference_microbenchmark_*`. Prompts are random tokens, and none is
found in the prefix cache.";

pub const BENCH_INFERENCE_EXAMPLES: &str = "\
Examples:
  maxtext bench inference load_parameters_path=maxtext_output/first
  maxtext bench inference hf_model_path=Qwen3-0.6B --sequences 1,8 \\
      inference_microbenchmark_prefill_lengths=128,512
  maxtext bench inference hf_model_path=Qwen3-0.6B --json \\
      inference_microbenchmark_stages=generate";

/// The arguments of `maxtext serve`.
#[derive(Debug, Args)]
pub struct Serve {
    /// The address to listen on; `0.0.0.0` serves other machines, too
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub host: String,
    /// The port to listen on; 0 for a free one
    #[arg(long, value_name = "PORT", default_value_t = 8000)]
    pub port: u16,
    /// The model's name in requests; by default the name of its directory
    #[arg(long, value_name = "NAME")]
    pub served_model_name: Option<String>,
    /// Adapters of the model, which requests choose by name: a PEFT directory, or a run with adapters; may be repeated
    #[arg(long = "adapter", alias = "lora-modules", value_name = "NAME=DIR")]
    pub adapters: Vec<String>,
    /// How `/v1/embeddings` turns a text into a vector unless a request tells: by its `last` token, or by the `mean` of all; by
    /// default as the model's `1_Pooling/config.json` says, or `last`
    #[arg(long, value_name = "POOLING")]
    pub pooling: Option<String>,
    /// A file with API keys, one on each line
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// The requests that may run or wait; more are refused with the status 429
    #[arg(long, value_name = "REQUESTS", default_value_t = 1024, value_parser = at_least_one)]
    pub max_requests: usize,
    /// The connections that may be open; more are refused with the status 503
    #[arg(long, value_name = "CONNECTIONS", default_value_t = 4096, value_parser = at_least_one)]
    pub max_connections: usize,
    /// The time of an answer in seconds, with its time in the queue
    #[arg(long, value_name = "SECONDS", default_value_t = 3600, value_parser = at_least_one)]
    pub answer_seconds: usize,
    /// The time in seconds in which accepted requests may finish after a signal
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub drain_seconds: u64,
    /// Write the text of prompts to the log
    #[arg(long)]
    pub log_prompts: bool,
    #[command(flatten)]
    pub settings: Settings,
}

#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Measure the latency and throughput of a running server
    #[command(long_about = BENCH_SERVE, after_help = BENCH_SERVE_EXAMPLES)]
    Serve(BenchServe),
    /// Time prefill and generation steps of the engine
    #[command(long_about = BENCH_INFERENCE, after_help = BENCH_INFERENCE_EXAMPLES)]
    Inference(BenchInference),
    /// Time saving and restoring the state of a run, without training
    #[command(long_about = BENCH_CHECKPOINT, after_help = BENCH_CHECKPOINT_EXAMPLES)]
    Checkpoint(BenchCheckpoint),
}

/// The arguments of `maxtext bench checkpoint`.
#[derive(Debug, Args)]
pub struct BenchCheckpoint {
    /// The number of checkpoints
    #[arg(long, value_name = "NUMBER", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..))]
    pub repeats: u64,
    /// Write the results as one JSON list
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub settings: Settings,
}

/// The arguments of `maxtext bench inference`.
#[derive(Debug, Args)]
pub struct BenchInference {
    /// Numbers of answers that receive their tokens together; by default 1, 8, 32 and 64
    #[arg(long, value_name = "SEQUENCES", value_delimiter = ',', value_parser = at_least_one)]
    pub sequences: Vec<usize>,
    /// Write the results as one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub settings: Settings,
}

/// The arguments of `maxtext bench serve`.
#[derive(Debug, Args)]
pub struct BenchServe {
    /// The server
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8000")]
    pub url: String,
    /// The model; by default the first one of the server
    #[arg(long, value_name = "NAME")]
    pub model: Option<String>,
    /// The number of requests of each measurement
    #[arg(long, value_name = "REQUESTS", default_value_t = 32, value_parser = at_least_one)]
    pub requests: usize,
    /// The length of prompts in tokens
    #[arg(long, value_name = "TOKENS", default_value_t = 128, value_parser = at_least_one)]
    pub prompt_tokens: usize,
    /// The length of answers in tokens
    #[arg(long, value_name = "TOKENS", default_value_t = 128, value_parser = at_least_one)]
    pub answer_tokens: usize,
    /// Numbers of clients, each of which waits for its answer before its next request; by default 1, 8 and 32
    #[arg(long, value_name = "CLIENTS", value_delimiter = ',', value_parser = at_least_one)]
    pub concurrency: Vec<usize>,
    /// Rates of arrival, in requests each second
    #[arg(long, value_name = "RATES", value_delimiter = ',', value_parser = positive)]
    pub rate: Vec<f64>,
    /// The seed of prompts and arrivals
    #[arg(long, value_name = "SEED", default_value_t = 0)]
    pub seed: u64,
    /// Write one JSON object per measurement
    #[arg(long)]
    pub json: bool,
}

fn at_least_one(text: &str) -> Result<usize, String> {
    let number = text.parse().map_err(|_| "it is not a whole number".to_owned())?;
    if number == 0 { Err("it has to be at least 1".to_owned()) } else { Ok(number) }
}

fn positive(text: &str) -> Result<f64, String> {
    let number: f64 = text.parse().map_err(|_| "it is not a number".to_owned())?;
    if number > 0.0 && number.is_finite() { Ok(number) } else { Err("it has to be above 0".to_owned()) }
}
