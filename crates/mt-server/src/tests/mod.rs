//! The server with a scripted generator, over real connections.

mod adapters;
mod client;
mod contracts;
mod embeddings;
mod fuzz;
mod limits;
mod marathon;
mod mutation;
mod routes;
mod script;
mod shutdown;
mod stress;
