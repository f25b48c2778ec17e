//! Published models of every family generate the same tokens as in transformers.

use std::{collections::BTreeMap, ops::ControlFlow, path::Path};

use mt_config::{Config, LoadConfig, ModelDescription, Request as ConfigRequest};
use mt_models::hugging_face::{description_path, settings_of};
use mt_runtime::{Array, CompileSettings};
use mt_testing::Golden;
use serde_json::Value;

use crate::{
    Engine, EngineError, EngineOptions, Limits, PromptBounds, Request, SamplingOptions, SourceBounds,
    load_model, score,
};

/// The rows of tokens in a golden value.
pub(crate) fn rows(value: &Value) -> Vec<Vec<u32>> {
    let token = |token: &Value| u32::try_from(token.as_u64().unwrap()).unwrap();
    let tokens = |row: &Value| row.as_array().unwrap().iter().map(token).collect();
    value.as_array().unwrap().iter().map(tokens).collect()
}

/// The configuration of the published model in a directory.
pub(crate) fn config(directory: &Path) -> LoadConfig {
    let settings = settings_of(directory).unwrap().into_pairs();
    let description = ModelDescription {
        path: description_path(directory),
        settings: settings.into_iter().map(|(name, value)| (name.to_owned(), value)).collect(),
        ..ModelDescription::default()
    };
    let path = format!("load_parameters_path={}", directory.display());
    let arguments = vec!["hardware=cpu".to_owned(), "dtype=float32".to_owned(), path];
    let request = ConfigRequest { arguments, ..ConfigRequest::default() }.describing(description);
    LoadConfig::from_config(&Config::resolve(&request).unwrap()).unwrap()
}

