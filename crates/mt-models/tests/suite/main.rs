//! Models traced and run on the CPU plugin: compared with reference values, in all ways to compute and place them, and
//! converted to and from checkpoints.

mod compressed;
mod consolidated;
mod context;
mod counts;
mod damaged;
mod decode;
mod described;
mod directory;
mod engram;
mod envy;
mod equivalence;
mod families;
mod formats;
mod harness;
mod hybrid;
mod hyper_connections;
mod indexer;
mod kernels;
mod layer_options;
mod length;
mod logical_axes;
mod lookups;
mod placement;
mod prediction;
mod quantized;
mod reference;
mod remat;
mod saved;
mod statistics;
mod training;
mod trees;
mod usual;
