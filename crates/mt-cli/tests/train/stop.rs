//! Stopping: signals, and values that are not finite.

use std::{
    fs,
    io::{BufRead, BufReader},
    process::{Child, Command},
    thread,
    time::{Duration, Instant},
};

use crate::support::{Random, Sandbox, prose};

fn send(signal: &str, process: &Child) {
    let kill = format!("kill -{signal} {}", process.id());
    assert!(Command::new("sh").args(["-c", &kill]).status().unwrap().success());
}

/// Sends a signal in the middle of a run. The run stops with a checkpoint and can be resumed.
fn check(sandbox: &Sandbox, signal: &str, status: i32) {
    let keys = ["dropout_rate=0.1", "head_dim=40"];
    let mut process = sandbox.command(signal, &keys).spawn().unwrap();
    let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
    let reached = lines.by_ref().any(|line| line.unwrap().starts_with("completed step: 7,"));
    assert!(reached);
    send(signal, &process);
    let last = lines.map(Result::unwrap).filter(|line| line.starts_with("completed step: ")).last();
    let output = process.wait_with_output().unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(status), "{errors}");
    assert!(errors.contains("stopped by a signal after"), "{errors}");
    let newest = *sandbox.checkpoints(signal).last().unwrap();
    assert!((7..59).contains(&newest), "{newest}");
    if let Some(last) = last {
        assert!(last.starts_with(&format!("completed step: {newest},")), "{last}, not {newest}");
    }
    let resumed = sandbox.train(signal, &keys).succeeded();
    assert!(resumed.output.lines().any(|line| line.starts_with(&format!("completed step: {},", newest + 1))));
    sandbox.assert_same_run("whole", signal);
}

#[test]
fn signals_stop_runs_with_a_checkpoint() {
    let sandbox = Sandbox::new();
    sandbox.train("whole", &["dropout_rate=0.1", "head_dim=40"]).succeeded();
    check(&sandbox, "INT", 130);
    check(&sandbox, "TERM", 143);
}

#[test]
fn a_signal_stops_the_training_of_a_tokenizer() {
    let sandbox = Sandbox::new();
    // A single word without repetition, whose merges take minutes to learn.
    let mut random = Random(3);
    let word: String = (0..20_000_000).map(|_| char::from(b'a' + random.below(26) as u8)).collect();
    fs::write(sandbox.path("word.txt"), word).unwrap();
    let keys = ["hf_train_files=word.txt", "tokenizer_vocab_size=60000", "vocab_size=60000"];
    let keys = [&keys[..], &["tokenizer_type=huggingface", "eval_interval=-1"]].concat();
    let mut process = sandbox.command("word", &keys).spawn().unwrap();
    // The first progress line appears after some seconds.
    let mut lines = BufReader::new(process.stderr.take().unwrap()).lines();
    let reached = lines.by_ref().any(|line| line.unwrap().starts_with("training the tokenizer: "));
    assert!(reached);
    let sent = Instant::now();
    send("TERM", &process);
    let errors: Vec<String> = lines.map(Result::unwrap).collect();
    assert_eq!(process.wait().unwrap().code(), Some(143), "{errors:?}");
    assert!(sent.elapsed() < Duration::from_secs(10));
    assert!(errors.iter().any(|line| line.contains("stopped by a signal after 0 steps")), "{errors:?}");
    assert!(!sandbox.path("runs/word/tokenizer").exists());
}

#[test]
fn a_second_signal_ends_at_once() {
    let sandbox = Sandbox::new();
    // A first signal does not interrupt an evaluation that takes minutes.
    fs::write(sandbox.path("evaluation.txt"), prose(4, 8_000_000)).unwrap();
    let mut process = sandbox.command("long", &[]).spawn().unwrap();
    let metrics = sandbox.path("runs/long/metrics/metrics.jsonl");
    let began = Instant::now();
    while !metrics.exists() {
        assert!(began.elapsed() < Duration::from_secs(120), "the run did not begin");
        thread::sleep(Duration::from_millis(20));
    }
    thread::sleep(Duration::from_millis(500));
    send("INT", &process);
    thread::sleep(Duration::from_millis(500));
    assert_eq!(process.try_wait().unwrap(), None, "the first signal is only noted");
    let second = Instant::now();
    send("INT", &process);
    assert_eq!(process.wait().unwrap().code(), Some(130));
    assert!(second.elapsed() < Duration::from_secs(5));
    assert!(sandbox.checkpoints("long").is_empty());
}

#[test]
fn a_loss_that_is_no_number_is_not_saved() {
    let sandbox = Sandbox::new();
    let wild = ["learning_rate=1e30", "gradient_clipping_threshold=0", "checkpoint_period=1"];
    let outcome = sandbox.train("wild", &wild);
    outcome.failed(1, &["the loss of step ", "hint: the last good checkpoint is kept"]);
    let unsaved = sandbox.train("unsaved", &[&wild[..], &["enable_checkpointing=false"]].concat());
    let unsaved = unsaved.failed(1, &["the loss of step ", "hint: lower `learning_rate`"]);
    assert!(!unsaved.errors.contains("checkpoint is kept"), "{}", unsaved.errors);
    let saved = sandbox.checkpoints("wild");
    let metrics = sandbox.metrics("wild");
    let aborted = *metrics.training.keys().last().unwrap();
    assert!(metrics.training[&aborted]["learning/loss"].is_null());
    assert!(!saved.is_empty() && saved.iter().all(|step| *step < aborted), "{saved:?}, aborted at {aborted}");
    for step in saved {
        let path = format!("load_full_state_path=runs/wild/checkpoints/{step}");
        let steps = format!("steps={}", step + 3);
        let run = format!("from{step}");
        sandbox.train(&run, &[&path, &steps, "learning_rate=0", "eval_interval=-1"]).succeeded();
        assert!(sandbox.metrics(&run).losses().iter().all(|loss| loss.is_finite()));
    }

    // A run may be set to continue after such values, but it saves no state that is not finite.
    let patient = [&wild[..], &["abort_on_nan_loss=false", "abort_on_inf_loss=false", "steps=12"]].concat();
    sandbox.train("patient", &patient).succeeded();
    assert_eq!(sandbox.metrics("patient").training.len(), 12);
    assert!(sandbox.checkpoints("patient").iter().all(|step| *step < aborted));
}
