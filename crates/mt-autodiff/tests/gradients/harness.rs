//! Traces small functions, runs them on the CPU plugin, and compares gradients with finite differences.

use std::sync::Arc;

use mt_derive::Tree;
use mt_ir::{Program, Target};
use mt_runtime::{Array, CompileSettings, Executable, Input, Runtime, testing::cpu};
use mt_shape::{Axis, DType, HostArray, LogicalAxis, LogicalRules, Mesh, Placement};
use mt_testing::{Random, assert_within, largest};
use mt_trace::{Inputs, Output, ProgramOptions, Region, Tensor, TraceError, program};

/// A single leaf, so that lists of tensors are trees.
#[derive(Clone, Copy, Tree)]
pub struct Leaf<L> {
    pub value: L,
}

/// A list of tensors as a tree.
pub fn leaves<'t>(tensors: &[Tensor<'t>]) -> Vec<Leaf<Tensor<'t>>> {
    tensors.iter().map(|tensor| Leaf { value: *tensor }).collect()
}

/// The tensors of a list that is a tree.
pub fn tensors<'t>(leaves: &[Leaf<Tensor<'t>>]) -> Vec<Tensor<'t>> {
    leaves.iter().map(|leaf| leaf.value).collect()
}

/// Options for a program on one device.
pub fn options(name: &str) -> ProgramOptions {
    options_on(name, Placement::single())
}

/// Options for a program on a mesh.
pub fn options_on(name: &str, placement: Placement) -> ProgramOptions {
    ProgramOptions { placement: Arc::new(placement), ..ProgramOptions::new(name, Target::CPU) }
}

/// The logical axis of rows.
pub fn row_axis() -> Option<LogicalAxis> {
    Some(LogicalAxis::named("rows"))
}

/// The logical axis of columns.
pub fn column_axis() -> Option<LogicalAxis> {
    Some(LogicalAxis::named("columns"))
}

/// A mesh of 8 devices, with rules that place `rows` on its first axis and `columns` on its second.
pub fn mesh() -> Placement {
    let mesh = Mesh::new([("fsdp".to_owned(), 4), ("tensor".to_owned(), 2)]).unwrap();
    let rules = [("rows", "fsdp"), ("columns", "tensor")];
    let rules = rules.map(|(logical, mesh_axis)| (logical.to_owned(), vec![mesh_axis.to_owned()]));
    Placement::new(mesh, LogicalRules(rules.to_vec()))
}

/// A program ready to run.
pub struct Compiled {
    runtime: &'static Runtime,
    executable: Executable,
}

impl Compiled {
    #[track_caller]
    pub fn new(program: Program) -> Self {
        let runtime = cpu(program.mesh.num_devices());
        let executable = runtime.compile(&program, &CompileSettings::default());
        Self { runtime, executable: executable.unwrap_or_else(|error| panic!("{error}\n{}", program.text)) }
    }

    /// Runs the program on whole arrays, which are split and joined by the program's shardings.
    #[track_caller]
    pub fn run(&self, inputs: &[HostArray]) -> Vec<HostArray> {
        let values = inputs.iter().zip(self.executable.inputs());
        let arguments = values.map(|(array, value)| {
            Input::Donate(Array::from_host(self.runtime, array, &value.sharding).unwrap())
        });
        let outputs = self.executable.run(arguments.collect()).unwrap();
        outputs.iter().map(|output| output.to_host().unwrap()).collect()
    }

    /// The bytes that arguments and results share on each device.
    pub fn aliased_bytes(&self) -> u64 {
        self.executable.memory().unwrap().aliased
    }
}

/// An argument of a function under test.
#[derive(Clone)]
pub struct Argument {
    pub axes: Vec<Axis>,
    pub values: Vec<f64>,
    pub dtype: DType,
}

/// Irregular numbers between `low` and `high`, the same in every run.
pub fn numbers(count: usize, low: f64, high: f64) -> Vec<f64> {
    let mut random = Random::new(count as u64 ^ low.to_bits() ^ high.to_bits().rotate_left(7));
    (0..count).map(|_| random.between(low, high)).collect()
}

/// A differentiated argument with numbers between `low` and `high`.
pub fn between(axes: &[Axis], low: f64, high: f64) -> Argument {
    let count = axes.iter().map(|axis| axis.size).product();
    Argument { axes: axes.to_vec(), values: numbers(count, low, high), dtype: DType::F64 }
}

