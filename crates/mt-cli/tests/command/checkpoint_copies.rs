//! `maxtext checkpoint params-only`, `reshard` and `average`, and GGUF files.

use std::{fs, path::Path};

use serde_json::Value;

use crate::{check_output, check_wrong, succeed, text};

fn golden(name: &str) -> String {
    let families = Path::new(env!("CARGO_MANIFEST_DIR")).join("../mt-models/tests/goldens/families");
    families.join(name).to_str().unwrap().to_owned()
}

#[track_caller]
fn json(arguments: &[&str]) -> Value {
    serde_json::from_str(&succeed(arguments).output).unwrap()
}

#[track_caller]
fn verdict(one: &Path, other: &Path) -> String {
    let diff = json(&["checkpoint", "diff", "--values", "--json", text(one), text(other)]);
    diff["verdict"].as_str().unwrap().to_owned()
}

#[track_caller]
fn import(name: &str, output: &Path) {
    let parameters = format!("load_parameters_path={}", golden(name));
    succeed(&["checkpoint", "import", "--output", text(output), &parameters]);
}

#[test]
fn copies_hold_the_same_numbers() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    // A folded query scale that is no power of two has an exact copy beside it.
    import("llama_scaled_tied", &path("run"));
    let (run, weights) = (path("run"), path("weights"));
    let copy = ["checkpoint", "params-only", text(&run), "--output", text(&weights)];
    check_output(&copy, &["wrote the parameters of step 0", "weights/checkpoints/0"]);
    assert!(verdict(&run, &weights).starts_with("equal: "));
    for (name, further) in [
        ("eight", &["--shards", "8"][..]),
        ("plain", &["checkpoint_storage_use_ocdbt=false", "checkpoint_storage_use_zarr3=false"]),
        ("files", &["--shards=3", "checkpoint_storage_use_ocdbt=false"]),
    ] {
        let reshard = ["checkpoint", "reshard", text(&run), "--output"];
        check_output(
            &[&reshard[..], &[text(&path(name))], further].concat(),
            &["wrote the whole checkpoint"],
        );
        assert!(verdict(&path("run"), &path(name)).starts_with("equal: "), "{name}");
        check_output(&["checkpoint", "verify", text(&path(name))], &["is whole", "every byte checked"]);
        // The copy is a model that commands use, with the unscaled numbers.
        let exported = path(&format!("{name}_exported"));
        let parameters = format!("load_parameters_path={}", text(&path(name)));
        succeed(&["checkpoint", "export", "--output", text(&exported), &parameters]);
        let original = golden("llama_scaled_tied");
        assert!(verdict(Path::new(&original), &exported).starts_with("equal: "), "{name}");
    }
    let chunks = path("files/checkpoints/0/items/params.params.token_embedder.embedding/c");
    assert_eq!(chunks.read_dir().unwrap().count(), 3);
}

#[test]
fn copies_refuse_what_they_cannot_copy() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    import("llama_six_on_two", &path("run"));
    let published = golden("llama_six_on_two");
    let output = path("out");
    let reshard = |further: &[&str], expected: &[&str]| {
        let run = path("run");
        let all = [&["checkpoint", "reshard", text(&run), "--output", text(&output)], further].concat();
        check_wrong(&all, expected);
    };
    reshard(&["steps=3"], &["`steps=3` does not choose how", "`checkpoint_storage_use_ocdbt`"]);
    reshard(&["--shards=0"], &["0 is not in 1..="]);
    check_wrong(
        &["checkpoint", "params-only", &published, "--output", text(&output)],
        &["is not a checkpoint of a run", "checkpoint import"],
    );
    check_wrong(
        &["checkpoint", "params-only", text(&path("run")), "--output", text(&path("run"))],
        &["is not empty"],
    );
    assert!(!output.exists());
}

