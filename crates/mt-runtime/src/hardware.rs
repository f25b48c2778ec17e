//! The hardware and the compile settings that a configuration requests.

use mt_config::{DebugGroup, Hardware, RunGroup};
use mt_pjrt::{OnInstall, Platform};

use crate::{CompileSettings, Runtime, RuntimeError, RuntimeOptions};

/// Starts the hardware that a configuration requests. `on_install` receives the installation of a missing plugin.
///
/// # Errors
/// The machine has no such hardware, or its plugin is missing.
pub fn start_runtime(
    run: &RunGroup,
    debug: &DebugGroup,
    on_install: OnInstall<'_>,
) -> Result<Runtime, RuntimeError> {
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
        num_cpu_devices: Some(run.num_cpu_devices),
        cache_directory: debug.jax_cache_dir.clone(),
        ..RuntimeOptions::default()
    };
    Runtime::new(&options, on_install)
}

impl CompileSettings {
    /// The settings that a configuration requests.
    pub fn of(debug: &DebugGroup) -> Self {
        Self {
            dump_to: debug.dump_hlo.then(|| debug.dump_hlo_local_dir.clone()),
            xla_flags: debug.compiler_options(),
        }
    }
}
