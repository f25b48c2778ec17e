//! Adapters that requests choose, compared with PEFT and with merged weights; `goldens/adapters.py` generates the values.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use mt_config::LoadConfig;
use mt_runtime::CompileSettings;
use mt_testing::Random;
use serde_json::{Value, json};

use super::models::{LONGEST, bounds, collect, family, family_with};
use crate::{
    EngineError, LoadedModel, load_beside, load_model,
    serve::{
        AdapterSource, AnswerLimits, Answers, CacheSize, DraftModel, EngineHandle, GenerationRequest,
        ServeOptions, ServedModel, Speculation, SpeculationMethod, SubmitError, load_served_adapters,
        steps::StepSizes,
    },
    tests::families::rows,
};

const BASE: &str = "llama_six_on_two";
const NAMES: [&str; 4] = ["lora", "rslora", "dora", "some"];

fn directory(name: &str, adapter: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../mt-models/tests/goldens/adapters").join(name).join(adapter)
}

fn sources(names: &[&str]) -> Vec<AdapterSource> {
    let source = |name: &&str| AdapterSource { name: (*name).to_owned(), path: directory(BASE, name) };
    names.iter().map(source).collect()
}

/// An engine with small pages and pieces, of which few fit into the cache.
fn start(config: &LoadConfig, adapters: Vec<AdapterSource>, num_pages: usize) -> EngineHandle {
    start_speculating(config, adapters, num_pages, &|_| None)
}

/// As [`start`], with tokens that are drafted.
fn start_speculating(
    config: &LoadConfig,
    adapters: Vec<AdapterSource>,
    num_pages: usize,
    speculation: &dyn Fn(&LoadedModel) -> Option<Speculation>,
) -> EngineHandle {
    let loaded = load_model(config, &mut |_| {}).unwrap();
    let adapters = (!adapters.is_empty())
        .then(|| load_served_adapters(&loaded, config, adapters, &CompileSettings::default()).unwrap());
    let options = ServeOptions {
        page_size: 4,
        cache: CacheSize::Pages(num_pages),
        max_sequences: 6,
        prefill_chunk_size: 8,
        speculation: speculation(&loaded),
        ..ServeOptions::new(bounds(&loaded), loaded.vocab_size)
    };
    let sizes = StepSizes { rows: vec![6], read_rows: vec![2], lengths: vec![8], pages: vec![LONGEST / 4] };
    EngineHandle::start_with(ServedModel { adapters, ..loaded.into() }, options, sizes).unwrap()
}

fn request(prompt: &[u32], count: usize, adapter: Option<&str>) -> GenerationRequest {
    GenerationRequest {
        limits: AnswerLimits { max_new_tokens: Some(count), ..AnswerLimits::default() },
        adapter: adapter.map(str::to_owned),
        ..GenerationRequest::greedy(prompt.to_vec())
    }
}

/// A request whose tokens are all scored.
fn scored(prompt: &[u32], count: usize, adapter: Option<&str>) -> GenerationRequest {
    let scores = Some(0);
    GenerationRequest {
        log_probabilities: scores,
        prompt_log_probabilities: scores,
        ..request(prompt, count, adapter)
    }
}

/// The answer, and the log-probabilities of all tokens from the second on.
fn tokens_and_scores(answers: Answers) -> (Vec<u32>, Vec<f32>) {
    let (of_prompt, mut answers) = collect(answers, 1);
    let answer = answers.remove(0);
    let scores = of_prompt.into_iter().flatten().chain(answer.iter().cloned());
    let scores = scores.map(|token| token.log_probability).collect();
    (answer.into_iter().map(|token| token.token).collect(), scores)
}

fn assert_near(name: &str, made: &[f32], expected: &[f32]) {
    assert_eq!(made.len(), expected.len(), "{name}");
    for (made, expected) in made.iter().zip(expected) {
        assert!((made - expected).abs() < 1e-5, "{name}: {made}, not {expected}");
    }
}

