//! `maxtext serve` with a real model, and `maxtext bench serve` against it.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    process::{Child, Command},
};

use serde_json::{Value, json};

use crate::support::{Sandbox, outcome};

/// A running server, which ends with this value.
pub struct Server {
    process: Child,
    address: String,
}

impl Server {
    fn start(sandbox: &Sandbox, keys: &[&str]) -> Self {
        Self::start_of(sandbox, "run", keys)
    }

    pub fn start_of(sandbox: &Sandbox, run: &str, keys: &[&str]) -> Self {
        let run = format!("load_parameters_path=runs/{run}");
        let arguments = [&["serve", &run, "--port", "0"], keys].concat();
        let mut process = sandbox.program(&arguments).spawn().unwrap();
        let mut lines = BufReader::new(process.stderr.take().unwrap()).lines();
        let mut log = String::new();
        let ready = lines.find_map(|line| {
            let line = line.unwrap();
            log += &format!("{line}\n");
            let (_, rest) = line.split_once("is ready at http://")?;
            rest.split(' ').next().map(str::to_owned)
        });
        let address = ready.unwrap_or_else(|| panic!("the server does not start:\n{log}"));
        // The server must not wait for a reader of its log.
        std::thread::spawn(move || lines.for_each(drop));
        Self { process, address }
    }

