//! Compilation for hardware that this machine does not have.

use std::{
    fmt,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use mt_ir::Program;
use mt_pjrt::{
    CompileOptions, CompiledProgram, MemoryUse, NamedValue, OnInstall, Platform, Plugin, Topology,
    TopologyDevice, find_or_install_compiler,
};
use mt_shape::DeviceAttributes;

use crate::{
    Activity, CompileSettings, RuntimeError,
    compiled_file::{Identity, write},
    dump::Dump,
    executable::{check_shardings, option_error, platform_flags},
    fingerprint, hlo,
};

/// The hardware to compile for.
#[derive(Clone, Debug)]
pub struct AheadOptions {
    pub platform: Platform,
    /// The plugin's file; `None` searches for one and installs it if there is none.
    pub plugin_path: Option<PathBuf>,
    /// The plugin's name for one slice, such as `v5p:4x4x4`; for GPUs, machines × processes × devices, such as `1x1x8`.
    pub topology: String,
    /// The plugin's name for the mode of its chips, such as `megacore`, if there are several modes.
    pub chip_config: Option<&'static str>,
    pub num_slices: usize,
    /// The description of a GPU that its compiler needs, as the text of a `GpuTargetConfigProto`.
    pub gpu_description: Option<String>,
}

/// Hardware for which programs can be compiled.
pub struct AheadOfTime {
    platform: Platform,
    plugin: Plugin,
    topology: Topology,
    num_slices: usize,
}

/// A program compiled for absent hardware.
#[derive(Debug)]
pub struct AheadProgram {
    program: CompiledProgram,
    /// The compiler's number for the device in each grid cell of the mesh.
    device_ids: Vec<i64>,
    identity: Identity,
    /// Time that the compiler took.
    pub elapsed: Duration,
}

impl AheadOfTime {
    /// Loads the plugin, installing it if it is missing, and describes the hardware. `on_install` receives the
    /// installation.
    ///
    /// # Errors
    /// There is no plugin and none can be installed, or the plugin does not know the hardware.
    pub fn new(options: &AheadOptions, on_install: OnInstall<'_>) -> Result<Self, RuntimeError> {
        let location =
            find_or_install_compiler(options.platform, options.plugin_path.as_deref(), on_install)?;
        let plugin = Plugin::load(&location.path)?;
        let mut named = Vec::new();
        if options.num_slices > 1 {
            named.push(("num_slices".to_owned(), NamedValue::Integer(options.num_slices as i64)));
        }
        if let Some(config) = options.chip_config {
            named.push(("chip_config_name".to_owned(), NamedValue::String(config.to_owned())));
        }
        let mut name = options.topology.as_str();
        if let Some(description) = &options.gpu_description {
            named.push(("topology".to_owned(), NamedValue::String(name.to_owned())));
            named.push(("target_config".to_owned(), NamedValue::String(description.clone())));
            name = "";
        }
        let topology = Topology::new(&plugin, name, &named)?;
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

    /// The properties that the plugin reports for the devices.
    pub fn device_attributes(&self) -> DeviceAttributes {
        let devices = self.topology.devices();
        let slices = devices.iter().map(|device| device.slice() as i64);
        DeviceAttributes {
            kind: self.device_kind().to_owned(),
            slices: (self.num_slices > 1).then(|| slices.collect()),
            coordinates: devices.iter().map(TopologyDevice::coordinates).collect(),
        }
    }

    /// The file of the plugin.
    pub fn plugin_path(&self) -> &Path {
        self.plugin.path()
    }

    /// The plugin's name for the kind of its devices.
    pub fn device_kind(&self) -> &str {
        self.topology.devices().first().map_or("", |device| &device.kind)
    }

    /// The bytes of memory that programs can use on each device, if the plugin reports them.
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
    /// The program is invalid, or needs more devices or memory than the hardware has.
    pub fn compile(
        &self,
        program: &Program,
        settings: &CompileSettings,
    ) -> Result<AheadProgram, RuntimeError> {
        check_shardings(program, self.num_devices())?;
        let mut options = CompileOptions { devices: program.mesh.devices(), ..CompileOptions::default() };
        options.xla_flags = settings.xla_flags.clone();
        options.xla_flags.extend(platform_flags(self.platform, &self.plugin));
        let dump = settings.dump_of(&program.name);
        let dump = dump.map(|directory| Dump::start(directory, program)).transpose()?;
        options.xla_flags.extend(dump.iter().flat_map(Dump::flags));
        let start = Instant::now();
        let compiled = self.topology.compile(&program.name, &program.text, &options);
        let compiled =
            compiled.map_err(|error| match OutOfMemory::of(&error.to_string(), self.memory_limit()) {
                Some(lack) => RuntimeError::OutOfMemory { program: program.name.clone(), lack },
                None => option_error(error, settings),
            })?;
        let elapsed = start.elapsed();
        dump.map(Dump::finish).transpose()?;
        let identity = Identity::new(
            program,
            settings,
            &fingerprint::of_plugin(self.plugin.path())?,
            self.device_kind(),
            self.num_slices,
        );
        let devices = self.topology.devices();
        let device_ids = options.devices.iter().map(|device| i64::from(devices[*device].id)).collect();
        Ok(AheadProgram { program: compiled, device_ids, identity, elapsed })
    }
}

/// The compiler's report on a program that does not fit into the memory of a device.
#[derive(Clone, Debug, PartialEq)]
pub struct OutOfMemory {
    /// The total bytes needed, if reported. libtpu speaks of temporaries but counts arguments too.
    pub needed: Option<u64>,
    /// The bytes available to a program.
    pub available: Option<u64>,
    /// The compiler's message.
    pub message: String,
}

impl OutOfMemory {
    /// The report in an error message, if the error is about memory.
    fn of(message: &str, limit: Option<u64>) -> Option<Self> {
        let is_memory = ["CompileTimeHbmOom", "Ran out of memory", "RESOURCE_EXHAUSTED", "Out of memory"];
        if !is_memory.iter().any(|text| message.contains(text)) {
            return None;
        }
        let words = message.split(|letter: char| letter.is_whitespace() || "()".contains(letter));
        let mut sizes = words.filter_map(parse_size);
        let (needed, available) = (sizes.next(), sizes.next());
        Some(Self { needed, available: available.or(limit), message: message.trim().to_owned() })
    }
}

/// A size in the compiler's notation, such as `18.53G`.
fn parse_size(word: &str) -> Option<u64> {
    let word = word.trim_end_matches(['.', ',', ';']);
    let (number, power) = match word.chars().last()? {
        'K' => (&word[..word.len() - 1], 10),
        'M' => (&word[..word.len() - 1], 20),
        'G' => (&word[..word.len() - 1], 30),
        'T' => (&word[..word.len() - 1], 40),
        _ => return None,
    };
    let number: f64 = number.parse().ok()?;
    Some((number * f64::from(1_u32 << 10).powi(power / 10)) as u64)
}

impl AheadProgram {
    /// The memory that the program needs on each device.
    ///
    /// # Errors
    /// The platform does not report it.
    pub fn memory(&self) -> Result<MemoryUse, RuntimeError> {
        Ok(self.program.memory()?)
    }

    /// The work of the compiled program on each device.
    ///
    /// # Errors
    /// The platform does not keep its optimized program.
    pub fn activity(&self) -> Result<Activity, RuntimeError> {
        let (format, bytes) = self.program.optimized_program()?;
        hlo::activity(&format, &bytes, &self.device_ids)
    }

    /// Writes the program to a file, which [`crate::Runtime::load_compiled`] reads on a machine with the hardware.
    ///
    /// # Errors
    /// The platform does not support serialization, or the file cannot be written.
    pub fn save(&self, path: &Path) -> Result<(), RuntimeError> {
        write(path, &self.identity, &self.program.serialize()?)
    }
}

impl fmt::Debug for AheadOfTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AheadOfTime({}, {} devices)", self.platform, self.num_devices())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_compilers_say_of_memory_is_understood() {
        let check = |message: &str, needed: f64, available: f64| {
            let lack = OutOfMemory::of(message, None).unwrap();
            let gib = |bytes: Option<u64>| bytes.unwrap() as f64 / (1_u64 << 30) as f64;
            assert!((gib(lack.needed) - needed).abs() < 1e-6, "{lack:?}");
            assert!((gib(lack.available) - available).abs() < 1e-6, "{lack:?}");
        };
        check(
            "E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO temporaries \
             (28.87G) exceeds available HBM (15.75G). HLO module: train_step.",
            28.87,
            15.75,
        );
        check(
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 18.53G of 15.75G hbm. Exceeded",
            18.53,
            15.75,
        );
        assert_eq!(OutOfMemory::of("invalid argument: 3.5G", None), None);
    }
}
