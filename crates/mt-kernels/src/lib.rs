//! Kernels for CPUs, which compiled programs call where XLA's own code is slower.
//!
//! Phase: run. A kernel is a function over slices and strides; [`handlers`] wraps each as a handler of XLA's foreign
//! function interface, which `mt-runtime` registers with the plugin for CPUs. What a program does instead wherever there
//! are no kernels is StableHLO, printed by `mt-ir`. The instructions are chosen when the program runs: [`Candidate`] lists
//! the kernels for products, [`measure()`] times them, and [`Kernels`] are the chosen ones.
//!
//! Results depend on the number of threads and on the kernels in use at most, never on which thread is faster.

mod amx;
pub mod attention;
mod block;
mod candidates;
mod choice;
mod cross_entropy;
mod dot;
mod element;
mod features;
mod ffi;
mod gate;
mod handlers;
mod largest;
mod measure;
mod normal;
mod optimizer;
mod rms_norm;
mod shared;
mod simd;
mod team;

pub use candidates::{Candidate, KERNEL_SET, Purpose};
pub use choice::{Kernels, Support, Timing, fastest};
pub use cross_entropy::{Cotangents, Targets, cross_entropy, cross_entropy_gradient};
pub use dot::{Arithmetic, Dim, Elements, ElementsMut, Operand, Product, dot, dot_by, dots};
pub use element::Element;
pub use features::{Feature, Features, UnknownFeature};
pub use ffi::Handler;
pub use gate::{Gate, Rows, gated, gated_gradient};
pub use handlers::handlers;
pub use largest::largest;
pub use measure::measure;
pub use normal::{Normal, normal};
pub use optimizer::{AdamNumbers, AdamState, adam, sum_of_squares};
pub use rms_norm::{RmsNorm, rms_norm, rms_norm_gradient};
pub use simd::Instructions;
pub use team::{Alone, ScopedThreads, Team};