/// A differentiated argument with numbers of both signs.
pub fn any(axes: &[Axis]) -> Argument {
    between(axes, -1.5, 1.7)
}

/// A differentiated argument with the given elements.
pub fn given(axes: &[Axis], values: &[f64]) -> Argument {
    Argument { axes: axes.to_vec(), values: values.to_vec(), dtype: DType::F64 }
}

/// An argument of integers.
pub fn integers(axes: &[Axis], values: &[i32]) -> Argument {
    Argument {
        axes: axes.to_vec(),
        values: values.iter().map(|value| f64::from(*value)).collect(),
        dtype: DType::I32,
    }
}

/// The types in which programs compute. 8-bit floats and 4-bit integers only hold weights.
pub const COMPUTED: [DType; 13] = [
    DType::Bool,
    DType::I8,
    DType::I16,
    DType::I32,
    DType::I64,
    DType::U8,
    DType::U16,
    DType::U32,
    DType::U64,
    DType::F16,
    DType::BF16,
    DType::F32,
    DType::F64,
];

/// Elements as an array of type `dtype`, one of [`COMPUTED`].
pub fn array(dtype: DType, dims: &[usize], values: &[f64]) -> HostArray {
    fn all<T: Copy>(values: &[f64], convert: impl Fn(f64) -> T, bytes: impl Fn(T) -> Vec<u8>) -> Vec<u8> {
        values.iter().flat_map(|value| bytes(convert(*value))).collect()
    }
    let bytes = match dtype {
        DType::Bool => all(values, |value| u8::from(value != 0.0), |value| vec![value]),
        DType::I8 => all(values, |value| value as i8, |value| value.to_le_bytes().into()),
        DType::I16 => all(values, |value| value as i16, |value| value.to_le_bytes().into()),
        DType::I32 => all(values, |value| value as i32, |value| value.to_le_bytes().into()),
        DType::I64 => all(values, |value| value as i64, |value| value.to_le_bytes().into()),
        DType::U8 => all(values, |value| value as u8, |value| vec![value]),
        DType::U16 => all(values, |value| value as u16, |value| value.to_le_bytes().into()),
        DType::U32 => all(values, |value| value as u32, |value| value.to_le_bytes().into()),
        DType::U64 => all(values, |value| value as u64, |value| value.to_le_bytes().into()),
        DType::F16 => all(values, half::f16::from_f64, |value| value.to_le_bytes().into()),
        DType::BF16 => all(values, half::bf16::from_f64, |value| value.to_le_bytes().into()),
        DType::F32 => all(values, |value| value as f32, |value| value.to_le_bytes().into()),
        DType::F64 => all(values, |value| value, |value| value.to_le_bytes().into()),
        DType::I4 | DType::F8E4M3FN | DType::F8E5M2 => {
            unreachable!("programs do not compute in {dtype}")
        }
    };
    HostArray::from_bytes(dtype, dims, &bytes).unwrap()
}

impl Argument {
    fn dims(&self) -> Vec<usize> {
        self.axes.iter().map(|axis| axis.size).collect()
    }

    pub fn array(&self) -> HostArray {
        array(self.dtype, &self.dims(), &self.values)
    }

    /// The argument in another floating-point type; integers stay.
    fn narrowed(&self, dtype: DType) -> Self {
        Self { dtype: if self.dtype.is_float() { dtype } else { self.dtype }, ..self.clone() }
    }
}

