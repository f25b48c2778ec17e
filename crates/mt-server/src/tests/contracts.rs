//! Fields that clients of vLLM, OpenAI and Anthropic read beside the text of answers.

use serde_json::{Value, json};

use super::script::{Running, Scripted};

fn with(mut body: Value, extra: Value) -> Value {
    let Value::Object(extra) = extra else { panic!("the fields are an object") };
    body.as_object_mut().unwrap().extend(extra);
    body
}

fn completion(extra: Value) -> Value {
    with(json!({ "prompt": "ab", "max_tokens": 50 }), extra)
}

fn messages() -> Value {
    json!([{ "role": "user", "content": "hi" }])
}

#[test]
fn answers_tell_what_stopped_them() {
    let server = Running::start(Scripted::new("one STOP two"));
    let at_space = u32::from(b' ') + 3;
    for (extra, text, reason) in [
        (json!({ "stop": ["two", "STOP"] }), "one ", json!("STOP")),
        (json!({ "stop_token_ids": [at_space] }), "one", json!(at_space)),
        (json!({ "stop": "STOP", "min_tokens": 8 }), "one STOP two", Value::Null),
        (json!({ "stop": "STOP", "min_tokens": 7 }), "one ", json!("STOP")),
        (json!({}), "one STOP two", Value::Null),
    ] {
        let body = server.post("/v1/completions", &completion(extra.clone())).json();
        let choice = &body["choices"][0];
        assert_eq!((&choice["text"], &choice["stop_reason"]), (&json!(text), &reason), "{extra}");
        let chat = with(json!({ "messages": messages() }), extra.clone());
        let choice = server.post("/v1/chat/completions", &chat).json()["choices"][0].clone();
        assert_eq!(choice["stop_reason"], reason, "{extra}");
        let events = server.post("/v1/chat/completions", &with(chat, json!({ "stream": true }))).events();
        assert_eq!(events.last().unwrap()["choices"][0]["stop_reason"], reason, "{extra}");
    }
}

#[test]
fn one_of_several_answers_ends_at_its_stop_string() {
    let server = Running::start(Scripted::new("one STOP two"));
    let body = server.post("/v1/completions", &completion(json!({ "n": 2, "stop": "STOP" }))).json();
    let texts: Vec<&Value> =
        body["choices"].as_array().unwrap().iter().map(|choice| &choice["text"]).collect();
    assert_eq!(texts, [&json!("one "), &json!("one ")]);
    // The request is over with the last answer.
    assert!(server.generator.ended.lock().unwrap().starts_with(&[0]));
}

#[test]
fn a_server_whose_engine_has_failed_is_not_healthy() {
    let server = Running::start(Scripted { has_failed: true, ..Scripted::new("") });
    let reply = server.get("/health");
    assert_eq!((reply.status, reply.header("retry-after")), (503, Some("1")));
    let error = &reply.json()["error"];
    assert_eq!(error["code"], "engine_failed");
    assert!(error["message"].as_str().unwrap().ends_with("out of luck"), "{error}");
}

#[test]
fn fields_without_a_place_in_the_answer_are_refused() {
    let server = Running::start(Scripted::new("x"));
    let chat = json!({ "messages": messages() });
    let of_messages = json!({ "messages": messages(), "max_tokens": 9 });
    let response = json!({ "input": "hi" });
    for (route, body, field) in [
        (
            "/v1/chat/completions",
            with(chat, json!({ "stream": true, "prompt_logprobs": 1 })),
            "prompt_logprobs",
        ),
        ("/v1/messages", with(of_messages.clone(), json!({ "stop": "x" })), "stop"),
        ("/v1/messages", with(of_messages.clone(), json!({ "prompt_logprobs": 1 })), "prompt_logprobs"),
        ("/v1/messages", with(of_messages, json!({ "return_token_ids": true })), "return_token_ids"),
        ("/v1/responses", with(response.clone(), json!({ "n": 2 })), "n"),
        ("/v1/responses", with(response.clone(), json!({ "return_token_ids": true })), "return_token_ids"),
        ("/v1/responses", with(response, json!({ "include": ["everything"] })), "include"),
    ] {
        let reply = server.post(route, &body);
        assert_eq!(reply.status, 400, "{body}: {}", reply.body);
        let message = reply.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.starts_with(&format!("`{field}` ")), "{message}");
    }
}

