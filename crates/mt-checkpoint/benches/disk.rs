//! Bytes per second saved and restored: `cargo bench -p mt-checkpoint`.
//!
//! Saves a state of weights and two moments, which compress as poorly as trained ones, to the temporary directory,
//! flushes and commits it, and reads it back while verifying its checksums. The data is still in the page cache, so
//! reading measures the program and not the disk. TMPDIR chooses another disk for writing.

#![forbid(unsafe_code)]

use std::time::Duration;

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use mt_checkpoint::{
    Checkpoint, CheckpointManager, Entry, ManagerOptions, RunLock, SaveRequest, StoredValue,
};
use mt_shape::{DType, HostArray};

const NUM_LAYERS: usize = 4;
const DIMS: [usize; 2] = [1024, 1536];
const TREES: [&str; 3] = ["params", "mu", "nu"];

/// Numbers like weights: irregular signs and mantissas, and a narrow range of exponents.
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

fn request(arrays: &[HostArray]) -> SaveRequest {
    let entry = |(index, array): (usize, &HostArray)| {
        let (tree, layer) = (TREES[index / NUM_LAYERS], format!("layers_{}", index % NUM_LAYERS));
        Entry::new(vec![tree.into(), layer.as_str().into(), "kernel".into()], array.clone())
    };
    SaveRequest { entries: arrays.iter().enumerate().map(entry).collect(), ..SaveRequest::default() }
}

fn disk(criterion: &mut Criterion) {
    let arrays: Vec<HostArray> = (0..TREES.len() * NUM_LAYERS).map(|seed| array(seed as u64)).collect();
    let bytes: usize = arrays.iter().map(|array| array.bytes().len()).sum();
    let directory = tempfile::tempdir().expect("the machine has a place for temporary files");
    let lock = RunLock::acquire(directory.path()).expect("nobody else uses a new directory");
    let mut group = criterion.benchmark_group("checkpoint");
    group
        .sample_size(10)
        .measurement_time(Duration::from_secs(20))
        .throughput(Throughput::Bytes(bytes as u64));
    for threads in [1, 2] {
        let options = ManagerOptions {
            max_to_keep: Some(1),
            asynchronous: false,
            threads,
            ..ManagerOptions::default()
        };
        let checkpoints = directory.path().join(format!("checkpoints_{threads}"));
        let mut manager =
            CheckpointManager::open(&checkpoints, &lock, options).expect("the directory is new");
        let mut step = 0;
        group.bench_function(BenchmarkId::new("save", format!("{threads} threads")), |bencher| {
            bencher.iter_batched(
                || request(&arrays),
                |request| {
                    step += 1;
                    manager.save(step, request).expect("the disk has room")
                },
                BatchSize::PerIteration,
            );
        });
        let checkpoint = Checkpoint::open(manager.directory(), step)
            .expect("the last step was saved")
            .with_threads(threads);
        let names: Vec<String> = checkpoint
            .entries()
            .iter()
            .filter(|entry| matches!(entry.value, StoredValue::Array { .. }))
            .map(|entry| entry.name.clone())
            .collect();
        group.bench_function(BenchmarkId::new("restore", format!("{threads} threads")), |bencher| {
            bencher.iter(|| {
                names
                    .iter()
                    .map(|name| checkpoint.read_all(name))
                    .collect::<Result<Vec<_>, _>>()
                    .expect("what was saved is whole")
            });
        });
    }
    group.finish();
}

criterion_group!(benches, disk);
criterion_main!(benches);
