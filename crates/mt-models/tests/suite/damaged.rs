//! Damaged directories and unsupported models give one message that names the file and the problem.

use std::{collections::BTreeMap, fs, path::Path};

use mt_models::{build_decoder, hugging_face::Weights};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::{Map, Value, json};

use crate::directory::Directory;

type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// The error for a copy of a reference model with a changed `config.json` and changed tensors.
fn message(
    name: &str,
    config: impl FnOnce(&mut Map<String, Value>),
    tensors: impl FnOnce(&mut Tensors),
) -> String {
    let original = Directory::open(name);
    let target = tempfile::tempdir().unwrap();
    let Value::Object(mut values) =
        serde_json::from_slice(&fs::read(original.path.join("config.json")).unwrap()).unwrap()
    else {
        panic!("`config.json` is an object")
    };
    config(&mut values);
    fs::write(target.path().join("config.json"), Value::Object(values).to_string()).unwrap();
    let bytes = fs::read(original.path.join("model.safetensors")).unwrap();
    let mut all: Tensors = SafeTensors::deserialize(&bytes)
        .unwrap()
        .iter()
        .map(|(name, view)| (name.to_owned(), (view.dtype(), view.shape().to_vec(), view.data().to_vec())))
        .collect();
    tensors(&mut all);
    let views = all.iter().map(|(name, (dtype, dims, data))| {
        (name.as_str(), TensorView::new(*dtype, dims.clone(), data).unwrap())
    });
    fs::write(target.path().join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
    open(name, target.path())
}

/// The error of opening a directory that cannot be read.
fn open(name: &str, path: &Path) -> String {
    let directory = Directory { name: name.to_owned(), path: path.to_owned() };
    let model = match directory.group(&[]).and_then(|group| build_decoder(&group)) {
        Ok(model) => model,
        Err(error) => return error.to_string(),
    };
    match Weights::open(&model, path) {
        Ok(_) => panic!("{name}: nothing is said"),
        Err(error) => error.to_string(),
    }
}

#[track_caller]
fn assert_says(message: &str, fragments: &[&str]) {
    for fragment in fragments {
        assert!(message.contains(fragment), "no `{fragment}` in: {message}");
    }
}

#[test]
fn configurations_that_cannot_be_used_name_file_and_key() {
    let llama = "llama_six_on_two";
    let cases: &[(&str, &str, Value, &[&str])] = &[
        (llama, "model_type", json!("mamba"), &["`mamba`", "gemma3_text", "qwen3"]),
        (llama, "hidden_size", Value::Null, &["no `hidden_size`"]),
        (llama, "num_hidden_layers", Value::Null, &["no `num_hidden_layers`"]),
        (llama, "hidden_size", json!("24"), &["`hidden_size`", "`\"24\"`", "whole number"]),
        (llama, "rms_norm_eps", json!(true), &["`rms_norm_eps`", "`true`", "a number"]),
        (llama, "rope_parameters", json!({"rope_type": "longrope"}), &["`rope_parameters`", "longrope"]),
        (llama, "hidden_act", json!("tanh"), &["`hidden_act`", "tanh"]),
        (
            llama,
            "rope_parameters",
            json!({"rope_type": "linear", "factor": "8"}),
            &["factor", "`\"8\"`", "a number"],
        ),
        (
            llama,
            "rope_parameters",
            json!({"partial_rotary_factor": 0.5}),
            &["`rope_parameters`", "partly rotated heads"],
        ),
        (
            llama,
            "rope_parameters",
            json!({"rope_type": "proportional"}),
            &["`rope_parameters`", "proportional"],
        ),
        ("gemma2_even", "hidden_activation", json!("gelu"), &["`hidden_activation`", "gelu"]),
        (
            "gemma3_one_layer",
            "rope_parameters",
            json!({"sliding_attention": {"rope_type": "linear", "factor": 2.0}, "full_attention": {}}),
            &["`rope_parameters`", "layers with a window"],
        ),
        (
            "olmo3_yarn",
            "rope_parameters",
            json!({"sliding_attention": {"rope_theta": 50.0}, "full_attention": {"rope_theta": 60.0}}),
            &["`rope_parameters`", "another base"],
        ),
        (
            "gemma4_dense_one_layer",
            "rope_parameters",
            json!({"full_attention": {"rope_type": "proportional", "factor": 2.0}, "sliding_attention": {}}),
            &["`rope_parameters`", "rotary scaling"],
        ),
        (
            "gemma4_dense_one_layer",
            "rope_parameters",
            json!({"full_attention": {"rope_type": "linear", "factor": 2.0}, "sliding_attention": {}}),
            &["`rope_parameters`", "scaling the rotary embeddings"],
        ),
        (
            "gemma3_cycle_of_six",
            "use_bidirectional_attention",
            json!(true),
            &["`use_bidirectional_attention`"],
        ),
        (
            "gemma4_dense_one_layer",
            "use_bidirectional_attention",
            json!("all"),
            &["`use_bidirectional_attention`", "later positions is not built"],
        ),
        (
            "qwen2_late_windows",
            "layer_types",
            json!(["linear_attention"]),
            &["`layer_types`", "linear_attention"],
        ),
        ("qwen2_late_windows", "layer_types", json!("full_attention"), &["`layer_types`", "list"]),
        ("gpt2_two_layers", "scale_attn_weights", json!(false), &["`scale_attn_weights`"]),
        ("qwen3_tied", "quantization_config", json!({"bits": 4}), &["no `quantization_config.quant_method`"]),
    ];
    check_values(cases);
}

#[test]
fn mixtures_that_cannot_be_used_name_file_and_key() {
    check_values(&[
        ("gemma4_dense_one_layer", "enable_moe_block", json!(true), &["no `num_experts`"]),
        ("gemma4_moe_all_chosen", "num_experts", json!(1), &["`num_experts`", "a single expert"]),
        ("gemma4_small_double_wide", "enable_moe_block", json!(true), &["no `num_experts`"]),
        ("qwen3_moe_dense_first", "mlp_only_layers", json!([1]), &["`mlp_only_layers`", "irregular layers"]),
        ("llama4_every_second", "moe_layers", json!([0, 1, 4]), &["`moe_layers`", "irregular layers"]),
        ("llama4_every_second", "no_rope_layers", json!([0, 1, 0, 1, 1]), &["`no_rope_layers`", "irregular"]),
        ("llama4_every_second", "layer_types", json!(["chunked_attention"]), &["`layer_types`", "chunks"]),
        ("llama4_every_second", "attention_chunk_size", Value::Null, &["no `attention_chunk_size`"]),
        ("deepseek3_groups", "norm_topk_prob", json!(false), &["`norm_topk_prob`", "not normalized"]),
        ("deepseek2_greedy", "norm_topk_prob", json!(true), &["`norm_topk_prob`", "normalized weights"]),
        (
            "deepseek3_groups",
            "moe_layer_freq",
            json!(2),
            &["`moe_layer_freq`", "`2`", "dense layers between"],
        ),
        ("deepseek3_groups", "topk_method", json!("greedy"), &["`topk_method`", "greedy"]),
        (
            "deepseek3_groups",
            "mlp_layer_types",
            json!(["sparse", "dense"]),
            &["`mlp_layer_types`", "dense layers between"],
        ),
        ("qwen3_next_cycle", "mlp_only_layers", json!([1]), &["`mlp_only_layers`", "`[1]`"]),
        (
            "qwen3_next_cycle",
            "shared_expert_intermediate_size",
            json!(27),
            &["`shared_expert_intermediate_size`", "`27`", "no multiple"],
        ),
    ]);
}

/// Checks the messages about models with these values of keys.
#[track_caller]
fn check_values(cases: &[(&str, &str, Value, &[&str])]) {
    for (name, key, value, fragments) in cases {
        let said = message(name, |config| drop(config.insert((*key).to_owned(), value.clone())), |_| {});
        assert_says(&said, &[&["config.json"], *fragments].concat());
    }
}

#[test]
fn weights_that_do_not_fit_name_their_tensors() {
    let with = |change: &dyn Fn(&mut Tensors)| message("llama_six_on_two", |_| {}, change);
    let extra = || (Dtype::F32, vec![1], vec![0; 4]);
    assert_says(&with(&|tensors| drop(tensors.remove("model.norm.weight"))), &["missing: model.norm.weight"]);
    assert_says(
        &with(&|tensors| drop(tensors.insert("model.extra.weight".into(), extra()))),
        &["not used: model.extra.weight"],
    );
    assert_says(
        &with(&|tensors| {
            let head = tensors.get_mut("lm_head.weight").unwrap();
            head.1.reverse();
        }),
        &["`lm_head.weight` is [24, 80], not [80, 24]"],
    );
    // This model's output matrix is not tied.
    let tied = message(
        "llama_six_on_two",
        |config| drop(config.insert("tie_word_embeddings".into(), true.into())),
        |_| {},
    );
    assert_says(&tied, &["not used: lm_head.weight, which is not the embedding table"]);
    let renamed = with(&|tensors| {
        let norm = tensors.remove("model.norm.weight").unwrap();
        tensors.insert("model.last_norm.weight".into(), norm);
    });
    assert_says(&renamed, &["missing: model.norm.weight", "not used: model.last_norm.weight"]);
    let layers = message(
        "llama_six_on_two",
        |config| drop(config.insert("num_hidden_layers".into(), 5.into())),
        |_| {},
    );
    assert_says(&layers, &["missing: model.layers.2", "more"]);
    let vocabulary =
        message("llama_six_on_two", |config| drop(config.insert("vocab_size".into(), 81.into())), |_| {});
    assert_says(&vocabulary, &["`model.embed_tokens.weight` is [80, 24], not [81, 24]"]);
}

#[test]
fn shards_that_are_incomplete_name_their_file() {
    let name = "llama_six_on_two_sharded";
    let copy = |change: &dyn Fn(&Path)| {
        let target = tempfile::tempdir().unwrap();
        for file in Directory::open(name).path.read_dir().unwrap().flatten() {
            fs::copy(file.path(), target.path().join(file.file_name())).unwrap();
        }
        change(target.path());
        open(name, target.path())
    };
    let shard = "model-00003-of-00006.safetensors";
    assert_says(&copy(&|path| fs::remove_file(path.join(shard)).unwrap()), &[shard]);
    let truncated = copy(&|path| {
        let bytes = fs::read(path.join(shard)).unwrap();
        fs::write(path.join(shard), &bytes[..bytes.len() - 1]).unwrap();
    });
    assert_says(&truncated, &[shard]);
    let unlisted = copy(&|path| {
        let index = path.join("model.safetensors.index.json");
        let mut content: Value = serde_json::from_slice(&fs::read(&index).unwrap()).unwrap();
        content["weight_map"].as_object_mut().unwrap().remove("model.norm.weight");
        fs::write(index, content.to_string()).unwrap();
    });
    assert_says(&unlisted, &["model.norm.weight"]);
}

#[test]
fn weights_of_integers_are_refused() {
    let said = message(
        "llama_six_on_two",
        |_| {},
        |tensors| {
            for (name, dtype) in [("model.embed_tokens.weight", Dtype::I32), ("lm_head.weight", Dtype::U32)] {
                tensors.get_mut(name).unwrap().0 = dtype;
            }
        },
    );
    let type_of = "not a type of weights";
    assert_says(&said, &[type_of, "`model.embed_tokens.weight` is", "`lm_head.weight` is"]);
}

#[test]
fn numbers_of_8_bits_are_not_read_without_their_scales() {
    const WEIGHT: &str = "model.layers.0.mlp.up_proj.weight";
    let said = message(
        "llama_six_on_two",
        |_| {},
        |tensors| {
            let (dtype, dims, data) = tensors.get_mut(WEIGHT).unwrap();
            *dtype = Dtype::F8_E4M3;
            data.truncate(dims.iter().product());
            let scale = (Dtype::F32, vec![1, 1], vec![0; 4]);
            tensors.insert(format!("{WEIGHT}_scale_inv"), scale);
        },
    );
    assert_says(&said, &["not used: model.layers.0.mlp.up_proj.weight_scale_inv"]);
}
