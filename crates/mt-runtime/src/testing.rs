//! Support for tests of this crate and the crates above it: one runtime per number of CPU devices in each process.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
};

use mt_ir::Program;
use mt_pjrt::Platform;
use mt_shape::HostArray;

use crate::{Array, CompileSettings, Input, Runtime, RuntimeError, RuntimeOptions};

static RUNTIMES: Mutex<BTreeMap<usize, &'static Runtime>> = Mutex::new(BTreeMap::new());

/// The CPU with this many virtual devices, shared by the tests of a process.
///
/// # Panics
/// There is no CPU plugin, and none can be installed.
pub fn cpu(num_devices: usize) -> &'static Runtime {
    let mut runtimes = RUNTIMES.lock().unwrap_or_else(PoisonError::into_inner);
    runtimes.entry(num_devices).or_insert_with(|| {
        let options = RuntimeOptions {
            platform: Some(Platform::Cpu),
            num_cpu_devices: Some(num_devices),
            ..RuntimeOptions::default()
        };
        let runtime = Runtime::new(&options, &mut |_| {})
            .unwrap_or_else(|error| panic!("no CPU runtime for tests: {error}"));
        Box::leak(Box::new(runtime))
    })
}

/// Bytes of temporaries of a program for CPU devices with XLA's own passes and schedule. These keep exactly the saved
/// values, and each of several devices holds its share. This crate's own choices take less memory, but less evenly.
///
/// # Errors
/// The program is not valid.
pub fn temporaries(program: &Program) -> Result<u64, RuntimeError> {
    const OWN: [(&str, &str); 3] = [
        ("xla_cpu_enable_concurrency_optimized_scheduler", "true"),
        ("xla_disable_hlo_passes", ""),
        // No machine code is needed.
        ("xla_backend_optimization_level", "0"),
    ];
    let xla_flags = OWN.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
    let settings = CompileSettings { xla_flags, ..CompileSettings::default() };
    Ok(cpu(program.mesh.num_devices()).compile(program, &settings)?.memory()?.temporaries)
}

/// Runs a program once on CPU devices, from and to host memory.
///
/// # Errors
/// The program is not valid, or it fails.
pub fn run(program: &Program, inputs: &[HostArray]) -> Result<Vec<HostArray>, RuntimeError> {
    let runtime = cpu(program.mesh.num_devices());
    let executable = runtime.compile(program, &CompileSettings::default())?;
    let mut arguments = Vec::with_capacity(inputs.len());
    for (index, input) in inputs.iter().enumerate() {
        // Surplus arguments are replicated; running then reports that there are too many.
        let sharding = program.inputs.get(index).map(|value| value.sharding.clone());
        let sharding = sharding
            .unwrap_or_else(|| mt_shape::Sharding::replicated(program.mesh.clone(), input.dims().len()));
        arguments.push(Input::Donate(Array::from_host(runtime, input, &sharding)?));
    }
    executable.run(arguments)?.iter().map(Array::to_host).collect()
}
