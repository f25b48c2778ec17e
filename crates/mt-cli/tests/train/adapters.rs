//! Adapters on the command line: training and resuming, decoding, and PEFT directories.

use std::{fs, path::Path, process::Command, process::Stdio};

use crate::support::{Outcome, Sandbox, outcome};

const LORA: [&str; 4] =
    ["lora.enable_lora=true", "lora.lora_rank=3", "lora.lora_alpha=6", "learning_rate=1e-2"];
const SHORT: [&str; 2] = ["eval_interval=4", "checkpoint_period=4"];

fn maxtext(sandbox: &Sandbox, arguments: &[&str]) -> Outcome {
    let programs = Path::new(env!("CARGO_TARGET_TMPDIR")).join("programs");
    let mut command = Command::new(env!("CARGO_BIN_EXE_maxtext"));
    command.args(arguments);
    if arguments[0] != "checkpoint" || arguments[1] == "export" {
        command.arg(format!("jax_cache_dir={}", programs.display()));
    }
    let command = command.current_dir(sandbox.path("")).env_remove("XLA_FLAGS").stdin(Stdio::null());
    outcome(command)
}

/// The bytes of the logits that a model gives two rows of tokens.
fn logits(sandbox: &Sandbox, keys: &[&str]) -> Vec<f32> {
    fs::write(sandbox.path("tokens.json"), "[[1, 2, 3, 77, 5], [200, 101]]").unwrap();
    let usual = ["logits", "tokens_path=tokens.json", "logits_path=logits.npy"];
    maxtext(sandbox, &[&usual[..], keys].concat()).succeeded();
    let file = fs::read(sandbox.path("logits.npy")).unwrap();
    let start = 10 + usize::from(u16::from_le_bytes([file[8], file[9]]));
    file[start..].chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

#[track_caller]
fn assert_near(one: &[f32], other: &[f32], bound: f32) {
    assert_eq!(one.len(), other.len());
    let largest = one.iter().zip(other).map(|(one, other)| (one - other).abs()).fold(0.0, f32::max);
    assert!(largest <= bound, "{largest:e}");
}

/// A sandbox with the run `base`, and the runs `whole` and `cut` of adapters of it, of which the second was resumed.
fn trained(extra: &[&str]) -> Sandbox {
    let sandbox = Sandbox::new();
    sandbox.train("base", &["steps=6", "eval_interval=-1", "learning_rate=1e-2"]).succeeded();
    let train = |run: &str, steps: &str| {
        let keys = [&LORA[..], &SHORT, extra, &["load_parameters_path=runs/base", steps]].concat();
        sandbox.train(run, &keys)
    };
    train("whole", "steps=8").succeeded();
    train("cut", "steps=5").succeeded();
    train("cut", "steps=8").succeeded();
    sandbox
}

#[test]
fn runs_save_adapters_alone_and_resume_to_the_bit() {
    let sandbox = trained(&["lora.use_dora=true"]);
    assert_eq!(sandbox.metrics("whole").losses(), sandbox.metrics("cut").losses());
    let evaluations = sandbox.metrics("whole").evaluation_losses();
    assert!(evaluations.last() < evaluations.first(), "{evaluations:?}");
    let weights = |run: &str| -> Vec<(String, Vec<u8>)> {
        let state = sandbox.state(run, 7).into_iter();
        let arrays =
            state.filter_map(|(path, array)| Some((path.strip_prefix("items").ok()?.to_owned(), array)));
        // Items within items are copies that are not scaled.
        let name = |path: &Path| path.to_str().unwrap().trim_start_matches("exact/").to_owned();
        arrays.map(|(path, array)| (name(&path), array)).collect()
    };
    for ((name, whole), (other, cut)) in weights("whole").iter().zip(&weights("cut")) {
        assert_eq!(name, other);
        assert!(whole == cut, "{name} differs");
    }
    for (name, _) in weights("whole") {
        let is_adapter = name.contains("kernel_lora_a")
            || name.contains("kernel_lora_b")
            || name.contains("kernel_lora_magnitude");
        let is_counter = name.contains("count") || name.starts_with("step");
        assert!(is_adapter || is_counter, "{name}");
    }

    // The run needs nothing but its own path, and its merged form is the same model.
    let of_run = logits(&sandbox, &["load_parameters_path=runs/whole"]);
    let of_base = logits(&sandbox, &["load_parameters_path=runs/base"]);
    let changes = of_run.iter().zip(&of_base).map(|(one, other)| (one - other).abs()).fold(0.0, f32::max);
    assert!(changes > 1e-2, "{changes}");
    let export = ["checkpoint", "export", "--output", "merged", "load_parameters_path=runs/whole"];
    maxtext(&sandbox, &export).succeeded();
    assert_near(&logits(&sandbox, &["hf_model_path=merged", "dtype=float32"]), &of_run, 1e-4);

    // Through a PEFT directory.
    let export = ["checkpoint", "export", "--format", "peft", "--output", "adapters"];
    let written =
        maxtext(&sandbox, &[&export[..], &["load_parameters_path=runs/whole"]].concat()).succeeded();
    assert!(written.output.contains("in PEFT's format to `adapters`, for the base `"), "{}", written.output);
    let restored = [&LORA[..3], &["lora.use_dora=true", "lora.lora_restore_path=adapters"]].concat();
    let of_peft = logits(&sandbox, &[&restored[..], &["load_parameters_path=runs/base"]].concat());
    assert_near(&of_peft, &of_run, 0.0);

    // The norms of the base are lost in merged weights.
    let unmerge = ["checkpoint", "export", "--unmerge", "--output", "unmerged", "hf_model_path=merged"];
    maxtext(&sandbox, &[&unmerge[..], &restored].concat())
        .failed(2, &["no adapters can be subtracted", "DoRA"]);
    maxtext(&sandbox, &unmerge).failed(2, &["no adapters are named", "hint: "]);

    // A new run begins with these adapters.
    let further = [&LORA[..], &restored[3..], &["load_parameters_path=runs/base", "steps=1"]].concat();
    sandbox.train("further", &further).succeeded();
    let (first, last) = (sandbox.metrics("further").losses()[0], sandbox.metrics("base").losses()[0]);
    assert!(first < last - 0.1, "{first} {last}");
}

#[test]
fn a_run_keeps_its_base_although_that_goes_on() {
    let sandbox = trained(&[]);
    let keys = [&LORA[..], &SHORT, &["load_parameters_path=runs/base"]].concat();
    sandbox.train("going", &[&keys[..], &["steps=5"]].concat()).succeeded();
    // The base goes on, so that its newest step has other weights. The run keeps those with which it began.
    sandbox.train("base", &["steps=7", "eval_interval=-1", "learning_rate=1e-2"]).succeeded();
    sandbox.train("going", &[&keys[..], &["steps=8"]].concat()).succeeded();
    assert_eq!(sandbox.metrics("whole").losses(), sandbox.metrics("going").losses());
    let options = ["logits", "tokens_path=tokens.json", "logits_path=logits.npy"];
    fs::write(sandbox.path("tokens.json"), "[[1, 2]]").unwrap();
    let newest = ["load_parameters_path=runs/base", "lora.lora_restore_path=runs/whole"];
    maxtext(&sandbox, &[&options[..], &LORA[..1], &newest].concat()).failed(2, &["has adapters of `"]);
    let off = ["load_parameters_path=runs/whole", "lora.enable_lora=false"];
    maxtext(&sandbox, &[&options[..], &off].concat()).failed(2, &["holds adapters alone, whose base is `"]);
    let none = [&LORA[..3], &["load_parameters_path=runs/base"]].concat();
    maxtext(&sandbox, &[&options[..], &none].concat()).failed(2, &["no adapters are named"]);

    // Weights that changed or are gone are named.
    let resume = |fragments: &[&str]| {
        sandbox.train("whole", &[&keys[..], &["steps=9"]].concat()).failed(2, fragments);
    };
    fs::write(sandbox.path("runs/base/checkpoints/5/items/other"), "file").unwrap();
    resume(&["checkpoints/5", "as its base, but now there is", "hint: restore these weights"]);
    fs::remove_file(sandbox.path("runs/base/checkpoints/5/items/other")).unwrap();
    fs::rename(sandbox.path("runs/base/checkpoints/5"), sandbox.path("moved")).unwrap();
    resume(&["checkpoints/5", "nothing is there any more, and keys name `", "checkpoints/6"]);
    maxtext(&sandbox, &[&options[..], &["load_parameters_path=runs/whole"]].concat())
        .failed(2, &["does not exist", "lora.lora_restore_path="]);
    let moved = ["load_parameters_path=moved", "lora.lora_restore_path=runs/whole"];
    let of_base = ["small.yml"];
    let moved = [&options[..1], &of_base, &options[1..], &LORA[..1], &moved].concat();
    maxtext(&sandbox, &moved).succeeded();
}

#[test]
fn options_are_those_of_saved_adapters() {
    let sandbox = trained(&["lora.use_rslora=true", "lora.lora_module_path=.*/(query|wo)"]);
    let of_run = logits(&sandbox, &["load_parameters_path=runs/whole"]);
    let base = ["load_parameters_path=runs/base", "lora.enable_lora=true"];
    let of_both = logits(&sandbox, &[&base[..], &["lora.lora_restore_path=runs/whole"]].concat());
    assert_near(&of_both, &of_run, 0.0);
    let export = ["checkpoint", "export", "--format", "peft", "--output", "adapters"];
    maxtext(&sandbox, &[&export[..], &["load_parameters_path=runs/whole"]].concat()).succeeded();
    let of_peft = [&base[..], &["lora.lora_restore_path=adapters"]].concat();
    assert_near(&logits(&sandbox, &of_peft), &of_run, 0.0);
    // Merged into their base and taken out of it again, they leave the base.
    let export = |arguments: &[&str]| {
        maxtext(&sandbox, &[&["checkpoint", "export"], arguments].concat()).succeeded();
    };
    export(&["--output", "merged", "load_parameters_path=runs/whole"]);
    let of_merged = ["hf_model_path=merged", "lora.enable_lora=true", "lora.lora_restore_path=adapters"];
    export(&[&["--unmerge", "--output", "unmerged"], &of_merged[..]].concat());
    let of_base = logits(&sandbox, &["load_parameters_path=runs/base"]);
    assert_near(&logits(&sandbox, &["hf_model_path=unmerged", "dtype=float32"]), &of_base, 1e-5);
    // A run that begins with them needs no more keys, also when it is resumed.
    let further = [&of_peft[..], &["eval_interval=-1", "learning_rate=1e-2"]].concat();
    sandbox.train("further", &[&further[..], &["steps=1"]].concat()).succeeded();
    sandbox.train("further", &[&further[..], &["steps=2"]].concat()).succeeded();
    for (key, fragments) in [
        ("lora.lora_alpha=5", ["`lora.lora_alpha` is 6.0 there and 5.0 here", "`lora.lora_alpha=6.0`"]),
        ("lora.use_dora=true", ["`lora.use_dora` is false there", "`lora.use_dora=false`"]),
        ("lora.use_rslora=false", ["`lora.use_rslora` is true there", "`lora.use_rslora=true`"]),
    ] {
        for adapters in ["adapters", "runs/whole"] {
            let restored = format!("lora.lora_restore_path={adapters}");
            let contradicting = [&base[..], &[restored.as_str(), key, "steps=1"]].concat();
            sandbox.train("wrong", &contradicting).failed(2, &fragments);
        }
    }
    // Adapters of another model are refused with one message.
    sandbox.train("wide", &["steps=1", "eval_interval=-1", "base_mlp_dim=80"]).succeeded();
    for (adapters, fragments) in [
        ("adapters", &["64", "80"][..]),
        ("runs/whole", &["`runs/whole` has adapters of `", "hint: adapters fit only the weights"]),
    ] {
        let restored = format!("lora.lora_restore_path={adapters}");
        let keys = ["load_parameters_path=runs/wide", "base_mlp_dim=80", base[1], &restored, "steps=1"];
        sandbox.train("wrong", &keys).failed(2, fragments);
    }
}

#[test]
fn mistakes_in_keys_are_named() {
    let sandbox = Sandbox::new();
    sandbox.train("run", &["lora.enable_lora=true"]).refused(&[
        "`lora_rank` is `0`",
        "`lora.lora_rank=16`",
        "`lora_alpha` is `0.0`",
    ]);
    let qk = [&LORA[..], &["use_qk_clip=true"]].concat();
    sandbox.train("run", &qk).refused(&["`use_qk_clip`", "freeze"]);
    let misspelled = [&LORA[..], &["lora.lora_module_path=.*/quary"]].concat();
    sandbox.train("run", &misspelled).refused(&["matches no linear map", "`query`"]);
}

#[test]
fn quantized_bases_train_resume_decode_and_merge() {
    let quantized = ["lora.lora_weight_qtype=nf4", "lora.lora_tile_size=8", "lora.lora_dropout=0.1"];
    let sandbox = trained(&quantized);
    assert_eq!(sandbox.metrics("whole").losses(), sandbox.metrics("cut").losses());
    let losses = sandbox.metrics("whole").losses();
    assert!(losses[7] < losses[0], "{losses:?}");
    let of_run = logits(&sandbox, &["load_parameters_path=runs/whole"]);
    let dense =
        [&LORA[..3], &["load_parameters_path=runs/base", "lora.lora_restore_path=runs/whole"]].concat();
    let above_dense = logits(&sandbox, &dense);
    assert!(above_dense != of_run, "the base of the run is not quantized");
    let export = ["checkpoint", "export", "--output", "merged", "load_parameters_path=runs/whole"];
    maxtext(&sandbox, &export).succeeded();
    assert_near(&logits(&sandbox, &["hf_model_path=merged", "dtype=float32"]), &of_run, 1e-4);
    let export = ["checkpoint", "export", "--format", "peft", "--output", "adapters"];
    maxtext(&sandbox, &[&export[..], &["load_parameters_path=runs/whole"]].concat()).succeeded();
    let saved = fs::read_to_string(sandbox.path("adapters/adapter_config.json")).unwrap();
    assert!(saved.contains("\"lora_dropout\": 0.1"), "{saved}");
    let restored = [&LORA[..3], &quantized, &["lora.lora_restore_path=adapters"]].concat();
    let of_peft = logits(&sandbox, &[&restored[..], &["load_parameters_path=runs/base"]].concat());
    assert_near(&of_peft, &of_run, 0.0);

    let refused = |keys: &[&str], fragments: &[&str]| {
        sandbox
            .train("wrong", &[&LORA[..], &["load_parameters_path=runs/base"], keys].concat())
            .failed(2, fragments);
    };
    refused(&["lora.lora_weight_qtype=int3"], &["weights of 3 bits below LoRA adapters"]);
    refused(&["lora.lora_weight_qtype=mxfp4"], &["weights in `mxfp4` below LoRA adapters"]);
    refused(&["lora.lora_weight_qtype=nf3"], &["lora_weight_qtype", "nf4"]);
    refused(&["lora.lora_weight_qtype=nf4", "lora.lora_tile_size=5"], &["does not divide the 32 inputs"]);
    refused(&["lora.lora_dropout=1"], &["drops everything"]);
    let drawn = [&LORA[..], &["lora.lora_weight_qtype=nf4"]].concat();
    sandbox.train("wrong", &drawn).refused(&["a quantized base of random weights"]);
    let changed = [&LORA[..], &SHORT, &["load_parameters_path=runs/base", "steps=9"]].concat();
    sandbox.train("whole", &changed).failed(2, &["lora_weight_qtype"]);
}

#[test]
fn preferences_share_a_quantized_base() {
    let sandbox = Sandbox::new();
    sandbox.train("base", &["steps=6", "eval_interval=-1", "learning_rate=1e-2"]).succeeded();
    let pair = |index: u32| {
        let (prompt, chosen) = (format!("Say {index}: "), format!("it is {index}"));
        serde_json::json!({"prompt": prompt, "chosen": chosen, "rejected": "no"}).to_string()
    };
    let pairs: Vec<String> = (0..8).map(pair).collect();
    fs::write(sandbox.path("pairs.jsonl"), pairs.join("\n")).unwrap();
    let keys = [
        "use_dpo=true",
        "hf_path=json",
        "hf_train_files=pairs.jsonl",
        "hf_eval_files=",
        "eval_interval=-1",
        "load_parameters_path=runs/base",
        "lora.lora_weight_qtype=int8",
        "steps=4",
    ];
    for (run, reference) in [("first", ""), ("named", "dpo.reference_path=runs/base")] {
        let further: Vec<&str> = [reference].into_iter().filter(|key| !key.is_empty()).collect();
        sandbox.train(run, &[&LORA[..], &keys, &further].concat()).succeeded();
        // Policy and reference are the same model at first.
        let loss = sandbox.metrics(run).losses()[0];
        assert!((loss - std::f64::consts::LN_2).abs() < 1e-6, "{loss}");
    }
    assert_eq!(sandbox.metrics("first").losses(), sandbox.metrics("named").losses());
}
