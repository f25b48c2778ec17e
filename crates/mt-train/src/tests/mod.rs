//! Programs of training, run on devices of the CPU.

mod placement;
mod training;
