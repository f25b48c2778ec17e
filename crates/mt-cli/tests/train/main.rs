//! `maxtext train` from the outside: small models, real processes, real files.

mod batches;
mod compile;
mod data;
mod kill;
mod mistakes;
mod optimizers;
mod placement;
mod published;
mod refusals;
mod resume;
mod stop;
mod support;
