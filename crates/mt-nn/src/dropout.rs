//! Dropout.

use mt_trace::{Key, Tensor};

use crate::{
    SequenceOrder,
    axes::{KV_POSITION, POSITION},
};

/// Sets a fraction `rate` of the elements to zero and scales the others up (Srivastava et al., 2014). The choice
/// depends on the places of tokens, not on the order in which they are stored.
#[track_caller]
pub fn dropout<'t>(x: Tensor<'t>, rate: f64, key: Key<'t>, order: SequenceOrder) -> Tensor<'t> {
    let drawn = key.uniform(&x.axes());
    let of_tokens = [POSITION, KV_POSITION].into_iter().filter(|axis| x.has_axis(axis));
    let drawn = match order {
        SequenceOrder::AsRead => drawn,
        // Every device draws all random numbers and permutes them locally. Otherwise the partitioner would split them
        // first and exchange them between devices.
        SequenceOrder::Paired { .. } => of_tokens
            .fold(drawn, |drawn, axis| order.store(drawn, axis).constrain(&vec![None; drawn.axes().len()])),
    };
    let keep = drawn.greater_equal(rate);
    let zeros = x.region().full(x.dtype(), &[], 0.0);
    keep.select(x * (1.0 / (1.0 - rate)), zeros.broadcast(&x.axes()))
}

/// The dropout of a layer.
#[derive(Clone, Copy, Default)]
pub enum Dropout<'t> {
    #[default]
    Off,
    /// Dropout with the layer's key. Each site derives its own key from it.
    On {
        rate: f64,
        key: Key<'t>,
        /// The order in which the tokens of activations are stored.
        order: SequenceOrder,
    },
}

impl<'t> Dropout<'t> {
    /// Whether elements are set to zero.
    pub fn is_on(self) -> bool {
        matches!(self, Self::On { .. })
    }

    /// The dropout of a module of the layer, whose sites have keys of their own.
    #[must_use]
    pub fn within(self, module: &str) -> Self {
        match self {
            Self::Off => self,
            Self::On { rate, key, order } => Self::On { rate, key: key.fold_in_name(module), order },
        }
    }

    /// Applies dropout at the site named `site`.
    #[track_caller]
    pub fn apply(self, site: &str, x: Tensor<'t>) -> Tensor<'t> {
        match self {
            Self::Off => x,
            Self::On { rate, key, order } => dropout(x, rate, key.fold_in_name(site), order),
        }
    }
}