    /// The status and the JSON of a response.
    pub fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        self.request("POST", path, &body.to_string())
    }

    pub fn request(&self, method: &str, path: &str, body: &str) -> (u16, Value) {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        )
        .unwrap();
        let mut reply = String::new();
        stream.read_to_string(&mut reply).unwrap();
        let status = reply.split(' ').nth(1).unwrap().parse().unwrap();
        let (_, body) = reply.split_once("\r\n\r\n").unwrap();
        (status, serde_json::from_str(body).unwrap_or_else(|_| panic!("{reply}")))
    }

    /// Ends the server as an operator does.
    pub fn end(mut self) {
        let id = self.process.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
        assert!(self.process.wait().unwrap().success());
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It has ended if the test has passed.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn a_run_is_served() {
    let sandbox = Sandbox::new();
    sandbox.train("run", &["steps=2", "max_target_length=64"]).succeeded();
    let decode =
        ["decode", "--json", "load_parameters_path=runs/run", "prompt=the river", "max_target_length=20"];
    let decoded =
        outcome(&mut sandbox.program(&[&decode[..], &["decode_sampling_strategy=greedy"]].concat()))
            .succeeded();
    let decoded: Value = serde_json::from_str(&decoded.output).unwrap();

    let server = Server::start(&sandbox, &[]);
    let asked = |extra: Value| {
        let mut body = json!({ "prompt": "the river", "max_tokens": 10, "temperature": 0 });
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        server.post("/v1/completions", &body)
    };
    let (status, plain) = asked(json!({}));
    assert_eq!((status, &plain["choices"][0]["text"]), (200, &decoded["text"]), "{plain}");
    assert_eq!(plain["model"], "run");
    let (_, scored) = asked(json!({ "logprobs": 2, "echo": true }));
    let text = format!("the river{}", decoded["text"].as_str().unwrap());
    assert_eq!(scored["choices"][0]["text"], text);
    // The prompt begins with BOS.
    assert_eq!(scored["choices"][0]["logprobs"]["tokens"].as_array().unwrap().len(), 1 + 9 + 10);
    let (_, formed) = asked(json!({ "structured_outputs": { "regex": "[0-9]{4}" } }));
    let digits = formed["choices"][0]["text"].as_str().unwrap();
    assert!(digits.len() == 4 && digits.bytes().all(|byte| byte.is_ascii_digit()), "{formed}");
    let (status, long) = server.post("/v1/completions", &json!({ "prompt": "x".repeat(80) }));
    assert_eq!((status, &long["error"]["code"]), (400, &json!("context_length_exceeded")), "{long}");
    // A search of width 1 takes the most probable token each time.
    let (status, narrow) = asked(json!({ "use_beam_search": true }));
    assert_eq!((status, &narrow["choices"][0]["text"]), (200, &decoded["text"]), "{narrow}");
    let (_, wide) = asked(
        json!({ "use_beam_search": true, "beam_width": 4, "n": 2, "length_penalty": 0.5, "logprobs": 1 }),
    );
    let sums = [0, 1].map(|answer| {
        let scores = wide["choices"][answer]["logprobs"]["token_logprobs"].as_array().unwrap();
        scores.iter().map(|score| score.as_f64().unwrap()).sum::<f64>()
    });
    assert!(sums[0] >= sums[1] && wide["choices"][0]["text"] != wide["choices"][1]["text"], "{wide}");

    let url = format!("http://{}", server.address);
    let bench = [
        "bench",
        "serve",
        "--json",
        "--url",
        &url,
        "--requests",
        "3",
        "--concurrency",
        "1,2",
        "--rate",
        "50",
    ];
    let sizes = ["--prompt-tokens", "8", "--answer-tokens", "4"];
    let measured = Command::new(env!("CARGO_BIN_EXE_maxtext")).args(bench).args(sizes).output().unwrap();
    assert!(measured.status.success(), "{}", String::from_utf8_lossy(&measured.stderr));
    let lines: Vec<Value> = String::from_utf8(measured.stdout)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(lines.len(), 3);
    for line in &lines {
        assert_eq!(
            (&line["completed"], &line["answer_tokens"], &line["prompt_tokens"]),
            (&json!(3), &json!(12), &json!(24)),
            "{line}"
        );
        assert!(line["ttft_ms"]["median"].as_f64().unwrap() > 0.0);
    }
    server.end();
}

#[test]
fn several_devices_serve_what_one_decodes() {
    let sandbox = Sandbox::new();
    sandbox.train("run", &["steps=2", "max_target_length=64"]).succeeded();
    let decode =
        ["decode", "--json", "load_parameters_path=runs/run", "prompt=the river", "max_target_length=20"];
    let mesh = ["num_cpu_devices=8", "ici_fsdp_parallelism=4", "ici_tensor_parallelism=2"];
    let decoded = |keys: &[&str]| -> Value {
        let decoded = outcome(&mut sandbox.program(&[&decode[..], keys].concat())).succeeded();
        serde_json::from_str(&decoded.output).unwrap()
    };
    let (one, several) = (decoded(&["return_log_prob=true"]), decoded(&mesh));
    assert_eq!(one["tokens"], several["tokens"]);
    let scores = one["log_probabilities"].as_array().unwrap();
    assert_eq!(scores.len(), one["tokens"].as_array().unwrap().len());
    assert!(
        scores.iter().all(|score| score.as_f64().unwrap() <= 0.0) && several["log_probabilities"].is_null()
    );
    let server = Server::start(&sandbox, &mesh);
    let body = json!({ "prompt": "the river", "max_tokens": 10, "temperature": 0, "n": 3 });
    let (status, answer) = server.post("/v1/completions", &body);
    for choice in 0..3 {
        assert_eq!((status, &answer["choices"][choice]["text"]), (200, &one["text"]), "{answer}");
    }
    server.end();
    let as_text = ["decode", "load_parameters_path=runs/run", "return_log_prob=true"];
    outcome(&mut sandbox.program(&as_text)).failed(2, &["`return_log_prob` adds", "hint: add `--json`"]);
    let chat = ["chat", "load_parameters_path=runs/run", "return_log_prob=true"];
    outcome(&mut sandbox.program(&chat)).failed(2, &["`return_log_prob` wants"]);
}

#[test]
fn keys_set_pieces_and_pages() {
    let sandbox = Sandbox::new();
    sandbox.train("run", &["steps=2", "max_target_length=64"]).succeeded();
    let decode =
        ["decode", "--json", "load_parameters_path=runs/run", "prompt=the river", "max_target_length=20"];
    let decoded = outcome(&mut sandbox.program(&decode)).succeeded();
    let decoded: Value = serde_json::from_str(&decoded.output).unwrap();
    // Five pages of 8 tokens hold sequences of 40.
    let keys = ["prefill_chunk_size=4", "pagedattn_tokens_per_page=8", "pagedattn_num_pages=5"];
    let server = Server::start(&sandbox, &keys);
    for _ in 0..2 {
        let body = json!({ "prompt": "the river", "max_tokens": 10, "temperature": 0 });
        let (status, answer) = server.post("/v1/completions", &body);
        assert_eq!((status, &answer["choices"][0]["text"]), (200, &decoded["text"]), "{answer}");
    }
    let (status, long) = server.post("/v1/completions", &json!({ "prompt": "x".repeat(50) }));
    assert_eq!((status, &long["error"]["code"]), (400, &json!("context_length_exceeded")), "{long}");
    server.end();
}

#[test]
fn mistakes_are_refused() {
    let sandbox = Sandbox::new();
    sandbox.train("run", &["steps=1"]).succeeded();
    let check = |arguments: &[&str], fragments: &[&str]| {
        let all = [&["serve", "load_parameters_path=runs/run"], arguments].concat();
        outcome(&mut sandbox.program(&all)).failed(2, fragments);
    };
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    check(&["--port", &port], &["cannot listen on `127.0.0.1:", "`--port`"]);
    check(&["--port", "99999"], &["`--port` is `99999`"]);
    check(&["--api-key-file", "missing"], &["cannot read the API keys in `missing`"]);
    check(&["use_chat_template=true", "--port", "0"], &["the tokenizer", "has none"]);
    let sizes = ["prefix_caching_hbm_byte=1e6", "pagedattn_num_pages=4", "--port", "0"];
    check(&sizes, &["`prefix_caching_hbm_byte` is", "`pagedattn_num_pages` is `4`"]);
    check(&["prefix_caching_dram_byte=1e6", "--port", "0"], &["prefix caches in host memory are not built"]);
    outcome(&mut sandbox.program(&["serve"])).failed(2, &["no key names a model"]);
    let unreachable = ["bench", "serve", "--url", "https://example.org"];
    let refused = Command::new(env!("CARGO_BIN_EXE_maxtext")).args(unreachable).output().unwrap();
    assert_eq!(refused.status.code(), Some(2), "{}", String::from_utf8_lossy(&refused.stderr));
}
