//! CPU kernels that compiled programs call where XLA's own code is slower.
//!
//! Phase: run. A kernel is a function over slices and strides. [`handlers`] wraps each kernel as a handler of XLA's
//! foreign function interface, which `mt-runtime` registers with the CPU plugin. On every other platform the same
//! program runs StableHLO that `mt-ir` prints. Instructions are chosen at run time: [`Candidate`] lists the kernels for
//! matrix products, [`measure()`] times them, and [`Kernels`] holds the chosen ones.
//!
//! Results may depend on the number of threads and on the chosen kernels, never on the order in which threads finish.

mod amx;
pub mod attention;
mod block;
mod buffer_element;
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
mod update_slice;

pub use candidates::{Candidate, KERNEL_SET, Purpose};
pub use choice::{Kernels, Support, Timing, fastest};
pub use cross_entropy::{Cotangents, Targets, cross_entropy, cross_entropy_gradient};
pub use dot::{
    Arithmetic, Dim, Elements, ElementsMut, Operand, Product, dot, dot_by, dots, invariant_dot_by,
    invariant_dots,
};
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
