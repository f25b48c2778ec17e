//! Parameters and training state in checkpoints and files: layouts, reading, and the form in which they are written.

pub(crate) mod encoded;
mod layout;
pub(crate) mod ranges;
mod reader;
mod saved;
pub(crate) mod state;

use crate::{Model, ModelError, hugging_face::FileTensor};

pub use layout::{Affine, StoredParameter, StoredSlice, moment_scale};
pub use reader::{StateReader, check_parameters, load_parameters};
pub use saved::{ArrayUse, LoadedParameters, SavedParameters};
pub use state::{EXACT_ITEM, StateArray, StateEntries, StateError, parameter_key};

/// The storage of a model's parameters in MaxText's checkpoints and in Hugging Face's files.
pub trait Storage {
    /// How each parameter is stored in MaxText's checkpoints, in the same order. Arrays of one encoded weight are stored as
    /// one array.
    fn storage(&self) -> Vec<StoredParameter>;

    /// The same model with the other value of `scan_layers`, if it supports that.
    fn otherwise_scanned(&self) -> Option<Box<dyn Model>>;

    /// The tensors of Hugging Face's files that hold the parameters.
    ///
    /// # Errors
    /// The model's family has no Hugging Face format.
    fn file_tensors(&self) -> Result<Vec<FileTensor>, ModelError>;

    /// Other names that Hugging Face's files may have for the tensor that is written under this name.
    fn other_names(&self, name: &str) -> Vec<String>;

    /// Whether a tensor of Hugging Face's files is known but not needed, such as the output matrix of a tied head.
    fn ignores_tensor(&self, name: &str) -> bool;
}
