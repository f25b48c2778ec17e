//! The hardware that a configuration asks for.

use mt_config::{DebugGroup, Hardware, RunGroup};
use mt_pjrt::Platform;

use crate::{CompileSettings, Runtime, RuntimeError, RuntimeOptions};

/// Starts the hardware that a configuration asks for.
///
/// # Errors
/// There is none, or its plugin is missing.
pub fn start_runtime(run: &RunGroup, debug: &DebugGroup) -> Result<Runtime, RuntimeError> {
    let platform = match run.hardware {
        Hardware::Auto => None,
        Hardware::Cpu => Some(Platform::Cpu),
        Hardware::Gpu => Some(Platform::Gpu),
        Hardware::Tpu => Some(Platform::Tpu),
    };
    Runtime::new(&RuntimeOptions {
        platform,
        plugin_path: run.pjrt_plugin_path.clone(),
        cpu_kernels: run.cpu_kernels,
        num_cpu_devices: Some(run.num_cpu_devices),
        cache_directory: debug.jax_cache_dir.clone(),
        ..RuntimeOptions::default()
    })
}

impl CompileSettings {
    /// The settings that a configuration asks for.
    pub fn of(debug: &DebugGroup) -> Self {
        Self {
            dump_to: debug.dump_hlo.then(|| debug.dump_hlo_local_dir.clone()),
            xla_flags: debug.compiler_options(),
        }
    }
}
