//! Model families.
//!
//! Phase: trace. [`decoder`] holds what all families share: layers of `mt-nn` wired as a [`decoder::DecoderConfig`]
//! says, scanned or not, with caches. [`families`] says what each family makes of the configuration and what its
//! parameters are called in checkpoints; [`hugging_face`] reads and writes the directories of published models.
//! Everything above sees a [`Model`], which is a list of parameters and functions from tokens to scores.

#![forbid(unsafe_code)]

pub mod decoder;
pub mod families;
mod flops;
pub mod hugging_face;
mod layer_output;
mod model;
mod reader;
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
pub use state::{EXACT_ITEM, StateArray, StateEntries, StateError, parameter_key};
pub use storage::{Affine, StoredParameter, StoredSlice, moment_scale};
