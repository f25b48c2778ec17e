//! Layers, origins, conflicts, groups and saved configurations, through the public interface.

use std::path::Path;

use mt_config::{
    AttentionKind, Config, DecodeConfig, Hardware, KeptIn, Origin, RematPolicy, Request, TrainConfig, table,
};
use mt_shape::DeviceAttributes;
use proptest::prelude::*;
use serde_json::{Value, json};

fn request(arguments: &[&str], environment: &[(&str, &str)]) -> Request {
    Request {
        arguments: arguments.iter().map(|&argument| argument.to_owned()).collect(),
        environment: environment.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect(),
        ..Request::default()
    }
}

fn resolved(arguments: &[&str]) -> Config {
    Config::resolve(&request(arguments, &[])).unwrap()
}

/// A command line for synthetic data, which needs no files.
fn training(arguments: &[&str]) -> Result<TrainConfig, mt_config::ConfigError> {
    let all: Vec<&str> = ["dataset_type=synthetic"].iter().chain(arguments).copied().collect();
    TrainConfig::from_config(&resolved(&all))
}

fn write(directory: &Path, name: &str, text: &str) -> String {
    let path = directory.join(name);
    std::fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

/// Checks that an error message contains all of `fragments`.
#[track_caller]
fn check_message(message: &str, fragments: &[&str]) {
    for fragment in fragments {
        assert!(message.contains(fragment), "no {fragment:?} in:\n{message}");
    }
    assert!(message.contains("hint: "), "no hint in:\n{message}");
}

#[track_caller]
fn check_refused(arguments: &[&str], fragments: &[&str]) {
    check_message(&Config::resolve(&request(arguments, &[])).unwrap_err().to_string(), fragments);
}

#[track_caller]
fn check_training_refused(arguments: &[&str], fragments: &[&str]) {
    check_message(&training(arguments).unwrap_err().to_string(), fragments);
}

#[test]
fn later_layers_win_and_leave_their_mark() {
    let directory = tempfile::tempdir().unwrap();
    write(directory.path(), "base.yml", "steps: 1\nlearning_rate: 1.0\nlog_period: 5\nrun_name: below\n");
    let file =
        write(directory.path(), "run.yml", "base_config: base.yml\n\nlearning_rate: 2.0\nlog_period: 6\n");
    let config =
        Config::resolve(&request(&[&file, "eval_interval=7"], &[("M_LOG_PERIOD", "9"), ("HOME", "/")]))
            .unwrap();
    for (key, value, origin) in [
        ("steps", json!(1), "base.yml`, line 1"),
        ("learning_rate", json!(2.0), "run.yml`, line 3"),
        ("log_period", json!(9), "environment variable `M_LOG_PERIOD`"),
        ("eval_interval", json!(7), "command line"),
        ("dropout_rate", json!(0.0), "default"),
    ] {
        let entry = config.entry(key);
        assert_eq!(entry.value, value, "{key}");
        assert!(entry.origin.to_string().contains(origin), "{key}: {}", entry.origin);
    }
    assert_eq!(config.entry("base_config").value, Value::Null);
}

#[test]
fn models_set_their_dimensions() {
    let config = resolved(&["model_name=llama2-70b"]);
    assert_eq!(config.entry("base_num_kv_heads").value, json!(8));
    assert!(
        matches!(&config.entry("base_emb_dim").origin, Origin::Model { name, .. } if name == "llama2-70b")
    );
    let rules = config.entry("logical_axis_rules").value.as_array().unwrap();
    let norm: Vec<&Value> = rules.iter().filter(|rule| rule[0] == "norm").collect();
    assert_eq!(norm, [&json!(["norm", ["fsdp"]])], "the model's rule replaces that of its name");
    assert!(rules.len() > 50, "other rules stay");
    let replaced = resolved(&["override_logical_axis_rules=true", "logical_axis_rules=[['norm','fsdp']]"]);
    assert_eq!(replaced.entry("logical_axis_rules").value, json!([["norm", ["fsdp"]]]));
}

#[test]
fn a_model_is_contradicted_only_on_purpose() {
    check_refused(
        &["model_name=llama2-7b", "base_emb_dim=128"],
        &["`base_emb_dim`", "`128`", "command line", "`llama2-7b`", "`4096`", "override_model_config=true"],
    );
    let error = Config::resolve(&request(&["model_name=llama2-7b"], &[("M_HEAD_DIM", "64")])).unwrap_err();
    check_message(&error.to_string(), &["`head_dim`", "`M_HEAD_DIM`"]);
    assert!(Config::resolve(&request(&["model_name=llama2-7b", "base_emb_dim=4096"], &[])).is_ok());
    let config = resolved(&["model_name=llama2-7b", "base_emb_dim=128", "override_model_config=True"]);
    assert_eq!(config.entry("base_emb_dim").value, json!(128));
    assert_eq!(config.entry("base_mlp_dim").value, json!(11008));
}

#[test]
fn a_file_yields_to_the_model_with_a_note() {
    let directory = tempfile::tempdir().unwrap();
    let file = write(directory.path(), "run.yml", "model_name: llama2-7b\nhead_dim: 64\n");
    let config = resolved(&[&file]);
    assert_eq!(config.entry("head_dim").value, json!(128));
    assert!(config.notes().iter().any(|note| note.contains("`head_dim`") && note.contains("`64`")));
}

#[test]
fn mistakes_are_reported_together() {
    let error = Config::resolve(&request(&["setps=3", "learning_rate=fast", "head_dim=0"], &[])).unwrap_err();
    assert_eq!(error.problems().len(), 3);
    check_message(
        &error.to_string(),
        &[
            "3 problems",
            "unknown key `setps`",
            "did you mean `steps`",
            "`learning_rate` is `fast`",
            "`head_dim` is `0`",
        ],
    );
}

#[test]
fn wrong_command_lines() {
    check_refused(&["steps"], &["`steps` is neither", "key=value"]);
    check_refused(&["--steps=3"], &["without dashes"]);
    check_refused(&["missing.yml"], &["`missing.yml` does not exist"]);
    let last = Config::resolve(&request(&["steps=1", "steps=2"], &[])).unwrap();
    assert_eq!(last.entry("steps").value, 2);
    check_refused(&["a.yml", "b.yml"], &["two YAML files", "base_config"]);
    check_refused(&["model_name=llama2-7"], &["`llama2-7`", "did you mean `llama2-7b`"]);
    check_refused(&["decode_sampling_strategy=gredy"], &["`gredy`", "did you mean `greedy`"]);
    check_refused(&["dropout_rate=1.5"], &["out of bounds", "from 0 to 1"]);
    check_refused(&["scan_layers=maybe"], &["true or false"]);
    check_refused(&["logical_axis_rules=norm"], &["list of pairs"]);
    let twice = Config::resolve(&request(&["steps=1"], &[("M_STEPS", "2")])).unwrap_err().to_string();
    check_message(&twice, &["`steps` is set twice", "`M_STEPS`", "command line"]);
    let unknown = Config::resolve(&request(&[], &[("M_STEP", "2")])).unwrap_err().to_string();
    check_message(&unknown, &["`M_STEP` names no key", "`M_STEPS`"]);
}

#[test]
fn wrong_files() {
    let directory = tempfile::tempdir().unwrap();
    let message = |text: &str| {
        let file = write(directory.path(), "a.yml", text);
        Config::resolve(&request(&[&file], &[])).unwrap_err().to_string()
    };
    check_message(&message("\nsteps: many\n"), &["`steps` is `many`", "a.yml`, line 2"]);
    check_message(&message("run_name: 7\n"), &["`run_name` is `7`", "text", "quotes"]);
    assert!(message("steps: [1\n").contains("line 1"));
    assert!(message("base_config: a.yml\n").contains("builds on itself"));
}

#[test]
fn presets_stand_in_for_files_of_the_source_tree() {
    let config = resolved(&["src/maxtext/configs/base.yml", "steps=3"]);
    assert_eq!(config.entries().filter(|entry| entry.is_changed()).count(), 1);
}

#[test]
fn the_quick_start_is_for_keys_about_the_run() {
    let quick = |arguments: &[&str], environment: &[(&str, &str)]| {
        Config::resolve(&request(arguments, environment).with_quick_start()).unwrap()
    };
    for arguments in [&[][..], &["steps=3", "run_name=a", "base_output_directory=/tmp/x", "log_period=1"]] {
        let config = quick(arguments, &[]);
        assert!(config.is_quick_start());
        TrainConfig::from_config(&config).unwrap().check_devices(1).unwrap();
    }
    assert_eq!(quick(&["steps=3"], &[]).entry("steps").value, json!(3));
    assert!(!quick(&["steps=3", "head_dim=64"], &[]).is_quick_start());
    assert!(!quick(&[], &[("M_HEAD_DIM", "64")]).is_quick_start());
    assert!(!quick(&["base.yml"], &[]).is_quick_start());
    assert!(!resolved(&["steps=3"]).is_quick_start());
}

#[test]
fn jax_asks_for_virtual_devices_too() {
    let flags = [("XLA_FLAGS", "--xla_a=1 --xla_force_host_platform_device_count=8")];
    let config = Config::resolve(&request(&[], &flags)).unwrap();
    assert_eq!(config.entry("num_cpu_devices").value, json!(8));
    let config = Config::resolve(&request(&["num_cpu_devices=2"], &flags)).unwrap();
    assert_eq!(config.entry("num_cpu_devices").value, json!(2));
}

#[test]
fn defaults_of_maxtext_make_a_typed_configuration() {
    let config = training(&[]).unwrap();
    assert_eq!(
        (config.model.emb_dim(), config.model.num_decoder_layers(), config.model.head_dim),
        (2048, 16, 128)
    );
    assert_eq!(config.model.attention, AttentionKind::Autoselected);
    assert_eq!(config.model.remat.remat_policy, RematPolicy::Full);
    assert_eq!(config.run.hardware, Hardware::Auto);
    assert_eq!(config.data.batch_schedule(2).unwrap().full_rows(), 24);
    assert_eq!(config.data.eval_global_batch(2).unwrap(), 24);
    assert_eq!(config.optimizer.schedule_steps(), 150_001);
    assert_eq!(config.optimizer.warmup_steps(), 15_000);
    assert_eq!(config.checkpoint.max_num_checkpoints_to_keep, None);
    assert_eq!(config.run.eval_interval, None);
}

#[test]
fn scaled_models_grow_in_all_dimensions() {
    for (scale, expected) in
        [(1, [8, 2, 4, 3]), (2, [8, 4, 8, 3]), (4, [16, 4, 8, 3]), (8, [16, 4, 8, 6]), (16, [16, 8, 16, 6])]
    {
        let config = training(&[
            "base_emb_dim=8",
            "base_num_query_heads=2",
            "base_num_kv_heads=1",
            "base_mlp_dim=4",
            "base_num_decoder_layers=3",
            &format!("global_parameter_scale={scale}"),
        ])
        .unwrap();
        let model = config.model;
        let dimensions =
            [model.emb_dim(), model.num_query_heads(), model.mlp_dim(), model.num_decoder_layers()];
        assert_eq!(dimensions, expected, "scale {scale}");
    }
    check_training_refused(
        &["global_parameter_scale=3"],
        &["`global_parameter_scale` is `3`", "power of two"],
    );
}

#[test]
fn features_that_are_not_built_are_refused_by_name() {
    for (argument, fragments) in [
        ("attention=paged", &["`attention` is `paged`", "command line", "`attention=autoselected`"][..]),
        ("dataset_type=grain", &["`grain`", "`dataset_type=synthetic`"]),
        ("profiler=nsys", &["profiles by Nsight Systems", "nsys profile maxtext train"]),
        ("ici_pipeline_parallelism=2", &["pipeline parallelism"]),
    ] {
        let config = resolved(
            &["dataset_type=synthetic"]
                .iter()
                .copied()
                .filter(|_| !argument.starts_with("dataset_type"))
                .chain([argument])
                .collect::<Vec<_>>(),
        );
        let error = TrainConfig::from_config(&config).unwrap_err();
        assert_eq!(error.problems().len(), 1, "{error}");
        check_message(&error.to_string(), fragments);
    }
    let unsaid = TrainConfig::from_config(&resolved(&["hf_path=json"])).unwrap_err().to_string();
    check_message(&unsaid, &["`dataset_type` is `tfds` (derived)", "`dataset_type=hf`"]);
}

#[test]
fn the_key_of_one_projection_goes_before_that_of_several() {
    let kept = |arguments: &[&str]| {
        let remat = training(&[&["remat_policy=custom"], arguments].concat()).unwrap().model.remat;
        let kept = remat.kept().unwrap().into_iter();
        kept.filter(|(name, _)| name.ends_with("_proj")).collect::<Vec<_>>()
    };
    let (device, host) = (KeptIn::Device, KeptIn::Host);
    assert_eq!(
        kept(&["qkv_proj=device", "kv_proj=offload"]),
        [("query_proj", device), ("key_proj", host), ("value_proj", host)]
    );
    assert_eq!(
        kept(&["qkv_proj=device", "query_proj=remat", "key_proj=offload"]),
        [("key_proj", host), ("value_proj", device)]
    );
    assert_eq!(kept(&["kv_proj=remat", "qkv_proj=offload"]), [("query_proj", host)]);
    let config = resolved(&["remat_policy=custom", "qkv_proj=offload", "query_proj=remat"]);
    assert_eq!(config.entry("tensors_to_offload").value, json!(["key_proj", "value_proj"]));
}

/// The rules alone decide whether a sequence is split, whatever the axis.
#[test]
fn chunks_are_distributed_where_rules_split_sequences() {
    let shards = |arguments: &[&str]| {
        let settings = training(&[&["ici_fsdp_parallelism=1"], arguments].concat()).unwrap();
        settings.context.paired_shards(&settings.placement.placement(8).unwrap())
    };
    let split = "ici_context_parallelism=8";
    assert_eq!(shards(&[split]), Some(8));
    assert_eq!(shards(&[split, "context_parallel_load_balance=false"]), None);
    assert_eq!(shards(&[split, "logical_axis_rules=[['activation_length_attn', []]]"]), None);
    let experts = ["custom_mesh_and_rule=ep-as-cp", "ici_expert_parallelism=8"];
    assert_eq!(shards(&experts), Some(8));
    assert_eq!(shards(&[&experts[..], &["context_sharding=expert"]].concat()), Some(8));
    assert_eq!(shards(&["ici_expert_parallelism=8"]), None);
}

#[test]
fn keys_without_effect_are_noted() {
    let config = resolved(&["shardy=false", "hf_access_token=abc"]);
    let notes = config.notes().join("\n");
    assert!(notes.contains("`shardy` (command line) has no effect here"), "{notes}");
    assert!(training(&["shardy=false"]).is_ok());
}

#[test]
fn what_a_resolved_file_holds_is_not_noted_again() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("whole.yml");
    std::fs::write(&path, resolved(&["model_name=gemma3-4b", "rope_factor=8"]).to_yaml()).unwrap();
    let path = path.to_str().unwrap();
    assert_eq!(resolved(&[path]).notes(), Vec::<String>::new());
    assert_eq!(resolved(&[path, "beta_fast=8"]).notes().len(), 1);
}

