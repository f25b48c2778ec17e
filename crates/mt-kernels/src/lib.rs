//! Kernels for CPUs, which compiled programs call where XLA's own code is slower.
//!
//! Phase: run. A kernel is a function over slices and strides; [`handlers`] wraps each as a handler of XLA's foreign
//! function interface, which `mt-runtime` registers with the plugin for CPUs. What a program does instead wherever there
//! are no kernels is StableHLO, printed by `mt-ir`. The instructions are chosen when the program runs.
//!
//! Results depend on the number of threads at most, never on which of them is faster.

mod dot;
mod team;

pub use dot::{Arithmetic, Dim, Elements, ElementsMut, Operand, dot};
pub use team::{Alone, ScopedThreads, Team};
