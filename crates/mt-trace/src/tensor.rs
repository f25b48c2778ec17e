//! The tensor handle.

use std::{fmt, sync::Arc};

use mt_ir::{Op, ShapeError, ValueId};
use mt_shape::{Axis, DType};

use crate::{Region, trace::Trace};

/// A tensor with named axes in a traced program.
///
/// A handle is `Copy`: it names a value and does not hold one. Axes have an order, which determines the layout and the
/// text of programs, but operations find axes by name.
#[derive(Clone, Copy)]
pub struct Tensor<'t> {
    pub(crate) trace: &'t Trace,
    pub(crate) region: u32,
    pub(crate) value: ValueId,
    pub(crate) axes: u32,
}

impl<'t> Tensor<'t> {
    /// The axes, in order.
    pub fn axes(self) -> Arc<[Axis]> {
        self.trace.axes(self.axes)
    }

    /// The axis of this name.
    #[track_caller]
    pub fn axis(self, name: &'static str) -> Axis {
        self.axes()[self.position(name)]
    }

    /// Whether the tensor has an axis of this name.
    pub fn has_axis(self, name: &str) -> bool {
        self.axes().iter().any(|axis| axis.name == name)
    }

    /// The element type.
    #[track_caller]
    pub fn dtype(self) -> DType {
        self.trace.dtype(self)
    }

    /// The region that the tensor belongs to.
    pub fn region(self) -> Region<'t> {
        Region { trace: self.trace, id: self.region }
    }

    /// Runs `body` with `name` added to the scope path, which error messages and profiles show.
    pub fn scope<R>(self, name: &str, body: impl FnOnce(Self) -> R) -> R {
        self.trace.scoped(name, || body(self))
    }

    /// Adds an operation given by its positional description, for code that needs positions. The first operand is the
    /// tensor itself; `axes` are those of each result.
    #[track_caller]
    pub fn apply(self, op: Op, others: &[Self], axes: &[&[Axis]]) -> Vec<Self> {
        let operands = [&[self], others].concat();
        self.trace.emit(op, &operands, self.region(), axes)
    }

    /// As [`Tensor::apply`], for operations with one result.
    #[track_caller]
    pub fn apply_one(self, op: Op, others: &[Self], axes: &[Axis]) -> Self {
        self.apply(op, others, &[axes])[0]
    }

    /// The position of an axis.
    #[track_caller]
    pub(crate) fn position(self, name: &'static str) -> usize {
        let axes = self.axes();
        match axes.iter().position(|axis| axis.name == name) {
            Some(position) => position,
            None => {
                let axes = format!("{axes:?}");
                self.trace.fail("axis", &[self], ShapeError::MissingAxis { axis: name, axes })
            }
        }
    }

    #[track_caller]
    pub(crate) fn positions(self, names: &[&'static str]) -> Vec<usize> {
        let mut positions = Vec::with_capacity(names.len());
        for name in names {
            positions.push(self.position(name));
        }
        positions
    }

    /// The same value under other axes of the same sizes.
    pub(crate) fn with_axes(self, axes: &[Axis]) -> Self {
        self.trace.handle(self.region, self.value, axes)
    }

    pub(crate) fn describe(self) -> String {
        let axes: Vec<String> = self.axes().iter().map(Axis::to_string).collect();
        let dtype = self.trace.known_dtype(self).map(|dtype| dtype.to_string()).unwrap_or_default();
        format!("{dtype}[{}]", axes.join(", "))
    }
}

impl fmt::Debug for Tensor<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.describe())
    }
}
