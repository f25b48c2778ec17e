//! The groups that one command needs, checked together.

use super::{
    CheckpointGroup, DataGroup, DatasetType, DebugGroup, DecodeGroup, ModelGroup, OptimizerGroup,
    PlacementGroup, RunGroup, TokenizerGroup,
};
use crate::{
    config::Config,
    error::{ConfigError, Problem},
};

/// Declares what a command receives: a struct whose fields are groups, and how it is read from a configuration.
macro_rules! command {
    ($(#[$meta:meta])* pub struct $name:ident { $(pub $field:ident: $group:ident,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq)]
        pub struct $name {
            $(pub $field: $group,)*
        }

        impl $name {
            /// Reads and checks everything that the command needs.
            ///
            /// # Errors
            /// All problems together: features that are not built, and values that do not fit.
            pub fn from_config(config: &Config) -> Result<Self, ConfigError> {
                let mut problems = config.missing_features();
                $(let $field = $group::read(config, &mut problems);)*
                let ($(Some($field),)*) = ($($field,)*) else { return Err(distinct(problems)) };
                let whole = Self { $($field,)* };
                whole.check(&mut problems);
                if problems.is_empty() { Ok(whole) } else { Err(distinct(problems)) }
            }
        }
    };
}

/// The error, with each refusal once though several groups may have met it.
fn distinct(problems: Vec<Problem>) -> ConfigError {
    let mut seen = std::collections::HashSet::new();
    let new = |problem: &Problem| match problem {
        Problem::NotBuilt { key, feature, .. } => seen.insert(format!("{key} {feature}")),
        other => seen.insert(other.to_string()),
    };
    ConfigError::new(problems.into_iter().filter(new).collect())
}

command! {
    /// What `maxtext train` receives.
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
}

command! {
    /// What `maxtext decode` receives.
    pub struct DecodeConfig {
        pub run: RunGroup,
        pub model: ModelGroup,
        pub tokenizer: TokenizerGroup,
        pub checkpoint: CheckpointGroup,
        pub placement: PlacementGroup,
        pub decode: DecodeGroup,
        pub debug: DebugGroup,
    }
}

impl TrainConfig {
    fn check(&self, problems: &mut Vec<Problem>) {
        if self.data.dataset_type == DatasetType::Hf
            && !self.checkpoint.brings_tokenizer()
            && let Err(error) = self.tokenizer.require()
        {
            problems.extend(error.into_problems());
        }
        if let (Some(interval), false) = (self.run.eval_interval, self.data.has_evaluation_data()) {
            problems.push(Problem::inconsistent(
                format!("`eval_interval` is `{interval}`, but there is nothing to evaluate on"),
                "name `hf_eval_files`, or leave out `eval_interval`",
            ));
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
    /// Nothing that spans groups can be wrong with decoding.
    fn check(&self, _problems: &mut Vec<Problem>) {}
}
