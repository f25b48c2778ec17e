//! Layers shared by all model families.
//!
//! Phase: trace. Layers are plain structs generic over their leaf: `Linear<ParamSpec>` describes parameters,
//! `Linear<Tensor>` computes. They take parameters for what differs between families and never ask which family they
//! serve. Below: `mt-trace`; above: `mt-models`.

#![forbid(unsafe_code)]

pub mod attention;
pub mod axes;
mod dropout;
mod embedding;
mod linear;
mod loss;
mod mlp;
mod norm;
mod order;
mod param;
mod position;
mod rotary;
mod weight;

pub use dropout::{Dropout, dropout};
pub use embedding::Embedding;
pub use linear::Linear;
pub use loss::{TiledHead, TokenLoss, cross_entropy, divisor, narrow_token_loss, token_loss, token_weights};
pub use mlp::{Activation, HIDDEN, Mlp, gated};
pub use norm::{LayerNorm, Norm, NormOptions, RmsNorm, rms_normalize};
pub use order::SequenceOrder;
pub use param::{Initializer, LayerIndex, LayerPlace, ParamSpec, constrain_to_specs, initialize};
pub use position::{PositionTable, sinusoidal_positions};
pub use rotary::{Rotary, RotaryAngles, RotaryExtent, RotaryOptions, RotaryScaling};
pub use weight::{Weight, WeightFormat};
