//! Weights: the matrices of linear maps and the tables that are looked up, whatever arrays hold them.
//!
//! Layers multiply by a weight and look its rows up, and never see the arrays. A further representation is a variant
//! of [`Weight`] with a file of its own beside this one, and a variant of [`WeightFormat`] that chooses it.

use mt_derive::Tree;
use mt_shape::{Axis, DType};
use mt_trace::Tensor;

use crate::ParamSpec;

/// A matrix or a table, in one of the forms that weights have.
#[derive(Clone, Debug, Tree)]
pub enum Weight<L> {
    /// One array of floating-point numbers.
    Dense(L),
}

/// The form in which a model holds its weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WeightFormat {
    #[default]
    Dense,
}

impl WeightFormat {
    /// The arrays that hold a weight which would be `dense` as one array.
    pub fn specs(self, dense: ParamSpec) -> Weight<ParamSpec> {
        match self {
            Self::Dense => Weight::Dense(dense),
        }
    }
}

impl<L> From<L> for Weight<L> {
    fn from(dense: L) -> Self {
        Self::Dense(dense)
    }
}

impl<'t> Weight<Tensor<'t>> {
    /// Multiplies by the weight in the activation's type and sums over the axes `over`.
    ///
    /// # Shapes
    /// `[…, over], [over, other axes] -> […, other axes]`
    #[track_caller]
    pub fn dot(&self, x: Tensor<'t>, over: &[&'static str]) -> Tensor<'t> {
        match self {
            Self::Dense(weight) => weight.cast(x.dtype()).dot(x, over),
        }
    }

    /// The rows along the leading axis `along`, whose logical name is `logical_axis`, that `indices` name, in the
    /// weight's own type.
    ///
    /// # Shapes
    /// `[along, …], i32[batch, position] -> [batch, position, …]`
    #[track_caller]
    pub fn lookup(&self, along: &'static str, logical_axis: &'static str, indices: Tensor<'t>) -> Tensor<'t> {
        match self {
            Self::Dense(table) => {
                let others = || table.axes().iter().skip(1).map(|_| None).collect::<Vec<_>>();
                // Devices that split the vectors gather them first. Otherwise the partitioner looks up parts of
                // vectors for the tokens of all devices, and exchanges activations.
                let whole_rows = table.constrain(&[vec![Some(logical_axis)], others()].concat());
                // The vectors of a batch are whole, and so are the gradients that are added to rows.
                let batch = vec![Some("activation_batch"), Some("activation_norm_length")];
                // Rows are gathered in the table's own type, so that the gradient's sums over equal tokens are, too.
                whole_rows.take(along, indices).constrain(&[batch, others()].concat())
            }
        }
    }

    /// As [`Self::lookup`], in the type `dtype`, by a product with one-hot vectors: a table that is split along `along`
    /// stays where it is, and its gradient is a product, too, instead of sums scattered over rows.
    ///
    /// # Shapes
    /// `[along, …], i32[batch, position] -> [batch, position, …]`
    #[track_caller]
    pub fn lookup_by_product(&self, along: &'static str, indices: Tensor<'t>, dtype: DType) -> Tensor<'t> {
        let axes = [&*indices.axes(), &[self.axis(along)]].concat();
        let numbers = indices.region().iota(DType::I32, self.axis(along)).broadcast(&axes);
        let rows = self.dot(numbers.equals(indices).cast(dtype), &[along]);
        let batch = [Some("activation_batch"), Some("activation_norm_length")];
        let others = rows.axes().iter().skip(batch.len()).map(|_| None).collect::<Vec<_>>();
        rows.constrain(&[batch.to_vec(), others].concat())
    }

    /// The same weight with one axis split into several.
    #[track_caller]
    pub fn split(&self, axis: &'static str, into: &[Axis]) -> Self {
        match self {
            Self::Dense(weight) => Self::Dense(weight.split(axis, into)),
        }
    }

    /// The axis of this name.
    #[track_caller]
    pub fn axis(&self, name: &'static str) -> Axis {
        match self {
            Self::Dense(weight) => weight.axis(name),
        }
    }
}
