//! Dot products by axis name.

use mt_ir::{Dot, Op, Precision, ShapeError};
use mt_shape::{Axis, DType};

use crate::Tensor;

impl<'t> Tensor<'t> {
    /// Multiplies an activation by this weight and contracts the axes `over`.
    ///
    /// The activation stays on the left: the result has its remaining axes first, then the weight's.
    #[track_caller]
    pub fn dot(self, activation: Self, over: &[&'static str]) -> Self {
        activation.contract(self, over)
    }

    /// Multiplies two tensors and contracts the axes `over`. Other shared axes are batch axes.
    ///
    /// The result has batch axes first, then this tensor's other axes, then the other tensor's; its type is that of the
    /// operands.
    #[track_caller]
    pub fn contract(self, other: Self, over: &[&'static str]) -> Self {
        self.contract_into(other, over, self.dtype())
    }

    /// As [`Tensor::contract`], with a result of type `result`.
    #[track_caller]
    pub fn contract_into(self, other: Self, over: &[&'static str], result: DType) -> Self {
        self.contracted(other, over, result, Precision::Default)
    }

    /// As [`Tensor::contract`], with at least this precision.
    #[track_caller]
    pub fn contract_at(self, other: Self, over: &[&'static str], precision: Precision) -> Self {
        self.contracted(other, over, self.dtype(), precision)
    }

    #[track_caller]
    fn contracted(self, other: Self, over: &[&'static str], result: DType, precision: Precision) -> Self {
        let (lhs, rhs) = (self.axes(), other.axes());
        for axis in lhs.iter() {
            if let Some(same) = rhs.iter().find(|other| other.name == axis.name && other.size != axis.size) {
                let error = ShapeError::AxisMismatch { axis: axis.name, lhs: axis.size, rhs: same.size };
                self.trace.fail("contract", &[self, other], error);
            }
        }
        let is_batch = |axis: &&Axis| rhs.contains(axis) && !over.contains(&axis.name);
        let batch: Vec<Axis> = lhs.iter().filter(is_batch).copied().collect();
        let batch_names: Vec<&'static str> = batch.iter().map(|axis| axis.name).collect();
        let is_free = |axis: &&Axis| !over.contains(&axis.name) && !batch_names.contains(&axis.name);
        let axes: Vec<Axis> = batch
            .iter()
            .chain(lhs.iter().filter(is_free))
            .chain(rhs.iter().filter(is_free))
            .copied()
            .collect();
        let dot = Dot {
            lhs_batch: self.positions(&batch_names),
            rhs_batch: other.positions(&batch_names),
            lhs_contract: self.positions(over),
            rhs_contract: other.positions(over),
            result,
            precision,
            may_round: false,
        };
        self.apply_one(Op::Dot(dot), &[other], &axes)
    }
}