#[test]
fn streams_of_completions_begin_with_what_concerns_the_prompt() {
    let server = Running::start(Scripted::new("c"));
    let extra = json!({ "stream": true, "return_token_ids": true, "prompt_logprobs": 0 });
    let events = server.post("/v1/completions", &completion(extra)).events();
    let choices: Vec<&Value> = events.iter().map(|event| &event["choices"][0]).collect();
    assert_eq!(choices[0]["prompt_token_ids"], json!([100, 101]));
    assert_eq!(choices[0]["prompt_logprobs"][1]["101"]["logprob"], -0.5);
    assert_eq!(choices[1]["token_ids"], json!([102]));
    assert!(choices[1..].iter().all(|choice| choice["prompt_token_ids"].is_null()), "{events:?}");

    let chat = json!({ "messages": messages(), "stream": true, "return_token_ids": true });
    let events = server.post("/v1/chat/completions", &chat).events();
    let length = "<user>hi<assistant>".len();
    assert_eq!(events[0]["prompt_token_ids"].as_array().map(Vec::len), Some(length));
    assert!(events[1..].iter().all(|event| event["prompt_token_ids"].is_null()), "{events:?}");
}

#[test]
fn responses_have_log_probabilities_of_their_text() {
    let server = Running::start(Scripted::new("<think>\nno\n</think>\n\nyes"));
    let body = json!({ "input": "hi", "top_logprobs": 2, "include": ["message.output_text.logprobs"] });
    let made = server.post("/v1/responses", &body).json();
    let tokens = |scores: &Value| -> String {
        scores.as_array().unwrap().iter().map(|score| score["token"].as_str().unwrap()).collect()
    };
    let text = &made["output"][1]["content"][0];
    // White space before the text belongs to its first token.
    assert_eq!((&text["text"], tokens(&text["logprobs"]).trim()), (&json!("yes"), "yes"), "{made}");
    assert_eq!(text["logprobs"][0]["top_logprobs"].as_array().map(Vec::len), Some(2));
    assert!(made["output"][0]["content"][0]["logprobs"].is_null());
    let counts = &made["usage"]["output_tokens_details"]["reasoning_tokens"];
    assert_eq!(counts.as_u64(), Some("<think>\nno\n</think>".len() as u64 - "<think".len() as u64), "{made}");

    let events = server.post("/v1/responses", &with(body, json!({ "stream": true }))).events();
    let of_deltas = events.iter().filter(|event| event["type"] == "response.output_text.delta");
    let of_deltas: String = of_deltas.map(|event| tokens(&event["logprobs"])).collect();
    assert_eq!(of_deltas.trim(), "yes");
    let done = events.iter().find(|event| event["type"] == "response.output_text.done").unwrap();
    assert_eq!(tokens(&done["logprobs"]).trim(), "yes");
}

/// The names that dashboards for vLLM read.
#[test]
fn metrics_have_the_names_of_vllm() {
    let server = Running::start(Scripted::new("x"));
    server.post("/v1/completions", &completion(json!({})));
    let metrics = server.get("/metrics").body;
    let counters = [
        "prompt_tokens",
        "prompt_tokens_cached",
        "generation_tokens",
        "request_success",
        "num_preemptions",
        "prefix_cache_queries",
        "prefix_cache_hits",
    ];
    let histograms = [
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_inference_time_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
        "iteration_tokens_total",
    ];
    let gauges = ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"];
    let names = counters.map(|name| format!("{name}_total{{")).into_iter();
    let names = names.chain(histograms.map(|name| format!("{name}_bucket{{")));
    for name in names.chain(gauges.map(|name| format!("{name}{{"))) {
        let is_it = |line: &str| line.strip_prefix("vllm:").is_some_and(|line| line.starts_with(&name));
        assert!(metrics.lines().any(is_it), "{name} is missing in\n{metrics}");
    }
    let waited = "vllm:request_queue_time_seconds_sum{model_name=\"tiny\",engine=\"0\"} 0.001";
    assert!(metrics.lines().any(|line| line == waited), "{metrics}");
}
