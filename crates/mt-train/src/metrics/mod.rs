//! What a run reports about itself, and where it goes.
//!
//! The loop turns its measurements into records ([`StepMeasurements::record`], [`EvaluationMeasurements::record`])
//! and hands them to a [`MetricLogger`], whose thread writes them to
//!
//! - the run's observer, as events;
//! - a file of JSON lines, one object a record, with each step exactly once however often the run was killed;
//! - TensorBoard event files;
//! - an SVG picture of the loss curves.
//!
//! Logging never delays a step; [`MetricLogger::flush`] is the barrier that a checkpoint waits for before it is
//! committed.

mod chart;
mod error;
mod files;
mod json_lines;
mod logger;
pub mod names;
mod record;
mod tensorboard;

pub use error::MetricsError;
pub use logger::{MetricBarrier, MetricLogger, MetricLoggerOptions};
pub use record::{EvaluationMeasurements, EvaluationRecord, Metrics, StepMeasurements, StepRecord};
