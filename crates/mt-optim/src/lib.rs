//! Optimizers and schedules.
