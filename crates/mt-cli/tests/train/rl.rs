//! `maxtext rl`: recorded rollouts, sampled ones, evaluations, kills and mistakes.

use std::{
    fs,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use crate::{
    preference::write_rows,
    support::{Outcome, Sandbox, outcome},
};

/// A model of bytes with a batch of four prompts with four answers each.
const CONFIG: &str = "\
tokenizer_type: byte
vocab_size: 260
base_emb_dim: 32
base_num_decoder_layers: 2
base_mlp_dim: 64
base_num_query_heads: 4
base_num_kv_heads: 2
head_dim: 16
max_target_length: 24
max_prefill_predict_length: 12
dtype: float32
learning_rate: 1e-3
learning_rate_schedule_steps: 60
log_period: 1
checkpoint_period: 2
base_output_directory: runs
steps: 6
batch_size: 4
num_generations: 4
grpo_beta: 0.04
num_epoch: -1
";

const PROMPTS: &[&str] = &["hf_train_files=prompts.jsonl", "reward_functions=exact,command", LENGTHS];

/// A reward that differs between answers of a random model.
const LENGTHS: &str = "reward_command=python3 -u -c 'import json, sys\n\
    for line in sys.stdin: print(json.dumps({\"reward\": sum(json.loads(line)[\"completion\"].encode()) % 7}))'";

fn sandbox() -> Sandbox {
    let sandbox = Sandbox::new();
    fs::write(sandbox.path("rl.yml"), CONFIG).unwrap();
    let row = |number: usize| json!({"prompt": format!("{number}+1="), "answer": (number + 1).to_string()});
    write_rows(&sandbox, "prompts.jsonl", &(0..11).map(row).collect::<Vec<_>>());
    write_rows(&sandbox, "others.jsonl", &(20..25).map(row).collect::<Vec<_>>());
    sandbox
}

fn command(sandbox: &Sandbox, run: &str, keys: &[&str]) -> Command {
    let name = format!("run_name={run}");
    sandbox.program(&[&["rl", "rl.yml", &name], keys].concat())
}

fn rl(sandbox: &Sandbox, run: &str, keys: &[&str]) -> Outcome {
    outcome(&mut command(sandbox, run, keys))
}

/// The lines of a run's file.
fn rows(sandbox: &Sandbox, path: &str) -> Vec<Value> {
    let text = fs::read_to_string(sandbox.path(path)).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn answers_are_sampled_judged_recorded_and_learned() {
    let sandbox = sandbox();
    let evaluation = ["hf_eval_files=others.jsonl", "eval_interval=3"];
    let sampling = [
        "num_eval_passes=4",
        "eval_sampling_strategy=all",
        "generation_configs={all: {eval_temperature: 1.0}}",
    ];
    let outcome = rl(&sandbox, "first", &[PROMPTS, &evaluation, &sampling].concat()).succeeded();
    assert!(outcome.output.contains("reward: "), "{}", outcome.output);
    assert!(outcome.output.contains("accuracy="), "{}", outcome.output);
    let metrics = sandbox.metrics("first");
    assert!(metrics.evaluation.keys().copied().eq([0, 3, 6]), "{:?}", metrics.evaluation);
    for record in metrics.evaluation.values() {
        for name in ["eval/accuracy", "eval/pass@4", "eval/maj@4", "eval/reward", "eval/format"] {
            assert!(record[name].is_f64(), "{name}: {record}");
        }
    }
    // The trainer computes what the sampler computed.
    let differences = metrics.series("learning/sampling/sampling_logp_difference/mean");
    assert!(differences.len() == 6 && differences.iter().all(|value| *value <= 1e-5), "{differences:?}");
    assert!(metrics.series("learning/reward_std").iter().all(|deviation| *deviation > 0.0));
    let losses = metrics.losses();
    assert!(losses[0].abs() < 1e-5 && losses.iter().all(|loss| loss.is_finite()), "{losses:?}");
    let rollouts = rows(&sandbox, "runs/first/rollouts/rollouts.jsonl");
    assert_eq!(rollouts.len(), 6 * 16);
    assert!(rollouts.iter().all(|row| row["log_probabilities"].as_array().unwrap().len()
        == row["completion"].as_array().unwrap().len()));
    let first: Vec<&Value> = rollouts[..4].iter().map(|row| &row["prompt"]).collect();
    assert!(first.iter().all(|prompt| *prompt == first[0]), "{first:?}");
    assert_ne!(rollouts[0]["completion"], rollouts[1]["completion"]);
    let rewards = &rollouts[0]["rewards"];
    assert!(rewards["exact"].is_f64() && rewards["command"].is_f64(), "{rewards}");
    assert_eq!(rows(&sandbox, "runs/first/rollouts/evaluation.jsonl").len(), 3 * 5 * 4);

    // The recorded answers give the same first step, and the same weights after it.
    let recorded =
        ["rl.rollouts_path=runs/first/rollouts/rollouts.jsonl", "steps=1", "rl.old_policy=trainer"];
    rl(&sandbox, "replayed", &[&recorded[..], &["num_epoch=1"]].concat()).succeeded();
    let replayed = sandbox.metrics("replayed");
    for name in ["learning/loss", "learning/raw_grad_norm", "learning/param_norm", "learning/kl"] {
        assert_eq!(replayed.series(name)[0], metrics.series(name)[0], "{name}");
    }
}

#[test]
fn killed_runs_continue_exactly() {
    let sandbox = sandbox();
    let check = |name: &str, keys: &[&str]| {
        let keys = [PROMPTS, keys].concat();
        let (whole, killed) = (format!("{name}-whole"), format!("{name}-killed"));
        rl(&sandbox, &whole, &keys).succeeded();
        for kill in 0..3 {
            let file = fs::File::create(sandbox.path("output.txt")).unwrap();
            let mut process = command(&sandbox, &killed, &keys).stdout(file).spawn().unwrap();
            let lines = || fs::read_to_string(sandbox.path("output.txt")).unwrap_or_default();
            let began = Instant::now();
            while lines().matches("completed step").count() <= kill && process.try_wait().unwrap().is_none() {
                assert!(began.elapsed() < Duration::from_secs(300), "no step after five minutes");
                thread::sleep(Duration::from_millis(2));
            }
            process.kill().unwrap();
            process.wait().unwrap();
        }
        rl(&sandbox, &killed, &keys).succeeded();
        sandbox.assert_same_run(&whole, &killed);
        let file =
            |run: &str| fs::read(sandbox.path(&format!("runs/{run}/rollouts/rollouts.jsonl"))).unwrap();
        assert!(file(&whole) == file(&killed), "{name}: the rollouts differ");
    };
    check("plain", &["hf_eval_files=others.jsonl", "eval_interval=2"]);
    // A checkpoint in the middle of a batch, whose answers the resumed run reads.
    check("several", &["num_iterations=2", "num_mini_batches=2", "steps=10", "rl.importance_cap=2"]);
    check("rloo", &["loss_algo=rloo", "grpo_beta=0.1"]);
    check("dapo", &["loss_algo=dapo", "num_generations=2", "rl.dynamic_sampling_rounds=2"]);
}

#[test]
fn placements_and_micro_batches_change_no_loss() {
    let sandbox = sandbox();
    rl(&sandbox, "sampled", &[PROMPTS, &["steps=1"]].concat()).succeeded();
    let recorded = ["rl.rollouts_path=runs/sampled/rollouts/rollouts.jsonl", "num_epoch=3", "steps=3"];
    rl(&sandbox, "whole", &recorded).succeeded();
    let expected = sandbox.metrics("whole").losses();
    assert!(expected[2] != expected[0], "{expected:?}");
    for (name, keys) in [
        ("accumulated", &["gradient_accumulation_steps=4"][..]),
        ("fsdp", &["num_cpu_devices=8", "ici_fsdp_parallelism=8"]),
        ("tensor", &["num_cpu_devices=8", "ici_fsdp_parallelism=4", "ici_tensor_parallelism=2"]),
    ] {
        rl(&sandbox, name, &[&recorded[..], keys].concat()).succeeded();
        for (own, whole) in sandbox.metrics(name).losses().iter().zip(&expected) {
            assert!((own - whole).abs() <= 1e-5 * whole.abs().max(0.1), "{name}: {own}, not {whole}");
        }
    }
}

#[test]
fn failing_rewards_stop_nothing_and_are_counted() {
    let sandbox = sandbox();
    let keys = [
        "hf_train_files=prompts.jsonl",
        "reward_functions=exact,command",
        "reward_command=read line; echo '{\"reward\": 1}'; exit 1",
        "reward_retries=0",
        "reward_timeout=5",
        "steps=2",
    ];
    let outcome = rl(&sandbox, "failing", &keys).succeeded();
    assert!(outcome.errors.contains("`reward_command` has failed"), "{}", outcome.errors);
    let failed = sandbox.metrics("failing").series("learning/rewards/command/failed");
    assert!(failed.iter().all(|count| *count > 0.0), "{failed:?}");
}

#[test]
fn wrong_input_is_refused() {
    let sandbox = sandbox();
    write_rows(&sandbox, "texts.jsonl", &[json!({"prompt": "1+1="})]);
    write_rows(
        &sandbox,
        "odd.jsonl",
        &[json!({"prompt": [1], "completion": [2, 3], "log_probabilities": [-1.0]})],
    );
    write_rows(&sandbox, "bare.jsonl", &vec![json!({"prompt": [1], "completion": [2]}); 16]);
    let file = "hf_train_files=prompts.jsonl";
    let check = |keys: &[&str], fragments: &[&str]| {
        rl(&sandbox, "wrong", keys).refused(fragments);
    };
    check(&[], &["`hf_train_files` is", "hint: name the files"]);
    check(&[file, "per_device_batch_size=2"], &["a batch has `batch_size` prompts", "hint: "]);
    check(&[file, "num_mini_batches=3"], &["a batch has 16 answers", "into 3 pieces"]);
    check(&[file, "packing=true"], &["each row holds one answer", "hint: use `packing=false`"]);
    check(&[file, "use_sft=true"], &["a run has one objective"]);
    check(&[file, "loss_algo=ppo"], &["value model", "not built yet"]);
    check(&[file, "loss_algo=rlo"], &["loss_algo", "rlo"]);
    check(&[file, "reward_functions=answer,maths"], &["there is no function `maths`", "`math`"]);
    check(&[file, "reward_functions=command"], &["`reward_command` is", "hint: "]);
    check(&[file, "num_eval_passes=2"], &["all answers to a prompt would be equal"]);
    check(&[file, "eval_sampling_strategy=standard"], &["has no such settings"]);
    check(&[file, "rl.dual_clip=1.1"], &["are clipped already"]);
    check(&[file, "use_agentic_rollout=true"], &["`use_agentic_rollout`", "not built yet"]);
    check(&[file, "decode_sampling_temperature=0"], &["would be equal"]);
    check(
        &["hf_train_files=texts.jsonl", "train_data_columns=[prompt]"],
        &["the prompt \"1+1=\" has none", "hint: name the column of answers"],
    );
    check(&["hf_train_files=texts.jsonl"], &["has no column `answer`", "hint: "]);
    check(&["rl.rollouts_path=absent.jsonl"], &["absent.jsonl"]);
    check(&["rl.rollouts_path=odd.jsonl"], &["`odd.jsonl` holds 1 rollouts, but a batch has 16"]);
    let one = ["batch_size=1", "num_generations=1"];
    check(
        &[&["rl.rollouts_path=odd.jsonl"], &one[..]].concat(),
        &["line 1: `log_probabilities` has 1 elements"],
    );
    check(&["rl.rollouts_path=bare.jsonl"], &["it has no `reward`", "hint: "]);
}

#[test]
fn tasks_are_generated_once() {
    let sandbox = sandbox();
    let generate = |kind: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_maxtext"));
        command.args(["data", "generate", kind, "--directory", "tasks", "--count", "30", "--held-out", "5"]);
        outcome(command.current_dir(sandbox.path("")))
    };
    let made = generate("addition").succeeded();
    assert!(made.output.contains("30 tasks"), "{}", made.output);
    assert_eq!(rows(&sandbox, "tasks/train.jsonl").len(), 30);
    assert_eq!(rows(&sandbox, "tasks/evaluation.jsonl").len(), 5);
    generate("addition").refused(&["`tasks/train.jsonl` exists already", "hint: "]);
    generate("division").refused(&["there is no task `division`", "`multiplication`"]);
}
