//! Refused runs leave no files behind; runs without steps report it.

use std::fs;

use crate::support::Sandbox;

#[test]
fn refused_runs_leave_no_directory_behind() {
    let sandbox = Sandbox::new();
    fs::write(sandbox.path("latin.txt"), b"caf\xe9 au lait").unwrap();
    fs::write(sandbox.path("empty.jsonl"), "{\"text\": \"\"}\n").unwrap();
    fs::write(sandbox.path("small.txt"), "few").unwrap();
    for keys in [
        &["hf_train_files=nothing/*.txt"][..],
        &["hf_train_files=latin.txt"],
        &["vocab_size=100"],
        &["metrics_file=train.txt"],
        &["load_parameters_path=nowhere"],
        &["base_output_directory=deep/er", "hf_train_files=nothing/*.txt"],
    ] {
        sandbox.train("wrong", keys).refused(&["hint: "]);
        assert!(!sandbox.path("runs").exists() && !sandbox.path("deep").exists(), "{keys:?}");
    }
    // Only the first batch shows that these files hold too little.
    for keys in [["hf_train_files=empty.jsonl", "hf_path=json"], ["hf_train_files=small.txt", "num_epoch=1"]]
    {
        sandbox.train("wrong", &[&keys[..], &["eval_interval=-1"]].concat()).failed(2, &["hint: "]);
        assert!(!sandbox.path("runs").exists(), "{keys:?}");
    }
    // Existing files survive, even those of a run that cannot be resumed.
    sandbox.train("right", &["steps=2", "eval_interval=-1"]).succeeded();
    sandbox
        .train("right", &["steps=4", "eval_interval=-1", "data_shuffle_seed=9"])
        .refused(&["data_shuffle_seed"]);
    sandbox.train("wrong", &["hf_train_files=nothing/*.txt"]).refused(&["hint: "]);
    assert_eq!(sandbox.checkpoints("right"), [0, 1]);
    assert!(!sandbox.path("runs/wrong").exists());
}

#[test]
fn a_run_without_steps_names_no_loss_curve() {
    let sandbox = Sandbox::new();
    let none = sandbox.train("none", &["steps=0", "eval_interval=-1"]).succeeded();
    assert!(!none.errors.contains("loss.svg"), "{}", none.errors);
    let one = sandbox.train("one", &["steps=1", "eval_interval=-1"]).succeeded();
    assert!(one.errors.contains("loss curve: "), "{}", one.errors);
    assert!(sandbox.path("runs/one/metrics/loss.svg").is_file());
}

#[test]
fn steps_in_flight_change_no_number() {
    let sandbox = Sandbox::new();
    let keys = |most: &'static str| ["steps=9", "eval_interval=4", "checkpoint_period=3", most];
    sandbox.train("two", &keys("max_inflight_computations=2")).succeeded();
    for (run, most) in [("one", "max_inflight_computations=1"), ("four", "max_inflight_computations=4")] {
        let trained = sandbox.train(run, &keys(most)).succeeded();
        assert_eq!(trained.output.matches("completed step: ").count(), 9, "{}", trained.output);
        sandbox.assert_same_run("two", run);
    }
    sandbox.train("none", &["max_inflight_computations=0"]).refused(&["`max_inflight_computations` is `0`"]);
}

#[test]
fn every_step_has_a_line_whatever_the_period_of_flushes() {
    let sandbox = Sandbox::new();
    let trained = sandbox.train("run", &["steps=5", "log_period=100", "eval_interval=-1"]).succeeded();
    assert_eq!(trained.output.matches("completed step: ").count(), 5, "{}", trained.output);
}

#[test]
fn losses_and_documents_follow_their_keys() {
    let sandbox = Sandbox::new();
    let losses = |run: &str, keys: &[&str]| {
        let all = [&["steps=3", "eval_interval=-1", "dtype=bfloat16"], keys].concat();
        sandbox.train(run, &all).succeeded();
        sandbox.metrics(run).losses()
    };
    let wide = losses("wide", &[]);
    let narrow = losses("narrow", &["cast_logits_to_fp32=false"]);
    assert_ne!(wide, narrow);
    for (wide, narrow) in wide.iter().zip(&narrow) {
        assert!((wide - narrow).abs() < 0.02 * wide, "{narrow}, not {wide}");
    }
    let tiled = losses("tiled", &["cast_logits_to_fp32=false", "num_vocab_tiling=2"]);
    assert_ne!(wide, tiled);
    // The file is one document. Truncation leaves one sequence of it, so one epoch has no full batch.
    let cut = sandbox.train("cut", &["steps=3", "num_epoch=1", "use_truncation=true", "eval_interval=-1"]);
    cut.failed(2, &["train.txt"]);
    let embedding =
        sandbox.train("embedding", &["steps=1", "use_iota_embed=true", "eval_interval=-1"]).succeeded();
    assert!(
        embedding.errors.contains("`use_iota_embed` (command line) has no effect on CPUs"),
        "{}",
        embedding.errors
    );
}

#[test]
fn explicit_placement_is_refused_where_it_cannot_be() {
    let sandbox = Sandbox::new();
    let mesh = [
        "num_cpu_devices=4",
        "ici_fsdp_parallelism=1",
        "ici_tensor_parallelism=4",
        "steps=1",
        "eval_interval=-1",
    ];
    // Two KV heads cannot be split over four devices.
    let auto = sandbox.train("auto", &[&mesh[..], &["shard_mode=auto"]].concat()).succeeded();
    assert!(auto.errors.contains("is not split over mesh axis `tensor`"), "{}", auto.errors);
    sandbox.train("explicit", &[&mesh[..], &["shard_mode=explicit"]].concat()).refused(&[
        "`shard_mode` is `explicit` (command line)",
        "is not split over mesh axis `tensor`",
        "`shard_mode=auto`",
    ]);
    sandbox.train("fits", &[&mesh[..], &["base_num_kv_heads=4", "shard_mode=explicit"]].concat()).succeeded();
}
