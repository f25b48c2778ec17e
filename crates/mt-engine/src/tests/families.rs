//! Published models of every family generate the same tokens as in transformers.

use std::{collections::BTreeMap, ops::ControlFlow, path::Path};

use mt_config::{Config, LoadConfig, ModelDescription, Request as ConfigRequest};
use mt_models::hugging_face::{description_path, settings_of};
use mt_runtime::{Array, CompileSettings};
use mt_shape::HostArray;
use mt_testing::{Golden, largest_error};
use serde_json::Value;

use crate::{
    Engine, EngineError, EngineOptions, Limits, LoadedModel, PromptBounds, Request, SamplingOptions,
    ScoredRows, Session, SourceBounds, load_model, score, serve::SEVERAL_AXES_OF_ROWS,
};

/// The rows of tokens in a golden value.
pub(crate) fn rows(value: &Value) -> Vec<Vec<u32>> {
    let token = |token: &Value| u32::try_from(token.as_u64().unwrap()).unwrap();
    let tokens = |row: &Value| row.as_array().unwrap().iter().map(token).collect();
    value.as_array().unwrap().iter().map(tokens).collect()
}

/// The configuration of the published model in a directory.
pub(crate) fn config(directory: &Path) -> LoadConfig {
    config_with(directory, &[])
}

