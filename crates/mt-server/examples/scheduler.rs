//! Measures what runs around a model: the scheduler, the texts with their stop strings, and HTTP, with a model that costs
//! nothing: `cargo run --release -p mt-server --example scheduler -- [sequences] [answer] [rounds]`.

use std::{
    io,
    net::{SocketAddr, TcpListener},
    sync::Arc,
    time::Instant,
};

use mt_data::{BYTE_LEVEL_SPECIAL_TOKENS, Watch, train_bpe};
use mt_engine::{
    PromptBounds,
    serve::{Pooling, ServeOptions, testing::blind_engine},
};
use mt_server::{ApiKeys, ServedModel, Server, ServerLimits};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    runtime,
    task::JoinSet,
};

const VOCAB_SIZE: usize = 600;
const PROMPT: usize = 128;

fn main() {
    let arguments: Vec<usize> =
        std::env::args().skip(1).map(|text| text.parse().expect("arguments are numbers")).collect();
    let number = |index: usize, default: usize| arguments.get(index).copied().unwrap_or(default);
    let (sequences, answer, rounds) = (number(0, 256), number(1, 400), number(2, 3));
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let address = listener.local_addr().expect("the listener has an address");
    let server = server(sequences, PROMPT + answer + 1);
    std::thread::spawn(move || server.run(listener, std::future::pending::<io::Result<()>>()));
    let clients = runtime::Builder::new_current_thread().enable_all().build().expect("the runtime starts");
    for round in 0..rounds {
        for (what, stream) in [("whole answers", false), ("streams", true)] {
            let started = Instant::now();
            let total = clients.block_on(all(address, sequences, answer, stream));
            let rate = total as f64 / started.elapsed().as_secs_f64();
            println!("{what:13} {round}: {sequences} sequences, {rate:9.0} tokens/s");
        }
    }
}

fn server(sequences: usize, length: usize) -> Server {
    let documents = include_str!("scheduler.rs").lines().map(|line| Ok(line.to_owned()));
    let tokenizer = train_bpe(documents, VOCAB_SIZE, &BYTE_LEVEL_SPECIAL_TOKENS, Watch::silent());
    let prompts = PromptBounds {
        vocab_size: VOCAB_SIZE,
        max_target_length: length,
        max_prefill_length: length,
        source: None,
    };
    let options = ServeOptions {
        max_sequences: sequences,
        prefill_chunk_size: 4096,
        max_requests: usize::MAX,
        ..ServeOptions::new(prompts, VOCAB_SIZE)
    };
    // The tokens behind those of bytes are pieces of words.
    let first_piece = (256 + BYTE_LEVEL_SPECIAL_TOKENS.len()) as u32;
    Server {
        served: ServedModel {
            name: "free".to_owned(),
            root: String::new(),
            adapters: Vec::new(),
            pooling: Pooling::Last,
            embedding_size: 1,
            tokenizer: Arc::new(tokenizer.expect("the text has words")),
            system: None,
            template: None,
            tokenizer_directory: None,
            add_bos: false,
            end_tokens: Vec::new(),
            vocab_size: VOCAB_SIZE,
            max_length: length,
            max_prompt: length - 1,
        },
        generator: Arc::new(blind_engine(options, first_piece..first_piece + 50)),
        limits: ServerLimits::default(),
        keys: ApiKeys::default(),
        log_prompts: false,
        reporter: Arc::new(|_| {}),
    }
}

/// The number of tokens that all clients receive.
async fn all(address: SocketAddr, sequences: usize, answer: usize, stream: bool) -> u64 {
    let mut clients = JoinSet::new();
    for number in 0..sequences {
        let prompt: Vec<usize> = (0..PROMPT).map(|index| 4 + (index * 7 + number * 31) % 200).collect();
        let mut body = json!({
            "prompt": prompt, "max_tokens": answer, "temperature": 0, "stream": stream,
            "stop": ["a text that no answer has", "\u{0}"],
        });
        if stream {
            body["stream_options"] = json!({ "include_usage": true });
        }
        clients.spawn(ask(address, body));
    }
    clients.join_all().await.into_iter().sum()
}

/// The number of tokens of an answer.
async fn ask(address: SocketAddr, body: Value) -> u64 {
    let body = body.to_string();
    let length = body.len();
    let request = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: free\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}"
    );
    let mut connection = TcpStream::connect(address).await.expect("the server listens");
    connection.write_all(request.as_bytes()).await.expect("the server reads");
    let mut reply = String::new();
    connection.read_to_string(&mut reply).await.expect("the server answers");
    let count = reply.rsplit_once("\"completion_tokens\":").map(|(_, rest)| rest);
    let digits = count.unwrap_or_else(|| panic!("no tokens in {reply}"));
    let end = digits.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(digits.len());
    digits[..end].parse().expect("the number of tokens is a number")
}
