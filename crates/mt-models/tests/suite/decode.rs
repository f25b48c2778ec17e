//! Running a model piece by piece on a cache equals running it on the whole sequence.

use std::sync::Arc;

use mt_models::{Cache, Forward, Model, Tokens};
use mt_nn::{
    attention::KeysValues,
    axes::{BATCH, KV_POSITION, POSITION},
};
use mt_runtime::testing;
use mt_shape::{DType, HostArray, Placement, axis};
use mt_trace::program;

use crate::harness::{Batch, declare, largest_error, logits, model, options, parameters};

const SLOTS: usize = 12;

/// Logits of tokens `start..start + length` of each row, and the caches with their keys and values.
fn extend(
    model: &dyn Model,
    parameters: &[HostArray],
    tokens: &[Vec<i32>],
    start: usize,
    cache: &[HostArray],
) -> (HostArray, Vec<HostArray>) {
    let (rows, length) = (tokens.len(), tokens[0].len());
    let specs = model.parameters();
    let caches = model.cache(rows, SLOTS);
    let program = program(&options("extend", Arc::new(Placement::single())), |inputs| {
        let parameters = declare(inputs, "params", &specs, false);
        let integers = |name: &str, axes: &[mt_shape::Axis]| {
            inputs.input(name, DType::I32, axes, &vec![None; axes.len()], false)
        };
        let axes = [axis(BATCH, rows), axis(POSITION, length)];
        let tokens = Tokens {
            tokens: integers("tokens", &axes),
            positions: integers("positions", &axes),
            segmentation: integers("segmentation", &axes),
        };
        let start = integers("start", &[]);
        let segmentation = integers("cache_segmentation", &[axis(BATCH, rows), axis(KV_POSITION, SLOTS)]);
        let layers = caches.iter().map(|spec| {
            let one = || inputs.input("cache", spec.dtype, &spec.axes, &spec.logical_axes, false);
            KeysValues { key: one(), value: one() }
        });
        let cache = Cache { layers: layers.collect(), start, segmentation };
        let forward = Forward { cache: Some(cache), ..Forward::default() };
        let (logits, cache) = model.logits(&parameters, tokens, forward);
        let arrays = cache.iter().flat_map(|layer| [layer.key, layer.value]);
        [logits].into_iter().chain(arrays).map(|tensor| inputs.replicated("output", tensor)).collect()
    })
    .unwrap();
    let array = |dims: &[usize], values: Vec<i32>| HostArray::from_slice(DType::I32, dims, &values).unwrap();
    let positions = (0..rows).flat_map(|_| (start..start + length).map(|place| place as i32)).collect();
    let filled = (0..rows).flat_map(|_| (0..SLOTS).map(|slot| i32::from(slot < start + length))).collect();
    let inputs = [
        array(&[rows, length], tokens.concat()),
        array(&[rows, length], positions),
        array(&[rows, length], vec![1; rows * length]),
        array(&[], vec![start as i32]),
        array(&[rows, SLOTS], filled),
    ];
    let arguments = [parameters, &inputs, cache].concat();
    let mut outputs = testing::run(&program, &arguments).unwrap();
    (outputs.remove(0), outputs)
}

#[track_caller]
fn check(arguments: &[&str]) {
    let model = model(arguments);
    let parameters = parameters(&*model);
    let (rows, length) = (2, 9);
    let batch = Batch::whole(rows, length, 256);
    let whole = logits(&*model, &parameters, &batch);
    let vocab = whole.dims()[2];
    let (all, whole) = (batch.arrays[0].as_slice::<i32>().unwrap(), whole.to_f64());
    let mut cache: Vec<HostArray> = Vec::new();
    for spec in model.cache(rows, SLOTS) {
        let dims: Vec<usize> = spec.axes.iter().map(|axis| axis.size).collect();
        cache.extend([HostArray::zeros(DType::F32, &dims), HostArray::zeros(DType::F32, &dims)]);
    }
    let mut start = 0;
    // A prompt in two chunks, then tokens one at a time.
    for size in [4, 3, 1, 1] {
        let tokens: Vec<Vec<i32>> =
            (0..rows).map(|row| all[row * length + start..row * length + start + size].to_vec()).collect();
        let (actual, next) = extend(&*model, &parameters, &tokens, start, &cache);
        cache = next;
        let actual = actual.to_f64();
        for row in 0..rows {
            let expected = &whole[(row * length + start) * vocab..(row * length + start + size) * vocab];
            let error = largest_error(&actual[row * size * vocab..(row + 1) * size * vocab], expected);
            assert!(error <= 1e-5, "{arguments:?}: tokens from {start} of row {row} differ by {error:e}");
        }
        start += size;
    }
}

#[test]
fn chunks_on_a_cache_equal_the_whole() {
    check(&["scan_layers=true"]);
    check(&["scan_layers=false"]);
    check(&[
        "scan_layers=true",
        "logits_via_embedding=true",
        "base_num_query_heads=6",
        "base_num_kv_heads=1",
    ]);
}
