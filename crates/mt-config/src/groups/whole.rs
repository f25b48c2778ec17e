//! The groups that one command needs, checked together.

use super::{
    CheckpointGroup, DataGroup, DatasetType, DebugGroup, DecodeGroup, ModelGroup, OptimizerGroup,
    PlacementGroup, RunGroup, TokenizerGroup,
};
use crate::{
    config::Config,
    error::{ConfigError, Problem},
};

/// What `maxtext train` receives.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainConfig {
    pub run: RunGroup,
    pub model: ModelGroup,
    pub optimizer: OptimizerGroup,
    pub data: DataGroup,
    pub tokenizer: TokenizerGroup,
    pub checkpoint: CheckpointGroup,
    pub placement: PlacementGroup,
    pub debug: DebugGroup,
}

/// What `maxtext decode` receives.
#[derive(Clone, Debug, PartialEq)]
pub struct DecodeConfig {
    pub run: RunGroup,
    pub model: ModelGroup,
    pub tokenizer: TokenizerGroup,
    pub checkpoint: CheckpointGroup,
    pub placement: PlacementGroup,
    pub decode: DecodeGroup,
    pub debug: DebugGroup,
}

/// Collects the problems of several groups, so that they are reported together.
struct Collector {
    problems: Vec<Problem>,
}

impl Collector {
    fn new(config: &Config) -> Self {
        Self { problems: config.missing_features() }
    }

    fn take<T>(&mut self, result: Result<T, ConfigError>) -> Option<T> {
        result.map_err(|error| self.problems.extend(error.into_problems())).ok()
    }

    /// The error, with each refusal once though several groups may have met it.
    fn error(self) -> ConfigError {
        let mut seen = std::collections::HashSet::new();
        ConfigError::new(
            self.problems.into_iter().filter(|problem| seen.insert(problem.to_string())).collect(),
        )
    }
}

impl TrainConfig {
    /// Reads and checks everything that training needs.
    ///
    /// # Errors
    /// All problems together: features that are not built, and values that do not fit.
    pub fn from_config(config: &Config) -> Result<Self, ConfigError> {
        let mut collector = Collector::new(config);
        let run = collector.take(RunGroup::from_config(config));
        let model = collector.take(ModelGroup::from_config(config));
        let optimizer = collector.take(OptimizerGroup::from_config(config));
        let data = collector.take(DataGroup::from_config(config));
        let tokenizer = collector.take(TokenizerGroup::from_config(config));
        let checkpoint = collector.take(CheckpointGroup::from_config(config));
        let placement = collector.take(PlacementGroup::from_config(config));
        let debug = collector.take(DebugGroup::from_config(config));
        if let Some(tokenizer) = &tokenizer
            && config.entry("dataset_type").value == DatasetType::Hf.name()
            && !checkpoint.as_ref().is_some_and(CheckpointGroup::brings_tokenizer)
        {
            collector.take(tokenizer.require());
        }
        if let (Some(run), Some(data)) = (&run, &data)
            && run.eval_interval.is_some()
            && !data.has_evaluation_data()
        {
            collector.problems.push(Problem::inconsistent(
                format!(
                    "`eval_interval` is `{}`, but there is nothing to evaluate on",
                    run.eval_interval.unwrap_or_default()
                ),
                "name `hf_eval_files`, or leave out `eval_interval`",
            ));
        }
        match (run, model, optimizer, data, tokenizer, checkpoint, placement, debug) {
            (
                Some(run),
                Some(model),
                Some(optimizer),
                Some(data),
                Some(tokenizer),
                Some(checkpoint),
                Some(placement),
                Some(debug),
            ) if collector.problems.is_empty() => {
                Ok(Self { run, model, optimizer, data, tokenizer, checkpoint, placement, debug })
            }
            _ => Err(collector.error()),
        }
    }

    /// Checks that meshes and batches fit a number of devices.
    ///
    /// # Errors
    /// The mesh does not fit the devices, or a batch cannot be split over it.
    pub fn check_devices(&self, num_devices: usize) -> Result<(), ConfigError> {
        let mesh = self.placement.mesh(num_devices)?;
        let batch = self.data.global_batch(num_devices)?;
        self.placement.check_batch(&mesh, "per_device_batch_size", batch)?;
        let batch = self.data.eval_global_batch(num_devices)?;
        self.placement.check_batch(&mesh, "eval_per_device_batch_size", batch)
    }
}

impl DecodeConfig {
    /// Reads and checks everything that decoding needs.
    ///
    /// # Errors
    /// All problems together: features that are not built, and values that do not fit.
    pub fn from_config(config: &Config) -> Result<Self, ConfigError> {
        let mut collector = Collector::new(config);
        let run = collector.take(RunGroup::from_config(config));
        let model = collector.take(ModelGroup::from_config(config));
        let tokenizer = collector.take(TokenizerGroup::from_config(config));
        let checkpoint = collector.take(CheckpointGroup::from_config(config));
        let placement = collector.take(PlacementGroup::from_config(config));
        let decode = collector.take(DecodeGroup::from_config(config));
        let debug = collector.take(DebugGroup::from_config(config));
        match (run, model, tokenizer, checkpoint, placement, decode, debug) {
            (
                Some(run),
                Some(model),
                Some(tokenizer),
                Some(checkpoint),
                Some(placement),
                Some(decode),
                Some(debug),
            ) if collector.problems.is_empty() => {
                Ok(Self { run, model, tokenizer, checkpoint, placement, decode, debug })
            }
            _ => Err(collector.error()),
        }
    }
}
