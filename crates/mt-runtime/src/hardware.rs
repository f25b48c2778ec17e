//! The hardware and the compile settings that a configuration requests.

use mt_config::{DebugGroup, Hardware, HardwareNotes, RunGroup};
use mt_pjrt::{OnInstall, Platform};

use crate::{CompileSettings, Runtime, RuntimeError, RuntimeOptions};

/// Starts the hardware that a configuration requests. `on_install` receives the installation of a missing plugin.
///
/// # Errors
/// The machine has no such hardware, its plugin is missing, or programs cannot be dumped where the configuration says.
pub fn start_runtime(
    run: &RunGroup,
    debug: &DebugGroup,
    on_install: OnInstall<'_>,
) -> Result<Runtime, RuntimeError> {
    if debug.dump_hlo {
        let path = &debug.dump_hlo_local_dir;
        let unwritable = |source| RuntimeError::Dump { path: path.clone(), source };
        std::fs::create_dir_all(path).map_err(unwritable)?;
    }
    let platform = match run.hardware {
        Hardware::Auto => None,
        Hardware::Cpu => Some(Platform::Cpu),
        Hardware::Gpu => Some(Platform::Gpu),
        Hardware::Tpu => Some(Platform::Tpu),
    };
    let options = RuntimeOptions {
        platform,
        plugin_path: run.pjrt_plugin_path.clone(),
        cpu_kernels: run.cpu_kernels,
        batch_invariant: run.batch_invariant,
        num_cpu_devices: Some(run.num_cpu_devices),
        cache_directory: debug.jax_cache_dir.clone(),
        ..RuntimeOptions::default()
    };
    Runtime::new(&options, on_install)
}

/// The notes that hold on a platform.
pub fn notes_on(notes: &HardwareNotes, platform: Platform) -> &[String] {
    match platform {
        Platform::Cpu => &notes.cpus,
        Platform::Gpu => &notes.gpus,
        Platform::Tpu => &[],
    }
}

impl CompileSettings {
    /// The settings that a configuration requests for programs of these names. If `dump_hlo_local_module_name`, whose
    /// default is MaxText's training step, is in none of the names, all programs are dumped.
    pub fn of(debug: &DebugGroup, programs: &[&str]) -> Self {
        let settings = Self {
            dump_to: debug.dump_hlo.then(|| debug.dump_hlo_local_dir.clone()),
            dumped: debug.dump_hlo_local_module_name.clone(),
            xla_flags: debug.compiler_options(),
        };
        match programs.iter().any(|program| settings.dumps(program)) {
            true => settings,
            false => Self { dumped: String::new(), ..settings },
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use mt_config::{Config, Request};

    use super::*;

    #[test]
    fn dumps_are_chosen_by_name() {
        let dumped = |keys: &[&str], programs: &[&'static str]| -> Vec<&'static str> {
            let arguments =
                keys.iter().chain(&["dump_hlo_local_dir=d"]).map(|key| (*key).to_owned()).collect();
            let config = Config::resolve(&Request { arguments, ..Request::default() }).unwrap();
            let settings = CompileSettings::of(&DebugGroup::from_config(&config).unwrap(), programs);
            let is_dumped = |program: &&str| settings.dump_of(program) == Some(Path::new("d"));
            programs.iter().copied().filter(is_dumped).collect()
        };
        let training = ["initialize", "train_step", "eval_step"];
        let decoding = ["prefill", "decode_step"];
        let named = |name: &'static str| ["dump_hlo=true", name];
        assert!(dumped(&[], &training).is_empty());
        assert_eq!(dumped(&["dump_hlo=true"], &training), ["train_step"]);
        assert_eq!(dumped(&named("dump_hlo_local_module_name=step"), &training), ["train_step", "eval_step"]);
        assert_eq!(dumped(&named("dump_hlo_local_module_name="), &training), training);
        assert_eq!(dumped(&["dump_hlo=true"], &decoding), decoding);
        assert_eq!(dumped(&named("dump_hlo_local_module_name=prefill"), &decoding), ["prefill"]);
    }
}
