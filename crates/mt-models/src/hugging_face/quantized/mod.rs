//! Weights of published models that are quantized, as `quantization_config` in `config.json` describes.
//!
//! | `quant_method` | tensors of a weight `x` | weights |
//! |---|---|---|
//! | `fp8` | `x`, `x_scale_inv` | e4m3 codes; a scale for each block of 128 × 128, or for the tensor |
//! | | `y.weight`, `y.scale` | the same, as DeepSeek-V4 names them; experts may have e2m1 codes, two in a byte, with a scale for 32 adjacent inputs |
//! | `mxfp4` | `x_blocks`, `x_scales` | e2m1 codes, transposed; a power of two for 32 adjacent inputs |
//! | `compressed-tensors` | `x_packed`, `x_scale`, `x_shape` | integers of 4 bits; a scale for each group of inputs |
//!
//! [`PublishedTensors`] shows each such group of tensors as one dense tensor of its name, whose rows are decoded while
//! they are read. Families and tables of tensor names know nothing of quantization.

mod config;
mod decode;
mod patterns;
mod tensors;
#[cfg(test)]
mod tests;

use std::path::Path;

use mt_shape::DType;

pub(super) use config::Quantization;
pub(super) use tensors::PublishedTensors;

use super::{HuggingFaceConfig, description_path};
use crate::ModelError;

/// The quantization of a published model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quantized {
    /// The method, such as `fp8`.
    pub method: &'static str,
    /// The type that `config.json` states for the weights.
    pub dtype: Option<DType>,
}

/// The quantization of the model in a directory; `None` if its weights are not quantized.
///
/// # Errors
/// `config.json` cannot be read, or requires an unsupported quantization.
pub fn quantization_of(directory: &Path) -> Result<Option<Quantized>, ModelError> {
    let Some((config, quantization)) = described(directory)? else { return Ok(None) };
    let name = match config.text("dtype")? {
        Some(name) => Some(name),
        None => config.text("torch_dtype")?,
    };
    let dtype = name.and_then(|name| name.parse().ok());
    Ok(Some(Quantized { method: quantization.method.name(), dtype }))
}

/// The description of a directory's model with its quantization, if it has one.
fn described(directory: &Path) -> Result<Option<(HuggingFaceConfig, Quantization)>, ModelError> {
    let path = description_path(directory);
    // Weights may lie in a directory without a description.
    if !path.is_file() {
        return Ok(None);
    }
    let config = HuggingFaceConfig::read(directory)?;
    let quantization = Quantization::of(&config)?;
    Ok(quantization.map(|quantization| (config, quantization)))
}
