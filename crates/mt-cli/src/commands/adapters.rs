//! The options of saved adapters, which keys need not repeat.

use mt_config::{CheckpointGroup, Config, ModelGroup};
use mt_models::{AdapterOptions, peft_modules};

use crate::failure::Failure;

/// The configuration with the options of the adapters that it loads, wherever it does not set them by hand. Loading compares
/// options that are set.
pub fn with_adapter_settings(mut config: Config) -> Result<Config, Failure> {
    if config.entry("enable_lora").value != true {
        return Ok(config);
    }
    let group = CheckpointGroup::from_config(&config)?;
    let Some(path) = group.lora_restore_path.as_deref().or(group.parameters_path()) else {
        return Ok(config);
    };
    // A path that does not exist is reported where it is loaded, and a run that is resumed needs none.
    if !path.exists() {
        // Without the rank, what is missing would be reported as a mistake of keys.
        if group.lora_restore_path.is_some() && !config.entry("lora_rank").is_asked_for() {
            let origin = &config.entry("lora_restore_path").origin;
            return Err(Failure::user(format!(
                "`lora.lora_restore_path` is `{}` ({origin}), which does not exist\nhint: name a run with adapters, or a directory of PEFT",
                path.display()
            )));
        }
        return Ok(config);
    }
    let Some(options) = AdapterOptions::at(path)? else { return Ok(config) };
    for (key, value) in options.settings() {
        if !config.entry(key).is_asked_for() {
            config = config.with_derived(key, value);
        }
    }
    let key = "lora_module_path";
    if config.entry(key).is_asked_for() {
        return Ok(config);
    }
    let modules = match options.module_path {
        Some(modules) => modules,
        None => peft_modules(&ModelGroup::from_config(&config)?, path)?,
    };
    Ok(config.with_derived(key, modules))
}
