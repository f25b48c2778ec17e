//! The routes and their errors.

use std::{sync::atomic::Ordering, time::Duration};

use mt_engine::serve::TokenChoice;
use serde_json::{Value, json};

use super::script::{Running, Scripted, Settings};
use crate::{ServerEvent, ServerLimits};

fn chat(extra: Value) -> Value {
    let mut body = json!({ "model": "tiny", "messages": [{ "role": "user", "content": "hi" }] });
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

fn completion(extra: Value) -> Value {
    let mut body = json!({ "model": "tiny", "prompt": "ab", "max_tokens": 50 });
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

#[test]
fn completions_have_openai_form() {
    let server = Running::start(Scripted::new("Grüße"));
    let reply = server.post("/v1/completions", &completion(json!({})));
    assert_eq!(
        (reply.status, reply.header("content-type")),
        (200, Some("application/json")),
        "{}",
        reply.body
    );
    let body = reply.json();
    assert_eq!(body["object"], "text_completion");
    assert_eq!(body["choices"][0]["text"], "Grüße");
    assert_eq!(body["choices"][0]["finish_reason"], "stop");
    assert_eq!(body["choices"][0]["logprobs"], Value::Null);
    assert_eq!(body["usage"]["prompt_tokens"], 2);
    assert_eq!(body["usage"]["completion_tokens"], 7);
    assert_eq!(body["usage"]["total_tokens"], 9);

    let body = server.post("/v1/completions", &completion(json!({ "max_tokens": 3 }))).json();
    // The third token is the first half of a character.
    assert_eq!(body["choices"][0]["text"], "Gr\u{fffd}");
    assert_eq!(body["choices"][0]["finish_reason"], "length");

    let body =
        server.post("/v1/completions", &completion(json!({ "n": 2, "prompt": [[100, 101], "x"] }))).json();
    assert_eq!(body["choices"].as_array().unwrap().len(), 4);
    assert_eq!(body["choices"][3]["index"], 3);
    let submitted = server.generator.submitted.lock().unwrap().clone();
    assert_eq!(submitted.last().unwrap().prompt, "x");
    assert_eq!(submitted.last().unwrap().stop_tokens, [2]);
}

#[test]
fn parameters_reach_the_engine() {
    let server = Running::start(Scripted::new("x"));
    let extra = json!({
        "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "seed": -1, "logit_bias": { "5": 2 },
        "presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.5, "allowed_token_ids": [4, 5],
        "bad_words": ["z"], "stop_token_ids": [9], "ignore_eos": true, "max_tokens": 7, "min_tokens": 2,
        "user": "someone", "request_id": "x", "priority": 0,
    });
    let reply = server.post("/v1/completions", &completion(extra));
    assert_eq!(reply.status, 200, "{}", reply.body);
    let found = server.generator.submitted.lock().unwrap()[0].clone();
    let expected = TokenChoice {
        temperature: 0.5,
        top_k: Some(3),
        top_p: 0.9,
        min_p: 0.1,
        repetition_penalty: 1.5,
        presence_penalty: 1.0,
        frequency_penalty: -1.0,
        logit_bias: vec![(5, 2.0)],
        allowed_tokens: Some(vec![4, 5]),
        banned_tokens: vec![u32::from(b'z') + 3],
        seed: Some(u64::MAX),
        beams: None,
    };
    assert_eq!(found.choice, expected);
    assert_eq!((found.max_new_tokens, found.stop_tokens), (Some(7), vec![9]));
}

#[test]
fn echo_scores_prompts() {
    let server = Running::start(Scripted::new("c"));
    let extra = json!({ "echo": true, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1234 });
    let body = server.post("/v1/completions", &completion(extra)).json();
    let choice = &body["choices"][0];
    assert_eq!(choice["text"], "abc");
    assert_eq!(choice["logprobs"]["tokens"], json!(["a", "b", "c"]));
    assert_eq!(choice["logprobs"]["token_logprobs"], json!([null, -0.5, -0.5]));
    assert_eq!(choice["logprobs"]["top_logprobs"], json!([null, { "b": -0.5 }, { "c": -0.5 }]));
    assert_eq!(choice["logprobs"]["text_offset"], json!([0, 1, 2]));
}

#[test]
fn streams_have_usage_and_an_end() {
    let server = Running::start(Scripted::new("ä!"));
    let extra =
        json!({ "stream": true, "stream_options": { "include_usage": true }, "logprobs": 0, "echo": true });
    let reply = server.post("/v1/completions", &completion(extra));
    assert_eq!(reply.header("content-type"), Some("text/event-stream; charset=utf-8"));
    assert!(reply.body.ends_with("data: [DONE]\n\n"));
    let events = reply.events();
    let text: String = events.iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect();
    assert_eq!(text, "abä!");
    let last = events.last().unwrap();
    assert_eq!((&last["choices"], &last["usage"]["completion_tokens"]), (&json!([]), &json!(3)));
    let offsets: Vec<&Value> = events
        .iter()
        .filter_map(|event| event["choices"][0]["logprobs"]["text_offset"].as_array())
        .flatten()
        .collect();
    assert_eq!(offsets.len(), 5, "{}", reply.body);

    let reply = server.post("/v1/chat/completions", &chat(json!({ "stream": true })));
    let events = reply.events();
    assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
    let text: String =
        events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(text, "ä!");
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "stop");
}

#[test]
fn stop_strings_end_answers() {
    let server = Running::start(Scripted::new("one STOP two"));
    let body = server.post("/v1/completions", &completion(json!({ "stop": ["STOP"] }))).json();
    assert_eq!(body["choices"][0]["text"], "one ");
    assert_eq!(body["choices"][0]["finish_reason"], "stop");
    assert_eq!(body["usage"]["completion_tokens"], 8);
    let extra = json!({ "stop": "STOP", "include_stop_str_in_output": true, "stream": true });
    let events = server.post("/v1/completions", &completion(extra)).events();
    let text: String = events.iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect();
    assert_eq!(text, "one STOP");
    let mut body = json!({
        "max_tokens": 50, "stop_sequences": ["never", " STOP"], "messages": [{ "role": "user", "content": "hi" }],
    });
    let whole = server.post("/v1/messages", &body).json();
    assert_eq!((&whole["content"][0]["text"], &whole["stop_sequence"]), (&json!("one"), &json!(" STOP")));
    assert_eq!(whole["stop_reason"], "stop_sequence");
    body["stream"] = json!(true);
    let events = server.post("/v1/messages", &body).events();
    let text: String = events.iter().filter_map(|event| event["delta"]["text"].as_str()).collect();
    assert_eq!(text, "one");
    let delta = &events[events.len() - 2]["delta"];
    assert_eq!((&delta["stop_reason"], &delta["stop_sequence"]), (&json!("stop_sequence"), &json!(" STOP")));
}

#[test]
fn reasoning_and_tools_are_parsed() {
    let answer = "<think>\nI look.\n</think>\n\nWell:\n<tool_call>\n{\"name\": \"look\", \"arguments\": {\"at\": \"é\"}}\n</tool_call>";
    let server = Running::start(Scripted::new(answer));
    let tools =
        json!([{ "type": "function", "function": { "name": "look", "parameters": { "type": "object" } } }]);
    let body = server.post("/v1/chat/completions", &chat(json!({ "tools": tools }))).json();
    let message = &body["choices"][0]["message"];
    assert_eq!(message["reasoning"], "I look.");
    assert_eq!(message["content"], "Well:");
    assert_eq!(
        message["tool_calls"][0]["function"],
        json!({ "name": "look", "arguments": "{\"at\":\"é\"}" })
    );
    assert_eq!(body["choices"][0]["finish_reason"], "tool_calls");
    assert!(
        server.generator.submitted.lock().unwrap()[0].prompt.starts_with("<tools>{\"type\": \"function\"")
    );

    let body = json!({
        "model": "tiny", "max_tokens": 500, "messages": [{ "role": "user", "content": [{ "type": "text", "text": "hi" }] }],
        "tools": [{ "name": "look", "input_schema": { "type": "object" } }],
    });
    let found = server.post("/v1/messages", &body).json();
    let kinds: Vec<&str> =
        found["content"].as_array().unwrap().iter().map(|block| block["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["thinking", "text", "tool_use"]);
    assert_eq!(found["content"][2]["input"], json!({ "at": "é" }));
    assert_eq!(found["stop_reason"], "tool_use");
    let mut streamed = body;
    streamed["stream"] = json!(true);
    let events = server.post("/v1/messages", &streamed).events();
    let names: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!(names.first(), Some(&"message_start"));
    assert_eq!(names.iter().filter(|name| **name == "content_block_start").count(), 3);
    assert_eq!(names[names.len() - 2..], ["message_delta", "message_stop"]);

    let tools = json!([{ "type": "function", "name": "look", "parameters": { "type": "object" } }]);
    let body = json!({ "model": "tiny", "input": "hi", "tools": tools });
    let found = server.post("/v1/responses", &body).json();
    let kinds: Vec<&str> =
        found["output"].as_array().unwrap().iter().map(|item| item["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["reasoning", "message", "function_call"]);
    assert_eq!(
        (&found["status"], &found["output"][1]["content"][0]["text"]),
        (&json!("completed"), &json!("Well:"))
    );
    let mut streamed = body;
    streamed["stream"] = json!(true);
    let events = server.post("/v1/responses", &streamed).events();
    assert_eq!(events.last().unwrap()["type"], "response.completed");
    let numbers: Vec<u64> = events.iter().map(|event| event["sequence_number"].as_u64().unwrap()).collect();
    assert_eq!(numbers, (0..events.len() as u64).collect::<Vec<_>>());
}

#[test]
fn schemas_and_forced_calls_filter_tokens() {
    let server = Running::start(Scripted::new("{\"a\": 1} and more"));
    let schema = json!({ "type": "object", "properties": { "a": { "type": "integer" } }, "required": ["a"], "additionalProperties": false });
    let format = json!({ "type": "json_schema", "json_schema": { "name": "x", "schema": schema } });
    let body = server.post("/v1/chat/completions", &chat(json!({ "response_format": format }))).json();
    assert_eq!(body["choices"][0]["message"]["content"], "{\"a\": 1}", "{body}");
    let body = server
        .post("/v1/completions", &completion(json!({ "structured_outputs": { "regex": "\\{\"a\": " } })))
        .json();
    assert_eq!(body["choices"][0]["text"], "{\"a\": ", "{body}");
    let format = json!({ "type": "json_schema", "json_schema": { "schema": { "type": 3 } } });
    let reply = server.post("/v1/chat/completions", &chat(json!({ "response_format": format })));
    assert_eq!((reply.status, reply.json()["error"]["param"].as_str()), (400, Some("response_format")));

    let server = Running::start(Scripted::new(
        "<tool_call>\n{\"name\": \"look\", \"arguments\": {}}\n</tool_call> no",
    ));
    let tools = json!([{ "type": "function", "function": { "name": "look", "parameters": { "type": "object", "properties": {}, "additionalProperties": false } } }]);
    for choice in [json!("required"), json!({ "type": "function", "function": { "name": "look" } })] {
        let extra = json!({ "tools": tools, "tool_choice": choice, "parallel_tool_calls": false });
        let body = server.post("/v1/chat/completions", &chat(extra)).json();
        let message = &body["choices"][0]["message"];
        assert_eq!(message["tool_calls"][0]["function"]["name"], "look", "{body}");
        assert_eq!(message["content"], Value::Null, "{body}");
    }
    assert!(server.generator.submitted.lock().unwrap().iter().all(|request| request.num_filters == 1));
}

#[test]
fn log_probabilities_of_chats_have_bytes() {
    let server = Running::start(Scripted::new("é"));
    let body =
        server.post("/v1/chat/completions", &chat(json!({ "logprobs": true, "top_logprobs": 2 }))).json();
    let entries = body["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(entries.len(), 2);
    assert_eq!((&entries[0]["token"], &entries[0]["bytes"]), (&json!("bytes:\\xc3"), &json!([0xc3])));
    assert_eq!(entries[0]["top_logprobs"].as_array().unwrap().len(), 2);
    let extra = json!({ "logprobs": true, "stream": true });
    let events = server.post("/v1/chat/completions", &chat(extra)).events();
    let entries: usize = events
        .iter()
        .filter_map(|event| event["choices"][0]["logprobs"]["content"].as_array())
        .map(Vec::len)
        .sum();
    assert_eq!(entries, 2);
}

#[track_caller]
fn check_error(
    server: &Running,
    path: &str,
    body: &Value,
    status: u16,
    parameter: Option<&str>,
    message: &str,
) {
    let reply = server.post(path, body);
    let found = reply.json();
    assert_eq!(reply.status, status, "{}", reply.body);
    assert_eq!(found["error"]["param"].as_str(), parameter, "{}", reply.body);
    let text = found["error"]["message"].as_str().unwrap();
    assert!(text.contains(message), "{text}");
}

#[test]
fn wrong_searches_are_explained() {
    let server = Running::start(Scripted::new("x"));
    for (extra, parameter, message) in [
        (json!({ "beam_width": 3 }), "beam_width", "`use_beam_search` is not true"),
        (json!({ "length_penalty": 2 }), "length_penalty", "`use_beam_search` is not true"),
        (json!({ "use_beam_search": true, "early_stopping": 1 }), "early_stopping", "true, false or `never`"),
        (json!({ "use_beam_search": true, "temperature": 1 }), "temperature", "most probable texts"),
        (json!({ "use_beam_search": true, "n": 3, "beam_width": 2 }), "beam_width", "`n` is 3"),
    ] {
        check_error(&server, "/v1/completions", &completion(extra), 400, Some(parameter), message);
    }
}

#[test]
fn wrong_requests_are_explained() {
    let server = Running::start(Scripted::new("x"));
    let completions = "/v1/completions";
    for (extra, parameter, message) in [
        (json!({ "temperature": -1 }), "temperature", "between 0 and 100"),
        (json!({ "temperature": "hot" }), "temperature", "is not a number"),
        (json!({ "top_p": 0 }), "top_p", "above 0"),
        (json!({ "n": 0 }), "n", "at least 1"),
        (json!({ "n": 1000 }), "n", "at most 128"),
        (json!({ "best_of": 3 }), "best_of", "every answer"),
        (json!({ "suffix": "x" }), "suffix", "not available"),
        (json!({ "logprobs": 21 }), "logprobs", "at most 20"),
        (json!({ "logit_bias": { "x": 1 } }), "logit_bias", "no token id"),
        (json!({ "logit_bias": { "5": 101 } }), "logit_bias", "from -100 to 100"),
        (json!({ "stop": [""] }), "stop", "empty text"),
        (json!({ "stop_token_ids": [259] }), "stop_token_ids", "below 259"),
        (json!({ "min_tokens": 51 }), "min_tokens", "`max_tokens` is 50"),
        (json!({ "bad_words": ["two letters"] }), "bad_words", "more than one token"),
        (json!({ "stream_options": {} }), "stream_options", "needs `stream`"),
        (json!({ "temprature": 1 }), "temprature", "unknown parameter"),
        (json!({ "prompt": [] }), "prompt", "empty list"),
        (json!({ "prompt": [300] }), "prompt", "below 259"),
        (json!({ "prompt": {} }), "prompt", "not a text"),
        (json!({ "guided_regex": "(" }), "guided_json", "cannot be used"),
        (json!({ "guided_regex": "a", "guided_choice": ["b"] }), "guided_json", "more than one"),
        (json!({ "guided_choice": [] }), "guided_json", "`guided_choice` has no text"),
        (json!({ "allowed_token_ids": [] }), "allowed_token_ids", "empty"),
    ] {
        check_error(&server, completions, &completion(extra), 400, Some(parameter), message);
    }
    let long = completion(json!({ "prompt": "x".repeat(1001) }));
    check_error(&server, completions, &long, 400, None, "1001 tokens, but at most 1000 fit");
    check_error(
        &server,
        completions,
        &completion(json!({ "model": "other" })),
        404,
        Some("model"),
        "does not exist",
    );
    check_error(&server, completions, &json!([]), 400, None, "not a JSON object");
    check_error(&server, completions, &json!({}), 400, Some("prompt"), "no `prompt`");
    let chats = "/v1/chat/completions";
    for (extra, parameter, message) in [
        (json!({ "messages": [] }), "messages", "is empty"),
        (json!({ "messages": [{ "role": "user" }] }), "messages[0]", "no `content`"),
        (json!({ "messages": [{ "role": "robot", "content": "" }] }), "messages[0]", "unknown role"),
        (
            json!({ "messages": [{ "role": "user", "content": [{ "type": "image_url", "image_url": {} }] }] }),
            "messages[0]",
            "text alone",
        ),
        (json!({ "tool_choice": "required" }), "tool_choice", "no `tools`"),
        (json!({ "tools": [{ "type": "web" }] }), "tools", "no function"),
        (json!({ "top_logprobs": 2 }), "top_logprobs", "needs `logprobs`"),
        (json!({ "max_tokens": 0 }), "max_tokens", "at least 1"),
        (json!({ "functions": [] }), "functions", "replaced"),
        (json!({ "reasoning_effort": "extreme" }), "reasoning_effort", "has to be"),
        (json!({ "response_format": { "type": "xml" } }), "response_format", "has to be"),
    ] {
        check_error(&server, chats, &chat(extra), 400, Some(parameter), message);
    }
    check_error(&server, "/v1/nothing", &json!({}), 404, None, "no route");
    check_error(&server, "/v1/models", &json!({}), 405, None, "does not accept POST");
    let reply = server.post("/v1/messages", &json!({ "messages": [] }));
    assert_eq!((reply.status, &reply.json()["error"]["type"]), (400, &json!("invalid_request_error")));
    check_error(
        &server,
        "/v1/responses",
        &json!({ "input": "x", "previous_response_id": "resp_1" }),
        400,
        Some("previous_response_id"),
        "stores no responses",
    );
    assert_eq!(server.generator.submitted.lock().unwrap().len(), 0);

    let settings = Settings { no_template: true, ..Settings::default() };
    let server = Running::with(Scripted::new("x"), settings);
    check_error(&server, chats, &chat(json!({})), 400, None, "no chat template");
}

#[test]
fn models_and_tokens_are_listed() {
    let server = Running::start(Scripted::new("x"));
    let model = server.get("/v1/models").json()["data"][0].clone();
    assert_eq!(
        (&model["id"], &model["root"], &model["max_model_len"]),
        (&json!("tiny"), &json!("/models/tiny"), &json!(1024))
    );
    assert_eq!(server.get("/v1/models/tiny").json()["id"], "tiny");
    assert_eq!(server.get("/v1/models/other").status, 404);
    let tokens = server
        .post("/tokenize", &json!({ "model": "tiny", "prompt": "é", "return_token_strs": true }))
        .json();
    assert_eq!((&tokens["tokens"], &tokens["count"]), (&json!([0xc3 + 3, 0xa9 + 3]), &json!(2)));
    let text = server.post("/detokenize", &json!({ "model": "tiny", "tokens": tokens["tokens"] })).json();
    assert_eq!(text["prompt"], "é");
    let counted = server
        .post("/v1/messages/count_tokens", &json!({ "messages": [{ "role": "user", "content": "hi" }] }));
    assert_eq!(counted.json()["input_tokens"], "<user>hi<assistant>".len());
    assert_eq!(server.get("/health").status, 200);
    assert_eq!(server.get("/version").json()["version"], env!("CARGO_PKG_VERSION"));
    let page = server.get("/");
    assert!(page.body.starts_with("<!doctype html>"));
    assert!(page.header("content-security-policy").is_some());
    server.post("/v1/completions", &completion(json!({})));
    let metrics = server.get("/metrics").body;
    for line in [
        "vllm:num_requests_running{model_name=\"tiny\",engine=\"0\"} 1",
        "vllm:kv_cache_usage_perc{model_name=\"tiny\",engine=\"0\"} 0.5",
        "vllm:generation_tokens_total{model_name=\"tiny\",engine=\"0\"} 1",
        "vllm:request_success_total{model_name=\"tiny\",engine=\"0\",finished_reason=\"stop\"} 1",
        "vllm:time_to_first_token_seconds_count{model_name=\"tiny\",engine=\"0\"} 1",
    ] {
        assert!(metrics.lines().any(|found| found == line), "{line} is missing in\n{metrics}");
    }
}

#[test]
fn keys_and_limits_are_enforced() {
    let limits = ServerLimits { max_body: 1000, max_requests: 1, ..ServerLimits::default() };
    let generator = Scripted { pause: Duration::from_millis(20), ..Scripted::new("long answer") };
    let server = Running::with(generator, Settings { limits, keys: "secret", ..Settings::default() });
    let body = completion(json!({}));
    let reply = server.post("/v1/completions", &body);
    assert_eq!((reply.status, reply.header("www-authenticate")), (401, Some("Bearer")));
    let with_key = |path: &str, body: &[u8]| {
        server.client().request(
            "POST",
            path,
            &[("authorization", "Bearer secret"), ("x-request-id", "mine")],
            body,
        )
    };
    let reply = with_key("/v1/completions", body.to_string().as_bytes());
    assert_eq!((reply.status, reply.header("x-request-id")), (200, Some("mine")), "{}", reply.body);
    assert_eq!(with_key("/v1/completions", &[b'x'; 2000]).status, 413);
    assert_eq!(server.get("/health").status, 200);

    // A second request at the same time is refused.
    let mut first = server.client();
    first.send(
        "POST",
        "/v1/completions",
        &[("x-api-key", "secret")],
        completion(json!({ "stream": true })).to_string().as_bytes(),
    );
    first.head();
    first.chunk();
    let reply = with_key("/v1/completions", body.to_string().as_bytes());
    assert_eq!((reply.status, reply.header("retry-after")), (429, Some("1")), "{}", reply.body);

    let full = Scripted { is_full: true, ..Scripted::new("") };
    assert_eq!(Running::start(full).post("/v1/completions", &body).status, 429);
}

#[test]
fn clients_that_go_end_their_requests() {
    for stream in [true, false] {
        let generator = Scripted { pause: Duration::from_millis(5), ..Scripted::new(&"word ".repeat(200)) };
        let server = Running::start(generator);
        let mut client = server.client();
        let body = completion(json!({ "stream": stream, "max_tokens": 1000 })).to_string();
        client.send("POST", "/v1/completions", &[], body.as_bytes());
        if stream {
            client.head();
            client.chunk();
        } else {
            while server.generator.submitted.lock().unwrap().is_empty() {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        drop(client);
        let cancelled = || server.generator.cancelled.load(Ordering::SeqCst);
        for _ in 0..500 {
            if cancelled() == 1 {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(cancelled(), 1, "stream: {stream}");
        let outcome =
            |event: &ServerEvent| matches!(event, ServerEvent::Answered { outcome: "cancelled", .. });
        assert!(server.events.lock().unwrap().iter().any(outcome));
    }
}

#[test]
fn answers_have_a_time_limit() {
    let limits = ServerLimits { answer_time: Duration::from_millis(50), ..ServerLimits::default() };
    let generator = || Scripted { pause: Duration::from_millis(30), ..Scripted::new("a long answer") };
    let server = Running::with(generator(), Settings { limits, ..Settings::default() });
    let reply = server.post("/v1/completions", &completion(json!({})));
    assert_eq!((reply.status, &reply.json()["error"]["code"]), (504, &json!("timeout")));
    let events = server.post("/v1/completions", &completion(json!({ "stream": true }))).events();
    assert_eq!(events.last().unwrap()["error"]["code"], "timeout");
}

#[test]
fn prompts_are_logged_on_request_alone() {
    for log_prompts in [false, true] {
        let server = Running::with(Scripted::new("x"), Settings { log_prompts, ..Settings::default() });
        server.post("/v1/completions", &completion(json!({ "prompt": "a secret" })));
        let logged = format!("{:?}", server.events.lock().unwrap()).contains("a secret");
        assert_eq!(logged, log_prompts);
    }
}
