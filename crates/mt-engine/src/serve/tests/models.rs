//! Engines with models: published ones, and some with random weights beside the engine that runs groups of prompts.

use std::{collections::BTreeMap, ops::ControlFlow, path::Path, time::Duration};

use mt_config::LoadConfig;
use mt_runtime::{Array, CompileSettings};
use mt_testing::Random;
use serde_json::Value;

use crate::{
    Engine, EngineOptions, FinishReason, Limits, LoadedModel, PromptBounds, Request, SamplingOptions,
    load_model, score,
    serve::{
        AnswerEvent, AnswerLimits, Answers, CacheSize, EngineHandle, EngineMetrics, GenerationRequest,
        ServeOptions, ServedModel, Speculation, TokenChoice, TokenLogProbability, steps::StepSizes,
    },
    tests::families::{config_with, rows},
};

/// The tokens of prompts and answers together.
pub(super) const LONGEST: usize = 64;

pub(super) fn family(name: &str) -> LoadConfig {
    family_with(name, &[])
}

/// A published model with keys on top.
pub(super) fn family_with(name: &str, keys: &[&str]) -> LoadConfig {
    let families = Path::new(env!("CARGO_MANIFEST_DIR")).join("../mt-models/tests/goldens/families");
    config_with(&families.join(name), keys)
}

pub(super) fn bounds(loaded: &LoadedModel) -> PromptBounds {
    PromptBounds {
        vocab_size: loaded.vocab_size,
        max_target_length: LONGEST,
        max_prefill_length: LONGEST,
        source: None,
    }
}

/// An engine with pages of 4 tokens and pieces of 8, of which few fit into the cache.
pub(super) fn start(loaded: LoadedModel, num_pages: usize, sequences: usize) -> EngineHandle {
    start_speculating(loaded, num_pages, sequences, None)
}

/// As [`start`], with tokens that are drafted.
pub(super) fn start_speculating(
    loaded: LoadedModel,
    num_pages: usize,
    sequences: usize,
    speculation: Option<Speculation>,
) -> EngineHandle {
    let options = ServeOptions {
        page_size: 4,
        cache: CacheSize::Pages(num_pages),
        max_sequences: sequences,
        prefill_chunk_size: 8,
        speculation,
        ..ServeOptions::new(bounds(&loaded), loaded.vocab_size)
    };
    // One program for all batches keeps compilation short.
    let sizes =
        StepSizes { rows: vec![sequences], read_rows: vec![2], lengths: vec![8], pages: vec![LONGEST / 4] };
    EngineHandle::start_with(ServedModel::from(loaded), options, sizes).unwrap()
}

pub(super) fn request(prompt: &[u32], count: usize) -> GenerationRequest {
    let limits = AnswerLimits { max_new_tokens: Some(count), ..AnswerLimits::default() };
    GenerationRequest { limits, ..GenerationRequest::greedy(prompt.to_vec()) }
}

/// The prompt's log-probabilities, and the tokens of each answer.
pub(super) type Collected = (Vec<Option<TokenLogProbability>>, Vec<Vec<TokenLogProbability>>);

pub(super) fn collect(mut answers: Answers, count: usize) -> Collected {
    let (mut of_prompt, mut all) = (Vec::new(), vec![Vec::new(); count]);
    while let Some(event) = answers.recv() {
        match event {
            AnswerEvent::Prompt { log_probabilities, .. } => of_prompt = log_probabilities,
            AnswerEvent::Token { answer, token } => all[answer].push(token),
            AnswerEvent::Finished { reason, .. } => assert_eq!(reason, FinishReason::Length),
            AnswerEvent::Pooled { .. } => panic!("an answer was wanted"),
            AnswerEvent::Failed(error) => panic!("{error}"),
        }
    }
    (of_prompt, all)
}

pub(super) fn tokens(answers: Answers) -> Vec<u32> {
    collect(answers, 1).1.remove(0).into_iter().map(|token| token.token).collect()
}

