//! `maxtext checkpoint`.

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde_json::Value;

use crate::{check_output, check_wrong, maxtext, maxtext_in, succeed, text};

fn golden(name: &str) -> String {
    let families = Path::new(env!("CARGO_MANIFEST_DIR")).join("../mt-models/tests/goldens/families");
    families.join(name).to_str().unwrap().to_owned()
}

#[track_caller]
fn json(arguments: &[&str]) -> Value {
    serde_json::from_str(&succeed(arguments).output).unwrap()
}

fn object(path: PathBuf) -> Value {
    serde_json::from_slice(&fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display())))
        .unwrap()
}

/// Exports a model, and returns the verdict of comparing its values with those of `original`.
#[track_caller]
fn export(source: &str, output: &Path, original: &str, further: &[&str]) -> String {
    let parameters = format!("load_parameters_path={source}");
    let all = [&["checkpoint", "export", "--output", text(output), &parameters], further].concat();
    succeed(&all);
    let diff = json(&["checkpoint", "diff", "--values", "--json", original, text(output)]);
    diff["verdict"].as_str().unwrap().to_owned()
}

#[test]
fn help_has_examples() {
    let commands = ["inspect", "diff", "verify", "params-only", "reshard", "average", "export", "import"];
    check_output(&["checkpoint", "-h"], &[&["Examples:"], &commands[..]].concat());
    for command in commands {
        check_output(
            &["checkpoint", command, "--help"],
            &["Examples:", &format!("maxtext checkpoint {command}")],
        );
    }
}

#[test]
fn tensors_are_listed() {
    let sharded = golden("llama_six_on_two_sharded");
    check_output(
        &["checkpoint", "inspect", &sharded],
        &[
            "(safetensors)",
            "model.layers.0.self_attn.q_proj.weight",
            "[36, 24]",
            "21 tensors",
            "lm_head",
            "by file",
        ],
    );
    let listed = json(&["checkpoint", "inspect", &sharded, "--json"]);
    assert_eq!(listed["kind"], "safetensors");
    assert_eq!(listed["tensors"].as_array().unwrap().len(), 21);
    assert_eq!(listed["tensors"][0]["name"], "lm_head.weight");
    assert_eq!(listed["tensors"][0]["shape"], serde_json::json!([80, 24]));
    assert_eq!(listed["total"]["bytes"], 52_704);
    assert_eq!(listed["by_dtype"]["float32"]["tensors"], 21);
    assert_eq!(listed["by_entry"]["lm_head"]["elements"], 1920);

    let consolidated = golden("llama_square_heads_consolidated_shards");
    check_output(&["checkpoint", "inspect", &consolidated], &["(PyTorch)", "consolidated.01/output.weight"]);
    let table = succeed(&["checkpoint", "inspect", &consolidated]).output;
    assert!(table.lines().skip(1).all(|line| line.chars().count() <= 100), "{table}");
    check_wrong(&["checkpoint", "inspect", "/nowhere"], &["`/nowhere`", "does not exist"]);
}

#[test]
fn differences_are_told() {
    let (one, other) = (golden("qwen3_tied"), golden("qwen3_untied"));
    check_output(
        &["checkpoint", "diff", &one, &other],
        &[
            "only in B:\n  lm_head.weight",
            "other shapes:",
            "[92, 20] → [80, 20]",
            "different: 24 tensors on both",
        ],
    );
    let whole = golden("llama_six_on_two");
    check_output(
        &["checkpoint", "diff", "--values", &whole, &golden("llama_six_on_two_sharded")],
        &["equal: 21 tensors of the same names, shapes and types, with the same values"],
    );
    check_output(
        &["checkpoint", "diff", &whole, &whole],
        &["alike: 21 tensors", "`--values` compares values"],
    );
    let rounded = golden("llama_six_on_two_bfloat16");
    let diff = json(&["checkpoint", "diff", "--values", "--json", &whole, &rounded]);
    assert_eq!(diff["equal"], false);
    assert_eq!(diff["dtypes"].as_array().unwrap().len(), 21);
    let values = diff["values"].as_array().unwrap();
    assert_eq!(values.len(), 21);
    let size = |value: &Value| value["max_absolute"].as_f64().unwrap();
    assert!(values.windows(2).all(|pair| size(&pair[0]) >= size(&pair[1])), "the worst come first");
    assert!(values.iter().all(|value| value["max_relative"].as_f64().unwrap() < 2.0_f64.powi(-8)));
    let shown = succeed(&["checkpoint", "diff", "--values", &whole, &rounded]).output;
    assert!(shown.contains("… and 1 more; `--json` lists all") && shown.lines().count() < 60, "{shown}");
}

