//! Models, traced and run on the CPU plugin: against reference values, under every way of computing and placing
//! them, and at the checkpoint boundary.

mod consolidated;
mod context;
mod counts;
mod damaged;
mod decode;
mod described;
mod directory;
mod equivalence;
mod families;
mod harness;
mod kernels;
mod length;
mod logical_axes;
mod lookups;
mod placement;
mod reference;
mod remat;
mod training;
mod trees;
mod usual;
