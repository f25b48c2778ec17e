//! An engine for a caller who waits for the answers.

use std::{
    collections::HashMap,
    ops::ControlFlow,
    sync::{Arc, Mutex, PoisonError},
};

use bytemuck::Pod;
use mt_ir::Memory;
use mt_models::Model;
use mt_runtime::{Array, Executable, Runtime, RuntimeError};
use mt_shape::{DType, HostArray, Placement, Sharding};

use crate::{
    EngineError, EngineOptions, Generation, GenerationEvent, Limits, Request, SamplingOptions,
    program::{ProgramKey, Programs},
    serve::{Executables, PoolSizes, ServeOptions, Speculation},
};

/// The hint for programs that do not fit into memory.
pub(crate) const LESS_MEMORY: &str = "fewer or shorter sequences at once, or a larger mesh need less";

/// The compiled programs with which a model continues sequences. An engine holds no parameters, so training and
/// generation can share one copy: [`Engine::with`] borrows a trainer's parameters between two steps.
pub struct Engine {
    pub(crate) runtime: Runtime,
    pub(crate) programs: Programs,
    pub(crate) options: EngineOptions,
    /// The programs of models with an encoder.
    executables: Mutex<HashMap<ProgramKey, Executable>>,
    /// The programs of other models, by the pools that they work on.
    pub(crate) with_pools: Mutex<HashMap<PoolSizes, Executables>>,
    /// How tokens are drafted, if they are.
    pub(crate) speculation: Option<Speculation>,
}

/// An engine with borrowed parameters of its model.
#[derive(Clone, Copy)]
pub struct Session<'a> {
    pub(crate) engine: &'a Engine,
    pub(crate) parameters: &'a [Array],
}

impl Engine {
    /// Creates an engine for a model whose parameters have these types, in the model's order, and are placed by its
    /// rules.
    pub fn new(
        runtime: Runtime,
        placement: Arc<Placement>,
        model: Arc<dyn Model>,
        parameter_types: Vec<DType>,
        mut options: EngineOptions,
    ) -> Self {
        options.prompts = options.prompts.within(&*model);
        let target = runtime.target();
        let num_choices = options.num_choices.min(options.prompts.vocab_size);
        let programs = Programs { model, placement, target, parameter_types, num_choices }.aligned();
        Self {
            runtime,
            programs,
            options,
            executables: Mutex::default(),
            with_pools: Mutex::default(),
            speculation: None,
        }
    }

    /// Drafts tokens, which steps then verify together. Prompts become no longer than the drafter can read.
    ///
    /// # Errors
    /// The drafter does not fit the model, or the model has an encoder.
    pub fn with_speculation(self, speculation: Speculation) -> Result<Self, EngineError> {
        let Self { runtime, programs, options, .. } = self;
        if programs.model.reads_source() {
            return Err(EngineError::Speculation {
                problem: "a model with an encoder generates token by token".to_owned(),
                hint: "leave out `speculative_method`".to_owned(),
            });
        }
        let defaults = ServeOptions::new(options.prompts, programs.num_choices);
        let mut checked = ServeOptions { speculation: Some(speculation), ..defaults };
        checked.check_speculation(&*programs.model)?;
        Ok(Self {
            runtime,
            programs,
            options: EngineOptions { prompts: checked.prompts, ..options },
            executables: Mutex::default(),
            with_pools: Mutex::default(),
            speculation: checked.speculation,
        })
    }

    /// Borrows parameters for the engine, without copying them.
    ///
    /// # Errors
    /// The arrays do not match the model's parameters, or they are in host memory.
    pub fn with<'a>(&'a self, parameters: &'a [Array]) -> Result<Session<'a>, EngineError> {
        let specs = self.programs.model.parameters();
        if specs.len() != parameters.len() {
            return Err(EngineError::ParameterCount { needed: specs.len(), given: parameters.len() });
        }
        let types = &self.programs.parameter_types;
        for (((path, spec), array), dtype) in specs.iter().zip(parameters).zip(types) {
            let (needed, given) = (spec.dims(), array.dims().to_vec());
            if (needed.as_slice(), *dtype) != (given.as_slice(), array.dtype()) {
                let name = path.to_string();
                let (needed_type, given_type) = (*dtype, array.dtype());
                return Err(EngineError::ParameterShape { name, needed, needed_type, given, given_type });
            }
        }
        if parameters.iter().any(|array| array.memory() != Memory::Device) {
            return Err(EngineError::ParametersOffloaded);
        }
        Ok(Session { engine: self, parameters })
    }

    /// The limits of the engine.
    pub fn options(&self) -> &EngineOptions {
        &self.options
    }

    /// The compiled program of these sizes; it is compiled on first use.
    pub(crate) fn executable(&self, key: ProgramKey) -> Result<Executable, EngineError> {
        let mut executables = self.executables.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(executable) = executables.get(&key) {
            return Ok(executable.clone());
        }
        let program = self.programs.trace(key)?;
        let executable = self.runtime.compile(&program, &self.options.compile)?;
        self.runtime.check_memory(&[&executable], LESS_MEMORY)?;
        executables.insert(key, executable.clone());
        Ok(executable)
    }

    pub(crate) fn replicated<T: Pod>(
        &self,
        dtype: DType,
        dims: &[usize],
        elements: &[T],
    ) -> Result<Array, RuntimeError> {
        let host = HostArray::from_slice(dtype, dims, elements)?;
        let sharding = Sharding::replicated(self.programs.placement.mesh().clone(), dims.len());
        Array::from_host(&self.runtime, &host, &sharding)
    }
}

impl Session<'_> {
    /// Continues the requests' prompts until each answer ends. `on_event` receives every token as it is generated, and
    /// can end that token's answer. Its return value for the end of an answer has no effect.
    ///
    /// # Errors
    /// A prompt or an option is out of bounds, or the model's logits are NaN.
    pub fn generate(
        &self,
        requests: &[Request],
        sampling: &SamplingOptions,
        limits: &Limits,
        mut on_event: impl FnMut(GenerationEvent) -> ControlFlow<()>,
    ) -> Result<Generation, EngineError> {
        if !self.engine.programs.model.is_causal() {
            return Err(EngineError::NotCausal);
        }
        for (index, request) in requests.iter().enumerate() {
            self.engine.options.prompts.check(index + 1, &request.prompt)?;
        }
        if self.engine.programs.model.reads_source() {
            return self.answer_sources(requests, sampling, limits, &mut on_event);
        }
        self.continue_texts(requests, sampling, limits, &mut on_event)
    }
}
