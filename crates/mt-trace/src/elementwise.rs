//! Elementwise operations, comparisons and reductions.

use std::ops;

use mt_ir::{Binary, Comparison, Literal, Memory, Op, Reduction, Scalar, ShapeError, Unary};
use mt_shape::{Axis, DType, HostArray, LogicalAxis, Sharding};

use crate::{
    Region, Tensor,
    trace::{sizes, tensor_type},
};

/// Name of the sharding-constraint operation in messages.
const CONSTRAIN: &str = "constrain";

impl<'t> Region<'t> {
    /// A tensor with the same number in every element.
    #[track_caller]
    pub fn full(self, dtype: DType, axes: &[Axis], value: f64) -> Tensor<'t> {
        let literal = Literal::Splat { ty: tensor_type(dtype, axes), value: Scalar::new(dtype, value) };
        self.trace.emit(Op::Constant(literal), &[], self, &[axes])[0]
    }

    /// An integer scalar, exact for all of `i64`.
    #[track_caller]
    pub fn integer(self, dtype: DType, value: i64) -> Tensor<'t> {
        let literal = Literal::Splat { ty: tensor_type(dtype, &[]), value: Scalar::Int(value) };
        self.trace.emit(Op::Constant(literal), &[], self, &[&[]])[0]
    }

    /// A small constant tensor, such as a table of frequencies.
    #[track_caller]
    pub fn table(self, values: HostArray, axes: &[Axis]) -> Tensor<'t> {
        self.trace.emit(Op::Constant(Literal::Dense(values)), &[], self, &[axes])[0]
    }

    /// The numbers 0, 1, 2, … along an axis.
    #[track_caller]
    pub fn iota(self, dtype: DType, axis: Axis) -> Tensor<'t> {
        let op = Op::Iota { ty: tensor_type(dtype, &[axis]), dimension: 0 };
        self.trace.emit(op, &[], self, &[&[axis]])[0]
    }

    /// Runs `body` with `name` added to the scope path.
    pub fn scope<R>(self, name: &str, body: impl FnOnce() -> R) -> R {
        self.trace.scoped(name, body)
    }
}

