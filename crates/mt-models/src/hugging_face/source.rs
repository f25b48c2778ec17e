//! Reads tensors from the files of published models in any supported format.

use std::{ops::Range, path::Path};

use mt_checkpoint::WeightsDirectory;
use mt_shape::{DType, HostArray};

use super::consolidated::{self, ConsolidatedWeights};
use crate::StateError;

/// The files of a published model.
#[derive(Debug)]
pub(super) enum TensorSource {
    Safetensors(WeightsDirectory),
    Consolidated(ConsolidatedWeights),
}

/// Checks that the files of a published model are present and complete, without comparing them with a model.
///
/// # Errors
/// A file is missing, incomplete or cannot be read.
pub fn check_files(path: &Path) -> Result<(), StateError> {
    TensorSource::open(path).map(|_| ())
}

impl TensorSource {
    pub fn open(path: &Path) -> Result<Self, StateError> {
        if consolidated::is_at(path) {
            return ConsolidatedWeights::open(path).map(Self::Consolidated);
        }
        Ok(Self::Safetensors(WeightsDirectory::open(path)?))
    }

    /// The possible names in the files of a tensor whose usual name is `name`, the most probable one first.
    pub fn candidates(&self, name: &str) -> Vec<String> {
        match self {
            Self::Safetensors(_) => prefixed(name).collect(),
            Self::Consolidated(_) => vec![consolidated::own_name(name).unwrap_or_else(|| name.to_owned())],
        }
    }

    /// The names of all tensors in the files.
    pub fn names(&self) -> Vec<&str> {
        match self {
            Self::Safetensors(directory) => directory.names().collect(),
            Self::Consolidated(weights) => weights.names().collect(),
        }
    }

    /// The dimensions of a tensor, by a name in the files.
    pub fn dims(&self, name: &str) -> Option<Vec<usize>> {
        match self {
            Self::Safetensors(directory) => directory.tensor(name).map(|tensor| tensor.dims.clone()),
            Self::Consolidated(weights) => weights.dims(name),
        }
    }

    /// The type of a tensor that cannot be read as floating-point numbers. Quantized weights are useless without their
    /// scales.
    pub fn other_type(&self, name: &str) -> Option<String> {
        let Self::Safetensors(directory) = self else { return None };
        let dtype = &directory.tensor(name)?.dtype;
        (!dtype.known().is_some_and(DType::is_float)).then(|| dtype.to_string())
    }

    /// The element type of a tensor whose file contents have the layout that [`Self::read`] returns; `None` for other
    /// tensors.
    pub fn plain_type(&self, name: &str) -> Option<DType> {
        match self {
            Self::Safetensors(directory) => directory.tensor(name)?.dtype.known(),
            Self::Consolidated(_) => None,
        }
    }

    /// Reads a range of a tensor's elements.
    pub fn read_elements_into(
        &self,
        name: &str,
        elements: Range<usize>,
        bytes: &mut [u8],
    ) -> Result<(), StateError> {
        match self {
            Self::Safetensors(directory) => Ok(directory.read_elements_into(name, elements, bytes)?),
            Self::Consolidated(weights) => {
                let whole = weights.read(name)?;
                let size = whole.dtype().byte_size();
                bytes.copy_from_slice(&whole.bytes()[elements.start * size..elements.end * size]);
                Ok(())
            }
        }
    }

    /// Reads a tensor, by a name in the files.
    pub fn read(&self, name: &str) -> Result<HostArray, StateError> {
        match self {
            Self::Safetensors(directory) => Ok(directory.read(name)?),
            Self::Consolidated(weights) => weights.read(name),
        }
    }
}

/// The names of a tensor in text models and in multimodal models, which nest the text model.
fn prefixed(name: &str) -> impl Iterator<Item = String> {
    let inside = name.strip_prefix("model.");
    let bare = name.strip_prefix("transformer.").map(str::to_owned);
    let nested = inside.map(|rest| format!("model.language_model.{rest}"));
    [name.to_owned(), format!("language_model.{name}")].into_iter().chain(nested).chain(bare)
}
