//! Programs of training, run on devices of the CPU.

mod context;
mod counts;
mod memory;
mod objective;
mod optimizers;
mod placement;
mod restore;
mod training;
