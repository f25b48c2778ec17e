//! Measures the cost of batch-invariant programs, in turns with the usual ones, on a model of random weights:
//! `cargo run --release -p mt-engine --example invariant -- [dtype] [prompt] [answer]`.

mod common;

use std::{sync::Arc, time::Instant};

use mt_engine::serve::{
    AnswerEvent, AnswerLimits, CacheSize, EngineHandle, GenerationRequest, ServeOptions, ServedModel,
};
use mt_ir::Target;
use mt_models::{Model, build};
use mt_runtime::{Platform, Runtime, RuntimeOptions};
use mt_shape::Placement;

use common::{bounds, described, random_parameters};

const ROUNDS: usize = 3;
const REQUESTS: [usize; 3] = [1, 8, 32];

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |index: usize, default: usize| {
        arguments.get(index).map_or(default, |text| text.parse().expect("arguments are numbers"))
    };
    let dtype = arguments.first().map_or("float32", String::as_str);
    let (prompt, answer) = (number(1, 128), number(2, 64));
    let engines = [false, true].map(|invariant| Measured::new(dtype, invariant));
    for requests in REQUESTS {
        let mut best = [[f64::INFINITY; 2]; 2];
        for _ in 0..ROUNDS {
            for (engine, best) in engines.iter().zip(&mut best) {
                let made = engine.answer(requests, prompt, answer);
                best.iter_mut().zip(made).for_each(|(best, made)| *best = best.min(made));
            }
        }
        let [usual, invariant] = best;
        println!(
            "{dtype}, {requests:2} requests: first token {:7.1} ms and {:7.1} ms ({:.2}), {:7.1} and {:7.1} tokens/s ({:.2})",
            usual[0] * 1e3,
            invariant[0] * 1e3,
            invariant[0] / usual[0],
            (requests * answer) as f64 / usual[1],
            (requests * answer) as f64 / invariant[1],
            usual[1] / invariant[1],
        );
    }
}

/// An engine, and the vocabulary of its texts.
struct Measured {
    handle: EngineHandle,
    vocab_size: usize,
}

impl Measured {
    fn new(dtype: &str, invariant: bool) -> Self {
        let group = described(dtype, &[format!("batch_invariant={invariant}")]);
        let model: Arc<dyn Model> = build(&group).expect("the model is valid").into();
        let options = RuntimeOptions {
            platform: Some(Platform::Cpu),
            num_cpu_devices: Some(1),
            batch_invariant: invariant,
            ..RuntimeOptions::default()
        };
        let runtime = Runtime::new(&options, &mut |_| {}).expect("there is a CPU");
        let parameters = Arc::new(random_parameters(&runtime, Target::CPU, &*model));
        let vocab_size = group.vocab_size;
        let prompts = bounds(vocab_size);
        let options = ServeOptions {
            cache: CacheSize::Bytes(1 << 30),
            max_sequences: REQUESTS[REQUESTS.len() - 1],
            enable_prefix_caching: false,
            ..ServeOptions::new(prompts, vocab_size)
        };
        let served = ServedModel {
            runtime,
            placement: Arc::new(Placement::single()),
            model,
            parameters,
            adapters: None,
        };
        let handle = EngineHandle::start(served, options).expect("the engine starts");
        Self { handle, vocab_size }
    }

    /// The seconds to the first token and to the last one.
    fn answer(&self, requests: usize, prompt: usize, answer: usize) -> [f64; 2] {
        let started = Instant::now();
        let ask = |row: usize| {
            let text = (0..prompt).map(|index| ((index * 31 + row * 977) % self.vocab_size) as u32).collect();
            let limits = AnswerLimits { max_new_tokens: Some(answer), ..AnswerLimits::default() };
            let request = GenerationRequest { limits, ..GenerationRequest::greedy(text) };
            self.handle.submit(request).expect("the request is right")
        };
        let all: Vec<_> = (0..requests).map(ask).collect();
        let mut first = None;
        for mut answers in all {
            while let Some(event) = answers.recv() {
                match event {
                    AnswerEvent::Token { .. } => {
                        first.get_or_insert_with(|| started.elapsed().as_secs_f64());
                    }
                    AnswerEvent::Failed(error) => panic!("{error}"),
                    AnswerEvent::Prompt { .. }
                    | AnswerEvent::Pooled { .. }
                    | AnswerEvent::Finished { .. } => {}
                }
            }
        }
        [first.expect("there is a token"), started.elapsed().as_secs_f64()]
    }
}