#[test]
fn published_models_come_back() {
    let directory = tempfile::tempdir().unwrap();
    for name in ["llama_six_on_two_bfloat16", "gemma3_cycle_of_three_untied_float16", "gpt2_two_layers"] {
        let (original, output) = (golden(name), directory.path().join(name));
        let verdict = export(&original, &output, &original, &[]);
        assert!(verdict.starts_with("equal: "), "{name}: {verdict}");
        let config = object(Path::new(&original).join("config.json"));
        assert_eq!(object(output.join("config.json")), config, "{name}");
    }
    let (original, output) = (golden("llama_six_on_two"), directory.path().join("sharded"));
    let verdict = export(&original, &output, &original, &["--shard-size", "12kB"]);
    assert!(verdict.starts_with("equal: "), "{verdict}");
    assert!(
        output.join("model.safetensors.index.json").is_file() && !output.join("model.safetensors").exists()
    );

    let output = directory.path().join("rounded");
    let verdict = export(&original, &output, &golden("llama_six_on_two_bfloat16"), &["--dtype=bfloat16"]);
    assert!(verdict.starts_with("equal: "), "{verdict}");
    assert_eq!(object(output.join("config.json"))["dtype"], "bfloat16");
}

#[test]
fn the_first_format_is_exported_as_hugging_face_has_it() {
    let directory = tempfile::tempdir().unwrap();
    let original = golden("llama_square_heads");
    let expected = object(Path::new(&original).join("config.json"));
    for suffix in ["", "_shards"] {
        let output = directory.path().join(format!("exported{suffix}"));
        let verdict =
            export(&golden(&format!("llama_square_heads_consolidated{suffix}")), &output, &original, &[]);
        assert!(verdict.starts_with("equal: "), "{verdict}");
        let config = object(output.join("config.json"));
        for key in
            ["hidden_size", "intermediate_size", "rms_norm_eps", "rope_parameters", "vocab_size", "head_dim"]
        {
            assert_eq!(config[key], expected[key], "{key}");
        }
    }
}

#[test]
fn imported_models_come_back() {
    let directory = tempfile::tempdir().unwrap();
    for (name, keys) in [("llama_scaled_tied", &["scan_layers=false"][..]), ("gemma2_odd_untied", &[])] {
        let original = golden(name);
        let (imported, output) =
            (directory.path().join(name), directory.path().join(format!("{name}_exported")));
        let parameters = format!("load_parameters_path={original}");
        let all = [&["checkpoint", "import", "--output", text(&imported), &parameters], keys].concat();
        assert!(succeed(&all).output.contains("checkpoints/0"));
        let listed = json(&["checkpoint", "inspect", "--json", text(&imported)]);
        assert_eq!((&listed["kind"], &listed["step"]), (&"Orbax".into(), &0.into()));
        let verdict = export(text(&imported), &output, &original, &[]);
        assert!(verdict.starts_with("equal: "), "{name}: {verdict}");
    }
}

#[test]
fn an_import_that_was_interrupted_is_repeated() {
    let directory = tempfile::tempdir().unwrap();
    let output = directory.path().join("imported");
    let parameters = format!("load_parameters_path={}", golden("llama_six_on_two"));
    let import = ["checkpoint", "import", "--output", text(&output), &parameters];
    // As a killed process leaves it.
    fs::create_dir_all(output.join("checkpoints/0.orbax-checkpoint-tmp/items.orbax-checkpoint-tmp")).unwrap();
    for file in [".maxtext.lock", ".maxtext.import", "config.yml"] {
        fs::write(output.join(file), "partial").unwrap();
    }
    succeed(&import);
    assert!(!output.join(".maxtext.import").exists());
    assert!(!output.join("checkpoints/0.orbax-checkpoint-tmp").exists());
    check_output(&["checkpoint", "verify", text(&output)], &["is whole", "every byte checked"]);
    // A complete import is not replaced.
    check_wrong(&import, &["is not empty"]);
}

#[test]
fn damaged_files_are_named_by_verify() {
    let directory = tempfile::tempdir().unwrap();
    let output = directory.path().join("imported");
    let parameters = format!("load_parameters_path={}", golden("llama_six_on_two"));
    succeed(&["checkpoint", "import", "--output", text(&output), &parameters]);
    let step = output.join("checkpoints/0");
    let verify = ["checkpoint", "verify", text(&output), "--json"];
    let verified = json(&verify);
    assert_eq!((&verified[0]["step"], &verified[0]["every_byte_checked"]), (&0.into(), &true.into()));
    assert!(verified[0]["bytes"].as_u64().unwrap() > 1000);
    for path in [step.clone(), step.join("items")] {
        check_output(&["checkpoint", "verify", text(&path)], &["is whole"]);
    }
    for file in ["commit_success.txt", "items/_METADATA"] {
        let mut contents = fs::read(step.join(file)).unwrap();
        contents[7] ^= 1;
        fs::write(step.join(file), contents).unwrap();
    }
    let outcome = maxtext(&["checkpoint", "verify", text(&output)]);
    assert_eq!(outcome.status, 1, "{}", outcome.errors);
    assert!(outcome.errors.contains("1 of 1 checkpoint is damaged"), "{}", outcome.errors);
    assert!(outcome.output.contains("items/_METADATA`: its checksum is"), "{}", outcome.output);

    check_output(
        &["checkpoint", "verify", &golden("llama_six_on_two_sharded")],
        &["is whole", "no checksum of every byte"],
    );
    check_wrong(&["checkpoint", "verify", "/nowhere"], &["`/nowhere`", "does not exist"]);
}

