//! Traces small functions, runs them, and reads reference values.

use std::{fs, path::PathBuf, sync::Arc};

use mt_derive::Tree;
use mt_ir::{Precision, Program, Target};
use mt_runtime::{CompileSettings, testing};
use mt_shape::{Axis, DType, HostArray, Placement};
use mt_trace::{Inputs, Output, ProgramOptions, Region, Tensor, program};
use safetensors::SafeTensors;

/// The size of a difference over that of what was expected, both as root-mean-squares.
pub fn relative_error(actual: &HostArray, expected: &HostArray) -> f64 {
    assert_eq!(actual.dims(), expected.dims());
    let (actual, expected) = (actual.to_f64(), expected.to_f64());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>().sqrt();
    let difference = norm(&mut actual.iter().zip(&expected).map(|(a, b)| a - b));
    difference / norm(&mut expected.iter().copied()).max(1e-30)
}

#[track_caller]
pub fn assert_close(what: &str, actual: &HostArray, expected: &HostArray, tolerance: f64) {
    let error = relative_error(actual, expected);
    assert!(error <= tolerance, "{what}: relative error {error:e} is above {tolerance:e}");
}

/// Numbers of both signs without a pattern, the same in every run.
pub fn numbers(seed: u64, dims: &[usize]) -> HostArray {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x2545_f491_4f6c_dd1d;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        ((state >> 11) as f64 / (1_u64 << 53) as f64 * 3.0 - 1.5) as f32
    };
    let values: Vec<f32> = std::iter::repeat_with(next).take(dims.iter().product()).collect();
    HostArray::from_slice(DType::F32, dims, &values).unwrap()
}

pub fn integers(dims: &[usize], values: &[i32]) -> HostArray {
    HostArray::from_slice(DType::I32, dims, values).unwrap()
}

/// An argument: its axes and elements.
pub type Argument = (Vec<Axis>, HostArray);

/// Differentiable arguments as a tree.
#[derive(Tree)]
struct Leaves<L>(Vec<L>);

fn traced<F>(name: &str, target: Target, arguments: &[Argument], code: F) -> Program
where
    F: for<'t> FnOnce(Region<'t>, Vec<Tensor<'t>>) -> Vec<Tensor<'t>>,
{
    let options = ProgramOptions {
        name: name.to_owned(),
        placement: Arc::new(Placement::single()),
        target,
        precision: Precision::Default,
    };
    program(&options, |inputs| outputs(inputs, arguments, code)).unwrap()
}

fn outputs<'t, F>(inputs: &Inputs<'t>, arguments: &[Argument], code: F) -> Vec<Output<'t>>
where
    F: FnOnce(Region<'t>, Vec<Tensor<'t>>) -> Vec<Tensor<'t>>,
{
    let tensors: Vec<Tensor<'t>> = arguments
        .iter()
        .enumerate()
        .map(|(index, (axes, array))| {
            inputs.input(&format!("argument_{index}"), array.dtype(), axes, &vec![None; axes.len()], false)
        })
        .collect();
    let results = code(inputs.region(), tensors);
    results
        .into_iter()
        .enumerate()
        .map(|(i, tensor)| inputs.replicated(&format!("result_{i}"), tensor))
        .collect()
}

/// The text of the program that `code` makes.
pub fn text<F>(arguments: &[Argument], code: F) -> String
where
    F: for<'t> FnOnce(Region<'t>, Vec<Tensor<'t>>) -> Vec<Tensor<'t>>,
{
    text_for(Target::CPU, arguments, code)
}

/// As [`text`], for `target`.
pub fn text_for<F>(target: Target, arguments: &[Argument], code: F) -> String
where
    F: for<'t> FnOnce(Region<'t>, Vec<Tensor<'t>>) -> Vec<Tensor<'t>>,
{
    traced("text", target, arguments, code).text
}

