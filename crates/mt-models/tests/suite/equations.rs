//! Whole models, compared with programs that follow the equations of their papers in float64.

use std::sync::Arc;

use mt_models::{Forward, ForwardPass, Model};
use mt_nn::{LayerPlace, ParamSpec};
use mt_shape::{DType, HostArray, Path, Placement};
use mt_trace::program;

use crate::harness::{Batch, Golden, declare, declare_batch, decoder, golden, largest_error, options, run};

/// Compares the logits of a model, and of its modules that predict further tokens, with those of a golden.
#[track_caller]
pub fn check(name: &str, keys: &[&str], num_modules: usize) {
    let golden = golden(&format!("{name}.safetensors"));
    let mut batch = Batch::packed(&[&[5, 8], &[13]], 13, 2);
    batch.arrays[0] = golden.array("tokens");
    for scan in ["scan_layers=true", "scan_layers=false"] {
        let model = decoder(&[keys, &[scan]].concat());
        let specs = model.parameters();
        let program = program(&options("logits", Arc::new(Placement::single())), |inputs| {
            let parameters = declare(inputs, "params", &specs, false);
            let (tokens, [targets, segmentation]) = declare_batch(inputs, 2, 13);
            let forward = Forward { predictions: true, ..Forward::default() };
            let hidden = model.hidden(&parameters, tokens, forward);
            // All arguments stay in use.
            let unused = (targets + segmentation).sum_all().cast(DType::F32) * 0.0;
            let all = [hidden.hidden].into_iter().chain(hidden.predictions);
            all.map(|hidden| inputs.replicated("logits", model.head(&parameters, hidden) + unused)).collect()
        })
        .unwrap();
        let given = parameters(&model, &golden);
        let made = run(&program, &[given.as_slice(), &batch.arrays].concat());
        assert_eq!(made.len(), 1 + num_modules);
        for (index, logits) in made.iter().enumerate() {
            let expected = golden.array(&format!("logits_{index}"));
            let error = largest_error(&logits.to_f64(), &expected.to_f64());
            assert!(error <= 1e-4, "{name}, {scan}: logits {index} differ by {error:e} deviations");
        }
    }
}

/// A model's parameters from the tensors of a golden, which have the names of parameters, and of layers' parameters
/// behind the layer's number.
pub fn parameters(model: &dyn Model, golden: &Golden) -> Vec<HostArray> {
    let of_parameter = |(path, spec): &(Path, ParamSpec)| {
        let of_layer = |layer: usize| golden.array(&format!("{layer}.{}", spec.role));
        let layers = match spec.place {
            LayerPlace::None => vec![golden.array(&path.to_string())],
            LayerPlace::One(layer) => vec![of_layer(layer)],
            LayerPlace::Stacked { first, step } => {
                (0..spec.dims()[0]).map(|index| of_layer(first + index * step)).collect()
            }
        };
        let values: Vec<f32> =
            layers.iter().flat_map(|array| array.as_slice::<f32>().unwrap()).copied().collect();
        HostArray::from_slice(DType::F32, &spec.dims(), &values).unwrap()
    };
    model.parameters().iter().map(of_parameter).collect()
}
