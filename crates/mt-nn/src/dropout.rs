//! Dropout.

use mt_trace::{Key, Tensor};

/// Sets a share `rate` of the elements to zero and scales the others up (Srivastava et al., 2014).
#[track_caller]
pub fn dropout<'t>(x: Tensor<'t>, rate: f64, key: Key<'t>) -> Tensor<'t> {
    let keep = key.uniform(&x.axes()).greater_equal(rate);
    let zeros = x.region().full(x.dtype(), &[], 0.0);
    keep.select(x * (1.0 / (1.0 - rate)), zeros.broadcast(&x.axes()))
}

/// Whether and how a layer drops activations.
#[derive(Clone, Copy)]
pub enum Dropout<'t> {
    Off,
    /// With the key of the layer; each site draws from a key of its own.
    On {
        rate: f64,
        key: Key<'t>,
    },
}

impl<'t> Dropout<'t> {
    /// Applies dropout at the place named `site`.
    #[track_caller]
    pub fn apply(self, site: &str, x: Tensor<'t>) -> Tensor<'t> {
        match self {
            Self::Off => x,
            Self::On { rate, key } => dropout(x, rate, key.fold_in_name(site)),
        }
    }
}