#[test]
fn means_of_runs_and_of_published_models_agree() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let models = [golden("llama_six_on_two"), golden("llama_six_on_two_bfloat16")];
    import("llama_six_on_two", &path("one"));
    import("llama_six_on_two_bfloat16", &path("two"));
    let average = |names: [&str; 2], output: &Path, further: &[&str]| {
        let all = [&["checkpoint", "average", "--output", text(output)], further, &names[..]].concat();
        succeed(&all).output
    };
    let (runs, published) = (path("runs"), path("published"));
    let said = average([text(&path("one")), text(&path("two"))], &runs, &[]);
    assert!(said.contains("wrote the mean of 2 checkpoints"), "{said}");
    let said = average([&models[0], &models[1]], &published, &[]);
    assert!(said.contains("wrote the mean of 2 models"), "{said}");
    let parameters = format!("load_parameters_path={}", text(&runs));
    succeed(&["checkpoint", "export", "--output", text(&path("exported")), &parameters]);
    assert!(verdict(&published, &path("exported")).starts_with("equal: "));
    assert!(published.join("config.json").is_file());
    // A weight of zero leaves the first model.
    average([&models[0], &models[1]], &path("first"), &["--weights", "2,0"]);
    assert!(verdict(Path::new(&models[0]), &path("first")).starts_with("equal: "));
}

#[test]
fn means_need_models_of_one_kind() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    import("llama_six_on_two", &path("run"));
    let (model, other) = (golden("llama_six_on_two"), golden("qwen3_tied"));
    let (output, run) = (path("out"), path("run"));
    let check = |further: &[&str], expected: &[&str]| {
        check_wrong(&[&["checkpoint", "average", "--output", text(&output)], further].concat(), expected);
        assert!(!output.exists());
    };
    check(&[&model], &["alone has no mean", "--last 3"]);
    check(&[&model, &other], &["has other parameters than", "checkpoint diff"]);
    check(&[&model, text(&run)], &["have no common mean"]);
    check(&["--last", "2", text(&run)], &["holds 1 checkpoint, fewer than `--last 2`"]);
    check(&["--last", "2", &model], &["is not a run with checkpoints"]);
    check(&["--last", "2", &model, &other], &["`--last` concerns one run"]);
    check(&["--weights", "1", &model, &model], &["`--weights` are not 2 numbers"]);
    check(&["--weights=1,-1", &model, &model], &["`--weights` are not 2 numbers"]);
}

#[track_caller]
fn export(name: &str, output: &Path, further: &[&str]) -> String {
    let parameters = format!("load_parameters_path={}", golden(name));
    let all = [&["checkpoint", "export", "--format", "gguf", "--output", text(output), &parameters], further];
    succeed(&all.concat()).output
}

#[test]
fn models_are_exported_as_gguf() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let said = export("llama_six_on_two", &path("llama.gguf"), &[]);
    assert!(said.contains("with 21 tensors (float32)"), "{said}");
    let listed = json(&["checkpoint", "inspect", "--json", text(&path("llama.gguf"))]);
    assert_eq!(
        (&listed["kind"], &listed["tensors"][0]["name"]),
        (&"GGUF".into(), &"blk.0.attn_k.weight".into())
    );
    assert_eq!(listed["total"]["elements"], 52_704 / 4);
    let metadata = &listed["metadata"];
    assert_eq!(
        (&metadata["general.architecture"], &metadata["llama.block_count"]),
        (&"llama".into(), &2.into())
    );
    assert_eq!(metadata["tokenizer.ggml.model"], "none");
    check_output(&["checkpoint", "verify", text(&path("llama.gguf"))], &["is whole"]);

    // The experts of a layer are one tensor.
    export("mixtral_two_of_five", &path("mixtral.gguf"), &["--dtype", "bf16"]);
    let listed = json(&["checkpoint", "inspect", "--json", text(&path("mixtral.gguf"))]);
    let tensor = |name: &str| {
        let tensors = listed["tensors"].as_array().unwrap().iter();
        tensors.clone().find(|tensor| tensor["name"] == name).unwrap_or_else(|| panic!("{name}")).clone()
    };
    assert_eq!(tensor("blk.1.ffn_gate_exps.weight")["shape"], serde_json::json!([5, 20, 24]));
    assert_eq!(tensor("blk.1.ffn_gate_exps.weight")["dtype"], "bfloat16");
    assert_eq!(tensor("blk.1.ffn_gate_inp.weight")["dtype"], "float32");

    // The factors of Llama 3.1's rotary embedding are a tensor; rows of 20 numbers are not divided into blocks.
    let parameters = format!("load_parameters_path={}", golden("llama_scaled_tied"));
    let scaled = path("scaled.gguf");
    let all =
        ["checkpoint", "export", "--format=gguf", "--dtype=q8_0", "--output", text(&scaled), &parameters];
    let outcome = succeed(&all);
    assert!(outcome.errors.contains("have rows that 32 does not divide"), "{}", outcome.errors);
    assert!(outcome.errors.contains("no tokenizer is known"), "{}", outcome.errors);
    let listed = json(&["checkpoint", "inspect", "--json", text(&scaled)]);
    assert!(listed.to_string().contains("rope_freqs.weight"));
    assert_eq!(listed["by_dtype"]["q8_0"]["tensors"], 3);
}

