//! The server with a scripted generator, over real connections.

mod client;
mod fuzz;
mod routes;
mod script;
mod shutdown;
mod stress;
