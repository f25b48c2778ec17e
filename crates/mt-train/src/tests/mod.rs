//! Programs of training, run on devices of the CPU.

mod objective;
mod placement;
mod training;