/// Answers to prompts by the adapter's name.
fn goldens() -> BTreeMap<String, Vec<Value>> {
    serde_json::from_str(include_str!("../../../tests/goldens/adapters.json")).unwrap()
}

fn prompt_and_answer(golden: &Value) -> [Vec<u32>; 2] {
    ["prompt", "answer"].map(|name| rows(&json!([golden[name]])).remove(0))
}

fn name_in_requests(name: &str) -> Option<&str> {
    Some(name).filter(|name| *name != "base")
}

#[test]
fn answers_in_one_batch_are_those_of_peft() {
    let goldens = goldens();
    assert_eq!(goldens.len(), 1 + NAMES.len());
    // A large cache, and one in which answers are put back.
    for num_pages in [200, 18] {
        let handle = start(&family(BASE), sources(&NAMES), num_pages);
        // Twice with scores, so that prompts are read, and twice without, so that they come from the cache.
        for round in 0..4 {
            let mut open = Vec::new();
            for number in 0..goldens["base"].len() {
                for (name, golden) in &goldens {
                    let golden = &golden[number];
                    let [prompt, expected] = prompt_and_answer(golden);
                    let make = if round < 2 { scored } else { request };
                    let answers =
                        handle.submit(make(&prompt, expected.len(), name_in_requests(name))).unwrap();
                    open.push((name, answers, expected, &golden["log_probabilities"]));
                }
            }
            for (name, answers, expected, scores) in open {
                let (tokens, made) = tokens_and_scores(answers);
                assert_eq!(tokens, expected, "{name}");
                if round < 2 {
                    let scores: Vec<f32> = serde_json::from_value(scores.clone()).unwrap();
                    assert_near(name, &made, &scores);
                }
            }
        }
        let metrics = handle.metrics();
        assert!(metrics.cached_prompt_tokens > 0 || num_pages == 18, "{metrics:?}");
        assert_eq!(metrics.preemptions > 0, num_pages == 18, "{metrics:?}");
    }
}

/// Eight devices answer requests for several adapters in one batch as PEFT does, and as weights into which an adapter was
/// merged, in rows that are split over several axes beside split heads.
#[test]
fn answers_of_eight_devices_are_those_of_peft_and_of_merged_weights() {
    let goldens = goldens();
    let merged: BTreeMap<&str, EngineHandle> = NAMES
        .into_iter()
        .map(|name| {
            let loaded = adapted(name).merged(&CompileSettings::default()).unwrap();
            let options = ServeOptions::new(bounds(&loaded), loaded.vocab_size);
            (name, EngineHandle::start(loaded.into(), options).unwrap())
        })
        .collect();
    let placements: [&[&str]; 3] = [
        &["ici_fsdp_parallelism=8"],
        &["ici_fsdp_parallelism=4", "ici_tensor_parallelism=2"],
        &["ici_data_parallelism=2", "ici_fsdp_parallelism=2", "ici_tensor_parallelism=2"],
    ];
    for keys in placements {
        let handle = start(&family_with(BASE, &[&["num_cpu_devices=8"], keys].concat()), sources(&NAMES), 40);
        let mut open = Vec::new();
        for number in 0..goldens["base"].len() {
            for (name, golden) in &goldens {
                let golden = &golden[number];
                let [prompt, expected] = prompt_and_answer(golden);
                let answers = handle.submit(scored(&prompt, expected.len(), name_in_requests(name))).unwrap();
                open.push((name, prompt, answers, expected, &golden["log_probabilities"]));
            }
        }
        for (name, prompt, answers, expected, scores) in open {
            let (tokens, made) = tokens_and_scores(answers);
            assert_eq!(tokens, expected, "{name} {keys:?}");
            let of_peft: Vec<f32> = serde_json::from_value(scores.clone()).unwrap();
            assert_near(name, &made, &of_peft);
            if let Some(merged) = merged.get(name.as_str()) {
                let answers = merged.submit(scored(&prompt, expected.len(), None)).unwrap();
                let (tokens, of_merged) = tokens_and_scores(answers);
                assert_eq!(tokens, expected, "{name}, merged");
                assert_near(name, &made, &of_merged);
            }
        }
    }
}

