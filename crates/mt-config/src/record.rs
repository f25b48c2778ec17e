//! The resolved configuration as a run records it.

use std::path::Path;

use crate::{Config, ConfigError, Difference, OptimizerSpace, Request};

/// A resolved configuration that is written beside a run's checkpoints and compared when the run resumes. It cannot be
/// changed.
#[derive(Clone, Debug)]
pub struct RunRecord {
    config: Config,
}

impl RunRecord {
    /// The record of a configuration, with the space of the optimizer that it leads to.
    pub fn new(config: Config) -> Self {
        let space = OptimizerSpace::of(&config);
        Self::stepped_in(space, config)
    }

    /// The record that a run left in a file.
    ///
    /// # Errors
    /// The file cannot be read, or its values do not resolve.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let config = Config::resolve(&Request::default().over_saved(path.to_owned()))?;
        Ok(Self::stepped_in(OptimizerSpace::recorded(&config), config))
    }

    fn stepped_in(space: OptimizerSpace, mut config: Config) -> Self {
        config.adopt(OptimizerSpace::KEY, space.name());
        Self { config }
    }

    /// The contents of the file.
    pub fn to_yaml(&self) -> String {
        self.config.to_yaml()
    }

    /// Whether the run is the quick start's.
    pub fn is_quick_start(&self) -> bool {
        self.config.is_quick_start()
    }

    /// The value of a key as messages show it.
    ///
    /// # Panics
    /// The table has no such key.
    pub fn shown(&self, key: &str) -> String {
        self.config.entry(key).shown()
    }

    /// The differences that keep the run of `saved` from being resumed under this configuration; each record comes with
    /// its number of devices.
    pub fn conflicts(&self, num_devices: usize, saved: &Self, saved_num_devices: usize) -> Vec<Difference> {
        self.config.resume_conflicts(num_devices, &saved.config, saved_num_devices)
    }

    /// The values of `saved` that are others now, conflicts or not.
    pub fn changes(&self, saved: &Self) -> Vec<Difference> {
        saved.config.differences(&self.config)
    }
}
