//! First losses and gradients of fine-tuning, preferences with another reference, judged steps and distillation, compared with
//! `first_losses.py`. Those of other losses on pairs are in `preference.rs`, and those of reward models in `reward.rs`.

use std::{fs, path::Path};

use serde_json::{Map, Value, json};

use crate::{
    preference::{copy_model_from, write_rows},
    support::{Sandbox, outcome},
};

/// Writes a file of float32 tensors with those that `change` makes of them, by name: their dimensions and bytes.
fn rewrite(from: &Path, to: &Path, change: impl Fn(&str, Vec<f32>) -> Vec<(String, Vec<usize>, Vec<f32>)>) {
    let file = fs::read(from).unwrap();
    let (size, rest) = file.split_first_chunk::<8>().unwrap();
    let (header, data) = rest.split_at(u64::from_le_bytes(*size) as usize);
    let header: Map<String, Value> = serde_json::from_slice(header).unwrap();
    let (mut made, mut bytes) = (Map::new(), Vec::new());
    for (name, entry) in header.iter().filter(|(name, _)| *name != "__metadata__") {
        assert_eq!(entry["dtype"], "F32");
        let offset = |index: usize| entry["data_offsets"][index].as_u64().unwrap() as usize;
        let values = data[offset(0)..offset(1)].chunks_exact(4);
        let values = values.map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect();
        let unchanged: Vec<usize> = serde_json::from_value(entry["shape"].clone()).unwrap();
        for (name, dims, values) in change(name, values) {
            let dims = if dims.is_empty() { unchanged.clone() } else { dims };
            let begin = bytes.len();
            bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
            made.insert(name, json!({"dtype": "F32", "shape": dims, "data_offsets": [begin, bytes.len()]}));
        }
    }
    let header = Value::from(made).to_string().into_bytes();
    fs::write(to, [&(header.len() as u64).to_le_bytes()[..], &header, &bytes].concat()).unwrap();
}

/// The model of `copy_model_from` with half of its output head, as `other`.
fn halve_head(sandbox: &Sandbox) {
    let [model, other] = ["model", "other"].map(|name| sandbox.path(name));
    fs::create_dir(&other).unwrap();
    for file in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        fs::copy(model.join(file), other.join(file)).unwrap();
    }
    let weights = "model.safetensors";
    rewrite(&model.join(weights), &other.join(weights), |name, mut values| {
        if name == "lm_head.weight" {
            values.iter_mut().for_each(|value| *value *= 0.5);
        }
        vec![(name.to_owned(), Vec::new(), values)]
    });
}

/// The reward model whose files are copied, with its head and the negative one as those of two classes of tokens.
fn copy_process_model(sandbox: &Sandbox) {
    copy_model_from(sandbox, "tests/train/reward_model");
    let model = sandbox.path("model");
    let mut config: Value = serde_json::from_slice(&fs::read(model.join("config.json")).unwrap()).unwrap();
    config["architectures"] = json!(["LlamaForTokenClassification"]);
    config["id2label"] = json!({"0": "LABEL_0", "1": "LABEL_1"});
    config["label2id"] = json!({"LABEL_0": 0, "LABEL_1": 1});
    fs::write(model.join("config.json"), config.to_string()).unwrap();
    let weights = model.join("model.safetensors");
    rewrite(&weights, &weights, |name, values| {
        if name != "score.weight" {
            return vec![(name.to_owned(), Vec::new(), values)];
        }
        let negative: Vec<f32> = values.iter().map(|value| -value).collect();
        let dims = vec![2, values.len()];
        let bias = ("score.bias".to_owned(), vec![2], vec![0.0; 2]);
        vec![(name.to_owned(), dims, [negative, values].concat()), bias]
    });
}

fn golden() -> Value {
    serde_json::from_str(include_str!("first_losses.json")).unwrap()
}

/// Checks the first loss and gradient of a run.
fn check(sandbox: &Sandbox, golden: &Value, run: &str, own: &[&str]) {
    let name = format!("run_name={run}");
    let keys = [
        "train",
        &name,
        "load_parameters_path=model",
        "base_output_directory=runs",
        "dataset_type=hf",
        "dtype=float32",
        "max_target_length=40",
        "packing=false",
        "add_bos=true",
        "per_device_batch_size=4",
        "learning_rate=0",
        "steps=1",
        "hf_path=json",
        "hf_train_files=rows.jsonl",
        "eval_interval=-1",
        "enable_data_shuffling=false",
    ];
    outcome(&mut sandbox.program(&[&keys[..], own].concat())).succeeded();
    let metrics = sandbox.metrics(run);
    for (metric, stored, tolerance) in
        [("learning/loss", "loss", 1e-5), ("learning/raw_grad_norm", "gradient_norm", 1e-4)]
    {
        let made = metrics.series(metric)[0];
        let expected = golden["results"][run][stored].as_f64().unwrap();
        assert!((made - expected).abs() <= tolerance * expected, "{run} {metric}: {made}, not {expected}");
    }
}

#[test]
fn losses_of_answers_and_pairs_are_those_of_the_references() {
    let sandbox = Sandbox::new();
    copy_model_from(&sandbox, "../mt-models/tests/goldens/families/llama_six_on_two");
    halve_head(&sandbox);
    let golden = golden();
    let row =
        |row: &Value| json!({"prompt": row[0], "completion": row[1], "chosen": row[1], "rejected": row[2]});
    write_rows(
        &sandbox,
        "rows.jsonl",
        &golden["rows"].as_array().unwrap().iter().map(row).collect::<Vec<_>>(),
    );
    let answers =
        ["use_sft=true", "sft_train_on_completion_only=true", "train_data_columns=[prompt,completion]"];
    let pairs = ["use_dpo=true", "train_data_columns=[prompt,chosen,rejected]"];
    let teacher = ["teacher_overrides.hf_model_path=other", "distill_alpha=0.6", "distill_temperature=2.0"];
    check(&sandbox, &golden, "supervised", &answers);
    check(&sandbox, &golden, "dft", &[&answers[..], &["sft_loss_type=dft"]].concat());
    check(&sandbox, &golden, "distilled", &[&answers[..], &teacher].concat());
    check(&sandbox, &golden, "other_reference", &[&pairs[..], &["dpo.reference_path=other"]].concat());
    check(&sandbox, &golden, "cpo", &[&pairs[..], &["dpo.algo=cpo"]].concat());
}

#[test]
fn losses_of_judged_steps_are_those_of_the_reference() {
    let sandbox = Sandbox::new();
    copy_process_model(&sandbox);
    let golden = golden();
    let row = |row: &Value| json!({"prompt": row[0], "completions": row[1], "labels": row[2]});
    write_rows(
        &sandbox,
        "rows.jsonl",
        &golden["steps"].as_array().unwrap().iter().map(row).collect::<Vec<_>>(),
    );
    let columns = "train_data_columns=[prompt,completions,labels]";
    check(&sandbox, &golden, "process", &["use_reward=true", "reward.reward_type=process", columns]);
}
