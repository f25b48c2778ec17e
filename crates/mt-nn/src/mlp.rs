//! Feed-forward layers.

use mt_derive::Tree;
use mt_trace::Tensor;

use crate::{
    Dropout, Linear,
    axes::{EMBED, MLP},
};

/// The functions that gates apply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    Silu,
    /// By its tanh approximation.
    Gelu,
    /// By the error function.
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
}

/// Where hidden units are placed.
pub const HIDDEN: [Option<&str>; 3] =
    [Some("activation_batch"), Some("activation_length"), Some("activation_mlp")];

/// A feed-forward layer whose hidden units are products of one or two projections: `wo(a₀(wi_0 x) · a₁(wi_1 x))`.
#[derive(Clone, Debug, Tree)]
pub struct Mlp<L> {
    pub wi_0: Linear<L>,
    /// Absent in a layer without a gate.
    pub wi_1: Option<Linear<L>>,
    pub wo: Linear<L>,
}

impl<'t> Mlp<Tensor<'t>> {
    /// Applies the layer; `activations` has one function for each projection.
    ///
    /// # Shapes
    /// `[batch, position, embed] -> [batch, position, embed]`
    #[track_caller]
    pub fn forward(&self, x: Tensor<'t>, activations: &[Activation], dropout: Dropout<'t>) -> Tensor<'t> {
        let project = |linear: &Linear<Tensor<'t>>, name: &str, activation: Activation| {
            let hidden = linear.forward(x, &[EMBED]).constrain(&HIDDEN);
            activation.apply(hidden.named(name))
        };
        let first = if self.wi_1.is_some() { "mlpwi_0" } else { "mlpwi" };
        let mut hidden = project(&self.wi_0, first, activations[0]);
        if let Some(wi_1) = &self.wi_1 {
            hidden = hidden * project(wi_1, "mlpwi_1", activations[1]);
        }
        let hidden = dropout.apply("mlp_hidden", hidden);
        let output = self.wo.forward(hidden, &[MLP]).constrain(&[
            Some("activation_batch"),
            Some("activation_norm_length"),
            Some("activation_embed"),
        ]);
        output.named("mlpwo")
    }
}