#[test]
fn greedy_answers_are_those_of_the_published_models() {
    let goldens: BTreeMap<String, Value> =
        serde_json::from_str(include_str!("../../../tests/goldens/greedy.json")).unwrap();
    let mut wrong = Vec::new();
    for (name, golden) in goldens {
        let handle = start(load_model(&family(&name), &mut |_| {}).unwrap(), 24, 3);
        let (prompts, expected) = (rows(&golden["prompts"]), rows(&golden["answers"]));
        // The prompts twice, so that the second time their beginnings are in the cache.
        for _ in 0..2 {
            let answers: Vec<Answers> = prompts
                .iter()
                .map(|prompt| handle.submit(request(prompt, expected[0].len())).unwrap())
                .collect();
            let answers: Vec<Vec<u32>> = answers.into_iter().map(tokens).collect();
            if answers != expected {
                wrong.push(format!("{name}: {answers:?}, not {expected:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The greedy answers of an engine that runs groups of prompts.
pub(super) fn reference(loaded: LoadedModel, prompts: &[Vec<u32>], count: usize) -> Vec<Vec<u32>> {
    let options = EngineOptions {
        prompts: bounds(&loaded),
        num_choices: loaded.vocab_size,
        max_batch: 64,
        compile: CompileSettings::default(),
    };
    let types = loaded.parameters.iter().map(Array::dtype).collect();
    let engine = Engine::new(loaded.runtime, loaded.placement, loaded.model, types, options);
    let requests: Vec<Request> =
        prompts.iter().map(|prompt| Request { prompt: prompt.clone(), sample: 0 }).collect();
    let limits = Limits { max_new_tokens: Some(count), stop: Vec::new() };
    let session = engine.with(&loaded.parameters).unwrap();
    let made = session
        .generate(&requests, &SamplingOptions::GREEDY, &limits, |_| ControlFlow::Continue(()))
        .unwrap();
    made.rows.into_iter().map(|row| row.tokens).collect()
}

/// Prompts of unequal lengths, many of which begin alike.
pub(super) fn prompts(vocab_size: usize) -> Vec<Vec<u32>> {
    let mut random = Random::new(11);
    let beginnings: Vec<Vec<u32>> =
        (0..3).map(|_| (0..24).map(|_| random.below(vocab_size) as u32).collect()).collect();
    (0..64)
        .map(|_| {
            let mut prompt = beginnings[random.below(3)][..random.below(25)].to_vec();
            prompt.extend((0..=random.below(16)).map(|_| random.below(vocab_size) as u32));
            prompt
        })
        .collect()
}

/// The number of tokens of answers under pressure.
pub(super) const NUM_PRESSED: usize = 20;

/// The answers to 64 requests that arrive at random, in a cache that is too small for those that run, equal those of
/// groups of prompts.
pub(super) fn under_pressure(
    name: &str,
    load: impl Fn() -> LoadedModel,
    start: impl FnOnce(LoadedModel) -> EngineHandle,
) -> EngineMetrics {
    let loaded = load();
    let prompts = prompts(loaded.vocab_size);
    let expected = reference(loaded, &prompts, NUM_PRESSED);
    answer_under_pressure(name, start(load()), &prompts, &expected)
}

/// Compares the answers to prompts that arrive at random, in a cache that is too small for those that run.
fn answer_under_pressure(
    name: &str,
    handle: EngineHandle,
    prompts: &[Vec<u32>],
    expected: &[Vec<u32>],
) -> EngineMetrics {
    let mut random = Random::new(5);
    let mut open = Vec::new();
    for prompt in prompts {
        open.push(handle.submit(request(prompt, NUM_PRESSED)).unwrap());
        std::thread::sleep(Duration::from_micros(random.below(3000) as u64));
    }
    let mut wrong = 0;
    for ((answers, expected), prompt) in open.into_iter().zip(expected).zip(prompts) {
        let answer = tokens(answers);
        if answer != *expected {
            wrong += 1;
            eprintln!("{name}, a prompt of {} tokens: {answer:?}, not {expected:?}", prompt.len());
        }
    }
    let metrics = handle.metrics();
    assert_eq!(wrong, 0, "{name}: {metrics:?}");
    assert!(metrics.preemptions > 0, "{name}: {metrics:?}");
    metrics
}

/// Checks answers under pressure against those of transformers, which `goldens/pressure.py` writes, and that prompts find the
/// prefixes of others.
fn check(name: &str, num_pages: usize) {
    let goldens: BTreeMap<String, Value> =
        serde_json::from_str(include_str!("../../../tests/goldens/pressure.json")).unwrap();
    let (prompts, expected) = (rows(&goldens[name]["prompts"]), rows(&goldens[name]["answers"]));
    assert_eq!((prompts.len(), expected.len(), expected[0].len()), (64, 64, NUM_PRESSED));
    let handle = start(load_model(&family(name), &mut |_| {}).unwrap(), num_pages, 6);
    let metrics = answer_under_pressure(name, handle, &prompts, &expected);
    assert!(metrics.cached_prompt_tokens > 0, "{name}: {metrics:?}");
}

#[test]
fn dense_models_answer_alike_under_pressure() {
    check("llama_six_on_two", 30);
}

#[test]
fn windowed_models_answer_alike_under_pressure() {
    check("mistral_window", 30);
    check("gemma3_cycle_of_six", 30);
}

#[test]
fn latent_models_answer_alike_under_pressure() {
    check("deepseek3_groups", 30);
    let load = || load_model(&family("deepseek32_groups"), &mut |_| {}).unwrap();
    under_pressure("deepseek32_groups", load, |loaded| start(loaded, 30, 6));
}

#[test]
fn hybrid_models_answer_alike_under_pressure() {
    check("qwen3_next_cycle", 30);
    check("bamba_every_second", 30);
}

/// Compressed attention keeps an entry for each sequence.
#[test]
fn models_with_entries_alone_need_no_pages() {
    let load = || load_model(&family("deepseek4_two_cycles"), &mut |_| {}).unwrap();
    let loaded = load();
    let prompts = prompts(loaded.vocab_size)[..12].to_vec();
    let expected = reference(loaded, &prompts, 9);
    let handle = start(load(), 4, 5);
    let answers: Vec<Answers> =
        prompts.iter().map(|prompt| handle.submit(request(prompt, 9)).unwrap()).collect();
    assert_eq!(answers.into_iter().map(tokens).collect::<Vec<_>>(), expected);
}

/// Log-probabilities of answers and prompts are those of one pass over the text.
#[test]
fn log_probabilities_are_those_of_logits() {
    for name in ["llama_six_on_two", "mistral_window", "deepseek3_groups", "qwen3_next_cycle"] {
        let loaded = load_model(&family(name), &mut |_| {}).unwrap();
        let prompt: Vec<u32> = (0..21).map(|index| (index * 5 + 3) % loaded.vocab_size as u32).collect();
        let handle = start(load_model(&family(name), &mut |_| {}).unwrap(), 40, 4);
        let wanted = GenerationRequest {
            log_probabilities: Some(3),
            prompt_log_probabilities: Some(2),
            num_answers: 2,
            ..request(&prompt, 7)
        };
        let (of_prompt, answers) = collect(handle.submit(wanted).unwrap(), 2);
        assert_eq!(answers[0], answers[1], "greedy answers are the same");
        let answer: Vec<u32> = answers[0].iter().map(|token| token.token).collect();
        let text = [prompt.clone(), answer].concat();
        let rows = [text.clone()];
        let made = score(&loaded, rows.as_slice().into(), false, &CompileSettings::default()).unwrap();
        let logits = made.logits.to_f64();
        let width = loaded.vocab_size;
        let check = |place: usize, given: &TokenLogProbability, num_top: usize| {
            let scores = &logits[(place - 1) * width..place * width];
            let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum = scores.iter().map(|score| (score - largest).exp()).sum::<f64>().ln() + largest;
            let of = |token: u32| scores[token as usize] - sum;
            assert_eq!(given.token, text[place], "{name}");
            assert!(
                (f64::from(given.log_probability) - of(given.token)).abs() < 1e-5,
                "{name} {place}: {given:?}"
            );
            let mut order: Vec<u32> = (0..width as u32).collect();
            order.sort_by(|a, b| of(*b).total_cmp(&of(*a)));
            assert_eq!(given.top.len(), num_top);
            for ((token, score), expected) in given.top.iter().zip(order) {
                assert_eq!(*token, expected, "{name} {place}");
                assert!((f64::from(*score) - of(expected)).abs() < 1e-5, "{name} {place}: {given:?}");
            }
        };
        assert_eq!((of_prompt.len(), &of_prompt[0]), (prompt.len(), &None));
        for (place, given) in of_prompt.iter().enumerate().skip(1) {
            check(place, given.as_ref().expect("each token has one"), 2);
        }
        for (place, given) in (prompt.len()..).zip(&answers[0]) {
            check(place, given, 3);
        }
    }
}

/// Draws depend on the seed, the number of the answer and the place of the token, not on what runs beside them.
#[test]
fn draws_do_not_depend_on_their_neighbors() {
    let handle = start(load_model(&family("llama_six_on_two"), &mut |_| {}).unwrap(), 30, 6);
    let choice = |seed| TokenChoice { temperature: 1.4, seed: Some(seed), ..TokenChoice::GREEDY };
    let drawn = |prompt: &[u32], seed| GenerationRequest {
        choice: TokenChoice { top_p: 0.9, ..choice(seed) },
        num_answers: 3,
        ..request(prompt, 15)
    };
    let prompt = [4, 8, 15, 16, 23];
    let ids = |answers| -> Vec<Vec<u32>> {
        let (_, all) = collect(answers, 3);
        all.into_iter().map(|answer| answer.into_iter().map(|token| token.token).collect()).collect()
    };
    let alone = ids(handle.submit(drawn(&prompt, 7)).unwrap());
    assert_ne!(alone[0], alone[1]);
    let others: Vec<Answers> =
        (0..4).map(|seed| handle.submit(drawn(&[1, 2, 3, seed as u32], 90 + seed)).unwrap()).collect();
    let beside = handle.submit(drawn(&prompt, 7)).unwrap();
    let greedy = handle.submit(request(&prompt, 15)).unwrap();
    assert_eq!(ids(beside), alone);
    assert_eq!(collect(greedy, 1).1[0].len(), 15);
    assert!(others.into_iter().all(|answers| ids(answers).iter().all(|answer| answer.len() == 15)));
    let banned = GenerationRequest {
        choice: TokenChoice { banned_tokens: alone[0].clone(), repetition_penalty: 1.1, ..choice(7) },
        ..request(&prompt, 15)
    };
    let (_, answers) = collect(handle.submit(banned).unwrap(), 1);
    assert!(answers[0].iter().all(|token| !alone[0].contains(&token.token)));
}

/// With host memory, prompts that the device no longer holds are not read again, and answers stay the same.
#[test]
fn prefixes_come_back_from_host_memory() {
    for name in ["llama_six_on_two", "mistral_window", "deepseek3_groups"] {
        let load = || load_model(&family(name), &mut |_| {}).unwrap();
        let prompts: Vec<Vec<u32>> =
            prompts(load().vocab_size).into_iter().filter(|p| p.len() > 16).collect();
        let expected = reference(load(), &prompts, 4);
        let mut cached = Vec::new();
        for host_bytes in [0, 1 << 14, 1 << 30] {
            let loaded = load();
            let options = ServeOptions {
                page_size: 4,
                cache: CacheSize::Pages(18),
                host_bytes,
                max_sequences: 2,
                prefill_chunk_size: 8,
                ..ServeOptions::new(bounds(&loaded), loaded.vocab_size)
            };
            let handle = EngineHandle::start(loaded.into(), options).unwrap();
            for _ in 0..2 {
                for (prompt, expected) in prompts.iter().zip(&expected) {
                    assert_eq!(tokens(handle.submit(request(prompt, 4)).unwrap()), *expected, "{name}");
                }
            }
            let metrics = handle.metrics();
            assert_eq!(metrics.restored_pages > 0, host_bytes > 0, "{name}: {metrics:?}");
            assert!(metrics.host_bytes <= host_bytes, "{name}: {metrics:?}");
            cached.push(metrics.cached_prompt_tokens);
        }
        assert!(cached[2] > cached[0], "{name}: {cached:?}");
    }
}