macro_rules! unary_methods {
    ($($(#[$doc:meta])* $method:ident => $unary:ident;)*) => {
        impl<'t> Tensor<'t> {
            $($(#[$doc])*
            #[track_caller]
            pub fn $method(self) -> Self {
                self.unary(Unary::$unary)
            })*
        }
    };
}

unary_methods! {
    /// The absolute value.
    abs => Abs;
    /// −1, 0 or 1.
    sign => Sign;
    /// e to the power of each element.
    exp => Exp;
    /// e to the power of each element, minus 1, precise near 0.
    exp_m1 => ExpM1;
    /// The natural logarithm.
    log => Log;
    /// The natural logarithm of 1 plus each element, precise near 0.
    log_1p => Log1p;
    /// The square root.
    sqrt => Sqrt;
    /// The reciprocal of the square root.
    rsqrt => Rsqrt;
    /// The hyperbolic tangent.
    tanh => Tanh;
    /// The logistic function, 1 / (1 + e⁻ˣ).
    sigmoid => Logistic;
    /// The sine.
    sin => Sin;
    /// The cosine.
    cos => Cos;
    /// The largest integer that is not greater.
    floor => Floor;
    /// The smallest integer that is not less.
    ceil => Ceil;
    /// The nearest integer; halves go to the even one.
    round => RoundNearestEven;
    /// The error function.
    erf => Erf;
    /// The inverse of the error function.
    erf_inv => ErfInv;
    /// Whether each element is neither infinite nor NaN.
    is_finite => IsFinite;
    /// The negation of truth values, or of each bit.
    logical_not => Not;
}

macro_rules! binary_methods {
    ($($(#[$doc:meta])* $method:ident => $binary:ident;)*) => {
        impl<'t> Tensor<'t> {
            $($(#[$doc])*
            #[track_caller]
            pub fn $method(self, other: impl Into<Operand<'t>>) -> Self {
                self.binary(Binary::$binary, other.into())
            })*
        }
    };
}

binary_methods! {
    /// The larger of two elements.
    maximum => Maximum;
    /// The smaller of two elements.
    minimum => Minimum;
    /// One element to the power of another.
    power => Power;
    /// The remainder of a division, with the sign of the dividend.
    remainder => Remainder;
    /// Truth of both, or the bits set in both.
    logical_and => And;
    /// Truth of either, or the bits set in either.
    logical_or => Or;
    /// Truth of exactly one, or the bits set in exactly one.
    logical_xor => Xor;
    /// Shifts bits towards the higher ones.
    shift_left => ShiftLeft;
    /// Shifts bits towards the lower ones and fills with zeros.
    shift_right => ShiftRightLogical;
}

macro_rules! comparison_methods {
    ($($(#[$doc:meta])* $method:ident => $comparison:ident;)*) => {
        impl<'t> Tensor<'t> {
            $($(#[$doc])*
            #[track_caller]
            pub fn $method(self, other: impl Into<Operand<'t>>) -> Self {
                let (lhs, rhs) = self.aligned(stringify!($method), other.into());
                lhs.apply_one(Op::Compare(Comparison::$comparison), &[rhs], &lhs.axes())
            })*
        }
    };
}

comparison_methods! {
    /// Whether elements are equal.
    equals => Equal;
    /// Whether elements differ.
    differs => NotEqual;
    /// Whether elements are less.
    less => Less;
    /// Whether elements are less or equal.
    less_equal => LessEqual;
    /// Whether elements are greater.
    greater => Greater;
    /// Whether elements are greater or equal.
    greater_equal => GreaterEqual;
}

/// The right side of an operator: a tensor, or a number that takes the left side's type and axes.
#[derive(Clone, Copy)]
pub enum Operand<'t> {
    Tensor(Tensor<'t>),
    Number(f64),
}

impl<'t> From<Tensor<'t>> for Operand<'t> {
    fn from(tensor: Tensor<'t>) -> Self {
        Self::Tensor(tensor)
    }
}

impl From<f64> for Operand<'_> {
    fn from(number: f64) -> Self {
        Self::Number(number)
    }
}

impl<'t> Tensor<'t> {
    #[track_caller]
    fn unary(self, unary: Unary) -> Self {
        self.apply_one(Op::Unary(unary), &[], &self.axes())
    }

    #[track_caller]
    fn binary(self, binary: Binary, other: Operand<'t>) -> Self {
        let (lhs, rhs) = self.aligned(binary.mnemonic(), other);
        lhs.apply_one(Op::Binary(binary), &[rhs], &lhs.axes())
    }

    /// Both operands with the same axes in the same order. The axes of one operand must include those of the other, so
    /// the axes of a result are never guessed. The order is that of the operand with more axes; if both have the same
    /// axes, that of the left one.
    #[track_caller]
    pub(crate) fn aligned(self, operation: &str, other: Operand<'t>) -> (Self, Self) {
        let other = match other {
            Operand::Tensor(other) => other,
            Operand::Number(number) => {
                let number = self.region().full(self.dtype(), &[], number);
                return (self, number.broadcast(&self.axes()));
            }
        };
        let (own, others) = (self.axes(), other.axes());
        for axis in own.iter() {
            if let Some(same) = others.iter().find(|other| other.name == axis.name && other.size != axis.size)
            {
                let error = ShapeError::AxisMismatch { axis: axis.name, lhs: axis.size, rhs: same.size };
                self.trace.fail(operation, &[self, other], error);
            }
        }
        if others.iter().all(|axis| own.contains(axis)) {
            (self, other.broadcast(&own))
        } else if own.iter().all(|axis| others.contains(axis)) {
            (self.broadcast(&others), other)
        } else {
            let missing = others.iter().find(|axis| !own.contains(axis)).expect("checked above");
            let axes = format!("{own:?}");
            self.trace.fail(operation, &[self, other], ShapeError::MissingAxis { axis: missing.name, axes })
        }
    }

    /// `x · σ(x)`.
    #[track_caller]
    pub fn silu(self) -> Self {
        self * self.sigmoid()
    }

    /// The Gaussian error linear unit by its tanh approximation.
    #[track_caller]
    pub fn gelu_tanh(self) -> Self {
        let inner = (self + self * self * self * 0.044_715) * (2.0 / std::f64::consts::PI).sqrt();
        self * 0.5 * (inner.tanh() + 1.0)
    }

    /// `log(1 + eˣ)`.
    #[track_caller]
    pub fn softplus(self) -> Self {
        self.maximum(0.0) + (-self.abs()).exp().log_1p()
    }

    /// `max(x, 0)`.
    #[track_caller]
    pub fn relu(self) -> Self {
        self.maximum(0.0)
    }

    /// `x²`.
    #[track_caller]
    pub fn square(self) -> Self {
        self * self
    }

    /// Selects the element of `if_true` where the condition holds, and that of `if_false` elsewhere. Axes follow the
    /// rules of operators, applied to all three operands.
    #[track_caller]
    pub fn select(self, if_true: impl Into<Operand<'t>>, if_false: Tensor<'t>) -> Self {
        let (if_false, if_true) = if_false.aligned("select", if_true.into());
        let (condition, if_true) = self.aligned("select", if_true.into());
        let (_, if_false) = if_true.aligned("select", if_false.into());
        condition.apply_one(Op::Select, &[if_true, if_false], &if_true.axes())
    }

    /// Elements limited to `minimum..=maximum`.
    #[track_caller]
    pub fn clamp(self, minimum: f64, maximum: f64) -> Self {
        let dtype = self.dtype();
        let minimum = self.region().full(dtype, &[], minimum);
        let maximum = self.region().full(dtype, &[], maximum);
        minimum.apply_one(Op::Clamp, &[self, maximum], &self.axes())
    }

    /// Elements in another type; the tensor itself if it has that type.
    #[track_caller]
    pub fn cast(self, dtype: DType) -> Self {
        if self.dtype() == dtype { self } else { self.apply_one(Op::Convert(dtype), &[], &self.axes()) }
    }

    /// The same bits as another type of the same size.
    #[track_caller]
    pub fn bitcast(self, dtype: DType) -> Self {
        self.apply_one(Op::Bitcast(dtype), &[], &self.axes())
    }

    #[track_caller]
    fn reduce(self, kind: Reduction, over: &[&'static str]) -> Self {
        if over.is_empty() {
            return self;
        }
        let dimensions = self.positions(over);
        let axes: Vec<Axis> = self.axes().iter().filter(|axis| !over.contains(&axis.name)).copied().collect();
        self.apply_one(Op::Reduce { kind, dimensions }, &[], &axes)
    }

    /// The sum over axes.
    #[track_caller]
    pub fn sum(self, over: &[&'static str]) -> Self {
        self.reduce(Reduction::Sum, over)
    }

    /// The sum over all axes.
    #[track_caller]
    pub fn sum_all(self) -> Self {
        let names: Vec<&'static str> = self.axes().iter().map(|axis| axis.name).collect();
        self.sum(&names)
    }

    /// The mean over axes.
    #[track_caller]
    pub fn mean(self, over: &[&'static str]) -> Self {
        let axes = self.axes();
        let count: usize = self.positions(over).into_iter().map(|position| axes[position].size).product();
        self.sum(over) * (1.0 / count as f64)
    }

    /// The product over axes.
    #[track_caller]
    pub fn product(self, over: &[&'static str]) -> Self {
        self.reduce(Reduction::Product, over)
    }

    /// The largest element over axes.
    #[track_caller]
    pub fn max(self, over: &[&'static str]) -> Self {
        self.reduce(Reduction::Maximum, over)
    }

    /// The smallest element over axes.
    #[track_caller]
    pub fn min(self, over: &[&'static str]) -> Self {
        self.reduce(Reduction::Minimum, over)
    }

    /// Whether all truth values over axes are set.
    #[track_caller]
    pub fn all(self, over: &[&'static str]) -> Self {
        self.reduce(Reduction::And, over)
    }

    /// Whether any truth value over axes is set.
    #[track_caller]
    pub fn any(self, over: &[&'static str]) -> Self {
        self.reduce(Reduction::Or, over)
    }

    /// Running sums along an axis, each including its own element.
    #[track_caller]
    pub fn cumulative_sum(self, along: &'static str) -> Self {
        let op = Op::CumulativeSum { dimension: self.position(along), reverse: false };
        self.apply_one(op, &[], &self.axes())
    }

    /// Softmax over an axis, in the tensor's type.
    #[track_caller]
    pub fn softmax(self, over: &'static str) -> Self {
        let shifted = (self - self.max(&[over]).stop_gradient()).exp();
        shifted / shifted.sum(&[over])
    }

    /// The logarithm of the sum over an axis of e to the power of each element.
    #[track_caller]
    pub fn log_sum_exp(self, over: &'static str) -> Self {
        let largest = self.max(&[over]).stop_gradient();
        (self - largest).exp().sum(&[over]).log() + largest
    }

    /// The identity, which blocks gradients.
    #[track_caller]
    pub fn stop_gradient(self) -> Self {
        self.apply_one(Op::StopGradient, &[], &self.axes())
    }

    /// The identity; names the tensor so that remat policies can refer to it, such as `query_proj`.
    #[track_caller]
    pub fn named(self, name: &str) -> Self {
        if self.trace.last_operation(self) == Some(CONSTRAIN) {
            self.trace.placement.name_last_value(name);
        }
        self.apply_one(Op::Name(name.into()), &[], &self.axes())
    }

    /// The tensor in another memory of its devices. Its gradient is computed on the device in any case.
    #[track_caller]
    pub fn moved_to(self, memory: Memory) -> Self {
        self.apply_one(Op::Transfer(memory), &[], &self.axes())
    }

    /// Constrains the tensor's sharding: for each axis, in order, its logical name, or `None` for an axis that is never
    /// split.
    #[track_caller]
    pub fn constrain(self, logical_axes: &[Option<LogicalAxis>]) -> Self {
        let Some(spec) = self.placed_by(CONSTRAIN, logical_axes) else { return self };
        let axes = self.axes();
        let scope = self.trace.scope();
        let made_by = self.trace.last_operation(self).unwrap_or("argument");
        let made_by = made_by.trim_start_matches("stablehlo.");
        self.trace.placement.note_value((&scope, made_by), self.dtype(), logical_axes, &sizes(&axes), &spec);
        self.apply_one(Op::Constrain(spec), &[], &axes)
    }

    /// Constrains the tensor to a sharding that logical axes alone do not express.
    #[track_caller]
    pub fn constrain_to(self, sharding: &Sharding) -> Self {
        if sharding.mesh.num_devices() == 1 {
            return self;
        }
        self.apply_one(Op::Constrain(sharding.spec.clone()), &[], &self.axes())
    }
}

macro_rules! operators {
    ($($trait:ident, $method:ident, $binary:ident;)*) => {$(
        impl<'t, T: Into<Operand<'t>>> ops::$trait<T> for Tensor<'t> {
            type Output = Self;

            #[track_caller]
            fn $method(self, other: T) -> Self {
                self.binary(Binary::$binary, other.into())
            }
        }
    )*};
}

operators! {
    Add, add, Add;
    Sub, sub, Subtract;
    Mul, mul, Multiply;
    Div, div, Divide;
}

impl ops::Neg for Tensor<'_> {
    type Output = Self;

    #[track_caller]
    fn neg(self) -> Self {
        self.unary(Unary::Negate)
    }
}
