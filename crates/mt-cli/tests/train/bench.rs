//! `maxtext bench inference` and `maxtext bench checkpoint`.

use std::fs;

use serde_json::{Value, json};

use crate::support::{Sandbox, outcome};

#[test]
fn the_engine_is_timed() {
    let sandbox = Sandbox::new();
    sandbox.train("run", &["steps=1", "max_target_length=64"]).succeeded();
    fs::write(sandbox.path("machine.json"), "{\"machine\": \"test\"}").unwrap();
    let measure = |keys: &[&str]| {
        let arguments = ["bench", "inference", "load_parameters_path=runs/run"];
        outcome(&mut sandbox.program(&[&arguments, keys].concat()))
    };
    let found = measure(&[
        "--json",
        "--sequences",
        "1,3",
        "inference_microbenchmark_prefill_lengths=8,32",
        "inference_microbenchmark_num_samples=[1,2]",
        "inference_microbenchmark_loop_iters=3",
        "inference_microbenchmark_log_file_path=results.json",
        "inference_metadata_file=machine.json",
    ])
    .succeeded();
    let found: Value = serde_json::from_str(&found.output).unwrap();
    let written: Value = serde_json::from_slice(&fs::read(sandbox.path("results.json")).unwrap()).unwrap();
    assert_eq!(found, written);
    assert_eq!((&found["iterations"], &found["metadata"]), (&json!(3), &json!({ "machine": "test" })));
    for value in [
        &found["prefill"]["8"]["time_in_ms"],
        &found["prefill"]["32"]["tokens_per_second"],
        &found["prefill"]["32"]["total_tflops_per_second"],
        &found["prefill_multisampling"]["8"]["2"]["time_in_ms"],
        &found["autoregressive"]["1"]["step_in_ms"],
        &found["autoregressive"]["3"]["total_throughput_tokens_per_second"],
        &found["autoregressive"]["3"]["weights_gb_per_second"],
        &found["sizes"]["model_size_in_gb"],
    ] {
        assert!(value.as_f64().is_some_and(|number| number > 0.0), "{found}");
    }
    // Default lengths beyond the context are left out, and stages that are not named.
    let table = measure(&[
        "inference_microbenchmark_stages=prefill",
        "inference_microbenchmark_loop_iters=1",
        "inference_microbenchmark_num_samples=[1]",
        "max_target_length=65",
    ])
    .succeeded();
    assert!(table.errors.contains("prompts of 128 tokens do not fit"), "{}", table.errors);
    assert_eq!(table.output.lines().count(), 2, "{}", table.output);
    assert!(!table.output.contains("sequences"), "{}", table.output);

    measure(&["inference_microbenchmark_stages=train"])
        .failed(2, &["`inference_microbenchmark_stages` is `train`"]);
    let lengths = "inference_microbenchmark_prefill_lengths=8,x";
    measure(&[lengths]).failed(2, &["separated by commas"]);
    let long = "inference_microbenchmark_prefill_lengths=900";
    measure(&[long]).failed(2, &["prompts of 900 tokens do not fit", "`max_target_length`"]);
    measure(&["--sequences", "0"]).failed(2, &["`--sequences` is `0`"]);
    let many = [
        "--sequences",
        "65",
        "inference_microbenchmark_stages=generate",
        "inference_microbenchmark_loop_iters=2",
    ];
    measure(&many).failed(2, &["65 sequences are more than"]);
    measure(&["inference_metadata_file=missing.json"]).failed(2, &["cannot read `missing.json`"]);
    let nowhere = "inference_microbenchmark_log_file_path=missing/results.json";
    measure(&[nowhere]).failed(2, &["its directory does not exist"]);
}

#[test]
fn checkpoints_are_timed_without_training() {
    let sandbox = Sandbox::new();
    let keys = ["--json", "--repeats", "2", "base_emb_dim=32", "base_num_decoder_layers=1", "vocab_size=64"];
    let found = outcome(&mut sandbox.program(&[&["bench", "checkpoint"], &keys[..]].concat())).succeeded();
    let found: Value = serde_json::from_str(&found.output).unwrap();
    assert_eq!(found.as_array().map(Vec::len), Some(2));
    for times in found.as_array().unwrap() {
        assert!(times["bytes"].as_u64().unwrap() > 10_000, "{times}");
        assert!(times["saved_seconds"].as_f64() >= times["blocked_seconds"].as_f64(), "{times}");
    }
    assert!(!sandbox.path("maxtext_output").join("bench_checkpoint").exists());
}
