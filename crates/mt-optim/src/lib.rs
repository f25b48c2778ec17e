//! Optimizers and schedules.
//!
//! Phase: trace. All functions add operations to a training program; none computes on the host. Parameters, gradients
//! and optimizer state are lists in the same order, so no optimizer knows the model. `mt-trace` is below this crate,
//! `mt-train` above.

#![forbid(unsafe_code)]

mod adafactor;
mod adam;
mod clip;
mod form;
mod muon;
mod optimizer;
mod schedule;
mod spikes;

pub use adafactor::Adafactor;
pub use adam::{Adam, AdamForm};
pub use clip::{clipping_factor, global_norm, gradient_norm, norm};
pub use form::StepForm;
pub use muon::{Muon, NewtonSchulz};
pub use optimizer::{Optimizer, Parameter, Slot, StepInputs, Updated, Values};
pub use schedule::{Schedule, ScheduleShape};
pub use spikes::{History, SpikeGuard};
