//! Command lines of MaxText's documentation are accepted, or refused for a feature that is not built.

mod common;

use std::fmt::Write as _;

use mt_config::{Config, ConfigError, DatasetType, Problem, Request, TrainConfig, value_text};
use serde_json::{Map, Value};

fn request(arguments: &[String]) -> Request {
    Request { arguments: arguments.to_vec(), ..Request::default() }
}

/// `accepted`, the missing features, the need of a bucket, or a mistake, which no line of the table may have.
fn verdict(result: Result<Config, ConfigError>) -> String {
    let Err(error) = result else { return "accepted".to_owned() };
    let feature = |problem: &Problem| match problem {
        Problem::NotBuilt { feature, .. } => Some(*feature),
        _ => None,
    };
    match error.problems().iter().map(feature).collect::<Option<Vec<&str>>>() {
        Some(features) => format!("refused: {}", features.join("; ")),
        None => format!("mistake: {error}"),
    }
}

#[test]
fn documented_command_lines_have_their_verdicts() {
    mt_storage::disconnect();
    let (mut table, mut mistakes, mut count) = (String::new(), String::new(), 0);
    for line in include_str!("command_lines.txt").lines() {
        // Verdicts are indented.
        if line.starts_with(' ') {
            continue;
        }
        writeln!(table, "{line}").unwrap();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let words = common::words(line);
        let (command, arguments) = words.split_first().unwrap();
        let verdict = verdict(common::check(command, request(arguments)));
        if verdict.starts_with("mistake: ") {
            writeln!(mistakes, "{line}\n{verdict}").unwrap();
        }
        writeln!(table, "    {verdict}").unwrap();
        count += 1;
    }
    assert!(mistakes.is_empty(), "{mistakes}");
    assert!(count >= 70, "{count} command lines");
    common::check_table("command_lines.txt", &table);
}

#[test]
fn every_preset_resolves() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src/presets");
    let mut folders = vec![folder.clone()];
    let mut count = 0;
    while let Some(next) = folders.pop() {
        for entry in std::fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let name = path.strip_prefix(&folder).unwrap().to_str().unwrap();
            let stem = name.strip_suffix(".yml").unwrap();
            for argument in [stem.to_owned(), format!("src/maxtext/configs/{name}")] {
                let config = Config::resolve(&request(std::slice::from_ref(&argument)));
                let config = config.unwrap_or_else(|error| panic!("{argument}: {error}"));
                let problems = config.missing_features();
                assert!(
                    problems.iter().all(|problem| matches!(problem, Problem::NotBuilt { .. })),
                    "{argument}"
                );
            }
            count += 1;
        }
    }
    assert!(count >= 40, "{count} presets");
}

/// The values in base.yml, as recorded by `golden/make.py`.
fn base_defaults() -> Map<String, Value> {
    let keys: Map<String, Value> = serde_json::from_str(include_str!("golden/keys.json")).unwrap();
    keys.into_iter().filter_map(|(name, row)| Some((name, row.get("base")?.clone()))).collect()
}

#[test]
fn all_of_base_yml_is_taken() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("mine.yml");
    let lines = base_defaults().into_iter().map(|(name, value)| format!("{name}: {value}\n"));
    std::fs::write(&path, lines.collect::<String>()).unwrap();
    let config = Config::resolve(&request(&[path.to_str().unwrap().to_owned()])).unwrap();
    assert!(config.notes().is_empty(), "{:?}", config.notes());
    assert_eq!(config.training_notes().len(), 1, "{:?}", config.training_notes());
    let train = TrainConfig::from_config(&config).unwrap();
    assert_eq!(train.data.dataset_type, DatasetType::Synthetic);
}

