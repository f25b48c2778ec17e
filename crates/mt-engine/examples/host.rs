//! Measures what the host adds to the steps of an engine, on a model of random weights: the time of steps for which a host
//! without a scheduler and clients waits, of those that it starts before it reads the tokens of the last one, and of an
//! engine's steps: `cargo run --release -p mt-engine --example host -- [dtype] [prompt] [answer] [key=value…]`.

mod common;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use mt_engine::serve::{
    AnswerEvent, AnswerLimits, Answers, CacheSize, EngineHandle, GenerationRequest, ServeOptions,
    ServedModel, testing::time_of_steps,
};
use mt_models::{Model, build};
use mt_runtime::testing;
use mt_shape::Placement;

use common::{bounds, described, random_parameters};

const ROUNDS: usize = 5;
const ROWS: [usize; 3] = [1, 8, 32];

fn main() {
    let (keys, arguments): (Vec<String>, Vec<String>) =
        std::env::args().skip(1).partition(|argument| argument.contains('='));
    let number = |index: usize, default: usize| {
        arguments.get(index).map_or(default, |text| text.parse().expect("arguments are numbers"))
    };
    let dtype = arguments.first().map_or("float32", String::as_str);
    let (prompt, answer) = (number(1, 128), number(2, 64));
    let group = described(dtype, &keys);
    let model: Arc<dyn Model> = build(&group).expect("the model is valid").into();
    let runtime = testing::cpu(1);
    let parameters = Arc::new(random_parameters(runtime, runtime.target(), &*model));
    let served = || ServedModel {
        runtime: runtime.clone(),
        placement: Arc::new(Placement::single()),
        model: model.clone(),
        parameters: parameters.clone(),
        adapters: None,
    };
    let options = |rows: usize| ServeOptions {
        cache: CacheSize::Pages(rows * (prompt + answer).div_ceil(ServeOptions::PAGE_SIZE) + 2 * rows + 1),
        max_sequences: rows,
        enable_prefix_caching: false,
        ..ServeOptions::new(bounds(group.vocab_size), group.vocab_size)
    };
    for rows in ROWS {
        let handle = EngineHandle::start(served(), options(rows)).expect("the engine starts");
        step_of_engine(&handle, rows, prompt, answer);
        let mut best = [Duration::MAX; 3];
        for _ in 0..ROUNDS {
            let alone = time_of_steps(served(), options(rows), rows, prompt, answer - 1);
            let [waiting, ahead] = alone.expect("the model runs");
            let times = [waiting, ahead, step_of_engine(&handle, rows, prompt, answer)];
            best.iter_mut().zip(times).for_each(|(best, time)| *best = time.min(*best));
        }
        let [waiting, ahead, engine] = best.map(|time| time.as_secs_f64() * 1e3);
        println!(
            "{rows:2} rows: {waiting:7.3} ms a step with waiting, {ahead:7.3} ms ahead, {engine:7.3} ms in the engine"
        );
    }
}

/// The mean time of steps in which all answers receive a token.
fn step_of_engine(handle: &EngineHandle, rows: usize, prompt: usize, answer: usize) -> Duration {
    let limits = AnswerLimits { max_new_tokens: Some(answer), ..AnswerLimits::default() };
    let ask = |row: usize| {
        let prompt = (row..row + prompt).map(|index| (index % 50) as u32).collect();
        let request = GenerationRequest { limits: limits.clone(), ..GenerationRequest::greedy(prompt) };
        handle.submit(request).expect("the request is right")
    };
    let all: Vec<Answers> = (0..rows).map(ask).collect();
    // The last request's steps are those of all rows, from its first token to the end of the others.
    let (mut first, mut last, mut count) = (None, Instant::now(), 0);
    for (row, mut answers) in all.into_iter().enumerate().rev() {
        while let Some(event) = answers.recv() {
            match event {
                AnswerEvent::Token { .. } if row + 1 == rows => {
                    last = Instant::now();
                    first.get_or_insert(last);
                    count += 1;
                }
                AnswerEvent::Failed(error) => panic!("{error}"),
                AnswerEvent::Token { .. }
                | AnswerEvent::Prompt { .. }
                | AnswerEvent::Pooled { .. }
                | AnswerEvent::Finished { .. } => {}
            }
        }
    }
    (last - first.expect("there is a token")) / (count - 1)
}
