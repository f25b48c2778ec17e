//! A format of weights that only this file knows, in files, in checkpoints, over devices and in programs.

use std::path::Path;

use mt_checkpoint::{
    Checkpoint, CheckpointManager, ExtraItem, ManagerOptions, RunLock, SaveRequest, WeightsOptions,
};
use mt_models::{
    Description, EXACT_ITEM, ForwardPass, Model, StateEntries, Storage,
    decoder::{Decoder, DecoderConfig},
    hugging_face::{Weights, write_weights},
    load_parameters,
};
use mt_nn::{ArrayForm, EncodedWeight, ParamSpec, WeightEncoding, WeightFormat, encoded};
use mt_runtime::{Array, testing::cpu};
use mt_shape::{DType, HostArray, Placement, axis};
use mt_trace::Tensor;

use crate::{
    directory::Directory,
    harness::{largest_error, logits, placement},
};

/// Whole numbers from −127 to 127, with a scale for two of them that are neighbours along the last axis of a linear
/// map's input. Scales are powers of two, so that what is decoded is encoded as before.
#[derive(Debug)]
struct Pairs;

static PAIRS: Pairs = Pairs;

const PAIR: &str = "pair";

impl WeightFormat for Pairs {
    fn name(&self) -> &'static str {
        "pairs"
    }

    fn specs(&self, dense: ParamSpec, num_inputs: usize) -> Vec<(&'static str, ParamSpec)> {
        encoded(&PAIRS, dense, num_inputs)
    }

    fn dense<'t>(&self, arrays: &[Tensor<'t>], dtype: DType) -> Tensor<'t> {
        let [values, scales] = *arrays else { panic!("{} arrays", arrays.len()) };
        let axes = scales.axes();
        let halved = axes.iter().find(|own| values.axis(own.name).size != own.size).unwrap();
        let pairs = values.split(halved.name, &[*halved, axis(PAIR, 2)]).cast(dtype);
        (pairs * scales.cast(dtype)).merge(&[halved.name, PAIR], halved.name)
    }
}

impl WeightEncoding for Pairs {
    fn name(&self) -> &'static str {
        "pairs"
    }

    fn format(&self) -> &'static dyn WeightFormat {
        &PAIRS
    }

    fn arrays(&self, dense: &ParamSpec, num_inputs: usize) -> Vec<ArrayForm> {
        let axes = |block: usize| {
            let along = 0..dense.axes.len();
            along.map(|axis| (axis, if axis + 1 == num_inputs { block } else { 1 })).collect()
        };
        vec![
            ArrayForm { name: "values", dtype: DType::I8, axes: axes(1) },
            ArrayForm { name: "scales", dtype: DType::F32, axes: axes(2) },
        ]
    }

    fn encode(&self, weight: &EncodedWeight, dense: &HostArray) -> Vec<HostArray> {
        let mut dims = dense.dims().to_vec();
        let inner: usize = dims[weight.num_inputs..].iter().product();
        let numbers = dense.as_slice::<f32>().unwrap();
        let mut values = vec![0_i8; numbers.len()];
        let mut scales = Vec::new();
        for first in (0..numbers.len()).step_by(2 * inner) {
            for one in first..first + inner {
                let pair = [one, one + inner];
                let largest =
                    pair.map(|index| numbers[index].abs()).into_iter().fold(f32::MIN_POSITIVE, f32::max);
                let scale = (largest / 127.0).log2().ceil().exp2();
                pair.into_iter().for_each(|index| values[index] = (numbers[index] / scale).round() as i8);
                scales.push(scale);
            }
        }
        let values = HostArray::from_slice(DType::I8, &dims, &values).unwrap();
        dims[weight.num_inputs - 1] /= 2;
        vec![values, HostArray::from_slice(DType::F32, &dims, &scales).unwrap()]
    }

    fn decode(&self, weight: &EncodedWeight, arrays: &[HostArray]) -> HostArray {
        let dims = arrays[0].dims();
        let inner: usize = dims[weight.num_inputs..].iter().product();
        let (values, scales) = (arrays[0].as_slice::<i8>().unwrap(), arrays[1].as_slice::<f32>().unwrap());
        let decoded = |(index, value): (usize, &i8)| {
            f32::from(*value) * scales[index / (2 * inner) * inner + index % inner]
        };
        let numbers: Vec<f32> = values.iter().enumerate().map(decoded).collect();
        HostArray::from_slice(DType::F32, dims, &numbers).unwrap()
    }
}

