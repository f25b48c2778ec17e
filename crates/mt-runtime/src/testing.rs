//! Support for tests of this crate and the crates above it: one runtime per number of CPU devices in each process.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
};

use mt_ir::{Program, ProgramValue};
use mt_pjrt::Platform;
use mt_shape::{DType, HostArray};

use crate::{Array, CompileSettings, Input, Runtime, RuntimeError, RuntimeOptions};

static RUNTIMES: Mutex<BTreeMap<usize, &'static Runtime>> = Mutex::new(BTreeMap::new());

/// The CPU with this many virtual devices, shared by the tests of a process.
///
/// # Panics
/// There is no CPU plugin, and none can be installed.
pub fn cpu(num_devices: usize) -> &'static Runtime {
    let mut runtimes = RUNTIMES.lock().unwrap_or_else(PoisonError::into_inner);
    runtimes.entry(num_devices).or_insert_with(|| Box::leak(Box::new(started(num_devices, false))))
}

/// One CPU device whose programs compute the same bits in every batch.
///
/// # Panics
/// As [`cpu`].
pub fn batch_invariant_cpu() -> Runtime {
    started(1, true)
}

fn started(num_devices: usize, batch_invariant: bool) -> Runtime {
    let options = RuntimeOptions {
        platform: Some(Platform::Cpu),
        num_cpu_devices: Some(num_devices),
        batch_invariant,
        ..RuntimeOptions::default()
    };
    Runtime::new(&options, &mut |_| {}).unwrap_or_else(|error| panic!("no CPU runtime for tests: {error}"))
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

/// The program with `f64` in place of `f32`, in arguments, results and all values between them. If two programs agree in
/// `f64` and differ in `f32`, they compute the same and only round differently.
///
/// # Panics
/// The program calls CPU kernels, which compute in `f32`.
#[track_caller]
pub fn in_f64(program: &Program) -> Program {
    assert!(!program.text.contains("custom_call"), "`{}` calls kernels", program.name);
    let widen = |values: &[ProgramValue]| -> Vec<ProgramValue> {
        values
            .iter()
            .cloned()
            .map(|mut value| {
                value.ty.dtype = widened_type(value.ty.dtype);
                value
            })
            .collect()
    };
    Program {
        text: widened_text(&program.text),
        inputs: widen(&program.inputs),
        outputs: widen(&program.outputs),
        ..program.clone()
    }
}

/// An argument of a program [`in_f64`].
#[track_caller]
pub fn widened(array: &HostArray) -> HostArray {
    match widened_type(array.dtype()) {
        dtype if dtype == array.dtype() => array.clone(),
        dtype => HostArray::from_slice(dtype, array.dims(), &array.to_f64()).expect("the sizes are equal"),
    }
}

fn widened_type(dtype: DType) -> DType {
    if dtype == DType::F32 { DType::F64 } else { dtype }
}

/// StableHLO text with `f64` in place of `f32`. Constants keep their values.
fn widened_text(text: &str) -> String {
    let mut wide = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("dense<") {
        let (data, behind) = after.split_once('>').expect("a constant ends");
        let ty = behind.strip_prefix(" : tensor<").and_then(|ty| ty.split_once('>')).map(|(ty, _)| ty);
        let is_narrow = ty.is_some_and(|ty| ty == "f32" || ty.ends_with("xf32"));
        wide.push_str(&before.replace("f32", "f64"));
        let data = if is_narrow { widened_constant(data) } else { data.to_owned() };
        wide.push_str(&format!("dense<{data}>"));
        rest = behind;
    }
    wide.push_str(&rest.replace("f32", "f64"));
    wide
}

/// The bits of an `f32` constant's elements as those of an `f64`.
fn widened_constant(data: &str) -> String {
    let wide = |value: f32| format!("{:016X}", f64::from(value).to_bits());
    let parsed = |digits: &str| u32::from_str_radix(digits, 16).expect("hexadecimal digits");
    match data.strip_prefix("\"0x").and_then(|data| data.strip_suffix('"')) {
        // A table's elements have their lowest byte first.
        Some(table) => {
            let elements = table.as_bytes().chunks(8).map(|digits| {
                let digits = std::str::from_utf8(digits).expect("hexadecimal digits");
                let bits = f64::from(f32::from_bits(parsed(digits).swap_bytes())).to_bits();
                format!("{:016X}", bits.swap_bytes())
            });
            format!("\"0x{}\"", elements.collect::<String>())
        }
        None => match data.strip_prefix("0x") {
            Some(digits) => format!("0x{}", wide(f32::from_bits(parsed(digits)))),
            None if data.is_empty() => String::new(),
            None => format!("0x{}", wide(data.parse().expect("a number"))),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constants_keep_their_values() {
        let narrow = "%0 = stablehlo.constant() {value = dense<0xFF800000> : tensor<2xf32>} : tensor<2xf32>\n\
                      dense<\"0x0000803F000000C0\"> : tensor<2xf32> dense<[1, 2]> : tensor<2xi64> dense<0.1> : tensor<f32>";
        let wide = "%0 = stablehlo.constant() {value = dense<0xFFF0000000000000> : tensor<2xf64>} : tensor<2xf64>\n\
                    dense<\"0x000000000000F03F00000000000000C0\"> : tensor<2xf64> dense<[1, 2]> : tensor<2xi64> \
                    dense<0x3FB99999A0000000> : tensor<f64>";
        assert_eq!(widened_text(narrow), wide);
    }
}