#[test]
fn keys_that_others_make_moot_are_noted() {
    for (arguments, note) in [
        (
            &["rope_factor=8"][..],
            "`rope_factor` (command line) has no effect without `rope_type=yarn` or `rope_type=ntk`",
        ),
        (
            &["hf_path=json", "dataset_type=synthetic"],
            "`hf_path` (command line) has no effect without `dataset_type=hf`",
        ),
        (
            &["sliding_window_size=8"],
            "`sliding_window_size` (command line) has no effect without `attention_type=local_sliding`",
        ),
        (
            &["param_scan_axis=0", "scan_layers=false"],
            "`param_scan_axis` (command line) has no effect without `scan_layers=true`",
        ),
        (
            &["mlpwo=offload", "remat_policy=minimal"],
            "`mlpwo` (command line) has no effect without `remat_policy=custom`",
        ),
        (
            &["mlpwi=device", "remat_policy=custom"],
            "`mlpwi` (command line) has no effect here: feed-forward layers have a gate",
        ),
        (
            &["mlpwi_1=device", "remat_policy=custom", "mlp_activations=[gelu]"],
            "`mlpwi_1` (command line) has no effect here: feed-forward layers have no gate",
        ),
        (
            &["hardware=cpu", "compile_topology=v5e-4"],
            "`hardware` (command line) has no effect beside `compile_topology=v5e-4`",
        ),
        (
            &["num_cpu_devices=8", "compile_topology=v5e-4"],
            "`num_cpu_devices` (command line) has no effect beside `compile_topology=v5e-4`",
        ),
    ] {
        let notes = resolved(arguments).notes().join("\n");
        assert!(notes.contains(note), "{arguments:?}: {notes}");
    }
    for arguments in [
        &["rope_factor=8", "rope_type=ntk"][..],
        &["sliding_window_size=8", "attention_pattern=local,global"],
        &["sliding_window_size=8", "decoder_block=gemma2"],
        &["param_scan_axis=0"],
        &["hardware=tpu", "compile_topology=v5e-4"],
        &["hardware=cpu", "num_cpu_devices=8"],
    ] {
        assert_eq!(resolved(arguments).notes(), Vec::<String>::new(), "{arguments:?}");
    }
}

