//! `/v1/embeddings`.

use serde_json::{Value, json};

use super::script::{Running, Scripted};

fn post(server: &Running, body: &Value) -> Value {
    let reply = server.post("/v1/embeddings", body);
    assert_eq!(reply.status, 200, "{}", reply.body);
    reply.json()
}

/// The vectors of a response. Scripted ones are the last token or the mean of the tokens, and the number of tokens.
fn vectors(body: &Value) -> Vec<Vec<f64>> {
    let data = body["data"].as_array().unwrap();
    assert!(
        data.iter().enumerate().all(|(index, item)| item["index"] == index && item["object"] == "embedding")
    );
    data.iter().map(|item| serde_json::from_value(item["embedding"].clone()).unwrap()).collect()
}

#[test]
fn texts_have_vectors_in_openai_form() {
    let server = Running::start(Scripted::new(""));
    let body = post(&server, &json!({ "model": "tiny", "input": "ab", "normalize": false }));
    assert_eq!((&body["object"], &body["model"]), (&json!("list"), &json!("tiny")));
    // Bytes are tokens from 3 on.
    assert_eq!(vectors(&body), [[101.0, 2.0]]);
    assert_eq!(body["usage"], json!({ "prompt_tokens": 2, "total_tokens": 2 }));

    let input = json!(["a", "ab", "abc"]);
    let body = post(&server, &json!({ "input": input, "normalize": false, "pooling": "mean" }));
    assert_eq!(vectors(&body), [[100.0, 1.0], [100.5, 2.0], [101.0, 3.0]]);
    assert_eq!(body["usage"]["prompt_tokens"], 6);
    for (input, expected) in
        [(json!([4, 3]), vec![[3.0, 2.0]]), (json!([[9], [4, 3]]), vec![[9.0, 1.0], [3.0, 2.0]])]
    {
        let body = post(&server, &json!({ "input": input, "normalize": false, "user": "someone" }));
        assert_eq!(vectors(&body), expected);
    }

    let body = post(&server, &json!({ "input": [4, 3, 3, 3] }));
    assert_eq!(vectors(&body), [[0.6_f32, 0.8].map(|value| value.to_string().parse::<f64>().unwrap())]);
    let body = post(&server, &json!({ "input": [4, 3, 3, 3], "dimensions": 1 }));
    assert_eq!(vectors(&body), [[1.0]]);
    let body = post(&server, &json!({ "input": [1, 1], "normalize": false, "encoding_format": "base64" }));
    // The little-endian bytes of 1 and 2.
    assert_eq!(body["data"][0]["embedding"], "AACAPwAAAEA=");
}

#[test]
fn many_texts_keep_their_order() {
    let server = Running::start(Scripted::new(""));
    let input: Vec<[u32; 1]> = (0..150).map(|token| [token]).collect();
    let body = post(&server, &json!({ "input": input, "normalize": false }));
    let firsts: Vec<f64> = vectors(&body).iter().map(|vector| vector[0]).collect();
    assert_eq!(firsts, (0..150).map(f64::from).collect::<Vec<_>>());
    assert_eq!(server.get("/load").json()["server_load"], 0);
}

#[test]
fn wrong_requests_for_vectors_have_errors() {
    let server = Running::start(Scripted::new(""));
    for (body, status, parameter, fragment) in [
        (json!({}), 400, "input", "no `input`"),
        (json!({ "input": [] }), 400, "input", "empty list"),
        (json!({ "input": [[]] }), 400, "input", "text 1 of `input` has no token"),
        (json!({ "input": { "text": "a" } }), 400, "input", "`input` is not a text"),
        (json!({ "input": [300] }), 400, "input", "`300`"),
        (json!({ "input": "a", "encoding_format": "int8" }), 400, "encoding_format", "`float` or `base64`"),
        (json!({ "input": "a", "dimensions": 0 }), 400, "dimensions", "between 1 and 2"),
        (json!({ "input": "a", "dimensions": 3 }), 400, "dimensions", "between 1 and 2"),
        (json!({ "input": "a", "pooling": "max" }), 400, "pooling", "`last` or `mean`"),
        (json!({ "input": "a", "dimension": 1 }), 400, "dimension", "unknown parameter"),
        (json!({ "input": "a", "model": "other" }), 404, "model", "this server has `tiny`, `tuned`"),
        (json!({ "input": vec!["a"; 2049] }), 400, "input", "at most 2048"),
    ] {
        let reply = server.post("/v1/embeddings", &body);
        let error = &reply.json()["error"];
        assert_eq!((reply.status, error["param"].as_str()), (status, Some(parameter)), "{}", reply.body);
        assert!(error["message"].as_str().unwrap().contains(fragment), "{}", reply.body);
    }
    let long = server.post("/v1/embeddings", &json!({ "input": "x".repeat(1001) }));
    assert_eq!((long.status, &long.json()["error"]["code"]), (400, &json!("context_length_exceeded")));
    assert_eq!(server.get("/load").json()["server_load"], 0);
}
