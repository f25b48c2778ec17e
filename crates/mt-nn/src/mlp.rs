//! MLPs.

use mt_derive::Tree;
use mt_shape::{
    DType, LogicalAxis,
    kernels::{self, attributes},
    logical,
};
use mt_trace::Tensor;

use crate::{
    Dropout, Linear,
    axes::{EMBED, MLP},
};

/// Activation functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    Silu,
    /// The tanh approximation.
    Gelu,
    /// The exact function, with erf.
    GeluExact,
    Relu,
    Sigmoid,
    Linear,
}

impl Activation {
    /// Applies the function to each element.
    #[track_caller]
    pub fn apply(self, x: Tensor<'_>) -> Tensor<'_> {
        match self {
            Self::Silu => x.silu(),
            Self::Gelu => x.gelu_tanh(),
            Self::GeluExact => x * 0.5 * ((x * 0.5_f64.sqrt()).erf() + 1.0),
            Self::Relu => x.relu(),
            Self::Sigmoid => x.sigmoid(),
            Self::Linear => x,
        }
    }

    /// The attribute that selects the function in gated-product kernels, if they support it.
    fn gelu_attribute(self) -> Option<i64> {
        match self {
            Self::Silu => Some(0),
            Self::Gelu => Some(1),
            _ => None,
        }
    }
}

/// The product of two projections after their activation functions.
///
/// # Shapes
/// `[…], […] -> […]`
#[track_caller]
pub fn gated<'t>(activations: [Activation; 2], gate: Tensor<'t>, up: Tensor<'t>) -> Tensor<'t> {
    let [function, Activation::Linear] = activations else {
        return activations[0].apply(gate) * activations[1].apply(up);
    };
    // The kernel knows no named axes.
    let Some(gelu) = function.gelu_attribute().filter(|_| gate.axes() == up.axes()) else {
        return function.apply(gate) * up;
    };
    let [hidden] = gate.region().custom_vjp(
        "gated",
        [gate, up],
        [true, true],
        |_, operands| [gated_by_kernel(function, gelu, operands)],
        |_, operands| ([gated_by_kernel(function, gelu, operands)], operands.to_vec()),
        |_, residuals, [of_hidden]| {
            gradients_by_kernel(function, gelu, &[residuals.as_slice(), &[of_hidden]].concat())
        },
    );
    hidden
}

fn gated_by_kernel<'t>(function: Activation, gelu: i64, operands: [Tensor<'t>; 2]) -> Tensor<'t> {
    operands[0].region().kernel(&kernels::GATED, vec![(attributes::GELU, gelu)], &operands, |_, operands| {
        vec![function.apply(operands[0]) * operands[1]]
    })[0]
}

/// The gradients of both operands. The third operand of the kernel is the gradient of their product.
fn gradients_by_kernel<'t>(function: Activation, gelu: i64, operands: &[Tensor<'t>]) -> Vec<Tensor<'t>> {
    #[derive(Tree)]
    struct Both<L> {
        gate: L,
        up: L,
    }
    operands[0].region().kernel(
        &kernels::GATED_GRADIENT,
        vec![(attributes::GELU, gelu)],
        operands,
        |region, operands| {
            let both = Both { gate: operands[0], up: operands[1] };
            let (_, [], gradients) = region.value_and_grad(&both, |_, both| {
                let weighted = function.apply(both.gate) * both.up * operands[2];
                (weighted.cast(DType::F32).sum_all(), [])
            });
            vec![gradients.gate, gradients.up]
        },
    )
}

/// Applies a function to tensors in `f32` if `in_f32` is set. The result has the type of the tensors.
#[track_caller]
pub(crate) fn in_f32_if<'t, const N: usize>(
    in_f32: bool,
    tensors: [Tensor<'t>; N],
    function: impl FnOnce([Tensor<'t>; N]) -> Tensor<'t>,
) -> Tensor<'t> {
    if !in_f32 {
        return function(tensors);
    }
    let dtype = tensors[0].dtype();
    function(tensors.map(|tensor| tensor.cast(DType::F32))).cast(dtype)
}

/// Logical axes of hidden units.
pub const HIDDEN: [Option<LogicalAxis>; 3] =
    [Some(logical::ACTIVATION_BATCH), Some(logical::ACTIVATION_LENGTH), Some(logical::ACTIVATION_MLP)];

/// An MLP with one or two input projections: `wo(a₀(wi_0 x) · a₁(wi_1 x))`.
#[derive(Clone, Debug, Tree)]
pub struct Mlp<L> {
    pub wi_0: Linear<L>,
    /// Absent in an MLP without a gate.
    pub wi_1: Option<Linear<L>>,
    pub wo: Linear<L>,
}

impl<'t> Mlp<Tensor<'t>> {
    /// Applies the MLP. `activations` has one function for each input projection; with `in_f32` they and their product
    /// are computed in `f32`.
    ///
    /// # Shapes
    /// `[batch, position, embed] -> [batch, position, embed]`
    #[track_caller]
    pub fn forward(
        &self,
        x: Tensor<'t>,
        activations: &[Activation],
        in_f32: bool,
        dropout: Dropout<'t>,
    ) -> Tensor<'t> {
        self.forward_clamped(x, activations, None, in_f32, dropout)
    }

    /// As [`Self::forward`]. With a limit, a gate is at most the limit, and the projection beside it is at most the limit
    /// in magnitude.
    #[track_caller]
    pub fn forward_clamped(
        &self,
        x: Tensor<'t>,
        activations: &[Activation],
        limit: Option<f64>,
        in_f32: bool,
        dropout: Dropout<'t>,
    ) -> Tensor<'t> {
        let project = |linear: &Linear<Tensor<'t>>, name: &str| {
            linear.forward(x, &[EMBED]).constrain(&HIDDEN).named(name)
        };
        let hidden = match &self.wi_1 {
            None => in_f32_if(in_f32, [project(&self.wi_0, "mlpwi")], |[x]| activations[0].apply(x)),
            Some(wi_1) => {
                let (gate, up) = (project(&self.wi_0, "mlpwi_0"), project(wi_1, "mlpwi_1"));
                let both = match limit {
                    Some(limit) => [gate.minimum(limit), up.clamp(-limit, limit)],
                    None => [gate, up],
                };
                in_f32_if(in_f32, both, |[gate, up]| gated([activations[0], activations[1]], gate, up))
            }
        };
        let hidden = dropout.apply("mlp_hidden", hidden);
        let output = self.wo.forward(hidden, &[MLP]).constrain(&[
            Some(logical::ACTIVATION_BATCH),
            Some(logical::ACTIVATION_NORM_LENGTH),
            Some(logical::ACTIVATION_EMBED),
        ]);
        output.named("mlpwo")
    }
}
