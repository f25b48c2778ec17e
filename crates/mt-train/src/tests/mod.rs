//! Programs of training, run on devices of the CPU.

mod context;
mod counts;
mod kernels;
mod memory;
mod objective;
mod optimizer_space;
mod optimizers;
mod placement;
mod planned;
mod query_key_clip;
mod restore;
mod training;