#[test]
fn gguf_refuses_what_llama_cpp_does_not_compute() {
    let directory = tempfile::tempdir().unwrap();
    let output = directory.path().join("model.gguf");
    let check = |name: &str, expected: &[&str]| {
        let parameters = format!("load_parameters_path={}", golden(name));
        let all = ["checkpoint", "export", "--format", "gguf", "--output", text(&output), &parameters];
        check_wrong(&all, expected);
        assert!(directory.path().read_dir().unwrap().next().is_none());
    };
    check("mistral_window", &["`sliding_window` of 6"]);
    check("qwen3_yarn_one_layer", &["`rope_type` of `yarn`"]);
    check("gemma2_even", &["`query_pre_attn_scalar` of 20"]);
    check("gpt2_two_layers", &["no architecture for models of the type `gpt2`", "llama, mistral, mixtral"]);
    let parameters = format!("load_parameters_path={}", golden("llama_six_on_two"));
    let target = |output: &Path, expected: &[&str]| {
        check_wrong(
            &["checkpoint", "export", "--format=gguf", "--output", text(output), &parameters],
            expected,
        );
    };
    target(directory.path(), &["is not the name of a GGUF file"]);
    fs::write(&output, "mine").unwrap();
    target(&output, &["already holds weights: `model.gguf`"]);
    check_wrong(
        &["checkpoint", "export", "--dtype=q8_0", "--output=x", &parameters],
        &["`--dtype q8_0` is a type of GGUF"],
    );
}

#[test]
fn gguf_refuses_tokenizers_that_llama_cpp_lacks() {
    let directory = tempfile::tempdir().unwrap();
    let model = directory.path().join("model");
    fs::create_dir(&model).unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(Path::new(&golden("llama_six_on_two")).join(name), model.join(name)).unwrap();
    }
    let tokenizer = |splits: Value| {
        let vocabulary: serde_json::Map<String, Value> =
            (0..80).map(|id| (char::from(b'!' + id as u8).to_string(), id.into())).collect();
        serde_json::json!({
            "version": "1.0", "added_tokens": [], "normalizer": null, "post_processor": null, "decoder": null,
            "pre_tokenizer": splits,
            "model": { "type": "BPE", "vocab": vocabulary, "merges": [] },
        })
    };
    let pattern = |pattern: &str| {
        let split = serde_json::json!({ "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false });
        let bytes = serde_json::json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false });
        tokenizer(serde_json::json!({ "type": "Sequence", "pretokenizers": [split, bytes] }))
    };
    let output = directory.path().join("model.gguf");
    let parameters = format!("load_parameters_path={}", text(&model));
    let export = ["checkpoint", "export", "--format", "gguf", "--output", text(&output), &parameters];
    fs::write(model.join("tokenizer.json"), pattern("[a-z]+").to_string()).unwrap();
    check_wrong(&export, &["cannot be written as GGUF", "the pattern `[a-z]+`", "GPT-2's, Llama 3's"]);
    assert!(!output.exists());
    let bytes = serde_json::json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": true });
    fs::write(model.join("tokenizer.json"), tokenizer(bytes).to_string()).unwrap();
    succeed(&export);
}
