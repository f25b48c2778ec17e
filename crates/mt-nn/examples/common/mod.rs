//! Times of programs.

use std::fs;

use mt_ir::ProgramValue;
use mt_runtime::{Array, Executable, Input, testing::cpu};
use mt_shape::{DType, HostArray};

/// The processor time of a call in milliseconds, the least of several ones. Arrays of `f32` have various numbers, and
/// `fill` fills the others, which are 0.
pub fn milliseconds(step: &Executable, repeats: usize, fill: impl Fn(&mut HostArray)) -> f64 {
    let input = |input: &ProgramValue| {
        let mut array = HostArray::zeros(input.ty.dtype, &input.ty.dims);
        if input.ty.dtype == DType::F32 {
            let values = bytemuck::cast_slice_mut::<u8, f32>(array.bytes_mut());
            values.iter_mut().enumerate().for_each(|(index, value)| *value = (index as f32).sin());
        } else {
            fill(&mut array);
        }
        Array::from_host(cpu(1), &array, &input.sharding).expect("the array fits")
    };
    let inputs: Vec<Array> = step.inputs().iter().map(input).collect();
    let mut best = f64::MAX;
    for _ in 0..repeats {
        let before = processor_time();
        let results = step.run(inputs.iter().map(Input::Borrow).collect()).expect("the program runs");
        results.iter().for_each(|result| result.wait().expect("the program runs"));
        best = best.min(processor_time() - before);
    }
    best
}

/// The processor time of this process's threads, in milliseconds.
fn processor_time() -> f64 {
    let tasks = fs::read_dir("/proc/self/task").expect("Linux lists threads");
    let nanoseconds = |task: fs::DirEntry| -> Option<f64> {
        fs::read_to_string(task.path().join("schedstat")).ok()?.split(' ').next()?.parse().ok()
    };
    tasks.flatten().filter_map(nanoseconds).sum::<f64>() / 1e6
}
