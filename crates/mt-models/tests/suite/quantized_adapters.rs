//! Adapters above quantized weights (QLoRA), compared with values in float64;
//! `goldens/quantized_adapters/generate.py` generates them and compares codes with Qwix.

use std::path::Path;

use mt_checkpoint::{WeightsDirectory, WeightsOptions};
use mt_models::{
    ForwardPass, Model, Storage,
    decoder::Decoder,
    hugging_face::{Weights, write_weights},
};
use mt_runtime::{Array, testing::cpu};
use mt_shape::{DType, HostArray, Placement};
use mt_testing::relative_error;

use crate::{
    adapters::{keys_of, merged, on_host, peft, together, with_keys, written},
    directory::Directory,
    harness::{golden, gradients, largest_error, logits, logits_in_f64, placement},
};

/// The cases of `generate.py`: the model and its adapters, the codes and the tile.
const CASES: &[(&str, &str, &str, Option<usize>)] = &[
    ("llama_six_on_two", "lora", "int8", None),
    ("llama_six_on_two", "lora", "int4", Some(2)),
    ("llama_six_on_two", "lora", "nf4", None),
    ("llama_six_on_two", "lora", "nf4", Some(2)),
    ("llama_six_on_two", "dora", "int8", Some(2)),
    ("llama_six_on_two", "dora", "nf4", Some(2)),
    ("llama_six_on_two", "dora", "nf4", None),
    ("llama_six_on_two", "dora", "int4", Some(2)),
    ("qwen3_untied", "lora", "int8", Some(2)),
    ("qwen3_untied", "dora", "nf4", None),
    ("qwen3_untied", "dora", "int4", Some(2)),
    ("gemma2_odd_untied", "lora", "int4", None),
    ("gemma2_odd_untied", "dora", "nf4", Some(2)),
    ("gemma2_odd_untied", "dora", "int8", None),
];

/// Cases whose logits `f32` rounds by up to 1.5e-5; those of PEFT in `f32` differ by 4.5e-6 from its own in `f64`, and by
/// 1.2e-5 with `int8`. In `f64`, where transformers still computes norms and softmax in `f32`, all cases agree within 5e-6.
const ROUNDED: &[(&str, &str, &str)] = &[("llama_six_on_two", "dora", "nf4")];

/// Only the configuration reads it.
const BASE: &str = "load_parameters_path=base";

fn built(directory: &Directory, keys: &[&str]) -> Decoder {
    let keys = with_keys(keys);
    let keys: Vec<&str> = keys.iter().map(String::as_str).chain([BASE]).collect();
    mt_models::build_decoder(&directory.group(&keys).unwrap()).unwrap()
}

fn loaded(model: &dyn Model, path: &Path, placement: &Placement, devices: usize) -> Vec<Array> {
    Weights::open(model, path).unwrap().load(cpu(devices), placement, model, None).unwrap()
}

