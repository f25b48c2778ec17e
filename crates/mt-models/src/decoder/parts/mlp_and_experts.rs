//! A dense MLP beside experts (Gemma 4). Both read the residual stream through norms of their own, and norms of their own
//! precede the sum of their outputs.

use mt_derive::Tree;
use mt_nn::{Initializer, Mlp, NormOptions, ParamSpec, RmsNorm, axes::EMBED, rms_normalize};
use mt_shape::{DType, logical};
use mt_trace::Tensor;

use super::{ExpertsConfig, Mixture, MlpConfig};
use crate::decoder::{
    Activation,
    part::{BatchDims, Part, PartDescription, PartInputs, PartOutputs, SpecBuilder},
};

/// A dense MLP and experts.
#[derive(Clone, Debug, PartialEq)]
pub struct MlpAndExpertsConfig {
    pub mlp: MlpConfig,
    pub experts: ExpertsConfig,
    pub norm: NormOptions,
}

/// The parameters of a dense MLP beside experts. The layer's norm precedes the MLP.
#[derive(Clone, Debug, Tree)]
pub struct MlpAndExperts<L> {
    pub mlp: Mlp<L>,
    pub post_mlp_norm: RmsNorm<L>,
    /// `[embed]`: the scale of the norm of the router's input, which is also divided by the root of the width.
    pub router_scale: L,
    pub pre_experts_norm: RmsNorm<L>,
    pub experts: Mixture<L>,
    pub post_experts_norm: RmsNorm<L>,
}

impl MlpAndExpertsConfig {
    /// # Shapes
    /// `[batch, position, embed], [embed] -> [batch, position, embed]`
    fn router_input<'t>(&self, residual: Tensor<'t>, scale: Tensor<'t>) -> Tensor<'t> {
        let x = if self.experts.routed.router.in_f32 { residual.cast(DType::F32) } else { residual };
        let normalized = rms_normalize(x, &[EMBED], self.norm.epsilon);
        normalized * scale.cast(x.dtype()) * (x.axis(EMBED).size as f64).powf(-0.5)
    }
}

impl Part for MlpAndExpertsConfig {
    type Parameters<L> = MlpAndExperts<L>;

    fn specs(&self, builder: &SpecBuilder) -> MlpAndExperts<ParamSpec> {
        MlpAndExperts {
            mlp: self.mlp.specs(builder),
            post_mlp_norm: builder.rms(builder.embed),
            router_scale: builder.array([(builder.embed, logical::NORM)], Initializer::Ones),
            pre_experts_norm: builder.rms(builder.embed),
            experts: self.experts.specs(builder),
            post_experts_norm: builder.rms(builder.embed),
        }
    }

    fn forward<'t>(
        &self,
        parameters: &MlpAndExperts<Tensor<'t>>,
        x: Tensor<'t>,
        inputs: &PartInputs<'_, 't>,
    ) -> PartOutputs<'t> {
        let dense = self.mlp.forward(&parameters.mlp, x, inputs).output;
        let router_input = self.router_input(inputs.residual, parameters.router_scale);
        let x = parameters.pre_experts_norm.forward(inputs.residual, EMBED, self.norm);
        let made = self.experts.forward_routed_by(&parameters.experts, x, router_input, inputs);
        let output = parameters.post_mlp_norm.forward(dense, EMBED, self.norm)
            + parameters.post_experts_norm.forward(made.output, EMBED, self.norm);
        PartOutputs { output, ..made }
    }

    fn differs_from(&self, other: &Self) -> bool {
        self.mlp.differs_from(&other.mlp)
            || self.experts.differs_from(&other.experts)
            || self.norm != other.norm
    }
}

impl PartDescription for MlpAndExpertsConfig {
    fn scope(&self) -> &'static str {
        "mlp_and_experts"
    }

    fn activations(&self, batch: &BatchDims) -> Vec<Activation> {
        let mut made = self.mlp.activations(batch);
        // The inputs of the router and of the experts.
        made.extend([batch.residual(None), batch.residual(None)]);
        made.extend(self.experts.activations(batch));
        made
    }

    fn idle_weights(&self) -> usize {
        self.experts.idle_weights()
    }
}
