//! Measures the cost of batch-invariant programs, in turns with the usual ones, on a model of random weights:
//! `cargo run --release -p mt-engine --example invariant -- [dtype] [prompt] [answer]`.

use std::{sync::Arc, time::Instant};

use mt_config::{Config, ModelGroup, Request as ConfigRequest};
use mt_engine::{
    PromptBounds,
    serve::{
        AnswerEvent, AnswerLimits, CacheSize, EngineHandle, GenerationRequest, ServeOptions, ServedModel,
    },
};
use mt_ir::Target;
use mt_models::{Model, build};
use mt_nn::initialize;
use mt_runtime::{Array, CompileSettings, Platform, Runtime, RuntimeOptions};
use mt_shape::Placement;
use mt_trace::{ProgramOptions, program};

/// About 66 million weights.
const MODEL: [&str; 9] = [
    "base_emb_dim=512",
    "base_mlp_dim=2048",
    "base_num_decoder_layers=12",
    "base_num_query_heads=8",
    "base_num_kv_heads=4",
    "head_dim=64",
    "vocab_size=16384",
    "max_target_length=1024",
    "logits_via_embedding=true",
];

const LONGEST: usize = 1024;
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
        let keys = MODEL.iter().map(|key| (*key).to_owned());
        let own = ["dtype", "weight_dtype"].map(|key| format!("{key}={dtype}"));
        let arguments = keys.chain(own).chain([format!("batch_invariant={invariant}")]).collect();
        let request = ConfigRequest { arguments, ..ConfigRequest::default() };
        let config = Config::resolve(&request).expect("the keys are right");
        let group = ModelGroup::from_config(&config).expect("the model is complete");
        let model: Arc<dyn Model> = build(&group).expect("the model is valid").into();
        let options = RuntimeOptions {
            platform: Some(Platform::Cpu),
            num_cpu_devices: Some(1),
            batch_invariant: invariant,
            ..RuntimeOptions::default()
        };
        let runtime = Runtime::new(&options, &mut |_| {}).expect("there is a CPU");
        let parameters = Arc::new(random_parameters(&runtime, &*model));
        let vocab_size = group.vocab_size;
        let prompts = PromptBounds {
            vocab_size,
            max_target_length: LONGEST,
            max_prefill_length: LONGEST,
            source: None,
        };
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

fn random_parameters(runtime: &Runtime, model: &dyn Model) -> Vec<Array> {
    let options = ProgramOptions::new("initialize", Target::CPU);
    let program = program(&options, |inputs| {
        let region = inputs.region();
        let parameters = initialize(region, region.key(7), &model.parameters());
        parameters.into_iter().map(|parameter| inputs.replicated("parameter", parameter)).collect()
    });
    let program = program.expect("parameters can be drawn");
    let executable = runtime.compile(&program, &CompileSettings::default()).expect("the program compiles");
    executable.run(Vec::new()).expect("the program runs")
}
