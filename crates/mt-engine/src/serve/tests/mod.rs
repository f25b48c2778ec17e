//! Tests of the scheduler with models that cost nothing, and of whole engines.

mod choices;
mod free;
mod models;
mod pages;
mod scheduler;
