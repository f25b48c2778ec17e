//! Gated units with CPU kernels compared with units without them.

use mt_derive::Tree;
use mt_ir::{CpuKernels, Target};
use mt_nn::{
    Activation, Dropout, Linear, Mlp,
    axes::{BATCH, EMBED, MLP, POSITION},
    gated,
};
use mt_shape::{DType, axis};
use mt_testing::f32_array;
use mt_trace::Tensor;

use crate::harness::{Argument, assert_close, numbers, run, run_for, text_for};

const KERNELS: Target = Target::Cpu(CpuKernels { f32: true, bf16: true, ..CpuKernels::NONE });

#[derive(Tree)]
struct Operands<L> {
    gate: L,
    up: L,
}

/// Hidden units, and the gradients of both operands, where the last argument is the cotangent.
fn units<'t>(t: &[Tensor<'t>], dtype: DType, activations: [Activation; 2]) -> Vec<Tensor<'t>> {
    let narrow: Vec<Tensor<'t>> = t.iter().map(|tensor| tensor.cast(dtype)).collect();
    let operands = Operands { gate: narrow[0], up: narrow[1] };
    let (_, [hidden], gradients) = t[0].region().value_and_grad(&operands, |_, operands| {
        let hidden = gated(activations, operands.gate, operands.up);
        ((hidden * narrow[2]).cast(DType::F32).sum_all(), [hidden])
    });
    vec![hidden, gradients.gate, gradients.up]
}

#[test]
fn kernels_do_what_programs_do() {
    use Activation::{Gelu, Linear, Relu, Silu};
    let cases = [([Silu, Linear], 2), ([Gelu, Linear], 2), ([Relu, Linear], 0), ([Silu, Silu], 0)];
    for (activations, num_calls) in cases {
        // The last case has too few units for a kernel.
        for (rows, length, hidden) in [(1, 1, 16411), (2, 59, 333), (3, 90, 61), (2, 5, 33)] {
            let num_calls = if rows * length * hidden < 1 << 14 { 0 } else { num_calls };
            let axes = vec![axis(BATCH, rows), axis(POSITION, length), axis(MLP, hidden)];
            let arguments: Vec<Argument> =
                (0..3).map(|seed| (axes.clone(), numbers(seed, &[rows, length, hidden]))).collect();
            for (dtype, tolerance) in [(DType::F32, 2e-6), (DType::BF16, 1e-2)] {
                let what = format!("{activations:?} of {dtype}, {rows} x {length} x {hidden}");
                let text = text_for(KERNELS, &arguments, |_, t| units(&t, dtype, activations));
                assert_eq!(text.matches("maxtext.gated").count(), num_calls, "{what}");
                let of = |target: Target| {
                    run_for(target, "units", &arguments, |_, t| units(&t, dtype, activations))
                };
                for (with, without) in of(KERNELS).iter().zip(&of(Target::CPU)) {
                    assert_close(&what, with, without, tolerance);
                }
            }
        }
    }
}

/// The nearest number of type `bf16`.
fn in_bf16(number: f64) -> f64 {
    let bits = (number as f32).to_bits();
    f64::from(f32::from_bits((bits + 0x7fff + (bits >> 16 & 1)) & !0xffff))
}

#[test]
fn functions_in_f32_are_rounded_once() {
    let width = 37;
    let identity: Vec<f64> = (0..width * width).map(|index| f64::from(index % (width + 1) == 0)).collect();
    let (embed, mlp) = (axis(EMBED, width), axis(MLP, width));
    let x = numbers(5, &[2, 11, width]);
    let arguments: Vec<Argument> = vec![
        (vec![axis(BATCH, 2), axis(POSITION, 11), embed], x.clone()),
        (vec![embed, mlp], f32_array(&[width, width], &identity)),
        (vec![mlp, embed], f32_array(&[width, width], &identity)),
    ];
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    for (activations, expected) in [
        (&[Activation::Silu, Activation::Linear][..], (|x, sigmoid| x * sigmoid * x) as fn(f64, f64) -> f64),
        (&[Activation::Sigmoid, Activation::Silu], |x, sigmoid| sigmoid * x * sigmoid),
        (&[Activation::Silu], |x, sigmoid| x * sigmoid),
    ] {
        let made = run("mlp", &arguments, |_, t| {
            let [x, into, from] = [t[0], t[1], t[2]].map(|tensor| tensor.cast(DType::BF16));
            let wi_1 = (activations.len() == 2).then(|| Linear::dense(into));
            let mlp = Mlp { wi_0: Linear::dense(into), wi_1, wo: Linear::dense(from) };
            vec![mlp.forward(x, activations, true, Dropout::Off).cast(DType::F32)]
        });
        for (made, x) in made[0].to_f64().iter().zip(x.to_f64()) {
            let x = in_bf16(x);
            let expected = expected(x, sigmoid(x));
            // The value in `f32` may lie on the other side of the middle between two numbers.
            let near = [in_bf16(expected * (1.0 - 1e-6)), in_bf16(expected * (1.0 + 1e-6))];
            assert!(near.contains(made), "{activations:?} of {x}: {made} is not {expected}");
        }
    }
}