/// As [`config`], with keys on top. The type is `f32` unless a key sets it.
pub(crate) fn config_with(directory: &Path, keys: &[&str]) -> LoadConfig {
    let settings = settings_of(directory).unwrap().into_pairs();
    let description = ModelDescription {
        path: description_path(directory),
        settings: settings.into_iter().map(|(name, value)| (name.to_owned(), value)).collect(),
        ..ModelDescription::default()
    };
    let path = format!("load_parameters_path={}", directory.display());
    let has_type = keys.iter().any(|key| key.starts_with("dtype="));
    let dtype = (!has_type).then_some("dtype=float32");
    let given = keys.iter().copied().chain(dtype).map(str::to_owned);
    let arguments = ["hardware=cpu".to_owned(), path].into_iter().chain(given).collect();
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
        let answers = greedy(&session, &requests, expected[0].len());
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
    let score = |length| {
        score(&loaded, [vec![1; length]].as_slice().into(), false, &CompileSettings::default()).map(|_| ())
    };
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

/// The rows of an array of tokens.
fn token_rows(golden: &Golden, name: &str) -> Vec<Vec<u32>> {
    let array = golden.array(name);
    let tokens = array.as_slice::<i32>().unwrap();
    tokens.chunks(array.dims()[1]).map(|row| row.iter().map(|id| *id as u32).collect()).collect()
}

/// Sources of different lengths, without their padding.
fn sources(golden: &Golden) -> Vec<Vec<u32>> {
    let lengths = token_rows(golden, "source_segmentation");
    let rows = token_rows(golden, "source").into_iter().zip(lengths);
    rows.map(|(row, is_token)| row[..is_token.iter().sum::<u32>() as usize].to_vec()).collect()
}

/// Compares the logits of given sources and tokens with those of transformers.
#[track_caller]
fn check_logits_of_sources(loaded: &LoadedModel, golden: &Golden) {
    let (tokens, sources, expected) = (token_rows(golden, "tokens"), sources(golden), golden.array("logits"));
    let logits = |tokens: &[Vec<u32>], sources: &[Vec<u32>]| {
        let rows = ScoredRows { tokens, sources: Some(sources) };
        score(loaded, rows, true, &CompileSettings::default())
    };
    let made = logits(&tokens, &sources).unwrap();
    let difference = |made: &HostArray, expected: &HostArray| {
        assert_eq!(made.dims(), expected.dims());
        let (made, expected) = (made.to_f64(), expected.to_f64());
        largest_error(&made, &expected)
    };
    assert!(difference(&made.logits, &expected) <= 1e-4);
    let intermediate = |name: &str| &made.intermediates.iter().find(|(known, _)| known == name).unwrap().1;
    assert!(difference(intermediate("embedding"), &golden.array("hidden_0")) <= 1e-4);
    // The encoder's outputs have the length of the source, and padding is 0.
    let of_encoder = intermediate("encoder.final_norm");
    let longest = sources.iter().map(Vec::len).max().unwrap();
    assert_eq!(of_encoder.dims()[..2], [sources.len(), longest]);
    let (values, width) = (of_encoder.to_f64(), of_encoder.dims()[2]);
    for (row, source) in sources.iter().enumerate() {
        for place in 0..longest {
            let vector = &values[(row * longest + place) * width..][..width];
            assert_eq!(vector.iter().any(|value| *value != 0.0), place < source.len(), "{row} {place}");
        }
    }
    let wrong = |tokens: &[Vec<u32>], sources: &[Vec<u32>]| logits(tokens, sources).map(|_| ()).unwrap_err();
    let message = wrong(&tokens, &sources[..2]).to_string();
    assert!(
        message.starts_with("the number of sources is 2, but that of rows of tokens is 3\nhint: "),
        "{message}"
    );
    let message = wrong(&tokens[..1], &[vec![9999]]).to_string();
    assert!(message.starts_with("source 1 has token 9999, but"), "{message}");
    let message = wrong(&tokens[..1], &[Vec::new()]).to_string();
    assert!(
        message.starts_with("source 1 has no token\nhint: give each source at least one token"),
        "{message}"
    );
}

/// Room for eight sources and answers of twelve tokens.
fn options_with_sources(config: &LoadConfig, loaded: &LoadedModel) -> EngineOptions {
    EngineOptions {
        prompts: PromptBounds {
            vocab_size: loaded.vocab_size,
            max_target_length: 12,
            max_prefill_length: 1,
            source: SourceBounds::of(&config.model, &*loaded.model),
        },
        num_choices: loaded.vocab_size,
        max_batch: 8,
        compile: CompileSettings::default(),
    }
}

/// Greedy answers of at most `count` tokens.
fn greedy(session: &Session<'_>, requests: &[Request], count: usize) -> Vec<Vec<u32>> {
    let limits = Limits { max_new_tokens: Some(count), stop: Vec::new() };
    let go_on = |_| ControlFlow::Continue(());
    let made = session.generate(requests, &SamplingOptions::GREEDY, &limits, go_on).unwrap();
    made.rows.into_iter().map(|row| row.tokens).collect()
}

/// Rows that are split over several axes, beside split heads, in the encoder as in the decoder.
#[test]
fn eight_devices_answer_sources_as_the_published_models_do() {
    let families = Path::new(env!("CARGO_MANIFEST_DIR")).join("../mt-models/tests/goldens/families");
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/../mt-models");
    for name in ["t5_relu_tied", "t5_gated_untied"] {
        let golden = Golden::open(manifest, &format!("families/{name}/golden.safetensors"));
        let (expected, sources) = (token_rows(&golden, "greedy"), sources(&golden));
        for keys in SEVERAL_AXES_OF_ROWS {
            let config = config_with(&families.join(name), keys);
            let loaded = load_model(&config, &mut |_| {}).unwrap();
            assert_eq!(loaded.placement.mesh().num_devices(), 8);
            let options = options_with_sources(&config, &loaded);
            let types = loaded.parameters.iter().map(Array::dtype).collect();
            let engine = Engine::new(loaded.runtime, loaded.placement, loaded.model, types, options);
            let session = engine.with(&loaded.parameters).unwrap();
            let requests: Vec<Request> =
                sources.iter().map(|prompt| Request { prompt: prompt.clone(), sample: 0 }).collect();
            assert_eq!(greedy(&session, &requests, expected[0].len()), expected, "{name}, {keys:?}");
        }
    }
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
        let options = options_with_sources(&config, &loaded);
        let refused =
            score(&loaded, [vec![1; 4]].as_slice().into(), false, &CompileSettings::default()).map(|_| ());
        assert!(matches!(refused, Err(EngineError::NoSource { command: "logits" })), "{refused:?}");
        check_logits_of_sources(&loaded, &golden);
        let types = loaded.parameters.iter().map(Array::dtype).collect();
        let engine = Engine::new(loaded.runtime, loaded.placement, loaded.model, types, options);
        let session = engine.with(&loaded.parameters).unwrap();
        let requests: Vec<Request> =
            sources(&golden).into_iter().map(|prompt| Request { prompt, sample: 0 }).collect();
        let expected = token_rows(&golden, "greedy");
        assert_eq!(greedy(&session, &requests, expected[0].len()), expected, "{name}");
        // As long as the decoder may read.
        assert_eq!(greedy(&session, &requests[..1], 100)[0].len(), 12, "{name}");
        let long = engine.options().prompts.check(2, &[1; 513]).unwrap_err().to_string();
        assert!(
            long.starts_with("prompt 2 has 513 tokens, more than the 512 of `max_source_length`"),
            "{long}"
        );
    }
}
