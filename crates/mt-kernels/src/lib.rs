//! Kernels for CPUs, which compiled programs call where XLA's own code is slower.
//!
//! Phase: run. A kernel is a function over slices and strides; [`handlers`] wraps each as a handler of XLA's foreign
//! function interface, which `mt-runtime` registers with the plugin for CPUs. What a program does instead wherever there
//! are no kernels is StableHLO, printed by `mt-ir`. The instructions are chosen when the program runs.
//!
//! Results depend on the number of threads at most, never on which of them is faster.

pub mod attention;
mod block;
mod cross_entropy;
mod dot;
mod element;
mod ffi;
mod gate;
mod handlers;
mod largest;
mod normal;
mod optimizer;
mod shared;
mod simd;
mod team;

pub use cross_entropy::{Cotangents, Targets, cross_entropy, cross_entropy_gradient};
pub use dot::{Arithmetic, Dim, Elements, ElementsMut, Operand, Product, dot, dots};
pub use element::Element;
pub use ffi::Handler;
pub use gate::{Gate, Rows, gated, gated_gradient};
pub use handlers::handlers;
pub use largest::largest;
pub use normal::{Normal, normal};
pub use optimizer::{AdamNumbers, AdamState, adam, sum_of_squares};
pub use simd::Instructions;
pub use team::{Alone, ScopedThreads, Team};

/// The types for which kernels are faster than XLA on this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Support {
    pub f32: bool,
    pub bf16: bool,
}

/// What the machine's processor has instructions for.
pub fn support() -> Support {
    #[cfg(target_arch = "x86_64")]
    {
        let wide = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw");
        let f32 = wide || (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"));
        Support { f32, bf16: wide && is_x86_feature_detected!("avx512bf16") }
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        Support { f32: false, bf16: false }
    }
}