/// A function under test.
pub type Function = for<'t> fn(Region<'t>, &[Tensor<'t>]) -> Vec<Tensor<'t>>;
/// The same function in plain Rust: the elements of each result from the elements of each argument.
pub type Reference = fn(&[Vec<f64>]) -> Vec<Vec<f64>>;

/// A function with arguments.
#[derive(Clone)]
pub struct Case {
    pub name: &'static str,
    pub inputs: Vec<Argument>,
    pub function: Function,
    pub reference: Option<Reference>,
}

/// A function whose gradients are checked.
pub fn case(name: &'static str, inputs: Vec<Argument>, function: Function) -> Case {
    Case { name, inputs, function, reference: None }
}

impl Case {
    /// Checks the function's values against plain Rust, too.
    pub fn like(self, reference: Reference) -> Self {
        Self { reference: Some(reference), ..self }
    }
}

/// An irregular number for each element, so that each has its own cotangent.
fn weights<'t>(region: Region<'t>, like: Tensor<'t>) -> Tensor<'t> {
    let dims: Vec<usize> = like.axes().iter().map(|axis| axis.size).collect();
    let values: Vec<f64> =
        (0..dims.iter().product()).map(|index: usize| (1.0 + 1.7 * index as f64).cos()).collect();
    region.table(array(DType::F64, &dims, &values), &like.axes()).cast(like.dtype())
}

/// A single number computed from all outputs of a function.
fn loss<'t>(region: Region<'t>, outputs: &[Tensor<'t>]) -> Tensor<'t> {
    let floats = outputs.iter().filter(|output| output.dtype().is_float());
    let sums = floats.map(|output| (*output * weights(region, *output)).sum_all());
    sums.reduce(|sum, next| sum + next.cast(sum.dtype())).expect("a function with a floating-point result")
}

fn declare<'t>(inputs: &Inputs<'t>, case: &Case) -> Vec<Tensor<'t>> {
    let declare = |(index, input): (usize, &Argument)| {
        let name = format!("{}.{index}", case.name);
        inputs.input(&name, input.dtype, &input.axes, &vec![None; input.axes.len()], false)
    };
    case.inputs.iter().enumerate().map(declare).collect()
}

/// Values and gradients of a case.
pub struct Evaluated {
    pub loss: f64,
    pub outputs: Vec<HostArray>,
    /// One for each argument.
    pub gradients: Vec<HostArray>,
}

#[track_caller]
fn traced(result: Result<Program, TraceError>) -> Program {
    result.unwrap_or_else(|error| panic!("{error}"))
}

/// Values and gradients of all cases, computed by one program.
#[track_caller]
pub fn evaluate(name: &str, cases: &[Case]) -> Vec<Evaluated> {
    let mut counts = Vec::new();
    let program = traced(program(&options(name), |inputs| {
        let mut results: Vec<Output<'_>> = Vec::new();
        for case in cases {
            let region = inputs.region();
            let arguments = leaves(&declare(inputs, case));
            region.scope(case.name, || {
                let outputs = (case.function)(region, &tensors(&arguments));
                let (value, [], gradients) = region.value_and_grad(&arguments, |region, arguments| {
                    let outputs = (case.function)(*region, &tensors(&arguments));
                    (loss(*region, &outputs), [])
                });
                counts.push(outputs.len());
                let all = std::iter::once(value).chain(outputs).chain(tensors(&gradients));
                results.extend(all.map(|tensor| inputs.replicated(case.name, tensor)));
            });
        }
        results
    }));
    let arrays: Vec<HostArray> =
        cases.iter().flat_map(|case| case.inputs.iter().map(Argument::array)).collect();
    let mut results = Compiled::new(program).run(&arrays).into_iter();
    let evaluated = cases.iter().zip(counts).map(|(case, count)| Evaluated {
        loss: results.next().unwrap().to_f64()[0],
        outputs: results.by_ref().take(count).collect(),
        gradients: results.by_ref().take(case.inputs.len()).collect(),
    });
    evaluated.collect()
}

#[track_caller]
fn close(what: &str, actual: &[f64], expected: &[f64], tolerance: f64) {
    assert_within(what, actual, expected, tolerance * (1.0 + largest(expected)));
}

/// Asserts that elements agree within `tolerance` of the largest one.
#[track_caller]
pub fn assert_close(what: &str, actual: &HostArray, expected: &[f64], tolerance: f64) {
    close(what, &actual.to_f64(), expected, tolerance);
}