#[test]
fn values_that_do_not_fit_name_each_other() {
    check_training_refused(
        &["base_num_query_heads=6", "base_num_kv_heads=4"],
        &["`base_num_query_heads` is `6`", "`base_num_kv_heads` is `4`", "base_num_kv_heads=3"],
    );
    check_training_refused(&["head_dim=33"], &["`head_dim` is `33`"]);
    check_training_refused(
        &["load_parameters_path=a", "load_full_state_path=b"],
        &["`load_parameters_path` is `a`", "`load_full_state_path` is `b`"],
    );
    check_training_refused(
        &["ici_data_parallelism=-1"],
        &["`ici_data_parallelism` is `-1`", "`ici_fsdp_parallelism` is `-1`"],
    );
    check_refused(&["mlp_activations=silu,linaer"], &["`mlp_activations`", "did you mean `linear`"]);
    check_training_refused(&["run_name=a/b"], &["`run_name` is `a/b`"]);
    let hf = |arguments: &[&str]| {
        let all: Vec<&str> = ["dataset_type=hf"].iter().chain(arguments).copied().collect();
        TrainConfig::from_config(&resolved(&all)).unwrap_err().to_string()
    };
    check_message(
        &hf(&[]),
        &["`hf_path` is `''`", "`hf_train_files` is `none`", "`tokenizer_path` is `none`"],
    );
    check_message(&hf(&["hf_path=c4"]), &["`hf_path` is `c4`", "neither a format nor the name of a dataset"]);
    check_message(
        &hf(&["hf_path=text", "hf_train_files=a", "tokenizer_type=byte", "eval_interval=5"]),
        &["`eval_interval` is `5`", "hf_eval_files"],
    );
}

