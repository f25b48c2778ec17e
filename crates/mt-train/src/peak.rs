//! What a device can do at best, for the share of it that a run uses.

use std::{sync::Arc, time::Instant};

use mt_ir::DotLowering;
use mt_runtime::{Array, CompileSettings, Input, Platform, Runtime};
use mt_shape::{DType, HostArray, Placement, Sharding, axis};
use mt_trace::{ProgramOptions, program};

/// Dense `bf16` peaks in 10¹² operations a second, from the makers' data sheets, by a part of the device's name.
const PEAKS: [(&str, f64); 12] = [
    ("B200", 2250.0),
    ("H200", 989.0),
    ("H100", 989.0),
    ("A100", 312.0),
    ("L40S", 362.0),
    ("L4", 121.0),
    ("TPU v6", 918.0),
    ("TPU7x", 2307.0),
    ("TPU v5p", 459.0),
    ("TPU v5 lite", 197.0),
    ("TPU v5e", 197.0),
    ("TPU v4", 275.0),
];

/// The size of the matrices multiplied on a CPU, which has no published peak.
const SIZE: usize = 1024;

/// The peak of one device in 10¹² operations a second, if it is known. On a CPU it is what a large matrix product
/// reaches here and now, shared among the virtual devices.
pub(crate) fn peak_tflops(runtime: &Runtime, dtype: DType) -> Option<f64> {
    if runtime.platform() != Platform::Cpu {
        let devices = runtime.devices();
        let kind = devices.first()?.kind();
        return PEAKS.iter().find(|(name, _)| kind.contains(name)).map(|(_, peak)| *peak);
    }
    measured(runtime, dtype).map(|peak| peak / runtime.num_devices() as f64)
}

fn measured(runtime: &Runtime, dtype: DType) -> Option<f64> {
    let placement = Arc::new(Placement::single());
    let options = ProgramOptions {
        name: "matrix_product".to_owned(),
        placement: placement.clone(),
        dots: DotLowering::ViaF32,
    };
    let (rows, inner, columns) = (axis("rows", SIZE), axis("inner", SIZE), axis("columns", SIZE));
    let program = program(&options, |inputs| {
        let lhs = inputs.input("lhs", dtype, &[rows, inner], &[None, None], false);
        let rhs = inputs.input("rhs", dtype, &[inner, columns], &[None, None], false);
        vec![inputs.replicated("product", lhs.contract(rhs, &["inner"]))]
    })
    .ok()?;
    let program = runtime.compile(&program, &CompileSettings::default()).ok()?;
    let sharding = Sharding::replicated(placement.mesh().clone(), 2);
    let matrix = Array::from_host(runtime, &HostArray::zeros(dtype, &[SIZE, SIZE]), &sharding).ok()?;
    let mut best = f64::INFINITY;
    // The first run warms up.
    for _ in 0..4 {
        let start = Instant::now();
        let result = program.run(vec![Input::Borrow(&matrix), Input::Borrow(&matrix)]).ok()?;
        result[0].wait().ok()?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Some(2.0 * (SIZE as f64).powi(3) / best / 1e12)
}