/// Compares the gradients of all cases with central differences in `f64`, and values with their references.
#[track_caller]
pub fn check(name: &str, cases: &[Case]) -> Vec<Evaluated> {
    let evaluated = evaluate(name, cases);
    for (case, evaluated) in cases.iter().zip(&evaluated) {
        if let Some(reference) = case.reference {
            let arguments: Vec<Vec<f64>> = case.inputs.iter().map(|input| input.values.clone()).collect();
            let expected = reference(&arguments);
            assert_eq!(expected.len(), evaluated.outputs.len(), "{}: number of results", case.name);
            for (actual, expected) in evaluated.outputs.iter().zip(&expected) {
                assert_close(&format!("value of `{}`", case.name), actual, expected, 1e-9);
            }
        }
    }
    let differences = finite_differences(name, cases);
    for ((case, evaluated), differences) in cases.iter().zip(&evaluated).zip(&differences) {
        for (index, (input, expected)) in case.inputs.iter().zip(differences).enumerate() {
            let what = format!("gradient of `{}` by argument {index}", case.name);
            let actual = evaluated.gradients[index].to_f64();
            if input.dtype.is_float() {
                close(&what, &actual, expected, 2e-7);
            } else {
                close(&what, &actual, &vec![0.0; actual.len()], 0.0);
            }
        }
    }
    evaluated
}

/// Central differences of the cases' losses with respect to each argument. One program evaluates all cases, and each
/// run perturbs one element of every case.
fn finite_differences(name: &str, cases: &[Case]) -> Vec<Vec<Vec<f64>>> {
    const STEP: f64 = 3e-6;
    let program = traced(program(&options(&format!("{name}_losses")), |inputs| {
        let losses = cases.iter().map(|case| {
            let arguments = declare(inputs, case);
            let outputs = (case.function)(inputs.region(), &arguments);
            inputs.replicated(case.name, loss(inputs.region(), &outputs))
        });
        losses.collect()
    }));
    let compiled = Compiled::new(program);
    let mut differences: Vec<Vec<Vec<f64>>> = cases
        .iter()
        .map(|case| case.inputs.iter().map(|input| vec![0.0; input.values.len()]).collect())
        .collect();
    // The floating-point elements of each case, as (argument, element).
    let places: Vec<Vec<(usize, usize)>> = cases
        .iter()
        .map(|case| {
            let floats = case.inputs.iter().enumerate().filter(|(_, input)| input.dtype.is_float());
            floats
                .flat_map(|(index, input)| (0..input.values.len()).map(move |element| (index, element)))
                .collect()
        })
        .collect();
    let losses = |place: usize, step: f64| -> Vec<f64> {
        let arrays = cases.iter().zip(&places).flat_map(|(case, places)| {
            let mut inputs = case.inputs.clone();
            if let Some((input, element)) = places.get(place) {
                inputs[*input].values[*element] += step;
            }
            inputs.into_iter().map(|input| input.array())
        });
        compiled.run(&arrays.collect::<Vec<_>>()).iter().map(|array| array.to_f64()[0]).collect()
    };
    for place in 0..places.iter().map(Vec::len).max().unwrap_or_default() {
        let (up, down) = (losses(place, STEP), losses(place, -STEP));
        for (index, places) in places.iter().enumerate() {
            if let Some((input, element)) = places.get(place) {
                differences[index][*input][*element] = (up[index] - down[index]) / (2.0 * STEP);
            }
        }
    }
    differences
}

/// Compares the gradients in a narrower type with those in `f64` of the same (rounded) arguments.
#[track_caller]
pub fn check_narrow(name: &str, cases: &[Case], dtype: DType, tolerance: f64) {
    let narrow: Vec<Case> = cases
        .iter()
        .map(|case| Case {
            inputs: case.inputs.iter().map(|input| input.narrowed(dtype)).collect(),
            ..case.clone()
        })
        .collect();
    let wide: Vec<Case> = narrow
        .iter()
        .map(|case| {
            let rounded = case
                .inputs
                .iter()
                .map(|input| Argument { values: input.array().to_f64(), ..input.narrowed(DType::F64) });
            Case { inputs: rounded.collect(), ..case.clone() }
        })
        .collect();
    let actual = evaluate(&format!("{name}_{dtype}"), &narrow);
    let expected = evaluate(&format!("{name}_rounded"), &wide);
    for ((case, actual), expected) in narrow.iter().zip(&actual).zip(&expected) {
        for (index, (actual, expected)) in actual.gradients.iter().zip(&expected.gradients).enumerate() {
            assert_eq!(actual.dtype(), case.inputs[index].dtype, "type of the gradient of `{}`", case.name);
            let what = format!("{dtype} gradient of `{}` by argument {index}", case.name);
            assert_close(&what, actual, &expected.to_f64(), tolerance);
        }
    }
}