/// Rows with adapters verify the drafts of texts, and those of the base, which drafts for all rows.
#[test]
fn drafts_change_no_answer() {
    let goldens = goldens();
    let of_texts = |_: &LoadedModel| {
        let method = SpeculationMethod::NGrams { shortest: 1, longest: 3 };
        Some(Speculation { num_tokens: 3, method })
    };
    let of_base = |loaded: &LoadedModel| {
        let draft = DraftModel::from(load_beside(&family(BASE), loaded).unwrap());
        Some(Speculation { num_tokens: 3, method: SpeculationMethod::Model(draft) })
    };
    let methods: [&dyn Fn(&LoadedModel) -> Option<Speculation>; 2] = [&of_texts, &of_base];
    for speculation in methods {
        let handle = start_speculating(&family(BASE), sources(&NAMES), 30, speculation);
        let mut open = Vec::new();
        for number in 0..goldens["base"].len() {
            for (name, golden) in &goldens {
                let prompt = rows(&json!([golden[number]["prompt"]])).remove(0);
                let expected = rows(&json!([golden[number]["answer"]])).remove(0);
                let request = request(&prompt, expected.len(), name_in_requests(name));
                open.push((name, handle.submit(request).unwrap(), expected));
            }
        }
        for (name, answers, expected) in open {
            assert_eq!(tokens_and_scores(answers).0, expected, "{name}");
        }
        let metrics = handle.metrics();
        assert!(metrics.drafted_tokens > 0, "{metrics:?}");
    }
}

/// Random requests to random adapters of the same prompts are answered as by an engine with merged weights.
#[test]
fn answers_are_those_of_merged_weights() {
    let handle = start(&family(BASE), sources(&["dora", "some"]), 24);
    let merged: Vec<EngineHandle> = ["dora", "some"]
        .into_iter()
        .map(|name| {
            let loaded = adapted(name).merged(&CompileSettings::default()).unwrap();
            let options = ServeOptions::new(bounds(&loaded), loaded.vocab_size);
            EngineHandle::start(loaded.into(), options).unwrap()
        })
        .collect();
    let mut random = Random::new(3);
    let prompts: Vec<Vec<u32>> =
        (0..4).map(|_| (0..=random.below(30)).map(|_| 3 + random.below(77) as u32).collect()).collect();
    let open: Vec<_> = (0..24)
        .map(|_| {
            let (prompt, adapter) = (&prompts[random.below(4)], random.below(2));
            let make = if random.below(2) == 0 { scored } else { request };
            let count = 1 + random.below(12);
            let answers = handle.submit(make(prompt, count, Some(["dora", "some"][adapter]))).unwrap();
            (answers, merged[adapter].submit(make(prompt, count, None)).unwrap())
        })
        .collect();
    for (answers, expected) in open {
        let ((tokens, made), (expected, scores)) = (tokens_and_scores(answers), tokens_and_scores(expected));
        assert_eq!(tokens, expected);
        assert_near("merged", &made, &scores);
    }
}

/// The model with one adapter of all rows.
fn adapted(name: &str) -> LoadedModel {
    let mut config = family(BASE);
    // An adapter of some layers fits no scanned stack.
    config.model.scan_layers = false;
    let path = directory(BASE, name);
    let options = mt_models::AdapterOptions::at(&path).unwrap().unwrap();
    let modules = mt_models::peft_modules(&config.model, &path).unwrap();
    let lora = &mut config.model.lora;
    lora.lora_module_path = modules;
    (lora.enable_lora, lora.lora_rank, lora.lora_alpha) = (true, options.rank, options.alpha);
    (lora.use_rslora, lora.use_dora) = (options.use_rslora, options.use_dora);
    config.checkpoint.lora_restore_path = Some(path);
    load_model(&config, &mut |_| {}).unwrap()
}

#[test]
fn unknown_adapters_are_refused() {
    let handle = start(&family(BASE), sources(&["lora"]), 40);
    let Err(SubmitError::Invalid(error @ EngineError::UnknownAdapter { .. })) =
        handle.submit(request(&[3], 1, Some("loro")))
    else {
        panic!("an unknown adapter answers")
    };
    assert!(error.is_user_error(), "{error}");
}

