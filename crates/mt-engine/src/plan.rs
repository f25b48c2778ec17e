//! The programs of generation, for devices that need not be there.

use std::sync::Arc;

use mt_config::DecodeConfig;
use mt_ir::Program;
use mt_models::{Model, build};
use mt_runtime::{CompileSettings, Platform, target_of};
use mt_shape::{Placement, Topology};

use crate::{EngineError, engine::Sizes, load::MAX_BATCH, program::Programs, sampler::Sampler};

/// What generation is on given devices: as many rows at once as there can be, with the longest prompts and answers that
/// the configuration allows.
pub struct DecodePlan {
    programs: Programs,
    sizes: Sizes,
    settings: DecodeConfig,
    topology: Topology,
}

impl DecodePlan {
    /// The plan of what a configuration describes; `slices` has the slice of each device, where devices say it.
    ///
    /// # Errors
    /// The configuration asks for what there is not, or does not fit the devices.
    pub fn new(
        settings: DecodeConfig,
        platform: Platform,
        num_devices: usize,
        slices: Option<&[i64]>,
    ) -> Result<Self, EngineError> {
        let model: Arc<dyn Model> = build(&settings.model)?.into();
        let topology = settings.placement.topology(num_devices, slices)?;
        let placement = Arc::new(settings.placement.placement(&topology)?);
        let target = target_of(platform, settings.run.cpu_kernels)?;
        let parameter_types = model.parameters().iter().map(|(_, spec)| spec.dtype).collect();
        let decode = &settings.decode;
        let positions = model.num_learned_positions().unwrap_or(usize::MAX);
        let sizes = Sizes::most(
            MAX_BATCH,
            decode.max_prefill_predict_length,
            decode.max_target_length.min(positions),
        );
        let num_choices = settings.model.vocab_size;
        let programs = Programs { model, placement, target, parameter_types, num_choices };
        Ok(Self { programs, sizes, settings, topology })
    }

    /// The program that fills the cache with prompts.
    ///
    /// # Errors
    /// The model's code misuses an operation.
    pub fn prefill(&self) -> Result<Program, EngineError> {
        self.programs.trace(self.sizes.prefill())
    }

    /// The program of one step, which chooses the likeliest token.
    ///
    /// # Errors
    /// The model's code misuses an operation.
    pub fn step(&self) -> Result<Program, EngineError> {
        self.programs.trace(self.sizes.step(Sampler::Greedy))
    }

    /// How its programs are compiled.
    pub fn compile_settings(&self) -> CompileSettings {
        CompileSettings::of(&self.settings.debug)
    }

    pub fn model(&self) -> &dyn Model {
        &*self.programs.model
    }

    /// The devices by slice.
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// The mesh, and what is split over it.
    pub fn placement(&self) -> &Arc<Placement> {
        &self.programs.placement
    }

    /// The rows that run at once.
    pub fn rows(&self) -> usize {
        self.sizes.batch
    }

    /// The slots that prompts fill.
    pub fn prompt_length(&self) -> usize {
        self.sizes.length
    }
}
