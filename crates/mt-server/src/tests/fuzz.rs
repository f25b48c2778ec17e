//! Arbitrary bodies: every answer is JSON with a status of the interface, and nothing panics.

use proptest::prelude::*;
use serde_json::{Map, Value, json};

use super::script::{Running, Scripted};

const PATHS: &[&str] = &[
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/tokenize",
    "/detokenize",
];

/// Fields of all routes.
const FIELDS: &[&str] = &[
    "model",
    "prompt",
    "messages",
    "input",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "best_of",
    "use_beam_search",
    "beam_width",
    "length_penalty",
    "early_stopping",
    "stop",
    "stop_sequences",
    "stop_token_ids",
    "encoding_format",
    "dimensions",
    "pooling",
    "normalize",
    "seed",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "echo",
    "logit_bias",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stream",
    "stream_options",
    "response_format",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "bad_words",
    "allowed_token_ids",
    "chat_template_kwargs",
    "continue_final_message",
    "add_generation_prompt",
    "reasoning_effort",
    "system",
    "thinking",
    "instructions",
    "tokens",
    "text",
    "add_special_tokens",
    "suffix",
    "documents",
    "skip_special_tokens",
    "return_token_ids",
];

fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        (-3_i64..300).prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        "\\PC{0,8}".prop_map(Value::from),
        prop::sample::select(vec![
            "user",
            "assistant",
            "tool",
            "text",
            "function",
            "auto",
            "json_schema",
            "tiny",
            "a"
        ])
        .prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 12, 4, |inner| {
        let key = prop::sample::select(vec![
            "role",
            "content",
            "type",
            "text",
            "name",
            "function",
            "arguments",
            "tool_calls",
            "parameters",
            "schema",
            "json_schema",
            "regex",
            "json",
            "input_schema",
            "include_usage",
            "5",
            "format",
            "id",
        ]);
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((key, inner), 0..4)
                .prop_map(|pairs| pairs
                    .into_iter()
                    .map(|(key, value)| (key.to_owned(), value))
                    .collect::<Map<_, _>>())
                .prop_map(Value::from),
        ]
    })
}

/// A valid request with some fields replaced.
fn body() -> impl Strategy<Value = Value> {
    let fields = prop::collection::vec((prop::sample::select(FIELDS), value()), 0..4);
    (any::<bool>(), fields).prop_map(|(is_valid, fields)| {
        let mut body = if is_valid {
            json!({ "max_tokens": 5, "prompt": "a", "messages": [{ "role": "user", "content": "a" }], "input": "a", "tokens": [5] })
        } else {
            json!({})
        };
        let object = body.as_object_mut().expect("it is an object");
        object.extend(fields.into_iter().map(|(name, value)| (name.to_owned(), value)));
        body
    })
}

fn check(server: &Running, path: &str, body: &[u8]) {
    let reply = server.client().request("POST", path, &[], body);
    let allowed = [200, 400, 404, 413];
    let text = String::from_utf8_lossy(body);
    assert!(allowed.contains(&reply.status), "{path} {text}: {} {}", reply.status, reply.body);
    if reply.header("content-type") == Some("application/json") {
        let found = reply.json();
        assert!(
            reply.status == 200 || found["error"]["message"].is_string(),
            "{path} {text}: {}",
            reply.body
        );
    }
}

/// The number of bodies; `FUZZ_CASES` sets more.
fn cases() -> u32 {
    std::env::var("FUZZ_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(400)
}

#[test]
fn arbitrary_bodies_are_answered() {
    let server = Running::start(Scripted::new("{\"a\": \"é\"}</think> word"));
    let config = ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() };
    proptest!(config, |(path in prop::sample::select(PATHS), body in body())| {
        check(&server, path, body.to_string().as_bytes());
    });
    let config =
        ProptestConfig { cases: cases() / 8, failure_persistence: None, ..ProptestConfig::default() };
    proptest!(config, |(path in prop::sample::select(PATHS), body in prop::collection::vec(any::<u8>(), 0..64))| {
        check(&server, path, &body);
    });
    assert_eq!(server.get("/health").status, 200);
}
