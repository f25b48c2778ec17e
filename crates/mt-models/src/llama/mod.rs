//! Pre-norm decoders with rotary grouped-query attention and gated feed-forward layers: Llama 2 and its like
//! (Touvron et al., 2023).

mod config;
mod convert;
mod model;

pub use config::LlamaConfig;
pub use model::{Decoder, DecoderLayer, Layers, Llama};