#[test]
fn greedy_answers_are_those_of_the_published_models() {
    let goldens: BTreeMap<String, Value> =
        serde_json::from_str(include_str!("../../tests/goldens/greedy.json")).unwrap();
    let families = Path::new(env!("CARGO_MANIFEST_DIR")).join("../mt-models/tests/goldens/families");
    assert!(goldens.len() > 30);
    let mut wrong = Vec::new();
    for (name, golden) in goldens {
        let loaded = load_model(&config(&families.join(&name)), &mut |_| {}).unwrap();
        let options = EngineOptions {
            prompts: PromptBounds {
                vocab_size: loaded.vocab_size,
                max_target_length: 64,
                max_prefill_length: 32,
                source: None,
            },
            num_choices: loaded.vocab_size,
            max_batch: 8,
            compile: CompileSettings::default(),
        };
        let types = loaded.parameters.iter().map(Array::dtype).collect();
        let engine = Engine::new(loaded.runtime, loaded.placement, loaded.model, types, options);
        let session = engine.with(&loaded.parameters).unwrap();
        let expected = rows(&golden["answers"]);
        let requests: Vec<Request> =
            rows(&golden["prompts"]).into_iter().map(|prompt| Request { prompt, sample: 0 }).collect();
        let limits = Limits { max_new_tokens: Some(expected[0].len()), stop: Vec::new() };
        let generation = session
            .generate(&requests, &SamplingOptions::GREEDY, &limits, |_| ControlFlow::Continue(()))
            .unwrap();
        let answers: Vec<Vec<u32>> = generation.rows.into_iter().map(|row| row.tokens).collect();
        if answers != expected {
            wrong.push(format!("{name}: {answers:?}, not {expected:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn texts_are_as_long_as_positions_were_learned() {
    let families = Path::new(env!("CARGO_MANIFEST_DIR")).join("../mt-models/tests/goldens/families");
    let loaded = load_model(&config(&families.join("gpt2_narrow_one_layer")), &mut |_| {}).unwrap();
    let score = |length| score(&loaded, &[vec![1; length]], false, &CompileSettings::default()).map(|_| ());
    assert!(score(21).is_ok());
    let Err(error @ EngineError::RowTooLong { number: 1, length: 22, positions: 21 }) = score(22) else {
        panic!("a row longer than the table of positions is scored")
    };
    assert!(error.is_user_error());
    let options = EngineOptions {
        prompts: PromptBounds {
            vocab_size: loaded.vocab_size,
            max_target_length: 64,
            max_prefill_length: 32,
            source: None,
        },
        num_choices: 8,
        max_batch: 1,
        compile: CompileSettings::default(),
    };
    let types = loaded.parameters.iter().map(Array::dtype).collect();
    let engine = Engine::new(loaded.runtime, loaded.placement, loaded.model, types, options);
    let error = engine.options().prompts.check(3, &[1; 21]).unwrap_err().to_string();
    assert!(error.starts_with("prompt 3 has 21 tokens, more than the 21 of `max_target_length`"), "{error}");
    let session = engine.with(&loaded.parameters).unwrap();
    let limits = Limits { max_new_tokens: None, stop: Vec::new() };
    let requests = [Request { prompt: vec![1; 5], sample: 0 }];
    let generation = session
        .generate(&requests, &SamplingOptions::GREEDY, &limits, |_| ControlFlow::Continue(()))
        .unwrap();
    assert!(generation.rows[0].tokens.len() <= 21 - 5, "{}", generation.rows[0].tokens.len());
}

/// The encoder reads sources of different lengths once, and the answers are those of transformers.
#[test]
fn answers_of_an_encoder_and_a_decoder_are_those_of_the_published_models() {
    let families = Path::new(env!("CARGO_MANIFEST_DIR")).join("../mt-models/tests/goldens/families");
    for name in ["t5_relu_tied", "t5_gated_untied", "t5_gated_silu_one_layer"] {
        let config = config(&families.join(name));
        let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/../mt-models");
        let golden = Golden::open(manifest, &format!("families/{name}/golden.safetensors"));
        let loaded = load_model(&config, &mut |_| {}).unwrap();
        let options = EngineOptions {
            prompts: PromptBounds {
                vocab_size: loaded.vocab_size,
                max_target_length: 12,
                max_prefill_length: 1,
                source: SourceBounds::of(&config.model, &*loaded.model),
            },
            num_choices: loaded.vocab_size,
            max_batch: 8,
            compile: CompileSettings::default(),
        };
        let refused = score(&loaded, &[vec![1; 4]], false, &CompileSettings::default()).map(|_| ());
        assert!(matches!(refused, Err(EngineError::NoSource { command: "logits" })), "{refused:?}");
        let types = loaded.parameters.iter().map(Array::dtype).collect();
        let engine = Engine::new(loaded.runtime, loaded.placement, loaded.model, types, options);
        let session = engine.with(&loaded.parameters).unwrap();
        let rows = |name: &str| -> Vec<Vec<u32>> {
            let array = golden.array(name);
            let width = array.dims()[1];
            array
                .as_slice::<i32>()
                .unwrap()
                .chunks(width)
                .map(|row| row.iter().map(|id| *id as u32).collect())
                .collect()
        };
        let lengths = rows("source_segmentation").into_iter().map(|row| row.iter().sum::<u32>() as usize);
        let sources = rows("source").into_iter().zip(lengths);
        let requests: Vec<Request> =
            sources.map(|(row, length)| Request { prompt: row[..length].to_vec(), sample: 0 }).collect();
        let expected = rows("greedy");
        let generate = |requests: &[Request], count| {
            let limits = Limits { max_new_tokens: Some(count), stop: Vec::new() };
            let go_on = |_| ControlFlow::Continue(());
            let made = session.generate(requests, &SamplingOptions::GREEDY, &limits, go_on).unwrap();
            made.rows.into_iter().map(|row| row.tokens).collect::<Vec<_>>()
        };
        assert_eq!(generate(&requests, expected[0].len()), expected, "{name}");
        // As long as the decoder may read.
        assert_eq!(generate(&requests[..1], 100)[0].len(), 12, "{name}");
        let long = engine.options().prompts.check(2, &[1; 513]).unwrap_err().to_string();
        assert!(
            long.starts_with("prompt 2 has 513 tokens, more than the 512 of `max_source_length`"),
            "{long}"
        );
    }
}
