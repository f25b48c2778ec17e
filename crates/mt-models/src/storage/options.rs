//! The options of adapters that decide what saved arrays compute.

use std::path::Path;

use serde_json::{Value, json};

use super::{adapted::adapter_checkpoint, state::StateError};
use crate::{
    decoder::AdapterConfig,
    hugging_face::{is_peft, peft_options},
};

/// The options of adapters that decide what saved arrays compute. Each is a key of the group `lora`.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterOptions {
    pub rank: usize,
    pub alpha: f64,
    pub use_rslora: bool,
    pub use_dora: bool,
    /// The expression that chose linear maps. It is `None` in PEFT directories, whose tensors tell.
    pub module_path: Option<String>,
}

impl AdapterOptions {
    /// Those of a model's adapters.
    pub fn of(config: &AdapterConfig) -> Self {
        Self {
            rank: config.adapter.rank,
            alpha: config.alpha,
            use_rslora: config.is_rank_stabilized,
            use_dora: config.adapter.has_magnitude,
            module_path: Some(config.module_path.clone()),
        }
    }

    /// Those of the adapters at a path, a PEFT directory or a run; `None` if no options are recorded there.
    ///
    /// # Errors
    /// The adapters are damaged, or of a kind that is not built.
    pub fn at(path: &Path) -> Result<Option<Self>, StateError> {
        if is_peft(path) {
            return Ok(Some(peft_options(path)?));
        }
        Ok(adapter_checkpoint(path)?.and_then(|(_, record)| record.options))
    }

    /// The options by the names of their keys, except the expression.
    pub fn settings(&self) -> [(&'static str, Value); 4] {
        [
            ("lora_rank", self.rank.into()),
            ("lora_alpha", self.alpha.into()),
            ("use_rslora", self.use_rslora.into()),
            ("use_dora", self.use_dora.into()),
        ]
    }

    /// Checks that adapters in `adapters` with these options are used in a model with the options `now`. Names of arrays
    /// tell which linear maps have adapters, whichever expression chose them.
    ///
    /// # Errors
    /// Options differ.
    pub fn check(&self, now: &Self, adapters: &Path) -> Result<(), StateError> {
        let (mut differences, mut remedies) = (Vec::new(), Vec::new());
        for ((key, before), (_, now)) in self.settings().into_iter().zip(now.settings()) {
            if before != now {
                differences.push(format!("`lora.{key}` is {before} there and {now} here"));
                remedies.push(format!("`lora.{key}={before}`"));
            }
        }
        if differences.is_empty() {
            return Ok(());
        }
        Err(StateError::OtherAdapters { path: adapters.to_owned(), differences, remedies })
    }

    /// The record in a checkpoint's metadata.
    pub fn to_json(&self) -> Value {
        let mut record = json!({ "lora_module_path": self.module_path });
        for (key, value) in self.settings() {
            record[key] = value;
        }
        record
    }

    /// Reads a record; `None` if it is not one.
    pub fn from_json(record: &Value) -> Option<Self> {
        Some(Self {
            rank: record.get("lora_rank")?.as_u64()? as usize,
            alpha: record.get("lora_alpha")?.as_f64()?,
            use_rslora: record.get("use_rslora")?.as_bool()?,
            use_dora: record.get("use_dora")?.as_bool()?,
            module_path: record.get("lora_module_path")?.as_str().map(str::to_owned),
        })
    }
}
