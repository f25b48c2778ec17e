//! A feed-forward part for tests, whose parameters have an axis of experts.

use mt_derive::Tree;
use mt_nn::{
    Initializer, ParamSpec,
    axes::{EMBED, MLP},
};
use mt_shape::{Axis, axis, logical};
use mt_trace::Tensor;

use crate::decoder::{
    Activation,
    part::{BatchDims, Part, PartDescription, PartInputs, PartOutputs, SpecBuilder},
};

/// Gated experts, all of which act on each token.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertsConfig {
    pub num_experts: usize,
    pub width: Axis,
}

#[derive(Clone, Debug, Tree)]
pub struct Experts<L> {
    /// `[expert, embed, mlp]`
    pub gate: L,
    /// `[expert, mlp]`
    pub gate_bias: L,
    /// `[expert, embed, mlp]`
    pub up: L,
    /// `[expert, mlp]`
    pub up_bias: L,
    /// `[expert, mlp, embed]`
    pub down: L,
}

const EXPERT: &str = "expert";

impl Part for ExpertsConfig {
    type Parameters<L> = Experts<L>;

    fn specs(&self, builder: &SpecBuilder) -> Experts<ParamSpec> {
        let (experts, embed, mlp) = (
            (axis(EXPERT, self.num_experts), logical::EXP),
            (builder.embed, logical::EMBED),
            (self.width, logical::MLP),
        );
        let matrix = |axes| builder.array::<3>(axes, Initializer::Normal { deviation: 0.1 });
        let bias = || builder.array([experts, mlp], Initializer::Normal { deviation: 0.1 });
        Experts {
            gate: matrix([experts, embed, mlp]),
            gate_bias: bias(),
            up: matrix([experts, embed, mlp]),
            up_bias: bias(),
            down: matrix([experts, mlp, embed]),
        }
    }

    fn forward<'t>(
        &self,
        parameters: &Experts<Tensor<'t>>,
        x: Tensor<'t>,
        _inputs: &PartInputs<'_, 't>,
    ) -> PartOutputs<'t> {
        let cast = |weight: Tensor<'t>| weight.cast(x.dtype());
        let gate = cast(parameters.gate).dot(x, &[EMBED]) + cast(parameters.gate_bias);
        let up = cast(parameters.up).dot(x, &[EMBED]) + cast(parameters.up_bias);
        PartOutputs::only(cast(parameters.down).dot(gate.silu() * up, &[EXPERT, MLP]))
    }
}

impl PartDescription for ExpertsConfig {
    fn scope(&self) -> &'static str {
        "experts"
    }

    fn activations(&self, _batch: &BatchDims) -> Vec<Activation> {
        Vec::new()
    }
}
