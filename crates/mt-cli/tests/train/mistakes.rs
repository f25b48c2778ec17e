//! Wrong input causes one message and status 2, and damages nothing.

use std::{
    fs,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use crate::support::{Sandbox, outcome};

#[test]
fn values_that_do_not_fit() {
    let sandbox = Sandbox::new();
    let check = |keys: &[&str], fragments: &[&str]| {
        sandbox.train("wrong", keys).refused(fragments);
    };
    check(&["setps=3"], &["unknown key `setps`", "hint: did you mean `steps`?"]);
    check(&["steps=abc"], &["`steps` is `abc`", "whole number"]);
    check(&["adam_b1=-1"], &["`adam_b1` is `-1`", "out of bounds"]);
    check(&["head_dim=41"], &["`head_dim` is `41`", "`head_dim=42`"]);
    check(&["base_num_query_heads=3"], &["`base_num_query_heads` is `3`", "`base_num_kv_heads`"]);
    let devices = "num_cpu_devices=4";
    check(&[devices, "ici_fsdp_parallelism=3"], &["`ici_fsdp_parallelism=3`", "which is 4"]);
    check(&[devices, "per_device_batch_size=0.3"], &["`per_device_batch_size` is `0.3`", "1.2 sequences"]);
    check(&[devices, "per_device_batch_size=0.5"], &["a batch of 2 sequences", "4 shards"]);
    check(
        &["vocab_size=100"],
        &["`byte` has 259 tokens", "`vocab_size` of 100", "hint: set `vocab_size=259`"],
    );
    check(
        &["decoder_block=gpt3", "trainable_position_size=16", "max_target_length=32"],
        &["`max_target_length` is 32", "16 learned positions", "hint: set `max_target_length=16`"],
    );
    check(&["run_name=../elsewhere"], &["`run_name`"]);
    check(&["adamw_mask=['norm(']"], &["`norm(` of `adamw_mask` is not a regular expression", "hint: "]);
    check(&["adamw_mask=['.*bais']"], &["`.*bais` of `adamw_mask` matches no parameter name", "hint: "]);
    check(
        &["trainable_parameters_mask=['mlp','embeding']"],
        &[
            "`embeding` of `trainable_parameters_mask` matches no parameter name",
            "hint: did you mean `embedding`?",
        ],
    );
    check(
        &["lr_schedule_type=wsd", "warmup_steps_fraction=0.6", "wsd_decay_steps_fraction=0.5"],
        &["`warmup_steps_fraction` is `0.6`", "`wsd_decay_steps_fraction` is `0.5`", "hint: "],
    );
    check(
        &["use_qk_clip=true", "decoder_block=qwen3", "use_qk_norm=true"],
        &["`use_qk_clip` is `true` (command line)", "normalizes queries and keys", "hint: leave out"],
    );
    assert!(sandbox.checkpoints("wrong").is_empty());
}

#[test]
fn files_that_do_not_fit() {
    let sandbox = Sandbox::new();
    fs::write(sandbox.path("empty.txt"), "").unwrap();
    fs::write(sandbox.path("torn.parquet"), [b"PAR1".as_slice(), &[0; 300]].concat()).unwrap();
    fs::write(sandbox.path("latin.txt"), b"caf\xe9 au lait").unwrap();
    fs::write(sandbox.path("torn.jsonl"), "{\"text\": \"a\"}\n{\"text\": \n").unwrap();
    let check = |keys: &[&str], fragments: &[&str]| {
        sandbox.train("wrong", keys).refused(fragments);
    };
    check(&["hf_train_files=nothing/*.txt"], &["no file matches `nothing/*.txt`", "hint: "]);
    check(&["hf_train_files=empty.txt"], &["`empty.txt` holds no document"]);
    check(&["hf_eval_files=empty.txt"], &["`empty.txt` holds no document"]);
    check(
        &["hf_path=parquet", "hf_train_files=torn.parquet", "eval_interval=-1"],
        &["`torn.parquet` is not a readable parquet file"],
    );
    // A bad line in the middle of a file is found before the run starts, even if the first batch does not include it.
    let json = |file: &str, fragments: &[&str]| {
        let files = format!("hf_train_files={file}");
        check(&["hf_path=json", &files, "eval_interval=-1"], fragments);
    };
    json("torn.jsonl", &["`torn.jsonl`, line 2"]);
    fs::write(sandbox.path("null.jsonl"), "{\"text\": \"a\"}\n\n{\"text\": null}\n").unwrap();
    json("null.jsonl", &["`null.jsonl`, line 3: column `text` holds null", "hint: "]);
    check(&["hf_train_files=latin.txt"], &["`latin.txt` is not UTF-8"]);
    check(
        &["tokenizer_type=huggingface", "tokenizer_path=train.txt"],
        &["cannot read the tokenizer `train.txt`"],
    );
    check(
        &["base_output_directory=train.txt"],
        &["cannot write to `train.txt/wrong`", "`base_output_directory`"],
    );
    check(&["metrics_file=train.txt"], &["`metrics_file` is `train.txt`", "has lines already"]);
    check(
        &["pjrt_plugin_path=train.txt"],
        &["cannot load PJRT plugin", "train.txt", "`maxtext plugin list`"],
    );
    let dump = ["dump_hlo=true", "dump_hlo_local_dir=train.txt"];
    check(&dump, &["cannot write programs to `train.txt`", "`dump_hlo_local_dir`"]);
    check(&["load_parameters_path=nowhere"], &["`nowhere` is not a checkpoint", "hint: "]);
    assert!(fs::read_to_string(sandbox.path("train.txt")).unwrap().len() >= 40_000);
}

#[test]
fn metrics_that_cannot_be_written() {
    let sandbox = Sandbox::new();
    fs::write(sandbox.path("afile"), "text").unwrap();
    fs::create_dir(sandbox.path("directory")).unwrap();
    for (file, problem) in [
        ("afile", "has lines already"),
        ("afile/x.jsonl", "is a file"),
        ("directory", "is a directory"),
        ("/proc/x/y", "cannot be written to"),
    ] {
        let key = format!("metrics_file={file}");
        sandbox.train("unwritten", &[&key, "steps=1"]).refused(&["`metrics_file` is", problem, "hint: "]);
        assert!(!sandbox.path("runs/unwritten").exists(), "{file}");
    }
}

#[test]
fn checkpoints_of_another_shape() {
    let sandbox = Sandbox::new();
    sandbox.train("base", &["steps=6", "eval_interval=-1"]).succeeded();
    let state = sandbox.state("base", 5);
    for key in ["load_parameters_path=runs/base", "load_full_state_path=runs/base"] {
        for other in ["base_emb_dim=16", "base_mlp_dim=32", "vocab_size=300"] {
            sandbox.train("other", &[key, other, "eval_interval=-1"]).refused(&[
                "does not fit",
                "stored",
                "hint: ",
            ]);
        }
        sandbox
            .train("other", &[key, "base_num_decoder_layers=3", "scan_layers=false"])
            .refused(&["does not fit"]);
    }
    assert!(sandbox.checkpoints("other").is_empty());
    assert_eq!(sandbox.state("base", 5), state);
}

#[test]
fn a_directory_has_one_run_at_a_time() {
    let sandbox = Sandbox::new();
    let endless = ["steps=1000000", "eval_interval=-1", "log_period=1000000"];
    let mut first = sandbox.command("run", &endless).spawn().unwrap();
    let began = Instant::now();
    while sandbox.checkpoints("run").is_empty() {
        assert!(began.elapsed() < Duration::from_secs(120), "the run did not begin");
        thread::sleep(Duration::from_millis(20));
    }
    let second = sandbox.train("run", &endless);
    let process = format!("(process {})", first.id());
    second.refused(&["is in use by another run", &process, "another `run_name`"]);
    assert_eq!(first.try_wait().unwrap(), None);
    first.kill().unwrap();
    first.wait().unwrap();
    let newest = *sandbox.checkpoints("run").last().unwrap();
    // The lock is released when the process dies.
    let steps = format!("steps={}", newest + 3);
    sandbox.train("run", &[&steps, "eval_interval=-1"]).succeeded();
}

#[test]
fn what_decoding_would_do_is_checked() {
    let sandbox = Sandbox::new();
    sandbox.train("run", &["steps=6", "eval_interval=-1"]).succeeded();
    let check = |keys: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_maxtext"));
        let all = ["config", "check", "decode", "load_parameters_path=runs/run"].iter().chain(keys);
        let command = command.args(all).current_dir(sandbox.path("")).env_remove("XLA_FLAGS");
        outcome(command.stdin(Stdio::null()))
    };
    let checked = check(&["prompt=Hello"]).succeeded();
    assert!(
        checked.output.starts_with("the configuration of `maxtext decode` has no mistakes"),
        "{}",
        checked.output
    );
    check(&["prompt=Hello", "max_prefill_predict_length=3"]).refused(&["prompt 1 has", "the 3 of"]);
    check(&["prompts_file=none.txt"]).refused(&["`none.txt`"]);
    check(&["num_cpu_devices=2", "ici_tensor_parallelism=3"]).refused(&["does not divide the 2 devices"]);
    check(&["decode_sampling_strategy=topk"]).refused(&["`decode_sampling_top_k` is `0`"]);
}