#[track_caller]
fn check((name, variant, codes, tile): (&str, &str, &str, Option<usize>), scan: &str) {
    let directory = Directory::open(name);
    let of_tile = tile.map_or("channel".to_owned(), |tile| tile.to_string());
    let what = format!("{name} {variant} {codes} {of_tile} {scan}");
    let golden = golden(&format!("quantized_adapters/{name}_{variant}_{codes}_{of_tile}.safetensors"));
    let quantized = format!("lora_weight_qtype={codes}");
    let tiles = tile.map(|tile| format!("lora_tile_size={tile}"));
    let further: Vec<&str> = [scan, &quantized].into_iter().chain(tiles.as_deref()).collect();
    let model = built(&directory, &[keys_of(name, variant), &further].concat());

    // The base keeps nothing but codes and scales of the weights below adapters, on one device and on several.
    let base_model = model.base().unwrap();
    let base = on_host(&loaded(&*base_model, &directory.path, &Placement::single(), 1));
    let split = placement(&["ici_fsdp_parallelism=4", "ici_tensor_parallelism=2"], 8);
    assert_eq!(on_host(&loaded(&*base_model, &directory.path, &split, 8)), base, "{what}");
    for ((path, spec), array) in base_model.parameters().iter().zip(&base) {
        let is_of_weight = path.to_string().contains(".kernel");
        assert_eq!(spec.encoded.is_some(), is_of_weight && !path.to_string().starts_with("head"), "{path}");
        assert!(spec.adapter.is_none() && !spec.is_trainable, "{path}");
        let is_codes = path.to_string().ends_with(".codes");
        assert_eq!(array.bytes().len() == array.num_elements(), is_codes, "{path}");
    }
    assert_eq!(base_model.num_parameters(), model.without_adapters().unwrap().num_parameters());

    let peft = peft(name, variant);
    let weights = Weights::open_adapters(&model, &peft).unwrap();
    let adapters = on_host(&weights.load(cpu(1), &Placement::single(), &model, None).unwrap());
    let parameters = together(&model, &base, &adapters);
    let mut batch = directory.batch();
    let expected = golden.numbers("logits");
    let error = largest_error(&logits(&model, &parameters, &batch).to_f64(), &expected);
    let is_rounded = ROUNDED.contains(&(name, variant, codes));
    assert!(error <= 1e-5 || is_rounded, "{what}: logits differ by {error:e}");
    let error = largest_error(&logits_in_f64(&model, &parameters, &batch).to_f64(), &expected);
    assert!(error <= 5e-6, "{what}: logits in f64 differ by {error:e}");

    // Merged into weights that are dense again.
    let plain = model.without_adapters().unwrap();
    let merged = merged(&model, &parameters);
    let error = largest_error(&logits(&*plain, &merged, &batch).to_f64(), &expected);
    assert!(error <= 1e-5, "{what}: merged logits differ by {error:e}");

    // Decoded on the host.
    let placed = loaded(&*base_model, &directory.path, &Placement::single(), 1);
    let target = tempfile::tempdir().unwrap();
    write_weights(&*base_model, &placed, DType::F32, target.path(), WeightsOptions::default()).unwrap();
    let decoded = WeightsDirectory::open(target.path()).unwrap();
    for tensor in base_model.file_tensors().unwrap().iter().filter(|tensor| tensor.name.contains("_proj")) {
        let error =
            largest_error(&decoded.read(&tensor.name).unwrap().to_f64(), &golden.numbers(&tensor.name));
        assert!(error <= 1e-6, "{what}: `{}` differs by {error:e}", tensor.name);
    }

    // Gradients reach the adapters alone.
    batch.arrays[3] = golden.array("targets");
    let found = gradients(&model, &parameters, &batch);
    let loss = golden.numbers("loss")[0];
    assert!((found.loss - loss).abs() <= 1e-5 * loss, "{what}: {} is not {loss}", found.loss);
    let specs = model.parameters();
    let of_adapters = specs.iter().zip(&found.gradients).filter(|((_, spec), _)| spec.adapter.is_some());
    let of_adapters: Vec<HostArray> = of_adapters.map(|(_, gradient)| gradient.clone()).collect();
    let directory = written(&model, &of_adapters);
    let named = WeightsDirectory::open(&directory.path().join("adapter_model.safetensors")).unwrap();
    for tensor in named.names() {
        // The module that holds a magnitude has no name of its own in PEFT's files.
        let of_module = if tensor.ends_with("lora_magnitude_vector") { ".weight" } else { "" };
        let expected = golden.numbers(&format!("gradient.{tensor}{of_module}"));
        let error = relative_error(&named.read(tensor).unwrap().to_f64(), &expected);
        assert!(error <= 1e-4, "{what}: the gradient of `{tensor}` differs by {error:e}");
    }
}

#[test]
fn logits_and_gradients_are_those_of_quantized_weights() {
    for case in CASES {
        for scan in ["scan_layers=true", "scan_layers=false"] {
            check(*case, scan);
        }
    }
}

#[test]
fn tiles_divide_inputs_and_dropout_stays_in_layers() {
    let directory = Directory::open("llama_six_on_two");
    let refused = |keys: &[&str], expected: &[&str]| {
        let keys = with_keys(&[&["lora_rank=3", "lora_alpha=5"], keys].concat());
        let keys: Vec<&str> = keys.iter().map(String::as_str).chain([BASE]).collect();
        let error = mt_models::build_decoder(&directory.group(&keys).unwrap()).unwrap_err().to_string();
        expected.iter().for_each(|text| assert!(error.contains(text), "{error}"));
    };
    refused(
        &["lora_weight_qtype=nf4", "lora_tile_size=16"],
        &[
            "`lora.lora_tile_size` is 16, which does not divide the 24 inputs of `decoder/layers/",
            "such as 8",
        ],
    );
    refused(
        &["lora_dropout=0.1", "lora_module_path=.*(mlp/wo|logits_dense)"],
        &["`lora.lora_dropout` is set, but `decoder/logits_dense` is outside of the layers"],
    );
}
