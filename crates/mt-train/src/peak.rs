//! What a device can do at best, for the share of it that a run uses.

use std::{sync::Arc, time::Instant};

use mt_config::Chip;
use mt_runtime::{Array, CompileSettings, Input, Platform, Runtime};
use mt_shape::{DType, HostArray, Placement, Sharding, axis};
use mt_trace::{Precision, ProgramOptions, program};

/// The size of the matrices multiplied on a CPU, which has no published peak.
const SIZE: usize = 1024;

/// The peak of one device in 10¹² operations a second, if it is known. On a CPU it is what a large matrix product
/// reaches here and now, with the run's type and precision, shared among the virtual devices.
pub(crate) fn peak_tflops(runtime: &Runtime, dtype: DType, precision: Precision) -> Option<f64> {
    if runtime.platform() != Platform::Cpu {
        let devices = runtime.devices();
        let kind = devices.first()?.kind();
        return Chip::of_device(kind).map(|chip| chip.peak_tflops);
    }
    measured(runtime, dtype, precision).map(|peak| peak / runtime.num_devices() as f64)
}

fn measured(runtime: &Runtime, dtype: DType, precision: Precision) -> Option<f64> {
    let placement = Arc::new(Placement::single());
    let options = ProgramOptions {
        name: "matrix_product".to_owned(),
        placement: placement.clone(),
        target: runtime.target(),
        precision,
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