#[test]
fn a_run_that_names_no_data_gets_random_tokens() {
    let directory = tempfile::tempdir().unwrap();
    let base = directory.path().join("base.yml");
    std::fs::write(&base, "run_name: ''\ndataset_type: tfds\ndataset_path: ''\nhf_path: ''\n").unwrap();
    let base = base.to_str().unwrap();
    let of = |arguments: &[&str]| {
        let arguments: Vec<String> = arguments.iter().map(|&argument| argument.to_owned()).collect();
        Config::resolve(&request(&arguments)).unwrap()
    };
    for arguments in [&["run_name=x"][..], &[base, "run_name=x"], &["learning_rate=1e-3"]] {
        let config = of(arguments);
        let train = TrainConfig::from_config(&config).unwrap();
        assert_eq!(train.data.dataset_type, DatasetType::Synthetic, "{arguments:?}");
        let notes = config.training_notes();
        assert!(
            matches!(notes.as_slice(), [only] if only.contains("`dataset_type=synthetic`")
                && only.contains("MaxText's default, `tfds`, needs `dataset_path`")),
            "{notes:?}"
        );
    }
    assert_eq!(
        of(&["dataset_type=synthetic"]).training_notes(),
        Vec::<String>::new(),
        "requested random tokens"
    );
    for (arguments, expected) in [
        (&[base, "dataset_path=hdfs://bucket/data"][..], "cloud storage is not built yet"),
        (&["dataset_path=hdfs://bucket/data"], "cloud storage is not built yet"),
        (&[base, "hf_path=json"], "`dataset_type` is `tfds`"),
        (&["hf_train_files=a.txt"], "`dataset_type=hf`, `dataset_type=grain`"),
        (&["dataset_type=grain"], "`grain_train_files` is `''`"),
        (&["dataset_type=olmo_grain"], "`olmo_index_path` is `''`"),
        (&["dataset_type=olmo_grain", "olmo_index_path=i", "olmo_path_remap_from=a"], "set both, or none"),
        (&["dataset_type=grain", "grain_train_files=hdfs://a/b"], "cloud storage is not built yet"),
        (
            &["dataset_type=grain", "grain_train_files=a", "grain_train_mixture_config_path=b"],
            "leave out one of both",
        ),
        (
            &["dataset_type=hf", "hf_path=text", "hf_train_files=a", "tokenize_train_data=false"],
            "which is text",
        ),
        (
            &[
                "dataset_type=hf",
                "hf_path=json",
                "hf_train_files=a",
                "tokenize_train_data=false",
                "use_sft=true",
            ],
            "and records are text",
        ),
        (
            &["dataset_type=hf", "hf_path=json", "hf_train_files=a", "train_split=some"],
            "but files have no splits",
        ),
    ] {
        let error = TrainConfig::from_config(&of(arguments)).unwrap_err().to_string();
        assert!(error.contains(expected), "{arguments:?}: {error}");
    }
}

#[test]
fn values_are_taken_as_maxtext_writes_them() {
    for (written, expected) in [
        ("steps=10.0", "10"),
        ("steps=1_000", "1000"),
        ("steps=1e4", "10000"),
        ("max_target_length=2048.0", "2048"),
        ("learning_rate=1", "1.0"),
        ("learning_rate=3.e-5", "3e-5"),
        ("per_device_batch_size=.25", "0.25"),
        ("per_device_batch_size=4", "4.0"),
        ("enable_checkpointing=True", "true"),
        ("enable_checkpointing=false", "false"),
        ("packing=0", "false"),
        ("use_dpo=1", "true"),
        ("decode_sampling_top_k=0.0", "0"),
        ("max_num_checkpoints_to_keep=None", "none"),
        ("max_num_checkpoints_to_keep=null", "none"),
        ("hf_train_files=", ""),
        ("mlp_activations=silu,linear", "['silu', 'linear']"),
        ("mlp_activations=['silu', 'linear']", "['silu', 'linear']"),
        (r#"mlp_activations=["gelu","linear"]"#, "['gelu', 'linear']"),
        ("train_data_columns=messages", "['messages']"),
        ("train_data_columns=['prompt','chosen']", "['prompt', 'chosen']"),
        ("mesh_axes=[data, fsdp]", "['data', 'fsdp']"),
        ("rl.loss_algo=gspo-token", "gspo-token"),
        ("quantization=", ""),
        ("teacher_overrides={model_name: llama2-7b}", r#"{"model_name":"llama2-7b"}"#),
        ("teacher_overrides.base_num_decoder_layers=24", r#"{"base_num_decoder_layers":24}"#),
        (
            "vllm_hf_overrides={architectures: ['MaxTextForCausalLM']}",
            r#"{"architectures":["MaxTextForCausalLM"]}"#,
        ),
    ] {
        let config = Config::resolve(&request(&[written.to_owned()])).unwrap();
        let (name, _) = written.split_once('=').unwrap();
        let name = name.strip_prefix("rl.").unwrap_or(name.split('.').next().unwrap());
        assert_eq!(value_text(&config.entry(name).value), expected, "{written}");
    }
}
