//! Gated units with CPU kernels compared with units without them.

use mt_derive::Tree;
use mt_ir::{CpuKernels, Target};
use mt_nn::{
    Activation,
    axes::{BATCH, MLP, POSITION},
    gated,
};
use mt_shape::{DType, axis};
use mt_trace::Tensor;

use crate::harness::{Argument, assert_close, numbers, run_for, text_for};

const KERNELS: Target = Target::Cpu(CpuKernels { f32: true, bf16: true });

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