#[test]
fn an_indexer_fits_its_attention_and_its_stage() {
    let with = |further: &[&'static str]| {
        [&["model_name=deepseek3.2-671b", "override_model_config=true"], further].concat()
    };
    let check =
        |further: &[&'static str], fragments: &[&str]| check_training_refused(&with(further), fragments);
    check_training_refused(&["use_indexer=true"], &["`attention_type` is `global`", "attention_type=mla"]);
    check(&["q_lora_rank=0"], &["`use_indexer` is `true`", "`q_lora_rank` is `0`"]);
    check(&["indexer_topk=0", "indexer_n_heads=0"], &["`indexer_topk` is `0`", "`indexer_n_heads` is `0`"]);
    check(&["indexer_head_dim=32"], &["`indexer_head_dim` is `32`", "`qk_rope_head_dim` is `64`"]);
    check(&["indexer_loss_scaling_factor=-1"], &["`indexer_loss_scaling_factor` is `-1"]);
    check(&["indexer_loss_scaling_factor=1"], &["trainable_parameters_mask", "indexer_sparse_training=true"]);
    check(
        &["indexer_use_approx_top_k=true", "indexer_approx_top_k_recall=0"],
        &["`indexer_approx_top_k_recall` is `0", "such as 0.95"],
    );
    let warms_up =
        |own| training(&with(&["indexer_loss_scaling_factor=1", own])).unwrap().model.indexer.warms_up();
    assert!(warms_up("trainable_parameters_mask=.*indexer.*"));
    assert!(!warms_up("indexer_sparse_training=true"));
}

#[test]
fn sampling_is_checked_when_decoding() {
    let decode = |arguments: &[&str]| DecodeConfig::from_config(&resolved(arguments));
    assert!(decode(&[]).is_ok());
    assert!(decode(&["decode_sampling_strategy=nucleus", "decode_sampling_nucleus_p=0.9"]).is_ok());
    for (arguments, fragments) in [
        (&["decode_sampling_strategy=nucleus"][..], &["`decode_sampling_nucleus_p` is `-1.0`"][..]),
        (&["decode_sampling_strategy=topk"], &["`decode_sampling_top_k` is `0`"]),
        (&["decode_sampling_strategy=weighted", "decode_sampling_temperature=0"], &["divides by it"]),
        (&["max_target_length=64"], &["`max_prefill_predict_length` is `64`", "`max_target_length` is `64`"]),
    ] {
        check_message(&decode(arguments).unwrap_err().to_string(), fragments);
    }
}

#[test]
fn meshes_are_filled_in() {
    let sizes = |arguments: &[&str], devices: usize| {
        let mesh = training(arguments).unwrap().placement.mesh(devices).unwrap();
        (mesh.axis_size("data"), mesh.axis_size("fsdp"), mesh.axis_size("tensor"), mesh.num_devices())
    };
    let one = Some(1);
    assert_eq!(sizes(&[], 1), (one, one, one, 1));
    assert_eq!(sizes(&[], 8), (one, Some(8), one, 8));
    assert_eq!(sizes(&["ici_fsdp_parallelism=8"], 8), (one, Some(8), one, 8));
    assert_eq!(sizes(&["ici_fsdp_parallelism=4", "ici_tensor_parallelism=2"], 8), (one, Some(4), Some(2), 8));
    assert_eq!(sizes(&["ici_data_parallelism=-1", "ici_fsdp_parallelism=2"], 8), (Some(4), Some(2), one, 8));
}

#[test]
fn meshes_over_slices_are_filled_in() {
    let check = |arguments: &[&str], sizes: &[(&str, usize)], devices: &[usize]| {
        let arguments = [&["num_cpu_slices=2"], arguments].concat();
        let placement = training(&arguments).unwrap().placement;
        let mesh = placement.mesh(placement.topology(8, &DeviceAttributes::default()).unwrap()).unwrap();
        let split: Vec<(&str, usize)> = mesh
            .axes()
            .iter()
            .filter(|(_, size)| *size > 1)
            .map(|(name, size)| (name.as_str(), *size))
            .collect();
        assert_eq!((&split[..], &mesh.devices()[..]), (sizes, devices), "{arguments:?}");
    };
    let in_order = [0, 1, 2, 3, 4, 5, 6, 7];
    check(&[], &[("data", 2), ("fsdp", 4)], &in_order);
    check(&["dcn_data_parallelism=1", "dcn_fsdp_parallelism=2"], &[("fsdp", 8)], &in_order);
    check(
        &["ici_tensor_parallelism=2", "dcn_data_parallelism=1", "dcn_fsdp_parallelism=-1"],
        &[("fsdp", 4), ("tensor", 2)],
        &in_order,
    );
    check(
        &[
            "ici_data_parallelism=4",
            "ici_fsdp_parallelism=1",
            "dcn_data_parallelism=1",
            "dcn_fsdp_parallelism=2",
        ],
        &[("data", 4), ("fsdp", 2)],
        &[0, 4, 1, 5, 2, 6, 3, 7],
    );
    // Devices that report their slice.
    let placement = training(&[]).unwrap().placement;
    let attributes = DeviceAttributes { slices: Some(vec![1, 0, 1, 0]), ..DeviceAttributes::default() };
    let topology = placement.topology(4, &attributes).unwrap();
    assert_eq!(placement.mesh(topology).unwrap().devices(), [1, 3, 0, 2]);
}

#[test]
fn one_axis_of_a_tpu_v6e_is_a_ring() {
    let in_order = [0, 1, 2, 3, 4, 5, 6, 7];
    let check = |arguments: &[&str], kind: &str, width: i64, devices: &[usize]| {
        let placement = training(arguments).unwrap().placement;
        let attributes = DeviceAttributes {
            kind: kind.to_owned(),
            slices: None,
            coordinates: Some((0..8).map(|device| vec![device % width, device / width, 0]).collect()),
        };
        let topology = placement.topology(8, &attributes).unwrap();
        assert_eq!(placement.mesh(topology).unwrap().devices(), devices, "{arguments:?} {kind} {width}");
    };
    const SET: &str = "optimize_mesh_for_tpu_v6e=true";
    check(&[SET], "TPU v6 lite", 2, &[0, 2, 4, 6, 7, 5, 3, 1]);
    check(&[SET], "TPU v6 lite", 4, &in_order);
    check(&[SET], "TPU v5 lite", 2, &in_order);
    check(&[], "TPU v6 lite", 2, &in_order);
    check(&[SET, "ici_fsdp_parallelism=4", "ici_tensor_parallelism=2"], "TPU v6 lite", 2, &in_order);
}

#[test]
fn slices_that_do_not_fit() {
    let check = |arguments: &[&str], slices: Option<&[i64]>, fragments: &[&str]| {
        let placement = training(arguments).unwrap().placement;
        let attributes =
            DeviceAttributes { slices: slices.map(<[i64]>::to_vec), ..DeviceAttributes::default() };
        let error =
            placement.topology(8, &attributes).and_then(|topology| placement.mesh(topology)).unwrap_err();
        check_message(&error.to_string(), fragments);
    };
    check(&["num_cpu_slices=3"], None, &["`num_cpu_slices` is `3`", "8 devices"]);
    check(&["num_slices=2"], None, &["`num_slices` is `2`", "of 1 slice", "`num_cpu_slices=2`"]);
    check(&[], Some(&[0, 0, 0, 0, 0, 1, 1, 1]), &["8 devices are not 2 slices of the same size"]);
    check(
        &["num_cpu_slices=2", "ici_tensor_parallelism=3"],
        None,
        &["`ici_tensor_parallelism=3`", "does not divide the 4 devices of a slice"],
    );
    check(
        &["num_cpu_slices=2", "dcn_data_parallelism=4"],
        None,
        &["`dcn_data_parallelism=4`", "is not the number of slices, which is 2", "`num_cpu_slices=4`"],
    );
    check(
        &["num_cpu_slices=2", "custom_mesh_and_rule=pure-fsdp"],
        None,
        &["`dcn_data_parallelism` is `-1`", "takes 2 slices", "has no `data`"],
    );
}

#[test]
fn meshes_and_batches_that_do_not_fit() {
    for (arguments, devices, fragments) in [
        (
            &["ici_tensor_parallelism=3"][..],
            8,
            &["`ici_tensor_parallelism=3` (command line) does not divide the 8 devices"][..],
        ),
        (
            &["ici_fsdp_parallelism=4", "ici_tensor_parallelism=4"],
            8,
            &[
                "`ici_fsdp_parallelism=4` (command line) × `ici_tensor_parallelism=4` (command line)",
                "which is 8",
                "num_cpu_devices=16",
            ],
        ),
        (&["dcn_fsdp_parallelism=2"], 1, &["`dcn_fsdp_parallelism=2`", "asks for several slices"]),
        (&["per_device_batch_size=0.3"], 2, &["`per_device_batch_size` is `0.3`", "0.6"]),
        (
            &["per_device_batch_size=0.5"],
            8,
            &["a batch of 4 sequences", "8 shards", "fsdp=8", "per_device_batch_size=1"],
        ),
    ] {
        let error = training(arguments).unwrap().check_devices(devices).unwrap_err();
        check_message(&error.to_string(), fragments);
    }
    let fractional = &["per_device_batch_size=0.5", "ici_tensor_parallelism=2"];
    training(fractional).unwrap().check_devices(8).unwrap();
}

#[test]
fn patterns_are_split_at_commas() {
    let files = "hf_train_files=a/*.txt, b/{c,d}.txt,,e";
    let config = training(&[files]).unwrap();
    assert_eq!(config.data.train_patterns(), ["a/*.txt", "b/{c,d}.txt", "e"]);
    assert!(config.data.eval_patterns().is_empty());
    assert_eq!(training(&["num_epoch=-1"]).unwrap().data.num_epoch, None);
}

#[test]
fn compiler_options_are_split() {
    let config = training(&["compile_xla_flags=--xla_a=1  --xla_b=two"]).unwrap();
    let expected =
        [("xla_a", "1"), ("xla_b", "two")].map(|(name, value)| (name.to_owned(), value.to_owned()));
    assert_eq!(config.debug.compiler_options(), expected);
    check_training_refused(&["compile_xla_flags=xla_a"], &["`xla_a`"]);
}

/// Checks that saving a configuration and reading it back changes nothing.
#[track_caller]
fn check_saved(config: &Config) -> Config {
    let directory = tempfile::tempdir().unwrap();
    let file = write(directory.path(), "config.yml", &config.to_yaml());
    let read = Config::resolve(&request(&[&file], &[])).unwrap();
    assert_eq!(config.differences(&read), []);
    read
}

#[test]
fn saved_configurations_read_back() {
    check_saved(&Config::defaults());
    check_saved(&resolved(&["model_name=llama2-7b", "base_emb_dim=128", "override_model_config=true"]));
    check_saved(&resolved(&[
        "logical_axis_rules=[['norm',[]],['new','tensor']]",
        "prompt=a: 'b' \"c\" # d\nе",
        "run_name=007",
    ]));
    check_saved(&Config::resolve(&request(&["steps=2"], &[]).with_quick_start()).unwrap());
}

#[test]
fn decoding_from_a_run_needs_nothing_else() {
    let directory = tempfile::tempdir().unwrap();
    let run = directory.path().join("run");
    let items = run.join("checkpoints").join("10").join("items");
    std::fs::create_dir_all(&items).unwrap();
    let trained = resolved(&["model_name=llama2-7b", "head_dim=64", "override_model_config=true"]);
    std::fs::write(mt_config::saved_config_path(&run), trained.to_yaml()).unwrap();
    for path in [&run, &run.join("checkpoints"), &items] {
        let found = mt_config::run_directory_of(path).unwrap();
        assert_eq!(found, std::path::absolute(&run).unwrap());
    }
    let load = format!("load_parameters_path={}", run.display());
    let request = request(&[&load, "prompt=Hello", "decode_seed=3"], &[])
        .over_saved(mt_config::saved_config_path(&run));
    let config = DecodeConfig::from_config(&Config::resolve(&request).unwrap()).unwrap();
    assert_eq!((config.model.head_dim, config.model.emb_dim(), config.decode.decode_seed), (64, 4096, 3));
    assert_eq!(config.decode.prompt, "Hello");
}

#[test]
fn secrets_stay_secret() {
    let config = resolved(&["hf_access_token=hf_verysecret"]);
    let shown = format!(
        "{}{:?}{}{}",
        config.to_yaml(),
        config.to_json(false),
        config.entry("hf_access_token").shown(),
        config.notes().join("")
    );
    assert!(!shown.contains("verysecret"));
    let twice = Config::resolve(&request(
        &["hf_access_token=first_secret"],
        &[("M_HF_ACCESS_TOKEN", "second_secret")],
    ))
    .unwrap_err();
    assert!(!twice.to_string().contains("_secret"), "{twice}");
}

#[test]
fn a_run_lasts_as_long_as_its_schedule() {
    let config = resolved(&["steps=-1", "learning_rate_schedule_steps=500"]);
    assert_eq!(config.entry("steps").value, json!(500));
    check_refused(&["steps=-1"], &["`steps` is `-1`", "`learning_rate_schedule_steps` is `-1`"]);
}

#[test]
fn old_names_still_work() {
    let config = resolved(&["cosine_learning_rate_final_fraction=0.2"]);
    assert_eq!(config.entry("learning_rate_final_fraction").value, json!(0.2));
    assert!(config.notes().iter().any(|note| note.contains("is now called")));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(256) })]

    #[test]
    fn no_argument_makes_it_panic(arguments in prop::collection::vec("[a-z_]{0,12}=?.{0,12}", 0..4)) {
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let _ = Config::resolve(&request(&arguments, &[]));
    }

    #[test]
    fn no_value_of_a_key_makes_it_panic(index in 0..200_usize, value in ".{0,16}") {
        let key = table::keys().nth(index % table::keys().count()).unwrap();
        if let Ok(config) = Config::resolve(&request(&[&format!("{}={value}", key.name)], &[])) {
            check_saved(&config);
            let errors = [TrainConfig::from_config(&config).err(), DecodeConfig::from_config(&config).err()];
            assert!(errors.into_iter().flatten().all(|error| !error.problems().is_empty()));
        }
    }

    #[test]
    fn no_file_makes_it_panic(text in "([a-z_]{1,10}: ?[\\[\\]{}'\"a-z0-9,.:-]{0,12}\n){0,4}") {
        let directory = tempfile::tempdir().unwrap();
        let file = write(directory.path(), "a.yml", &text);
        let _ = Config::resolve(&request(&[&file], &[]));
    }
}