/// A reference model with its weights in this format.
fn in_pairs(directory: &Directory, scan: &str) -> Decoder {
    let dense = directory.model(&[scan]);
    let config = DecoderConfig { weight_format: &PAIRS, ..dense.config().clone() };
    Decoder::new(config, dense.family())
}

fn on_host(arrays: &[Array]) -> Vec<HostArray> {
    arrays.iter().map(|array| array.to_host().unwrap()).collect()
}

fn loaded(model: &dyn Model, path: &Path) -> Vec<Array> {
    Weights::open(model, path).unwrap().load(cpu(1), &Placement::single(), model, None).unwrap()
}

#[track_caller]
fn check(name: &str) {
    let directory = Directory::open(name);
    for scan in directory.scans() {
        let (dense, model) = (directory.model(&[scan]), in_pairs(&directory, scan));
        let written = Storage::file_tensors(&model).unwrap();
        let described: Vec<_> = written.iter().map(|tensor| (&tensor.name, &tensor.dims)).collect();
        let of_dense = Storage::file_tensors(&dense).unwrap();
        assert_eq!(described, of_dense.iter().map(|tensor| (&tensor.name, &tensor.dims)).collect::<Vec<_>>());
        assert_eq!(model.num_parameters(), dense.num_parameters());
        assert_eq!(model.num_active_parameters(), dense.num_active_parameters());

        // From files, on one device and on several, and back into files.
        let arrays = loaded(&model, &directory.path);
        let whole = on_host(&arrays);
        assert!(whole.len() > dense.parameters().len());
        let split = placement(&["ici_fsdp_parallelism=4", "ici_tensor_parallelism=2"], 8);
        let of_files = Weights::open(&model, &directory.path).unwrap();
        assert_eq!(on_host(&of_files.load(cpu(8), &split, &model, None).unwrap()), whole);
        let target = tempfile::tempdir().unwrap();
        write_weights(&model, &arrays, DType::F32, target.path(), WeightsOptions::default()).unwrap();
        assert_eq!(on_host(&loaded(&model, target.path())), whole);

        // The model computes what the dense one does with the numbers that the codes stand for.
        let decoded = on_host(&loaded(&dense, target.path()));
        let exact = directory.parameters(&dense);
        for ((one, other), (path, _)) in decoded.iter().zip(&exact).zip(dense.parameters()) {
            let (error, is_equal) = (largest_error(&one.to_f64(), &other.to_f64()), one == other);
            assert!(is_equal || (path.to_string().ends_with("kernel") && error < 0.05), "{path}: {error:e}");
        }
        let batch = directory.batch();
        let expected = logits(&dense, &decoded, &batch).to_f64();
        let error = largest_error(&logits(&model, &whole, &batch).to_f64(), &expected);
        assert!(error <= 1e-5, "{name} {scan}: logits differ by {error:e}");

        // Through checkpoints, also of the model with its layers run in the other way, and of the dense one.
        let run = tempfile::tempdir().unwrap();
        let lock = RunLock::acquire(run.path()).unwrap();
        let mut manager = CheckpointManager::open(run.path(), &lock, ManagerOptions::default()).unwrap();
        let (entries, exact) = StateEntries::of_parameters(&model, &arrays).unwrap().into_entries();
        // Without a copy that is not scaled, numbers at the edge of a code could get another one.
        let exact = ExtraItem { item: EXACT_ITEM.to_owned(), entries: exact };
        let extra_items = if exact.entries.is_empty() { Vec::new() } else { vec![exact] };
        manager.save(0, SaveRequest { entries, extra_items, ..SaveRequest::default() }).unwrap();
        manager.wait_until_finished().unwrap();
        let checkpoint = Checkpoint::open(run.path(), 0).unwrap();
        let again = |model: &dyn Model, num_devices, placement: &Placement| {
            on_host(&load_parameters(cpu(num_devices), placement, model, &checkpoint).unwrap())
        };
        assert_eq!(again(&model, 1, &Placement::single()), whole);
        assert_eq!(again(&model, 8, &split), whole);
        for (read, decoded) in again(&dense, 1, &Placement::single()).iter().zip(&decoded) {
            assert!(largest_error(&read.to_f64(), &decoded.to_f64()) < 1e-6);
        }
        if let Some(other) = model.otherwise_scanned() {
            let expected = on_host(&loaded(&*other, target.path()));
            assert_eq!(again(&*other, 1, &Placement::single()), expected);
        }
    }
}

#[test]
fn weights_of_a_further_format_are_stored_in_their_dense_form() {
    check("llama_six_on_two");
}

#[test]
fn weights_beside_each_other_in_one_array_are_encoded_alone() {
    check("gpt2_two_layers");
}
