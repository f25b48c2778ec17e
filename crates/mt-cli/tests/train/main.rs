//! `maxtext train` from the outside: small models, real processes, real files.

mod batches;
mod data;
mod kill;
mod mistakes;
mod optimizers;
mod placement;
mod published;
mod resume;
mod stop;
mod support;
