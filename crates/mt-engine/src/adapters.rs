//! Models with adapters: the adapters alone, and the model into whose weights they are merged.

use std::sync::Arc;

use mt_config::LoadConfig;
use mt_models::{AdaptedParameters, Model, WeightsOrigin, build};
use mt_nn::merged_weights;
use mt_runtime::{Array, CompileSettings, Input, OnInstall, start_runtime};
use mt_trace::{ProgramOptions, program};

use crate::{EngineError, LoadedModel, engine::LESS_MEMORY};

/// The name of the program that merges adapters.
pub const MERGE_PROGRAM: &str = "merge_adapters";

/// The adapters of a model on the devices, without their base.
pub struct LoadedAdapters {
    pub model: Arc<dyn Model>,
    /// In the model's order.
    pub adapters: Vec<Array>,
    pub base: WeightsOrigin,
}

/// Loads the adapters that a configuration names, and checks that their base exists.
///
/// # Errors
/// The configuration names no adapters, or they fit neither the model nor the base.
pub fn load_adapters(config: &LoadConfig, on_install: OnInstall<'_>) -> Result<LoadedAdapters, EngineError> {
    let path = config.checkpoint.parameters_path().ok_or(EngineError::NoCheckpoint)?;
    let model: Arc<dyn Model> = build(&config.model)?.into();
    if model.adapters().is_none() {
        return Err(EngineError::NoAdapters { path: path.to_owned() });
    }
    let sources = AdaptedParameters::open(&*model, path, config.checkpoint.lora_restore_path.as_deref())?;
    let runtime = start_runtime(&config.run, &config.debug, on_install)?;
    let topology = config.placement.topology(runtime.num_devices(), &runtime.device_attributes())?;
    let placement = config.placement.placement(topology)?;
    let adapters = sources.load_adapters(&*model, &runtime, &placement)?;
    let adapters = adapters.ok_or(EngineError::NoAdapters { path: path.to_owned() })?;
    Ok(LoadedAdapters { model, adapters, base: sources.record.base })
}

impl LoadedModel {
    /// The same model with its adapters merged into the weights. A model without adapters stays as it is.
    ///
    /// # Errors
    /// The program does not fit into memory.
    pub fn merged(self, compile: &CompileSettings) -> Result<Self, EngineError> {
        self.with_adapters_times(1.0, compile)
    }

    /// The model into whose weights these adapters were merged, without them: their products are subtracted.
    ///
    /// # Errors
    /// There are no adapters, they cannot be subtracted, or the program does not fit into memory.
    pub fn unmerged(self, compile: &CompileSettings) -> Result<Self, EngineError> {
        let adapters = self.model.adapters();
        let is_quantized = self.model.parameters().iter().any(|(_, spec)| spec.encoded.is_some());
        let reason = match adapters {
            None => Some("no adapters are named"),
            Some(adapters) if adapters.adapter.has_magnitude => Some(
                "adapters with DoRA scale weights by norms of the base, which merged weights do not tell",
            ),
            Some(_) if is_quantized => Some("the weights below the adapters are quantized"),
            Some(_) => None,
        };
        match reason {
            Some(reason) => Err(EngineError::CannotUnmerge { reason }),
            None => self.with_adapters_times(-1.0, compile),
        }
    }

    /// The weights and `factor` times the products of their adapters.
    fn with_adapters_times(self, factor: f64, compile: &CompileSettings) -> Result<Self, EngineError> {
        let Some((adapters, plain)) = self.model.adapters().zip(self.model.without_adapters()) else {
            return Ok(self);
        };
        let (mut adapter, specs) = (adapters.adapter, self.model.parameters());
        adapter.scale *= factor;
        let Self { runtime, placement, parameters, .. } = &self;
        let options = ProgramOptions {
            name: MERGE_PROGRAM.to_owned(),
            placement: placement.clone(),
            target: runtime.target(),
            precision: self.model.precision(),
        };
        let of_plain = plain.parameters();
        let traced = program(&options, |inputs| {
            let declared = specs.iter().zip(parameters).map(|((path, spec), array)| {
                inputs.input(&path.to_string(), array.dtype(), &spec.axes, &spec.logical_axes, false)
            });
            let merged = merged_weights(&specs, adapter, &declared.collect::<Vec<_>>());
            let outputs = of_plain
                .iter()
                .zip(merged)
                .map(|((path, spec), value)| inputs.output(&path.to_string(), value, &spec.logical_axes));
            outputs.collect()
        })?;
        let executable = runtime.compile(&traced, compile)?;
        runtime.check_memory(&[&executable], LESS_MEMORY)?;
        let merged = executable.run(parameters.iter().map(Input::from).collect())?;
        Ok(Self { model: plain.into(), parameters: merged, ..self })
    }
}
