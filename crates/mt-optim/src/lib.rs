//! Optimizers and schedules.
//!
//! Phase: trace. Everything here adds operations to a training program; nothing is computed on the host. Parameters,
//! gradients and optimizer state are lists in one order, so that no optimizer knows the model. Below: `mt-trace`;
//! above: `mt-train`.

#![forbid(unsafe_code)]

mod adamw;
mod clip;
mod optimizer;
mod schedule;

pub use adamw::AdamW;
pub use clip::{clip_by_global_norm, global_norm};
pub use optimizer::{Optimizer, Parameter, Slot, Values};
pub use schedule::WarmupCosine;
