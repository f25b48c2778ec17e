//! End-to-end tests of `maxtext train`: small models, real processes, real files.

mod adapters;
mod batches;
mod bench;
mod chat;
mod compile;
mod conversations;
mod damage;
mod data;
mod data_formats;
mod distill;
mod goodput;
mod kill;
mod learned_maps;
mod mistakes;
mod optimizers;
mod placement;
mod preference;
mod profile;
mod published;
mod refusals;
mod resume;
mod reward;
mod rl;
mod saving;
mod serve;
mod served_adapters;
#[path = "../common/server.rs"]
mod server;
mod sft;
mod stacks;
mod stop;
mod storage;
mod stored_logits;
mod support;
mod training_engine;
mod user_functions;
