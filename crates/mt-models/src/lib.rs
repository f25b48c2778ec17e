//! Model families.
//!
//! Phase: trace. A family is a folder: `config` reads what the family needs from the configuration, `model` wires
//! shared layers from `mt-nn`, `convert` maps its parameters to the names and layouts of checkpoints. Everything
//! above sees a [`Model`], which is a list of parameters and a function from tokens to logits.

#![forbid(unsafe_code)]

mod flops;
mod hardware;
pub mod llama;
mod model;
mod state;
mod storage;

pub use flops::FlopCount;
pub use hardware::start_runtime;
pub use model::{Cache, CacheSpec, Forward, Model, ModelError, Tokens, build};
pub use state::{EXACT_ITEM, Slot, SlotEntries, StateError, expected_arrays, load_slot, slot_entries};
pub use storage::{StoredParameter, moment_scale};
