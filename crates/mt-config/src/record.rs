//! The resolved configuration, as a run records it.

use std::path::Path;

use crate::{Config, ConfigError, Difference, OptimizerSpace, Request};

/// The resolved configuration that is written beside a run's checkpoints and compared when the run resumes. It is
/// immutable.
#[derive(Clone, Debug)]
pub struct RunRecord {
    config: Config,
}

impl RunRecord {
    /// Creates the record of a configuration, which names the optimizer's space.
    pub fn new(config: Config) -> Self {
        let space = config.space.name();
        Self { config: config.with_derived(OptimizerSpace::KEY, space) }
    }

    /// Reads the record that a run wrote to a file.
    ///
    /// # Errors
    /// The file cannot be read, or its values do not resolve.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let config = Config::resolve(&Request::default().over_saved(path.to_owned()))?;
        Ok(Self::new(config))
    }

    /// The contents of the record's file.
    pub fn to_yaml(&self) -> String {
        self.config.to_yaml()
    }

    /// Whether the run is the quick start.
    pub fn is_quick_start(&self) -> bool {
        self.config.is_quick_start()
    }

    /// The value of a key for a message.
    ///
    /// # Panics
    /// The table has no such key.
    pub fn shown(&self, key: &str) -> String {
        self.config.entry(key).shown()
    }

    /// The differences that prevent the run of `saved` from being resumed with this configuration. Each record comes
    /// with its number of devices.
    pub fn conflicts(&self, num_devices: usize, saved: &Self, saved_num_devices: usize) -> Vec<Difference> {
        self.config.resume_conflicts(num_devices, &saved.config, saved_num_devices)
    }

    /// The values that differ from `saved`, conflicts or not.
    pub fn changes(&self, saved: &Self) -> Vec<Difference> {
        saved.config.differences(&self.config)
    }
}
