//! `maxtext completion`, and the queries of its scripts.

use std::{fs, path::Path, process::Command};

use crate::{check_wrong, maxtext, maxtext_in};

/// The completions of `current` after `words`.
fn complete(shell: &str, directory: &Path, words: &[&str]) -> Vec<String> {
    let index = words.len().to_string();
    let all: Vec<&str> = ["complete", shell, index.as_str()].iter().chain(words).copied().collect();
    let outcome = maxtext_in(directory, &all, &[]);
    assert_eq!((outcome.status, outcome.errors.as_str()), (0, ""));
    outcome.output.lines().map(str::to_owned).collect()
}

#[track_caller]
fn check(words: &[&str], expected: &[&str]) {
    let nowhere = tempfile::tempdir().unwrap();
    assert_eq!(complete("zsh", nowhere.path(), words), expected, "{words:?}");
}

#[test]
fn commands_and_options_are_completed() {
    let commands = [
        "train",
        "sft",
        "dpo",
        "reward",
        "rl",
        "distill",
        "decode",
        "chat",
        "serve",
        "bench",
        "data",
        "estimate",
        "compile",
        "logits",
        "config",
        "checkpoint",
        "tokenizer",
        "plugin",
        "completion",
    ];
    check(&[""], &commands);
    check(&["tr"], &["train"]);
    check(&["config", ""], &["show", "explain", "check", "diff", "models"]);
    check(&["config", "show", "--c"], &["--changed"]);
    check(&["config", "show", "steps=3", "--"], &["--origins", "--changed", "--json", "--help"]);
    check(&["plugin", "install", ""], &["cpu", "gpu", "tpu"]);
    check(&["completion", "z"], &["zsh"]);
    check(&["nothing", ""], &[]);
}

#[test]
fn keys_and_values_are_completed() {
    check(&["train", "learning_rate_s"], &["learning_rate_schedule_steps="]);
    check(&["train", "learning_rate_schedule_steps=3", "learning_rate_s"], &[]);
    check(&["train", "remat_policy=f"], &["remat_policy=full"]);
    check(&["train", "scan_layers="], &["scan_layers=true", "scan_layers=false"]);
    check(&["train", "mlp_activations=silu,l"], &["mlp_activations=silu,linear"]);
    check(&["train", "model_name=llama3.1-8"], &["model_name=llama3.1-8b"]);
    check(
        &["train", "base_config=post_train/sft-vision-c"],
        &["base_config=post_train/sft-vision-chartqa", "base_config=post_train/sft-vision-coco-captions"],
    );
    check(&["train", "no_such_key="], &[]);
    check(&["decode", "prompts_f"], &["prompts_file="]);
    check(&["config", "explain", "rl.num_g"], &["rl.num_generations"]);
    check(&["train", "rl.num_g"], &["rl.num_generations="]);
    check(&["config", "diff", "llama2-7b", "llama3.1-8"], &["llama3.1-8b"]);
    check(&["config", "models", "mistral"], &["mistral-7b"]);
    // The first argument may be a command.
    let nowhere = tempfile::tempdir().unwrap();
    for (words, expected) in [(&["trai"][..], true), (&["steps=3", "trai"], false)] {
        let words: Vec<&str> = ["config", "check"].iter().chain(words).copied().collect();
        let found = complete("zsh", nowhere.path(), &words);
        assert!(found.contains(&"train_data_columns=".to_owned()), "{found:?}");
        assert_eq!(found.contains(&"train".to_owned()), expected, "{found:?}");
    }
}

#[test]
fn files_and_presets_are_completed() {
    let directory = tempfile::tempdir().unwrap();
    fs::create_dir(directory.path().join("runs")).unwrap();
    for name in ["run.yml", "run.txt", "runs/a.yaml", "run me.yml"] {
        fs::write(directory.path().join(name), "").unwrap();
    }
    let check = |words: &[&str], expected: &[&str]| {
        let found = complete("zsh", directory.path(), words);
        let found: Vec<&String> = found.iter().filter(|answer| !answer.ends_with('=')).collect();
        assert_eq!(found, expected, "{words:?}");
    };
    check(&["train", "ru"], &["run.yml", "runs/"]);
    check(&["train", "runs/"], &["runs/a.yaml"]);
    check(&["train", "run.yml", "ru"], &[]);
    check(
        &["train", "load_parameters_path=ru"],
        &["load_parameters_path=run.txt", "load_parameters_path=run.yml", "load_parameters_path=runs/"],
    );
    check(
        &["train", "custom_mesh_and_rule/p"],
        &["custom_mesh_and_rule/pipeline-large-moe", "custom_mesh_and_rule/pure-fsdp"],
    );
    check(&["config", "diff", "runs/"], &["runs/a.yaml"]);
}

#[test]
fn fish_gets_descriptions() {
    let nowhere = tempfile::tempdir().unwrap();
    let found = complete("fish", nowhere.path(), &["train", "learning_rate_s"]);
    assert!(found[0].starts_with("learning_rate_schedule_steps=\t"), "{found:?}");
}

#[test]
fn scripts_are_printed_for_known_shells() {
    for shell in ["bash", "zsh", "fish"] {
        let script = maxtext(&["completion", shell]);
        assert_eq!(script.status, 0, "{}", script.errors);
        assert!(script.output.contains(&format!("complete {shell} ")), "{}", script.output);
    }
    check_wrong(&["completion", "tcsh"], &["tcsh", "bash"]);
}

/// Bash splits words at `=` and replaces only the text after it, so its script has to handle that.
#[test]
fn bash_completes_with_its_script() {
    let has_bash = Command::new("bash").arg("--version").output().is_ok_and(|output| output.status.success());
    if !has_bash {
        return;
    }
    let program = Path::new(env!("CARGO_BIN_EXE_maxtext"));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let directories = program.parent().map(Path::to_owned).into_iter().chain(std::env::split_paths(&path));
    let path = std::env::join_paths(directories).unwrap();
    for (words, expected) in [
        (&["tr"][..], "train"),
        (&["train", "learning_rate_s"], "learning_rate_schedule_steps="),
        (
            &["train", "remat_policy", "="],
            "full minimal minimal_with_context minimal_with_quantization minimal_with_context_and_quantization \
             save_dot_with_context_except_mlp save_dot_except_mlpwi save_dot_except_mlp save_qkv_proj save_out_proj \
             qkv_proj_offloaded minimal_offloaded custom none",
        ),
        (&["train", "remat_policy", "=", "f"], "full"),
        (&["train", "remat_policy", "=", "full", "scan_layers", "=", "t"], "true"),
        (&["train", "mlp_activations", "=", "silu,l"], "silu,linear"),
        (&["config", "show", "--ch"], "--changed"),
        (&["config", "diff", "llama2-7b", "llama3.1-8"], "llama3.1-8b"),
        (&["train", "prompt", "=", "a", "steps"], "steps="),
    ] {
        let quoted: Vec<String> = words.iter().map(|word| format!("'{word}'")).collect();
        let script = format!(
            "source <(maxtext completion bash); complete -p maxtext >/dev/null || exit 3\n\
             COMP_WORDS=(maxtext {}); COMP_CWORD={}; _maxtext maxtext; echo \"${{COMPREPLY[*]}}\"",
            quoted.join(" "),
            words.len()
        );
        let output =
            Command::new("bash").args(["--norc", "-c", &script]).env("PATH", &path).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && errors.is_empty(), "{words:?}: {errors}");
        assert_eq!(String::from_utf8_lossy(&output.stdout).trim_end(), expected, "{words:?}");
    }
}
