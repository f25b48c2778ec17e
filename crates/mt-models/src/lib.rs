//! Model families.
//!
//! Phase: trace. [`decoder`] holds the code that all families share: layers of `mt-nn`, wired as a
//! [`decoder::DecoderConfig`] describes, scanned or unrolled, with caches. [`families`] turns the configuration into
//! each family's description and names its parameters in checkpoints. [`hugging_face`] reads and writes the directories
//! of published models. Crates above see a [`Model`]: a list of parameters and functions from tokens to logits.

#![forbid(unsafe_code)]

pub mod decoder;
mod encoded;
pub mod families;
mod flops;
pub mod hugging_face;
mod layer_output;
mod model;
mod ranges;
mod reader;
mod saved;
mod state;
mod storage;

pub use families::build_decoder;
pub use flops::{AttentionFlops, FlopCount};
pub use layer_output::{LayerOutput, OfLayers, OutputLabel, Reduce, ScoreWeights, statistics};
pub use model::{
    Description, Forward, ForwardPass, GenerationState, Hidden, Kept, Model, ModelError, StateSpec, Storage,
    Tokens, build,
};
pub use reader::{StateReader, check_parameters, load_parameters};
pub use saved::{ArrayUse, LoadedParameters, SavedParameters};
pub use state::{EXACT_ITEM, StateArray, StateEntries, StateError, parameter_key};
pub use storage::{Affine, StoredParameter, StoredSlice, moment_scale};
