//! Tests that run programs: tiny models with random weights, on the CPU.

mod cache;
pub(crate) mod families;
mod generate;
mod load;
mod sampling;

use std::{
    ops::{ControlFlow, Deref},
    sync::Arc,
};

use mt_config::{Config, ModelGroup, PlacementGroup, Request as ConfigRequest};
use mt_ir::Target;
use mt_models::{Model, build};
use mt_nn::initialize;
use mt_runtime::{Array, CompileSettings, testing};
use mt_shape::{HostArray, Placement};
use mt_testing::merged;
use mt_trace::{ProgramOptions, program};

use crate::{
    Engine, EngineError, EngineOptions, Generation, GenerationEvent, Limits, PromptBounds, Request,
    SamplingOptions, Session,
};

pub const VOCAB_SIZE: usize = 61;

/// A model's configuration: `base` with `keys` on top.
pub fn resolve(keys: &[&str]) -> Config {
    let base = [
        "dtype=float32",
        "base_emb_dim=24",
        "base_mlp_dim=40",
        "base_num_decoder_layers=2",
        "base_num_query_heads=3",
        "base_num_kv_heads=1",
        "head_dim=8",
        "max_target_length=64",
        "max_prefill_predict_length=32",
        "vocab_size=61",
    ];
    let arguments = merged(base.iter().chain(keys));
    Config::resolve(&ConfigRequest { arguments, ..ConfigRequest::default() }).unwrap()
}

pub fn model(keys: &[&str]) -> Arc<dyn Model> {
    build(&ModelGroup::from_config(&resolve(keys)).unwrap()).unwrap().into()
}

/// Random weights, three times as large as training starts from, so that attention is not nearly uniform.
pub fn weights(model: &dyn Model) -> Vec<HostArray> {
    let options = ProgramOptions::new("initialize", Target::CPU);
    let program = program(&options, |inputs| {
        let region = inputs.region();
        initialize(region, region.key(7), &model.parameters())
            .into_iter()
            .map(|parameter| inputs.replicated("parameter", parameter * 3.0))
            .collect()
    });
    testing::run(&program.unwrap(), &[]).unwrap()
}

/// An engine with its parameters.
pub struct Equipped {
    pub engine: Engine,
    pub parameters: Vec<Array>,
}

impl Equipped {
    pub fn session(&self) -> Session<'_> {
        self.engine.with(&self.parameters).unwrap()
    }

    pub fn generate(
        &self,
        requests: &[Request],
        sampling: &SamplingOptions,
        limits: &Limits,
        on_event: impl FnMut(GenerationEvent) -> ControlFlow<()>,
    ) -> Result<Generation, EngineError> {
        self.session().generate(requests, sampling, limits, on_event)
    }
}

impl Deref for Equipped {
    type Target = Engine;

    fn deref(&self) -> &Engine {
        &self.engine
    }
}

/// An engine on `num_devices` devices, placed by `keys`.
pub fn engine_on(num_devices: usize, keys: &[&str]) -> Equipped {
    let runtime = testing::cpu(num_devices);
    let placement = match num_devices {
        1 => Placement::single(),
        _ => PlacementGroup::from_config(&resolve(keys)).unwrap().placement(num_devices).unwrap(),
    };
    let model = model(keys);
    let parameters: Vec<Array> = model
        .parameters()
        .iter()
        .zip(weights(&*model))
        .map(|((_, spec), host)| {
            let sharding = placement.sharding(&spec.logical_axes, host.dims());
            Array::from_host(runtime, &host, &sharding).unwrap()
        })
        .collect();
    let options = EngineOptions {
        prompts: PromptBounds {
            vocab_size: VOCAB_SIZE,
            max_target_length: 64,
            max_prefill_length: 32,
            source: None,
        },
        num_choices: VOCAB_SIZE,
        max_batch: 4,
        compile: CompileSettings::default(),
    };
    let types = parameters.iter().map(Array::dtype).collect();
    let engine = Engine::new(runtime.clone(), Arc::new(placement), model, types, options);
    Equipped { engine, parameters }
}

pub fn engine(keys: &[&str]) -> Equipped {
    engine_on(1, keys)
}

/// A prompt of `length` tokens that depends on `seed`.
pub fn prompt(length: usize, seed: u64) -> Vec<u32> {
    let token = |index: u64| ((index + 1) * (2 * seed + 17) * 2_654_435_761 % VOCAB_SIZE as u64) as u32;
    (0..length as u64).map(token).collect()
}

pub fn request(length: usize, seed: u64) -> Request {
    Request { prompt: prompt(length, seed), sample: 0 }
}
