//! Operations that batch-invariant programs leave to XLA: elementwise functions, and sums over dimensions other than the last.

use mt_runtime::{Array, CompileSettings, Input, Runtime, testing::batch_invariant_cpu};
use mt_shape::{Axis, DType, HostArray, Placement, Sharding, axis};
use mt_testing::Random;
use mt_trace::{ProgramOptions, Tensor, program};

const TOKEN: &str = "token";
const CHOICE: &str = "choice";
const WIDTH: &str = "width";

/// The sizes of programs: fewer elements than a vector has, and numbers of vectors with and without a rest.
const SIZES: [usize; 14] = [1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 33, 64, 130];

/// Functions that layers apply to elements, and sequences of them that a compiler might round less often.
const FUNCTIONS: [(&str, fn(Tensor<'_>) -> Tensor<'_>); 15] = [
    ("exp", |x| x.exp()),
    ("log", |x| x.abs().log()),
    ("log_1p", |x| x.abs().log_1p()),
    ("sqrt", |x| x.abs().sqrt()),
    ("rsqrt", |x| x.abs().rsqrt()),
    ("tanh", |x| x.tanh()),
    ("sigmoid", |x| x.sigmoid()),
    ("sin", |x| (x * 40.0).sin()),
    ("cos", |x| (x * 40.0).cos()),
    ("erf", |x| x.erf()),
    ("silu", |x| x.silu()),
    ("gelu", |x| x.gelu_tanh()),
    ("softplus", |x| x.softplus()),
    ("polynomial", |x| x * x * 1.7 + x * 0.3 + 0.1),
    ("quotient", |x| (x * 1.3 - 0.7) / (x * x + 1.1)),
];

fn all(x: Tensor<'_>) -> Vec<Tensor<'_>> {
    FUNCTIONS.map(|(_, function)| function(x)).to_vec()
}

/// Runs a program of one argument. The results are bits.
fn run(
    runtime: &Runtime,
    dtype: DType,
    axes: &[Axis],
    numbers: &[f64],
    made: impl Fn(Tensor<'_>) -> Vec<Tensor<'_>>,
) -> Vec<Vec<u32>> {
    let traced = program(&ProgramOptions::new("elementwise", runtime.target()), |inputs| {
        let x = inputs.input("x", DType::F32, axes, &vec![None; axes.len()], false);
        made(x.cast(dtype)).into_iter().map(|made| inputs.replicated("made", made.cast(DType::F32))).collect()
    });
    let executable = runtime.compile(&traced.unwrap(), &CompileSettings::default()).unwrap();
    let dims: Vec<usize> = axes.iter().map(|axis| axis.size).collect();
    let numbers: Vec<f32> = numbers.iter().map(|number| *number as f32).collect();
    let host = HostArray::from_slice(DType::F32, &dims, &numbers).unwrap();
    let sharding = Sharding::replicated(Placement::single().mesh().clone(), dims.len());
    let x = Array::from_host(runtime, &host, &sharding).unwrap();
    let outputs = executable.run(vec![Input::from(&x)]).unwrap();
    let bits = |array: &Array| {
        array.to_host().unwrap().to_f64().iter().map(|number| (*number as f32).to_bits()).collect()
    };
    outputs.iter().map(bits).collect()
}

#[test]
fn elements_do_not_depend_on_how_many_there_are() {
    let runtime = batch_invariant_cpu();
    let mut random = Random::new(3);
    let numbers: Vec<f64> = (0..300).map(|_| random.between(-6.0, 6.0)).collect();
    let mut wrong = Vec::new();
    for dtype in [DType::F32, DType::BF16] {
        let expected = run(&runtime, dtype, &[axis(WIDTH, numbers.len())], &numbers, all);
        for size in SIZES {
            let first = random.below(numbers.len() - size);
            let made = run(&runtime, dtype, &[axis(WIDTH, size)], &numbers[first..first + size], all);
            // Alone, a function is not compiled together with the others.
            let (name, function) = FUNCTIONS[random.below(FUNCTIONS.len())];
            let index = FUNCTIONS.iter().position(|(other, _)| *other == name).unwrap();
            let alone = run(&runtime, dtype, &[axis(WIDTH, size)], &numbers[first..first + size], |x| {
                vec![function(x)]
            });
            if alone[0] != made[index] {
                wrong.push(format!("{name} of {size} {dtype:?} alone"));
            }
            for (((name, _), made), expected) in FUNCTIONS.iter().zip(&made).zip(&expected) {
                if made[..] != expected[first..first + size] {
                    wrong.push(format!("{name} of {size} {dtype:?}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn sums_over_inner_dimensions_do_not_depend_on_the_number_of_rows() {
    let runtime = batch_invariant_cpu();
    let mut random = Random::new(4);
    let (choices, width) = (3, 37);
    let numbers: Vec<f64> = (0..40 * choices * width).map(|_| random.between(-3.0, 3.0)).collect();
    for dtype in [DType::F32, DType::BF16] {
        let of_rows = |count: usize| {
            let axes = [axis(TOKEN, count), axis(CHOICE, choices), axis(WIDTH, width)];
            let numbers = &numbers[..count * choices * width];
            run(&runtime, dtype, &axes, numbers, |x| {
                let length = (x.square().sum(&[WIDTH]) + 1e-6).rsqrt();
                vec![
                    (x * 1.3 + 0.2).sum(&[CHOICE]),
                    (x * x).sum(&[WIDTH]),
                    x.sum(&[CHOICE, WIDTH]),
                    x * length * 0.35,
                    x.softmax(WIDTH),
                ]
            })
        };
        let expected = of_rows(40);
        for count in [1, 2, 3, 8, 21] {
            for (made, expected) in of_rows(count).iter().zip(&expected) {
                assert!(made[..] == expected[..made.len()], "{count} rows of {dtype:?}");
            }
        }
    }
}

#[test]
fn logarithms_of_sums_are_precise() {
    let runtime = batch_invariant_cpu();
    let numbers: Vec<f64> = [0.0, 1e-30, 1e-9, 3e-8, 1e-4, 0.3, 1.0, 7.5, 3e4, 1e12, 3e38]
        .into_iter()
        .flat_map(|number: f64| [number, -number.min(0.999)])
        .chain([f64::INFINITY])
        .collect();
    let made = run(&runtime, DType::F32, &[axis(WIDTH, numbers.len())], &numbers, |x| vec![x.log_1p()]);
    for (number, bits) in numbers.iter().zip(&made[0]) {
        let (made, expected) = (f64::from(f32::from_bits(*bits)), f64::from(*number as f32).ln_1p());
        let is_close = made == expected || (made - expected).abs() <= 4e-7 * expected.abs();
        assert!(is_close, "of {number}: {made}, not {expected}");
    }
}

#[test]
fn products_are_rounded_before_they_are_added() {
    let runtime = batch_invariant_cpu();
    let mut random = Random::new(5);
    let numbers: Vec<f64> = (0..300).map(|_| random.between(-6.0, 6.0)).collect();
    let f32s: Vec<f32> = numbers.iter().map(|number| *number as f32).collect();
    for size in [1, 7, 8, 130, 300] {
        let made = run(&runtime, DType::F32, &[axis(WIDTH, size)], &numbers[..size], |x| {
            vec![x * x + x * 0.3, x * 1.7 - 0.1]
        });
        let expected: [fn(f32) -> f32; 2] = [|x| x * x + x * 0.3, |x| x * 1.7 - 0.1];
        for (made, expected) in made.iter().zip(expected) {
            let expected: Vec<u32> = f32s[..size].iter().map(|x| expected(*x).to_bits()).collect();
            assert!(*made == expected, "{size} elements");
        }
    }
}