/// The hashes of n-grams follow from the numbers of tokens. The run keeps them, and refuses another tokenizer.
#[test]
fn memories_keep_the_numbers_of_tokens() {
    let sandbox = Sandbox::new();
    let maxtext = |directory: &str, arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_maxtext"));
        command.args(arguments).current_dir(sandbox.path(directory)).env_remove("XLA_FLAGS");
        outcome(command.stdin(Stdio::null()))
    };
    let train_tokenizer = |size: &str| {
        let files = ["hf_path=text", "hf_train_files=train.txt"];
        let own = ["tokenizer", "train", "--vocab-size", size, "--output", "own"];
        maxtext("", &[&own[..], &files].concat()).succeeded();
    };
    train_tokenizer("270");
    let keys = [
        "decoder_block=deepseek",
        "attention_type=mla",
        "kv_lora_rank=8",
        "qk_nope_head_dim=8",
        "qk_rope_head_dim=4",
        "v_head_dim=8",
        "base_num_kv_heads=4",
        "num_experts=4",
        "num_experts_per_tok=2",
        "first_num_dense_layers=1",
        "base_moe_mlp_dim=16",
        "engram_layers=[1]",
        "engram_num_heads=2",
        "engram_head_dim=8",
        "engram_vocab_bases=[50,70]",
        "tokenizer_type=huggingface",
        "tokenizer_path=own",
        "vocab_size=300",
        "eval_interval=-1",
    ];
    sandbox.train("memories", &[&keys[..], &["steps=2"]].concat()).succeeded();
    assert!(sandbox.path("runs/memories/token_numbers.json").is_file());
    // Neither resuming nor other commands need the tokenizer's own files again.
    fs::remove_dir_all(sandbox.path("own")).unwrap();
    sandbox.train("memories", &[&keys[..], &["steps=3"]].concat()).succeeded();
    fs::create_dir(sandbox.path("elsewhere")).unwrap();
    let run = "load_parameters_path=../runs/memories";
    maxtext("elsewhere", &["decode", run, "prompt=The", "max_target_length=12"]).succeeded();
    fs::write(sandbox.path("elsewhere/tokens.json"), "[[5, 6, 7]]").unwrap();
    let logits = ["logits", run, "tokens_path=tokens.json", "logits_path=logits.npy"];
    maxtext("elsewhere", &logits).succeeded();
    let export = ["checkpoint", "export", run, "--output", "published"];
    maxtext("elsewhere", &export).failed(2, &["no name for the parameter", "engram"]);
    let export = ["checkpoint", "export", run, "--output", "tokens.json"];
    maxtext("elsewhere", &export).failed(2, &["cannot write to `tokens.json`", "`--output`"]);
    // The run's parameters begin another run, whose memories have the same numbers.
    let begun = ["steps=1", "load_parameters_path=runs/memories"];
    let without_path: Vec<&str> =
        keys.iter().copied().filter(|key| !key.starts_with("tokenizer_path")).collect();
    sandbox.train("begun", &[without_path.as_slice(), &begun].concat()).succeeded();
    let numbers = |run: &str| fs::read(sandbox.path(&format!("runs/{run}/token_numbers.json"))).unwrap();
    assert!(numbers("begun") == numbers("memories"));
    // Another tokenizer would number tokens in another way.
    train_tokenizer("280");
    let refusal = ["the tokenizer `", "is not the one whose tokens", "hint: leave out `tokenizer_path`"];
    sandbox.train("memories", &[&keys[..], &["steps=4"]].concat()).failed(2, &refusal);
    sandbox.train("begun", &[&keys[..], &["steps=2", begun[1]]].concat()).failed(2, &refusal);
    let other = ["decode", run, "prompt=The", "tokenizer_path=../own"];
    maxtext("elsewhere", &other).failed(2, &refusal);
    // A damaged file is named.
    fs::write(sandbox.path("runs/memories/token_numbers.json"), "{}").unwrap();
    maxtext("elsewhere", &logits).failed(2, &["token_numbers.json` does not hold the numbers of tokens"]);
}
