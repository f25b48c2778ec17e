//! End-to-end tests of `maxtext train`: small models, real processes, real files.

mod batches;
mod compile;
mod conversations;
mod data;
mod goodput;
mod kill;
mod mistakes;
mod optimizers;
mod placement;
mod profile;
mod published;
mod refusals;
mod resume;
mod stacks;
mod stop;
mod support;
mod training_engine;
