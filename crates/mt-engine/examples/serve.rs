//! Measures an engine that serves requests beside the one that runs groups of prompts, on a model of random weights:
//! `cargo run --release -p mt-engine --example serve -- [dtype] [requests] [prompt] [answer] [drafts] [directory for HLO
//! text]`. With a number of drafts, prompts repeat themselves, and the engine is measured with and without n-grams.

mod common;

use std::{
    ops::ControlFlow,
    sync::Arc,
    time::{Duration, Instant},
};

use mt_engine::{
    Engine, EngineOptions, Limits, PromptBounds, Request, SamplingOptions,
    serve::{
        AnswerEvent, AnswerLimits, CacheSize, EngineHandle, GenerationRequest, ServeOptions, ServedModel,
        Speculation, SpeculationMethod,
    },
};
use mt_models::{Model, build};
use mt_runtime::{Array, CompileSettings, testing};
use mt_shape::Placement;

use common::{bounds, described, random_parameters};

/// The sizes of a measurement.
struct Sizes {
    requests: usize,
    prompt: usize,
    answer: usize,
}

const ROUNDS: usize = 3;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |index: usize, default: usize| {
        arguments.get(index).map_or(default, |text| text.parse().expect("arguments are numbers"))
    };
    let dtype = arguments.first().map_or("float32", String::as_str);
    let sizes = Sizes { requests: number(1, 8), prompt: number(2, 128), answer: number(3, 128) };
    let group = described(dtype, &[]);
    let model: Arc<dyn Model> = build(&group).expect("the model is valid").into();
    let placement = Arc::new(Placement::single());
    let parameters = Arc::new(random_parameters(testing::cpu(1), testing::cpu(1).target(), &*model));
    let num_drafts = number(4, 0);
    let period = if num_drafts > 0 { 24 } else { usize::MAX };
    let texts: Vec<Vec<u32>> = (0..sizes.requests)
        .map(|row| {
            let token = |index: usize| ((index % period * 31 + row * 977) % group.vocab_size) as u32;
            (0..sizes.prompt).map(token).collect()
        })
        .collect();
    let served = || ServedModel {
        runtime: testing::cpu(1).clone(),
        placement: placement.clone(),
        model: model.clone(),
        parameters: parameters.clone(),
        adapters: None,
    };
    let prompts = bounds(group.vocab_size);
    let expected = measure_groups(served(), prompts, &sizes, &texts);
    let compile = CompileSettings { dump_to: arguments.get(5).map(Into::into), ..CompileSettings::default() };
    let method = SpeculationMethod::NGrams { shortest: 1, longest: 4 };
    let ngrams = (num_drafts > 0).then_some(Speculation { num_tokens: num_drafts, method });
    for speculation in [None].into_iter().chain(ngrams.map(Some)) {
        let options = ServeOptions {
            cache: CacheSize::Bytes(1 << 30),
            max_sequences: sizes.requests.max(1),
            enable_model_warmup: true,
            enable_prefix_caching: false,
            compile: compile.clone(),
            speculation,
            ..ServeOptions::new(prompts, prompts.vocab_size)
        };
        measure_serving(served(), options, &sizes, &texts, &expected);
    }
}

/// The answers of the engine that runs groups of prompts.
fn measure_groups(
    served: ServedModel,
    prompts: PromptBounds,
    sizes: &Sizes,
    texts: &[Vec<u32>],
) -> Vec<Vec<u32>> {
    let types = served.parameters.iter().map(Array::dtype).collect();
    let options = EngineOptions {
        prompts,
        num_choices: prompts.vocab_size,
        max_batch: 64,
        compile: CompileSettings::default(),
    };
    let engine = Engine::new(served.runtime, served.placement, served.model, types, options);
    let session = engine.with(&served.parameters).expect("the parameters are the model's");
    let requests: Vec<Request> =
        texts.iter().map(|text| Request { prompt: text.clone(), sample: 0 }).collect();
    let limits = Limits { max_new_tokens: Some(sizes.answer), stop: Vec::new() };
    let mut answers = Vec::new();
    for round in 0..ROUNDS {
        let go_on = |_| ControlFlow::Continue(());
        let made = session.generate(&requests, &SamplingOptions::GREEDY, &limits, go_on);
        let made = made.expect("the engine generates");
        let timing = made.timing;
        report("groups", round, sizes, timing.num_tokens, [timing.first_token, timing.total]);
        answers = made.rows.into_iter().map(|row| row.tokens).collect();
    }
    answers
}

fn measure_serving(
    served: ServedModel,
    options: ServeOptions,
    sizes: &Sizes,
    texts: &[Vec<u32>],
    expected: &[Vec<u32>],
) {
    let what = if options.speculation.is_some() { "n-grams" } else { "serving" };
    let started = Instant::now();
    let handle = EngineHandle::start(served, options).expect("the engine starts");
    println!("ready after {:.1} s", started.elapsed().as_secs_f64());
    for round in 0..ROUNDS {
        let started = Instant::now();
        let limits = AnswerLimits { max_new_tokens: Some(sizes.answer), ..AnswerLimits::default() };
        let ask = |text: &Vec<u32>| {
            let request =
                GenerationRequest { limits: limits.clone(), ..GenerationRequest::greedy(text.clone()) };
            handle.submit(request).expect("the request is right")
        };
        let all: Vec<_> = texts.iter().map(ask).collect();
        let (mut first, mut total, mut equal) = (None, 0, 0);
        for (mut answers, expected) in all.into_iter().zip(expected) {
            let mut tokens = Vec::new();
            while let Some(event) = answers.recv() {
                match event {
                    AnswerEvent::Token { token, .. } => {
                        first.get_or_insert_with(|| started.elapsed());
                        tokens.push(token.token);
                    }
                    AnswerEvent::Failed(error) => panic!("{error}"),
                    AnswerEvent::Prompt { .. }
                    | AnswerEvent::Pooled { .. }
                    | AnswerEvent::Finished { .. } => {}
                }
            }
            total += tokens.len();
            equal += usize::from(tokens == *expected);
        }
        report(what, round, sizes, total, [first.unwrap_or_default(), started.elapsed()]);
        println!("  {equal} of {} answers are those of groups", expected.len());
    }
    let metrics = handle.metrics();
    if metrics.drafts > 0 {
        let mean = 1.0 + metrics.accepted_tokens as f64 / metrics.drafts as f64;
        println!("  {mean:.2} tokens per verification, {} verifications", metrics.drafts);
    }
}

fn report(what: &str, round: usize, sizes: &Sizes, num_tokens: usize, [first, total]: [Duration; 2]) {
    let step = total.saturating_sub(first).as_secs_f64() * 1e3 / sizes.answer.saturating_sub(1).max(1) as f64;
    let rate = num_tokens as f64 / total.as_secs_f64();
    let first = first.as_secs_f64() * 1e3;
    println!("{what:8} {round}: {rate:8.1} tokens/s, first token after {first:7.1} ms, {step:6.2} ms a step");
}
