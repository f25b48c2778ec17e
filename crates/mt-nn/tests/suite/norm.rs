//! Norms with CPU kernels compared with norms without them, and custom derivatives compared with automatic
//! differentiation.

use mt_derive::Tree;
use mt_ir::{CpuKernels, Target};
use mt_nn::{
    NormOptions, RmsNorm,
    axes::{BATCH, EMBED, POSITION},
    rms_normalize,
};
use mt_shape::{DType, axis};
use mt_trace::Tensor;

use crate::harness::{Argument, assert_close, numbers, run_for, text_for};

const KERNELS: Target = Target::Cpu(CpuKernels { f32: true, bf16: true, ..CpuKernels::NONE });

#[derive(Clone, Copy, Debug, PartialEq)]
enum Scale {
    Absent,
    /// A scale with this offset.
    Present(f64),
}

#[derive(Tree)]
struct Operands<L> {
    x: L,
    scale: L,
}

/// The normalized tensor, and the gradients of both operands, where the last argument is the cotangent.
fn results<'t>(
    t: &[Tensor<'t>],
    dtype: DType,
    normalize: impl for<'b> Fn(Tensor<'b>, Tensor<'b>) -> Tensor<'b>,
) -> Vec<Tensor<'t>> {
    let operands = Operands { x: t[0].cast(dtype), scale: t[1] };
    let weights = t[2].cast(dtype);
    let (_, [result], gradients) = t[0].region().value_and_grad(&operands, |_, operands| {
        let result = normalize(operands.x, operands.scale);
        ((result * weights).cast(DType::F32).sum_all(), [result])
    });
    vec![result, gradients.x, gradients.scale]
}

/// The layer under test.
fn layer<'t>(x: Tensor<'t>, scale: Tensor<'t>, kind: Scale) -> Tensor<'t> {
    match kind {
        Scale::Absent => rms_normalize(x, &[EMBED], 1e-3),
        Scale::Present(offset) => RmsNorm { scale }.forward(x, EMBED, NormOptions { epsilon: 1e-3, offset }),
    }
}

/// The same norm as plain operations with automatic derivatives.
fn plain<'t>(x: Tensor<'t>, scale: Tensor<'t>, kind: Scale) -> Tensor<'t> {
    let wide = x.cast(DType::F32);
    let wide = wide * (wide.square().mean(&[EMBED]) + 1e-3).rsqrt();
    match kind {
        Scale::Absent => wide.cast(x.dtype()),
        Scale::Present(0.0) => wide.cast(x.dtype()) * scale.cast(x.dtype()),
        Scale::Present(offset) => (wide * (scale + offset)).cast(x.dtype()),
    }
}

#[test]
fn kernels_do_what_programs_do() {
    // The last case has too few elements for a kernel.
    for (rows, length, embed) in [(1, 1, 16411), (2, 59, 333), (3, 90, 61), (2, 128, 64), (2, 5, 33)] {
        let axes = vec![axis(BATCH, rows), axis(POSITION, length), axis(EMBED, embed)];
        let all = |seed| (axes.clone(), numbers(seed, &[rows, length, embed]));
        let arguments: Vec<Argument> = vec![all(0), (vec![axis(EMBED, embed)], numbers(1, &[embed])), all(2)];
        for kind in [Scale::Absent, Scale::Present(0.0), Scale::Present(1.0)] {
            for (dtype, tolerance) in [(DType::F32, 2e-6), (DType::BF16, 5e-3)] {
                let what = format!("{kind:?} of {dtype}, {rows} x {length} x {embed}");
                let text = text_for(KERNELS, &arguments, |_, t| {
                    results(&t, dtype, |x, scale| layer(x, scale, kind))
                });
                let num_calls = if rows * length * embed < 1 << 14 { 0 } else { 2 };
                assert_eq!(text.matches("maxtext.rms_norm").count(), num_calls, "{what}");
                let of = |target: Target| {
                    run_for(target, "norms", &arguments, |_, t| {
                        results(&t, dtype, |x, scale| layer(x, scale, kind))
                    })
                };
                let expected = run_for(Target::CPU, "plain norms", &arguments, |_, t| {
                    results(&t, dtype, |x, scale| plain(x, scale, kind))
                });
                // Without kernels, XLA rounds partial sums of `bf16` values to `bf16`.
                let exact = run_for(Target::CPU, "wide norms", &arguments, |_, t| {
                    let t: Vec<Tensor<'_>> =
                        [t[0].cast(dtype), t[1], t[2].cast(dtype)].map(|x| x.cast(DType::F32)).into();
                    results(&t, DType::F32, |x, scale| plain(x, scale, kind))
                });
                let (with, without) = (of(KERNELS), of(Target::CPU));
                for index in 0..3 {
                    let what = format!("result {index} of {what}");
                    assert_close(&what, &without[index], &expected[index], tolerance);
                    let expected = if index == 2 { &exact } else { &expected };
                    assert_close(&what, &with[index], &expected[index], tolerance);
                }
            }
        }
    }
}
