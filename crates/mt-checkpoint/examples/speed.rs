//! Measures saving and restoring arrays, for `bench/checkpoints.sh`: `speed save|restore DIRECTORY THREADS LAYERS`.
//!
//! The arrays are those of `bench/checkpoints.py`: weights and two moments, of random numbers that compress as poorly as
//! trained ones. A line says the seconds and the bytes; the arrays are made before the clock starts.

#![forbid(unsafe_code)]

use std::{path::Path, time::Instant};

use mt_checkpoint::{
    Checkpoint, CheckpointManager, Entry, ManagerOptions, RunLock, SaveRequest, StoredValue,
};
use mt_shape::{DType, HostArray};

const DIMS: [usize; 2] = [2048, 8192];
const TREES: [&str; 3] = ["params", "mu", "nu"];

fn array(seed: u64) -> HostArray {
    let mut state = seed | 1;
    let numbers: Vec<f32> = (0..DIMS.iter().product())
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1 << 24) as f32 - 0.5
        })
        .collect();
    HostArray::from_slice(DType::F32, &DIMS, &numbers).expect("there is a number for each element")
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [task, directory, threads, layers] = arguments.as_slice() else {
        panic!("give a task, a directory, a number of threads and a number of layers")
    };
    let threads: usize = threads.parse().expect("a number of threads");
    let num_layers: usize = layers.parse().expect("a number of layers");
    let checkpoints = Path::new(directory).join("checkpoints");
    let bytes = TREES.len() * num_layers * DIMS.iter().product::<usize>() * 4;
    let started = match task.as_str() {
        "save" => {
            let entry = |index: usize| {
                let (tree, layer) = (TREES[index / num_layers], format!("layers_{}", index % num_layers));
                Entry::new(vec![tree.into(), layer.as_str().into(), "kernel".into()], array(index as u64))
            };
            let entries = (0..TREES.len() * num_layers).map(entry).collect();
            let lock = RunLock::acquire(Path::new(directory)).expect("nobody else uses the directory");
            let options = ManagerOptions { asynchronous: false, threads, ..ManagerOptions::default() };
            let mut manager = CheckpointManager::open(&checkpoints, &lock, options).expect("it is writable");
            let started = Instant::now();
            manager.save(1, SaveRequest { entries, ..SaveRequest::default() }).expect("there is room");
            started
        }
        "restore" => {
            let started = Instant::now();
            let checkpoint = Checkpoint::open(&checkpoints, 1).expect("it was saved").with_threads(threads);
            for entry in checkpoint.entries() {
                if matches!(entry.value, StoredValue::Array { .. }) {
                    checkpoint.read_all(&entry.name).expect("it is whole");
                }
            }
            started
        }
        other => panic!("`{other}` is no task"),
    };
    println!("{:.3} {bytes}", started.elapsed().as_secs_f64());
}
