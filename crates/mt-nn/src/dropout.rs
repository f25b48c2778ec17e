//! Dropout.

use mt_trace::{Key, Tensor};

use crate::{SequenceOrder, axes::POSITION};

/// Sets a share `rate` of the elements to zero and scales the others up (Srivastava et al., 2014). Which ones follows
/// from the places of tokens, not from the order in which they are stored.
#[track_caller]
pub fn dropout<'t>(x: Tensor<'t>, rate: f64, key: Key<'t>, order: SequenceOrder) -> Tensor<'t> {
    let drawn = key.uniform(&x.axes());
    let drawn = match order {
        // Every device draws all numbers, and brings them into order by itself: otherwise they would be split first, and
        // sent to where they belong.
        SequenceOrder::Paired { .. } if x.has_axis(POSITION) => {
            order.store(drawn, POSITION).constrain(&vec![None; drawn.axes().len()])
        }
        _ => drawn,
    };
    let keep = drawn.greater_equal(rate);
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
        /// Of the tokens of `x`.
        order: SequenceOrder,
    },
}

impl<'t> Dropout<'t> {
    /// Applies dropout at the place named `site`.
    #[track_caller]
    pub fn apply(self, site: &str, x: Tensor<'t>) -> Tensor<'t> {
        match self {
            Self::Off => x,
            Self::On { rate, key, order } => dropout(x, rate, key.fold_in_name(site), order),
        }
    }
}