#[test]
fn what_is_above_a_resolved_file_counts_as_above_any_other() {
    let directory = tempfile::tempdir().unwrap();
    let whole = resolved(&["run_name=a", "num_cpu_devices=8", "dataset_type=synthetic"]).to_yaml();
    write(directory.path(), "whole.yml", &whole);
    let text = "base_config: whole.yml\nmodel_name: llama2-7b\ncustom_mesh_and_rule: pure-fsdp\n";
    let file = write(directory.path(), "top.yml", text);
    let config = resolved(&[&file, "logical_axis_rules=[['norm','fsdp']]"]);
    assert_eq!(config.entry("base_mlp_dim").value, json!(11008));
    assert_eq!(
        config.entry("mesh_axes").value,
        resolved(&["custom_mesh_and_rule=pure-fsdp"]).entry("mesh_axes").value
    );
    let rules = config.entry("logical_axis_rules").value.as_array().unwrap();
    assert!(rules.len() > 1 && rules.contains(&json!(["norm", ["fsdp"]])), "{rules:?}");
}

#[test]
fn values_that_follow_from_others_may_follow_from_changed_ones() {
    let directory = tempfile::tempdir().unwrap();
    let text = "run_name: a\nbase_emb_dim: 256\nemb_dim: 256\ncheckpoint_dir: maxtext_output/a/checkpoints\n";
    let file = write(directory.path(), "whole.yml", text);
    let config = resolved(&[&file, "run_name=b", "base_emb_dim=512"]);
    assert_eq!(config.entry("emb_dim").value, json!(512));
    assert_eq!(config.entry("checkpoint_dir").value, json!("maxtext_output/b/checkpoints"));
    let file = write(directory.path(), "wrong.yml", "base_emb_dim: 256\nemb_dim: 512\n");
    check_refused(&[&file], &["`emb_dim`", "`512`", "wrong.yml`, line 2", "`base_emb_dim`"]);
}

