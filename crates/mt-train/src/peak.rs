//! The peak throughput of a device, for the run's utilization.

use std::{sync::Arc, time::Instant};

use mt_config::Chip;
use mt_runtime::{Array, CompileSettings, Input, Platform, Runtime};
use mt_shape::{DType, HostArray, Placement, Sharding, axis};
use mt_trace::{Precision, ProgramOptions, program};

/// Rows and columns of the square matrices that are multiplied on a CPU, which has no published peak.
const SIZE: usize = 1024;

/// The peak throughput of one device in TFLOP/s, if it is known. On a CPU it is the measured throughput of a large
/// matrix product in the run's type and precision, divided by the number of virtual devices.
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
