//! Training data of all formats.

use std::{fs, path::Path};

use crate::support::{Sandbox, prose};

/// Trains a few steps on the data that `keys` name, and returns the losses.
#[track_caller]
fn losses(sandbox: &Sandbox, run: &str, keys: &[&str], steps: usize) -> Vec<f64> {
    sandbox.train(run, keys).succeeded();
    let losses = sandbox.metrics(run).losses();
    assert_eq!(losses.len(), steps, "{run}");
    assert!(losses.iter().all(|loss| (2.0..7.0).contains(loss)), "{run}: {losses:?}");
    losses
}

#[test]
fn the_same_documents_in_any_format_train_the_same_model() {
    let sandbox = Sandbox::new();
    let documents = fs::read_to_string(sandbox.path("train.txt")).unwrap();
    let json: String = documents
        .lines()
        .map(|line| serde_json::json!({ "text": line, "n": 1 }).to_string() + "\n")
        .collect();
    fs::write(sandbox.path("train.jsonl"), json).unwrap();
    let train = |run, keys: &[&str]| losses(&sandbox, run, &[keys, &["steps=5"]].concat(), 5);
    let lines = train("lines", &["hf_text_unit=line"]);
    let json = train("json", &["hf_path=json", "hf_train_files=*.jsonl", "eval_interval=-1"]);
    assert_eq!(lines, json);
    assert_ne!(lines, train("file", &["hf_text_unit=file"]));
    let evaluation = sandbox.metrics("lines").evaluation;
    assert!(evaluation.keys().eq(&[0, 5]), "{evaluation:?}");
    assert!(sandbox.metrics("json").evaluation.is_empty());
}

#[test]
fn parquet_and_synthetic_data() {
    let sandbox = Sandbox::new();
    let parquet = Path::new(env!("CARGO_MANIFEST_DIR")).join("../mt-data/tests/goldens/zstd_v2.parquet");
    fs::copy(parquet, sandbox.path("train.parquet")).unwrap();
    let keys = ["hf_path=parquet", "hf_train_files=train.parquet", "eval_interval=-1", "steps=5"];
    losses(&sandbox, "parquet", &keys, 5);
    fs::write(
        sandbox.path("synthetic.yml"),
        "base_config: small.yml\ndataset_type: synthetic\neval_interval: 2\neval_steps: 2\nsteps: 5\n",
    )
    .unwrap();
    let mut command = sandbox.command("synthetic", &[]);
    let arguments: Vec<_> = command.get_args().map(|argument| argument.to_owned()).collect();
    command = std::process::Command::new(command.get_program());
    command.current_dir(sandbox.path("")).arg("train").arg("synthetic.yml").args(&arguments[2..]);
    crate::support::outcome(&mut command).succeeded();
    let metrics = sandbox.metrics("synthetic");
    assert_eq!(metrics.losses().len(), 5);
    assert!(metrics.evaluation.keys().eq(&[0, 2, 4, 5]));
}

#[test]
fn epochs_end_and_batches_are_reused() {
    let sandbox = Sandbox::new();
    fs::write(sandbox.path("short.txt"), prose(3, 1_000)).unwrap();
    let keys = ["hf_train_files=short.txt", "eval_interval=-1"];
    let train = |run, more: &[&str]| {
        let outcome = sandbox.train(run, &[&keys, more].concat()).succeeded();
        (outcome.errors, sandbox.metrics(run).training.len())
    };
    let (errors, one) = train("one", &["num_epoch=1"]);
    assert!(errors.contains(&format!("the data ended after {one} steps")), "{errors}");
    let (errors, three) = train("three", &["num_epoch=3"]);
    assert!(errors.contains(&format!("the data ended after {three} steps")), "{errors}");
    assert!((2 * one..=3 * one + 3).contains(&three), "{one} and {three}");
    // Repeating the command finds no data left.
    let (errors, again) = train("one", &["num_epoch=1"]);
    assert!(errors.contains(&format!("the data ended after {one} steps")), "{errors}");
    assert_eq!(again, one);

    // With a learning rate of 0, equal losses show that each step sees the same batch.
    let same = ["reuse_example_batch=1", "learning_rate=0", "steps=4", "num_epoch=1"];
    train("same", &same);
    let losses = sandbox.metrics("same").losses();
    assert!(losses.iter().all(|loss| *loss == losses[0]), "{losses:?}");
    train("other", &["learning_rate=0", "steps=4"]);
    let losses = sandbox.metrics("other").losses();
    assert_ne!(losses[0], losses[1]);
}

#[test]
fn padding_continues_data_that_has_ended() {
    let sandbox = Sandbox::new();
    fs::write(sandbox.path("short.txt"), prose(3, 1_000)).unwrap();
    let keys = ["hf_train_files=short.txt", "num_epoch=1", "eval_interval=-1"];
    let train = |run: &str, more: &[&str]| {
        let outcome = sandbox.train(run, &[&keys, more].concat()).succeeded();
        (outcome.errors, sandbox.metrics(run).losses())
    };
    let (errors, ends) = train("ends", &["steps=50"]);
    assert!(errors.contains("the data ended after"), "{errors}");
    let steps = format!("steps={}", ends.len() + 4);
    let padding = ["generate_padding_batch_train=true", &steps];
    let (errors, continues) = train("continues", &padding);
    assert!(!errors.contains("the data ended"), "{errors}");
    assert_eq!((continues.len(), &continues[..ends.len()]), (ends.len() + 4, &ends[..]));
    // One batch may hold the rows that do not fill one.
    assert!(continues[ends.len() + 1..].iter().all(|loss| *loss == 0.0), "{continues:?}");
    // A run that stops among its padding resumes there.
    train("parts", &[padding[0], &format!("steps={}", ends.len() + 2)]);
    assert_eq!(train("parts", &padding).1, continues);
}

#[test]
fn hosts_workers_and_padding_leave_evaluations_as_they_are() {
    let sandbox = Sandbox::new();
    let evaluated = |run: &str, more: &[&str]| {
        sandbox.train(run, &[&["steps=4", "eval_interval=2"], more].concat()).succeeded();
        let metrics = sandbox.metrics(run);
        (metrics.losses(), metrics.evaluation_losses())
    };
    let usual = evaluated("usual", &[]);
    let workers = [
        "grain_worker_count_eval=2",
        "grain_per_worker_buffer_size_eval=3",
        "grain_num_threads_eval=1",
        "grain_prefetch_buffer_size_eval=2",
        "grain_per_worker_buffer_size=3",
        "grain_num_threads=0",
        "grain_prefetch_buffer_size=3",
    ];
    assert_eq!(evaluated("workers", &workers), usual);
    assert_eq!(evaluated("hosts", &["expansion_factor_real_data=4"]), usual);
    assert_eq!(evaluated("padded", &["generate_padding_batch_eval=true", "eval_steps=30"]), usual);
    sandbox
        .train("endless", &["eval_interval=2", "generate_padding_batch_eval=true"])
        .refused(&["`generate_padding_batch_eval` is `true`", "eval_steps"]);
}
