//! Runs layers on the CPU plugin and compares them with reference values and with each other.

mod adapter_dropout;
mod attention;
mod attention_kernels;
mod cache;
mod context;
mod dropout;
mod embedding;
mod engram;
mod experts;
mod following;
mod gate;
mod gated_delta;
mod harness;
mod hyper_connections;
mod init;
mod loss;
mod norm;
mod reference;
mod reference_attention;
mod reference_rotary;
mod row_adapters;
mod tpu_kernels;
