//! A run on its devices, before any of them is touched: its model, where everything is, and its programs.

use std::sync::Arc;

use mt_config::{Config, TrainConfig};
use mt_ir::Program;
use mt_models::{Model, ModelError};
use mt_runtime::{CompileSettings, Platform, Runtime};
use mt_shape::{Placement, Sharding, Topology};
use serde::Serialize;

use crate::{
    TrainError,
    measured::Measured,
    placement::{check_state_axes, report},
    planned::StateKind,
    program::{BATCH_ARRAYS, Programs},
    run::{StateRule, batch_axes, compile_settings, programs_of},
};

/// The devices that a run is for. They need not be there.
#[derive(Clone, Debug, PartialEq)]
pub struct Devices {
    pub platform: Platform,
    pub number: usize,
    /// The slice of each device, where devices say it.
    pub slices: Option<Vec<i64>>,
}

impl Devices {
    /// Those that are there.
    pub fn of(runtime: &Runtime) -> Self {
        Self {
            platform: runtime.platform(),
            number: runtime.num_devices(),
            slices: runtime.slices().as_deref().map(<[i64]>::to_vec),
        }
    }
}

/// A configuration that was read and found to be that of a run, and its model.
pub struct Intended {
    pub(crate) settings: TrainConfig,
    pub(crate) model: Box<dyn Model>,
}

impl Intended {
    /// # Errors
    /// The configuration asks for what there is not.
    pub fn new(config: &Config) -> Result<Self, TrainError> {
        let settings = TrainConfig::from_config(config)?;
        let model = mt_models::build(&settings.model)?;
        let length = settings.model.max_target_length;
        if let Some(positions) = model.num_learned_positions().filter(|positions| length > *positions) {
            return Err(ModelError::TooFewPositions { length, positions }.into());
        }
        Ok(Self { settings, model })
    }

    /// The configuration.
    pub fn settings(&self) -> &TrainConfig {
        &self.settings
    }
}

/// Bytes on each device of what a training step is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ArgumentBytes {
    pub parameters: u64,
    /// What the optimizer keeps, and counts.
    pub optimizer: u64,
    pub batch: u64,
}

impl ArgumentBytes {
    pub fn total(&self) -> u64 {
        self.parameters + self.optimizer + self.batch
    }
}

/// What a run is on given devices.
pub struct TrainPlan {
    pub(crate) settings: TrainConfig,
    pub(crate) model: Box<dyn Model>,
    pub(crate) platform: Platform,
    pub(crate) topology: Topology,
    pub(crate) placement: Arc<Placement>,
    pub(crate) state_rule: StateRule,
    batch_dims: [usize; 2],
}

impl TrainPlan {
    /// The plan of the run that a configuration describes.
    ///
    /// # Errors
    /// The configuration asks for what there is not, or does not fit the devices.
    pub fn new(config: &Config, devices: &Devices) -> Result<Self, TrainError> {
        Self::on(Intended::new(config)?, devices)
    }

    /// As [`Self::new`], of a configuration that was read already.
    ///
    /// # Errors
    /// It does not fit the devices.
    pub fn on(intended: Intended, devices: &Devices) -> Result<Self, TrainError> {
        let Intended { settings, model } = intended;
        let topology = settings.placement.topology(devices.number, devices.slices.as_deref())?;
        settings.check_devices(&topology)?;
        let placement = Arc::new(settings.placement.placement(&topology)?);
        let rows = settings.data.batch_schedule(topology.num_devices())?.full_rows();
        let batch_dims = [rows, settings.data.max_target_length];
        let platform = devices.platform;
        let state_rule = StateRule::new(&settings, &*model, platform)?;
        let plan = Self { settings, model, platform, topology, placement, state_rule, batch_dims };
        check_state_axes(&plan.placement, &plan.state_rule.layout, &plan.batch_sharding())?;
        Ok(plan)
    }

    /// The program of a training step with as many sequences as training ends with.
    ///
    /// # Errors
    /// Some of what the configuration asks for does not fit together.
    pub fn train_step(&self) -> Result<Program, TrainError> {
        let [rows, length] = self.batch_dims;
        let Measured { program, .. } = self.programs().train_step(rows, length)?;
        Ok(program)
    }

    /// The program that makes the state of a fresh run.
    ///
    /// # Errors
    /// As for the training step.
    pub fn initialize(&self) -> Result<Program, TrainError> {
        self.programs().initialize()
    }

    /// How its programs are compiled.
    pub fn compile_settings(&self, program: &Program) -> CompileSettings {
        compile_settings(&self.settings, &program.name)
    }

    /// The configuration that it was made from.
    pub fn settings(&self) -> &TrainConfig {
        &self.settings
    }

    pub fn model(&self) -> &dyn Model {
        &*self.model
    }

    /// The mesh, and what is split over it.
    pub fn placement(&self) -> &Arc<Placement> {
        &self.placement
    }

    /// The devices by slice.
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// The sequences of a whole batch, and their length.
    pub fn batch_dims(&self) -> [usize; 2] {
        self.batch_dims
    }

    /// What the arguments of a training step take on each device.
    pub fn argument_bytes(&self) -> ArgumentBytes {
        let mut bytes = ArgumentBytes { parameters: 0, optimizer: 0, batch: 0 };
        for array in self.state() {
            let part = match array.kind {
                StateKind::Parameter => &mut bytes.parameters,
                StateKind::Optimizer => &mut bytes.optimizer,
            };
            *part += array.bytes_on_device() as u64;
        }
        let rows = self.batch_sharding().shard_dims(&self.batch_dims);
        bytes.batch = (BATCH_ARRAYS.len() * rows.iter().product::<usize>() * size_of::<i32>()) as u64;
        bytes
    }

    /// Prints on standard error where everything is: parameters, the optimizer's state, the batch, and what model code
    /// places between them in the programs that were made so far.
    pub fn print_placements(&self) {
        report(self, (&batch_axes(&self.settings), &self.batch_dims, &self.batch_sharding()));
    }

    pub(crate) fn programs(&self) -> Programs<'_> {
        self.programs_at(self.placement.clone())
    }

    /// The programs of the run on another mesh of the same devices, or under other rules.
    pub(crate) fn programs_at(&self, placement: Arc<Placement>) -> Programs<'_> {
        programs_of(&self.settings, &*self.model, placement, self.platform, self.state_rule.clone())
    }

    fn batch_sharding(&self) -> Sharding {
        let names = batch_axes(&self.settings);
        self.placement.sharding(&names.each_ref().map(|name| Some(name.as_str())), &self.batch_dims)
    }
}
