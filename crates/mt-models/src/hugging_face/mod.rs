//! Hugging Face's directories: what their `config.json` means, and where parameters are in their files.

mod config;
mod consolidated;
mod exported;
mod source;
mod tensors;
mod weights;

pub use config::{HuggingFaceConfig, Settings, description_path, settings_of};
pub(crate) use config::{common, gemma, layer_types, settings_in};
pub use exported::{check_described, config_of, context_length};
pub(crate) use exported::{common_config, layer_type_names, window, windows_and_caps};
pub use source::check_files;
pub use tensors::{FileTensor, TensorPart, file_tensors, parameter_part, tensor_bytes};
pub use weights::{Weights, generation_config, is_hugging_face, write_weights};
