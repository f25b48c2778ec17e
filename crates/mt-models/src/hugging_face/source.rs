//! Where tensors are read from, whatever the files.

use std::path::Path;

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

/// Checks that the files of a published model are there and whole, without a model to compare them with.
///
/// # Errors
/// They are not, or cannot be read.
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

    /// What a tensor that is usually called `name` may be called in the files, the likeliest name first.
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

    /// The type of a tensor, if it is none of floating-point numbers that can be read: quantized weights mean nothing
    /// without their scales.
    pub fn other_type(&self, name: &str) -> Option<String> {
        let Self::Safetensors(directory) = self else { return None };
        let dtype = &directory.tensor(name)?.dtype;
        (!dtype.known().is_some_and(DType::is_float)).then(|| dtype.to_string())
    }

    /// The type of the numbers of a tensor that is plain: it lies in the files in the order in which [`Self::read`] gives it.
    pub fn plain_type(&self, name: &str) -> Option<DType> {
        match self {
            Self::Safetensors(directory) => directory.tensor(name)?.dtype.known(),
            Self::Consolidated(_) => None,
        }
    }

    /// Reads the bytes of a tensor that is plain.
    pub fn read_into(&self, name: &str, bytes: &mut [u8]) -> Result<(), StateError> {
        match self {
            Self::Safetensors(directory) => Ok(directory.read_into(name, bytes)?),
            Self::Consolidated(weights) => {
                bytes.copy_from_slice(weights.read(name)?.bytes());
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

/// Models that also see and hear have the text model inside.
fn prefixed(name: &str) -> impl Iterator<Item = String> {
    let inside = name.strip_prefix("model.");
    let bare = name.strip_prefix("transformer.").map(str::to_owned);
    let nested = inside.map(|rest| format!("model.language_model.{rest}"));
    [name.to_owned(), format!("language_model.{name}")].into_iter().chain(nested).chain(bare)
}
