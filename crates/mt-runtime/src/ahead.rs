//! Compiling for hardware that is not there.

use std::{fmt, path::PathBuf, time::Duration, time::Instant};

use mt_ir::Program;
use mt_pjrt::{
    CompileOptions, CompiledProgram, MemoryUse, NamedValue, Platform, Plugin, Topology, find_or_install,
};

use crate::{
    Collective, CompileSettings, RuntimeError,
    dump::Dump,
    executable::{check_shardings, option_error, platform_flags},
    hlo,
};

/// Which hardware to compile for.
#[derive(Clone, Debug)]
pub struct AheadOptions {
    pub platform: Platform,
    /// The plugin's file; `None` to look for one, and to install it if there is none.
    pub plugin_path: Option<PathBuf>,
    /// What the plugin calls one slice, such as `v5p:4x4x4`.
    pub topology: String,
    pub num_slices: usize,
}

/// Hardware that programs can be compiled for.
pub struct AheadOfTime {
    platform: Platform,
    plugin: Plugin,
    topology: Topology,
    num_slices: usize,
}

/// A program compiled for hardware that is not there.
#[derive(Debug)]
pub struct AheadProgram {
    program: CompiledProgram,
    /// How long the compiler took.
    pub elapsed: Duration,
}

impl AheadOfTime {
    /// Loads the plugin, installing it if need be, and describes the hardware.
    ///
    /// # Errors
    /// There is no plugin or it cannot be installed, or it does not know the hardware.
    pub fn new(options: &AheadOptions) -> Result<Self, RuntimeError> {
        let location = find_or_install(options.platform, options.plugin_path.as_deref())?;
        let plugin = Plugin::load(&location.path)?;
        let slices = [("num_slices".to_owned(), NamedValue::Integer(options.num_slices as i64))];
        let named: &[_] = if options.num_slices > 1 { &slices } else { &[] };
        let topology = Topology::new(&plugin, &options.topology, named)?;
        Ok(Self { platform: options.platform, plugin, topology, num_slices: options.num_slices })
    }

    /// The kind of hardware.
    pub fn platform(&self) -> Platform {
        self.platform
    }

    /// The number of devices of all slices.
    pub fn num_devices(&self) -> usize {
        self.topology.devices().len()
    }

    /// The number of slices.
    pub fn num_slices(&self) -> usize {
        self.num_slices
    }

    /// What the plugin calls the kind of its devices.
    pub fn device_kind(&self) -> &str {
        self.topology.devices().first().map_or("", |device| &device.kind)
    }

    /// The bytes of memory that programs can use on each device, if the plugin says.
    pub fn memory_limit(&self) -> Option<u64> {
        let attributes = &self.topology.devices().first()?.attributes;
        attributes.iter().find_map(|(name, value)| match (name.as_str(), value) {
            ("device_memory_bytes_limit", NamedValue::Integer(bytes)) => u64::try_from(*bytes).ok(),
            _ => None,
        })
    }

    /// Compiles a program for the first devices.
    ///
    /// # Errors
    /// The program is not valid, or there are too few devices or too little memory for it.
    pub fn compile(
        &self,
        program: &Program,
        settings: &CompileSettings,
    ) -> Result<AheadProgram, RuntimeError> {
        check_shardings(program, self.num_devices())?;
        let mut options = CompileOptions { devices: program.mesh.devices(), ..CompileOptions::default() };
        options.xla_flags = settings.xla_flags.clone();
        options.xla_flags.extend(platform_flags(self.platform, &self.plugin));
        let dump =
            settings.dump_to.as_deref().map(|directory| Dump::start(directory, program)).transpose()?;
        options.xla_flags.extend(dump.iter().flat_map(Dump::flags));
        let start = Instant::now();
        let compiled = self.topology.compile(&program.name, &program.text, &options);
        let compiled = compiled.map_err(|error| option_error(error, settings))?;
        let elapsed = start.elapsed();
        dump.map(Dump::finish).transpose()?;
        Ok(AheadProgram { program: compiled, elapsed })
    }
}

impl AheadProgram {
    /// What the program needs in the memory of each device.
    ///
    /// # Errors
    /// The platform does not say.
    pub fn memory(&self) -> Result<MemoryUse, RuntimeError> {
        Ok(self.program.memory()?)
    }

    /// The collectives that the compiled program runs on each device.
    ///
    /// # Errors
    /// The platform does not keep its optimized program.
    pub fn collectives(&self) -> Result<Vec<Collective>, RuntimeError> {
        let (format, bytes) = self.program.optimized_program()?;
        hlo::collectives(&format, &bytes)
    }

    /// The program as bytes, to be loaded where the hardware is.
    ///
    /// # Errors
    /// The platform cannot do that.
    pub fn serialize(&self) -> Result<Vec<u8>, RuntimeError> {
        Ok(self.program.serialize()?)
    }
}

impl fmt::Debug for AheadOfTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AheadOfTime({}, {} devices)", self.platform, self.num_devices())
    }
}