/// A copy of an adapter's directory, with changed options.
fn changed(change: impl FnOnce(&mut Value)) -> tempfile::TempDir {
    let (from, to) = (directory(BASE, "some"), tempfile::tempdir().unwrap());
    let config = fs::read_to_string(from.join("adapter_config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    change(&mut config);
    fs::write(to.path().join("adapter_config.json"), config.to_string()).unwrap();
    fs::copy(from.join("adapter_model.safetensors"), to.path().join("adapter_model.safetensors")).unwrap();
    to
}

#[test]
fn adapters_that_do_not_fit_are_refused() {
    let config = family(BASE);
    let loaded = load_model(&config, &mut |_| {}).unwrap();
    let check = |path: &Path, fragments: &[&str]| {
        let sources = vec![AdapterSource { name: "other".to_owned(), path: path.to_owned() }];
        let made = load_served_adapters(&loaded, &config, sources, &CompileSettings::default());
        let error = made.err().expect("the adapter does not fit");
        let message = error.to_string();
        assert!(error.is_user_error(), "{message}");
        fragments.iter().for_each(|fragment| assert!(message.contains(fragment), "{message}"));
    };
    check(&directory("qwen3_untied", "lora"), &["are not those of the model", "qwen3_untied"]);
    check(Path::new("missing"), &["`missing` holds no adapters", "adapter_config.json"]);
    let without = changed(|_| {});
    fs::remove_file(without.path().join("adapter_config.json")).unwrap();
    check(without.path(), &["adapter_config.json` cannot be used", "save_pretrained"]);
    let refused = [
        ("rank_pattern", json!({ "q_proj": 3 })),
        ("peft_type", json!("LOHA")),
        ("r", json!(0)),
        ("modules_to_save", json!(["lm_head"])),
    ];
    for (option, value) in refused {
        check(changed(|config| config[option] = value).path(), &[&format!("`{option}`")]);
    }
    check(changed(|config| config["r"] = json!(7)).path(), &["are not those of the model", "not [7, "]);
    for (module, fragment) in [
        ("model.layers.0.mlp.other_proj", "other_proj"),
        ("model.embed_tokens", "embed_tokens"),
        ("lm_head", "only linear maps in layers"),
    ] {
        let directory = with_module(module);
        check(directory.path(), &[fragment, module]);
    }
    let twice = [sources(&["lora"]), sources(&["lora"])].concat();
    let error = load_served_adapters(&loaded, &config, twice, &CompileSettings::default()).err().unwrap();
    assert!(matches!(error, EngineError::AdapterNamedTwice { .. }) && error.is_user_error(), "{error}");
    let own = adapted("lora");
    let error = load_served_adapters(&own, &config, sources(&["some"]), &CompileSettings::default());
    assert!(matches!(error.err(), Some(EngineError::AdaptersOfTheModel { .. })));
}

/// A directory with an adapter of rank 1 of one module alone.
fn with_module(module: &str) -> tempfile::TempDir {
    let directory = changed(|config| config["target_modules"] = json!([module]));
    let (a, b) = match module {
        "model.embed_tokens" => ("lora_embedding_A", "lora_embedding_B"),
        _ => ("lora_A.weight", "lora_B.weight"),
    };
    let rows = if module == "lm_head" { 80 } else { 24 };
    let mut header = serde_json::Map::new();
    let mut end = 0;
    for (name, dims) in [(a, [1, 24]), (b, [rows, 1])] {
        let start = end;
        end += 4 * dims[0] * dims[1];
        let tensor = json!({ "dtype": "F32", "shape": dims, "data_offsets": [start, end] });
        header.insert(format!("base_model.model.{module}.{name}"), tensor);
    }
    let header = Value::Object(header).to_string();
    let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &vec![0; end]].concat();
    fs::write(directory.path().join("adapter_model.safetensors"), bytes).unwrap();
    directory
}
