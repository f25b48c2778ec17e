//! Attention with CPU kernels compared with attention without them.

use mt_ir::{CpuKernels, Target};
use mt_nn::{SequenceOrder, attention::MaskSpec};
use mt_shape::DType;

use crate::{
    context::{CASE, CONTEXT_2, Case, RESULTS},
    harness::relative_error,
};

const KERNELS: Target = Target::Cpu(CpuKernels { f32: true, bf16: true, ..CpuKernels::NONE });

/// The number of calls of the forward and of the backward kernel in a program.
fn num_calls(case: Case, dtype: DType) -> [usize; 2] {
    let text = case.program("text", dtype).text;
    ["maxtext.attention_forward", "maxtext.attention_backward"].map(|name| text.matches(name).count())
}

#[track_caller]
fn check(case: Case) {
    for (dtype, tolerance) in [(DType::F32, 2e-6), (DType::BF16, 1e-2)] {
        let with = Case { target: KERNELS, ..case };
        assert_eq!(num_calls(with, dtype), [1, 1], "{case:?}");
        assert_eq!(num_calls(case, dtype), [0, 0]);
        let (with, without) = (with.run("with", dtype), case.run("without", dtype));
        for ((result, with), without) in RESULTS.iter().zip(&with).zip(&without) {
            let error = relative_error(with, without);
            assert!(error <= tolerance, "{case:?} in {dtype}: {result} differs by {error:e}");
        }
    }
}

#[test]
fn kernels_do_what_programs_do() {
    let causal = MaskSpec::CAUSAL;
    check(CASE);
    check(Case { block: 5, length: 61, group: 1, ..CASE });
    for (mask, soft_cap, has_sinks) in [
        (MaskSpec { window: Some(4), ..causal }, None, true),
        (MaskSpec { window: Some(17), ..causal }, Some(0.7), false),
        (MaskSpec { chunk: Some(10), ..causal }, Some(0.7), true),
        (MaskSpec { causal: false, ..MaskSpec::CAUSAL }, None, false),
    ] {
        check(Case { mask, soft_cap, has_sinks, ..CASE });
    }
    check(Case { with_scores: true, soft_cap: Some(0.7), has_sinks: true, length: 130, ..CASE });
}

#[test]
fn what_has_no_kernel_is_printed() {
    let paired = SequenceOrder::Paired { shards: 2 };
    for case in [Case { order: paired, ..CASE }, Case { mesh: CONTEXT_2, order: paired, ..CASE }] {
        assert_eq!(num_calls(Case { target: KERNELS, ..case }, DType::F32), [0, 0], "{case:?}");
    }
    assert_eq!(num_calls(Case { target: KERNELS, ..CASE }, DType::F16), [0, 0]);
}
