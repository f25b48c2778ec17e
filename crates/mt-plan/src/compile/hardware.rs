//! The target of compilation: absent hardware, or this machine's devices.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use mt_config::{AbsentHardware, Chip, DebugGroup, Hardware, RunGroup};
use mt_ir::Program;
use mt_runtime::{
    Activity, AheadOfTime, AheadOptions, AheadProgram, CompileSettings, Executable, MemoryUse, OnInstall,
    Platform, Runtime, RuntimeError, start_runtime,
};
use mt_shape::DeviceAttributes;
use mt_train::Devices;

use super::gpu;

/// The target of compilation.
pub enum Target {
    /// Absent hardware with its compiler.
    Absent { hardware: AbsentHardware, compiler: AheadOfTime },
    /// This machine's devices.
    Present(Runtime),
}

/// A compiled program.
pub(super) struct Compiled {
    program: Either,
    pub elapsed: Duration,
}

enum Either {
    Ahead(AheadProgram),
    Here(Executable),
}

/// The devices of absent hardware.
pub(crate) fn devices(hardware: &AbsentHardware) -> Devices {
    let slices = hardware.slices();
    let platform = match hardware.slice.chip.hardware {
        Hardware::Gpu => Platform::Gpu,
        Hardware::Cpu => Platform::Cpu,
        _ => Platform::Tpu,
    };
    let number = slices.len();
    let slices = (hardware.num_slices > 1).then_some(slices);
    Devices { platform, number, attributes: DeviceAttributes { slices, ..DeviceAttributes::default() } }
}

impl Target {
    /// Loads the compiler for `hardware`, or starts this machine's devices.
    ///
    /// # Errors
    /// The plugin is missing and cannot be installed, or it does not support the hardware.
    pub fn new(
        hardware: Option<AbsentHardware>,
        run: &RunGroup,
        debug: &DebugGroup,
        on_install: OnInstall<'_>,
    ) -> Result<Self, RuntimeError> {
        let Some(hardware) = hardware else {
            return Ok(Self::Present(start_runtime(run, debug, on_install)?));
        };
        let chip = hardware.slice.chip;
        let is_gpu = chip.hardware == Hardware::Gpu;
        let topology = if is_gpu {
            format!("1x1x{}", hardware.slice.chips_per_slice())
        } else {
            hardware.slice.compiler_name()
        };
        let options = AheadOptions {
            platform: devices(&hardware).platform,
            plugin_path: run.pjrt_plugin_path.clone(),
            topology,
            chip_config: hardware.slice.chip_config(),
            num_slices: hardware.num_slices,
            gpu_description: if is_gpu { Some(gpu::description(chip)) } else { None },
        };
        let compiler = AheadOfTime::new(&options, on_install)?;
        Ok(Self::Absent { hardware, compiler })
    }

    /// The target's devices.
    pub fn devices(&self) -> Devices {
        match self {
            // The plugin may list the devices of several slices in another order.
            Self::Absent { compiler, .. } => Devices {
                platform: compiler.platform(),
                number: compiler.num_devices(),
                attributes: compiler.device_attributes(),
            },
            Self::Present(runtime) => Devices::of(runtime),
        }
    }

    /// The requested name of absent hardware, or a description of this machine's devices.
    pub fn name(&self) -> String {
        match self {
            Self::Absent { hardware, .. } => hardware.slice.name.clone(),
            Self::Present(runtime) => format!("this machine's {}", runtime.platform()),
        }
    }

    /// The devices' kind, as the plugin reports it.
    pub fn device_kind(&self) -> String {
        match self {
            Self::Absent { compiler, .. } => compiler.device_kind().to_owned(),
            Self::Present(runtime) => {
                runtime.devices().first().map(|device| device.kind().to_owned()).unwrap_or_default()
            }
        }
    }

    /// The chip of the devices, if known.
    pub fn chip(&self) -> Option<&'static Chip> {
        match self {
            Self::Absent { hardware, .. } => Some(hardware.slice.chip),
            Self::Present(_) => Chip::of_device(&self.device_kind()),
        }
    }

    /// The memory of each device in bytes that programs can use; `None` if devices use host memory.
    pub fn memory_limit(&self) -> Option<u64> {
        match self {
            Self::Absent { hardware, compiler } => {
                Some(compiler.memory_limit().unwrap_or(hardware.slice.chip.memory))
            }
            Self::Present(runtime) => {
                runtime.devices().first().and_then(|device| device.memory_stats()?.bytes_limit)
            }
        }
    }

    /// The sides of the slice: its chips along each dimension.
    pub fn sides(&self) -> Vec<usize> {
        match self {
            Self::Absent { hardware, .. } => hardware.slice.sides().to_vec(),
            Self::Present(_) => {
                let coordinates = self.devices().attributes.coordinates.unwrap_or_default();
                let dimensions = coordinates.first().map_or(0, Vec::len);
                let along = |dimension: usize| coordinates.iter().map(move |place| place[dimension]);
                (0..dimensions)
                    .map(|dimension| {
                        let (first, last) = (along(dimension).min(), along(dimension).max());
                        last.zip(first).map_or(1, |(last, first)| (last - first) as usize + 1)
                    })
                    .collect()
            }
        }
    }

    pub(super) fn compile(
        &self,
        program: &Program,
        settings: &CompileSettings,
    ) -> Result<Compiled, RuntimeError> {
        let start = Instant::now();
        let program = match self {
            Self::Absent { compiler, .. } => Either::Ahead(compiler.compile(program, settings)?),
            Self::Present(runtime) => Either::Here(runtime.compile(program, settings)?),
        };
        Ok(Compiled { program, elapsed: start.elapsed() })
    }
}

impl Compiled {
    pub fn memory(&self) -> Result<MemoryUse, RuntimeError> {
        match &self.program {
            Either::Ahead(program) => program.memory(),
            Either::Here(program) => program.memory(),
        }
    }

    pub fn activity(&self) -> Result<Activity, RuntimeError> {
        match &self.program {
            Either::Ahead(program) => program.activity(),
            Either::Here(program) => program.activity(),
        }
    }

    pub fn save(
        &self,
        program: &Program,
        settings: &CompileSettings,
        path: &Path,
    ) -> Result<(), RuntimeError> {
        match &self.program {
            Either::Ahead(compiled) => compiled.save(path),
            Either::Here(compiled) => compiled.save(program, settings, path),
        }
    }
}
