//! Names and layouts of parameters in MaxText's checkpoints.

use mt_nn::ParamSpec;
use mt_shape::{Path, Tree};

use super::{Decoder, LlamaConfig};
use crate::StoredParameter;

/// The stored form of each parameter. Fields already have MaxText's names; what differs is how layers are named, where
/// the axis of scanned layers is, and that query kernels hold attention's scale.
pub(super) fn storage(config: &LlamaConfig, specs: &Decoder<ParamSpec>) -> Vec<StoredParameter> {
    specs
        .leaves()
        .iter()
        .map(|(path, spec)| {
            let is_stacked =
                spec.axes.first() == Some(&config.layers) && spec.layer.is_none() && in_layers(path);
            // Vectors have fewer axes than the configured position may ask for.
            let layer_axis = is_stacked.then(|| config.param_scan_axis.min(spec.axes.len() - 1));
            let is_query = path.segments().iter().any(|segment| segment == "query");
            StoredParameter {
                key: key(path),
                layer_axis,
                scale: if is_query { config.attention.scale } else { 1.0 },
            }
        })
        .collect()
}

fn in_layers(path: &Path) -> bool {
    path.segments().iter().any(|segment| segment == "layers")
}

/// `decoder.layers.3.mlp` is stored as `decoder.layers_3.mlp`.
fn key(path: &Path) -> Vec<String> {
    let mut key: Vec<String> = Vec::new();
    for segment in path.segments() {
        match key.last_mut() {
            Some(last) if last == "layers" && segment.parse::<usize>().is_ok() => {
                *last = format!("layers_{segment}")
            }
            _ => key.push(segment.clone()),
        }
    }
    key
}