#[test]
fn unread_keys_of_a_published_model_are_named_once() {
    let directory = tempfile::tempdir().unwrap();
    let (original, model) = (PathBuf::from(golden("llama_six_on_two")), directory.path().join("model"));
    fs::create_dir(&model).unwrap();
    for entry in fs::read_dir(&original).unwrap().flatten().filter(|entry| entry.path().is_file()) {
        fs::copy(entry.path(), model.join(entry.file_name())).unwrap();
    }
    let mut config = object(original.join("config.json"));
    config["mlp_gain"] = 2.0.into();
    fs::write(model.join("config.json"), config.to_string()).unwrap();
    let parameters = format!("load_parameters_path={}", text(&model));
    let output = directory.path().join("imported");
    let check = |arguments: &[&str]| {
        let outcome = maxtext(arguments);
        let named = outcome.errors.matches("`mlp_gain`").count();
        assert_eq!((outcome.status, named), (0, 1), "{arguments:?}: {}", outcome.errors);
    };
    check(&["checkpoint", "import", "--output", text(&output), &parameters]);
    let tokens = directory.path().join("tokens.json");
    fs::write(&tokens, "[[1, 2, 3]]").unwrap();
    let (tokens, logits) = (
        format!("tokens_path={}", text(&tokens)),
        format!("logits_path={}", text(&directory.path().join("logits.npy"))),
    );
    check(&["logits", &parameters, &tokens, &logits]);
    check(&["config", "check", &parameters]);
}

#[test]
fn targets_are_checked_before_anything_is_read() {
    let directory = tempfile::tempdir().unwrap();
    let output = directory.path().join("out");
    fs::create_dir(&output).unwrap();
    fs::write(output.join("model.safetensors"), "mine").unwrap();
    let parameters = format!("load_parameters_path={}", golden("llama_six_on_two"));
    let arguments = ["checkpoint", "export", "--output", text(&output), &parameters];
    check_wrong(&arguments, &["already holds weights: `model.safetensors`"]);
    assert_eq!(fs::read(output.join("model.safetensors")).unwrap(), b"mine");
    assert_eq!(output.read_dir().unwrap().count(), 1);

    check_wrong(
        &["checkpoint", "export", "--output", "x"],
        &["no key names a model", "load_parameters_path="],
    );
    check_wrong(&["checkpoint", "export", &parameters], &["--output"]);
    check_wrong(
        &["checkpoint", "export", "--output", "x", "--shard-size", "much", &parameters],
        &["a size such as 5GB"],
    );
    check_wrong(&["checkpoint", "export", "--output", "x", "--dtype", "int8", &parameters], &["bfloat16"]);
    check_wrong(
        &["checkpoint", "export", "--output", "x", "load_parameters_path=/nowhere"],
        &["`/nowhere` does not exist"],
    );
    let import = ["checkpoint", "import", "--output", text(&output), &parameters];
    check_wrong(&import, &["is not empty"]);
}

/// An export of a damaged checkpoint leaves no weights behind.
#[test]
fn failures_leave_nothing_that_looks_complete() {
    let directory = tempfile::tempdir().unwrap();
    let (copy, output) = (directory.path().join("copy"), directory.path().join("out"));
    fs::create_dir(&copy).unwrap();
    for entry in Path::new(&golden("llama_six_on_two")).read_dir().unwrap().flatten() {
        fs::copy(entry.path(), copy.join(entry.file_name())).unwrap();
    }
    let weights = copy.join("model.safetensors");
    let bytes = fs::read(&weights).unwrap();
    fs::write(&weights, &bytes[..bytes.len() - 100]).unwrap();
    let parameters = format!("load_parameters_path={}", text(&copy));
    let outcome =
        maxtext_in(directory.path(), &["checkpoint", "export", "--output", "out", &parameters], &[]);
    assert_eq!(outcome.status, 2, "{}", outcome.errors);
    assert!(outcome.errors.contains("cut short"), "{}", outcome.errors);
    assert!(!output.join("model.safetensors").exists());
}
