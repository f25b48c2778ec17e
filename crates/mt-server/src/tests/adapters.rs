//! Adapters by their names.

use serde_json::{Value, json};

use super::script::{Running, Scripted};

#[test]
fn models_list_adapters_with_their_base() {
    let server = Running::start(Scripted::new(""));
    let list = server.get("/v1/models").json();
    let of = |field: &str| -> Vec<Value> {
        list["data"].as_array().unwrap().iter().map(|model| model[field].clone()).collect()
    };
    assert_eq!(of("id"), ["tiny", "tuned"]);
    assert_eq!(of("root"), ["/models/tiny", "/adapters/tuned"]);
    assert_eq!(of("parent"), [Value::Null, json!("tiny")]);
    let one = server.get("/v1/models/tuned");
    assert_eq!((one.status, &one.json()["parent"]), (200, &json!("tiny")));
    assert_eq!(server.get("/v1/models/other").status, 404);
}

#[test]
fn requests_choose_adapters() {
    let server = Running::start(Scripted::new("x"));
    let messages = json!([{ "role": "user", "content": "hi" }]);
    let routes = [
        ("/v1/completions", json!({ "prompt": "a" })),
        ("/v1/chat/completions", json!({ "messages": messages })),
        ("/v1/responses", json!({ "input": "hi" })),
        ("/v1/messages", json!({ "messages": messages, "max_tokens": 5 })),
    ];
    for (route, body) in routes {
        for (name, adapter) in [("tiny", None), ("/models/tiny", None), ("tuned", Some("tuned"))] {
            let mut body = body.clone();
            body["model"] = json!(name);
            let reply = server.post(route, &body);
            assert_eq!(reply.status, 200, "{}", reply.body);
            assert_eq!(reply.json()["model"], adapter.unwrap_or("tiny"), "{route}");
            let submitted = server.generator.submitted.lock().unwrap();
            assert_eq!(submitted.last().unwrap().adapter.as_deref(), adapter, "{route}");
        }
        let mut body = body;
        body["model"] = json!("other");
        let reply = server.post(route, &body);
        assert_eq!(reply.status, 404, "{}", reply.body);
        let message = reply.json()["error"]["message"].as_str().unwrap().to_owned();
        assert_eq!(message, "the model `other` does not exist; this server has `tiny`, `tuned`");
    }
}