#[test]
fn devices_are_known_of_cpus_only() {
    for (arguments, expected) in [
        (&["num_cpu_devices=8"][..], Some(8)),
        (&["num_cpu_devices=1"], Some(1)),
        (&["hardware=cpu"], Some(1)),
        (&["hardware=gpu", "num_cpu_devices=8"], None),
        (&[], None),
    ] {
        let config = resolved(arguments);
        assert_eq!(config.known_devices(), expected, "{arguments:?}");
        assert_eq!(config.entry("num_target_devices").value, json!(expected), "{arguments:?}");
    }
}

#[test]
fn secrets_are_neither_repeated_nor_kept_in_mappings() {
    for arguments in [
        &["hf_access_token", "=", "hidden"][..],
        &["hf_access_token:hidden"],
        &["--hf_access_token", "hidden"],
        &["student_overrides.hf_access_token=hidden"],
        &["student_overrides={hf_access_token: hidden}"],
    ] {
        let message = Config::resolve(&request(arguments, &[])).unwrap_err().to_string();
        assert!(message.contains("hf_access_token") && !message.contains("hidden"), "{message}");
    }
}

#[test]
fn variables_of_other_programs_are_not_warned_of() {
    let config = |variable: &str| Config::resolve(&request(&[], &[(variable, "hidden")])).unwrap();
    assert_eq!(config("HF_TOKEN").notes(), Vec::<String>::new());
    let of_this_program = config("M_HF_ACCESS_TOKEN");
    assert_eq!(of_this_program.entry("hf_access_token").value, json!("hidden"));
}

#[test]
fn what_rules_split_is_counted_by_rules() {
    let shards = |keys: &[&str]| {
        let eight = ["num_cpu_devices=8", "hardware=cpu"];
        resolved(&[&eight[..], keys].concat()).entry("context_parallel_size").value.clone()
    };
    assert_eq!(shards(&[]), json!(1));
    assert_eq!(shards(&["ici_context_parallelism=4"]), json!(4));
    let experts = ["custom_mesh_and_rule=ep-as-cp", "ici_expert_parallelism=4"];
    assert_eq!(shards(&experts), json!(4));

    let batch = |rules: &str| {
        let config = training(&["num_cpu_devices=8", "ici_tensor_parallelism=2", rules]).unwrap();
        config.placement.num_batch_shards(&config.placement.mesh(8).unwrap())
    };
    assert_eq!(batch("sharding_tolerance=0.1"), 4);
    // A dimension without mesh axes after a rule takes those of the next rule.
    let rule = |axis: &str| format!("['activation_embed_and_logits_batch',['{axis}']]");
    let taken = "['activation_norm_length',['fsdp']]";
    assert_eq!(batch(&format!("logical_axis_rules=[{taken},{},{}]", rule("fsdp"), rule("tensor"))), 2);
}