/// The memory that the program which `code` makes needs besides arguments and results.
pub fn temporary_bytes<F>(arguments: &[Argument], code: F) -> u64
where
    F: for<'t> FnOnce(Region<'t>, Vec<Tensor<'t>>) -> Vec<Tensor<'t>>,
{
    let program = traced("memory", Target::CPU, arguments, code);
    let executable = testing::cpu(1).compile(&program, &CompileSettings::default()).unwrap();
    executable.memory().unwrap().temporaries
}

/// Runs `code` on arguments.
pub fn run<F>(name: &str, arguments: &[Argument], code: F) -> Vec<HostArray>
where
    F: for<'t> FnOnce(Region<'t>, Vec<Tensor<'t>>) -> Vec<Tensor<'t>>,
{
    run_for(Target::CPU, name, arguments, code)
}

/// As [`run`], with a program for `target`.
pub fn run_for<F>(target: Target, name: &str, arguments: &[Argument], code: F) -> Vec<HostArray>
where
    F: for<'t> FnOnce(Region<'t>, Vec<Tensor<'t>>) -> Vec<Tensor<'t>>,
{
    let program = traced(name, target, arguments, code);
    let arrays: Vec<HostArray> = arguments.iter().map(|(_, array)| array.clone()).collect();
    testing::run(&program, &arrays).unwrap()
}

/// The result of `code`, in `f32`, and the gradients by its floating-point arguments of the sum of the result's
/// products with `cotangent`.
pub fn gradients<F>(
    name: &str,
    arguments: &[Argument],
    cotangent: &HostArray,
    code: F,
) -> (HostArray, Vec<HostArray>)
where
    F: for<'b> Fn(&[Tensor<'b>]) -> Tensor<'b>,
{
    let mut all = arguments.to_vec();
    // The cotangent's axes are those of the result, which only `code` knows.
    all.push((vec![mt_shape::axis("cotangent", cotangent.num_elements())], flat(cotangent)));
    let mut results = run(name, &all, |region, mut tensors| {
        let cotangent = tensors.pop().unwrap();
        let is_float = |tensor: &&Tensor<'_>| tensor.dtype().is_float();
        let leaves = Leaves(tensors.iter().filter(is_float).copied().collect());
        let others = tensors.clone();
        let (_, [y], gradients) = region.value_and_grad(&leaves, |_, leaves| {
            let mut leaves = leaves.0.into_iter();
            let tensors: Vec<Tensor<'_>> = others
                .iter()
                .map(|tensor| if tensor.dtype().is_float() { leaves.next().unwrap() } else { *tensor })
                .collect();
            let y = code(&tensors).cast(DType::F32);
            let axes = y.axes();
            let cotangent = if axes.is_empty() {
                cotangent.squeeze("cotangent")
            } else {
                cotangent.split("cotangent", &axes)
            };
            ((y * cotangent).sum_all(), [y])
        });
        [vec![y], gradients.0.iter().map(|gradient| gradient.cast(DType::F32)).collect()].concat()
    });
    let gradients = results.split_off(1);
    (results.remove(0), gradients)
}

fn flat(array: &HostArray) -> HostArray {
    HostArray::from_bytes(array.dtype(), &[array.num_elements()], array.bytes()).unwrap()
}

/// The tensors of a file of reference values.
pub struct Golden {
    bytes: Vec<u8>,
}

impl Golden {
    pub fn open(name: &str) -> Self {
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/goldens").join(name);
        Self { bytes: fs::read(path).unwrap() }
    }

    #[track_caller]
    pub fn array(&self, name: &str) -> HostArray {
        let tensors = SafeTensors::deserialize(&self.bytes).unwrap();
        let view = tensors.tensor(name).unwrap_or_else(|error| panic!("`{name}`: {error}"));
        let dtype = match view.dtype() {
            safetensors::Dtype::F32 => DType::F32,
            safetensors::Dtype::I32 => DType::I32,
            other => panic!("`{name}` has the type {other:?}"),
        };
        HostArray::from_bytes(dtype, view.shape(), view.data()).unwrap()
    }
}
