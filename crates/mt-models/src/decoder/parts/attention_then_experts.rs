//! Attention whose output experts read directly (MaxText's custom Qwen 3): a norm between them, and a projection back to
//! the residual stream, because attention and experts may be narrower than that. The layer adds only the result.

use mt_derive::Tree;
use mt_nn::{
    Linear, NormOptions, ParamSpec, RmsNorm, RotaryOptions,
    attention::Attention,
    axes::{EMBED, LATENT},
};
use mt_shape::{Axis, axis, logical};
use mt_trace::Tensor;

use super::{AttentionConfig, ExpertsConfig, Mixture};
use crate::{
    AttentionFlops, StateSpec,
    decoder::{
        Activation,
        part::{
            BatchDims, Part, PartDescription, PartInputs, PartOutputs, PartScoreWeights, SpecBuilder,
            StateDims,
        },
    },
};

/// Attention and the experts that read its output.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionThenExpertsConfig {
    pub attention: AttentionConfig,
    pub experts: ExpertsConfig,
    /// The width of the residual stream.
    pub embed: Axis,
    /// The width of the output of attention, and of the experts' inputs and outputs.
    pub width: usize,
    pub norm: NormOptions,
}

/// The parameters of attention and the experts that read its output.
#[derive(Clone, Debug, Tree)]
pub struct AttentionThenExperts<L> {
    pub attention: Attention<L>,
    pub latent_norm: RmsNorm<L>,
    pub experts: Mixture<L>,
    /// `[latent, embed]`; absent if the experts are as wide as the residual stream.
    pub up: Option<Linear<L>>,
}

impl AttentionThenExpertsConfig {
    fn narrow(&self, batch: &BatchDims) -> BatchDims {
        BatchDims { embed: self.width, ..*batch }
    }

    fn has_projection(&self) -> bool {
        self.width != self.embed.size
    }
}

impl Part for AttentionThenExpertsConfig {
    type Parameters<L> = AttentionThenExperts<L>;

    fn specs(&self, builder: &SpecBuilder) -> AttentionThenExperts<ParamSpec> {
        let narrow = SpecBuilder { embed: builder.embed.with_size(self.width), ..builder.clone() };
        let latent = (axis(LATENT, self.width), logical::MLP);
        let attention = Attention { out: self.attention.specs(&narrow).out, ..self.attention.specs(builder) };
        AttentionThenExperts {
            attention,
            latent_norm: narrow.rms(narrow.embed),
            experts: self.experts.specs(&narrow),
            up: self.has_projection().then(|| builder.linear(1, [latent, (builder.embed, logical::EMBED)])),
        }
    }

    fn forward<'t>(
        &self,
        parameters: &AttentionThenExperts<Tensor<'t>>,
        x: Tensor<'t>,
        inputs: &PartInputs<'_, 't>,
    ) -> PartOutputs<'t> {
        let attended = self.attention.forward(&parameters.attention, x, inputs);
        let latent = parameters.latent_norm.forward(attended.output, EMBED, self.norm);
        let made = latent
            .scope(self.experts.scope(), |latent| self.experts.forward(&parameters.experts, latent, inputs));
        let output = match &parameters.up {
            Some(up) => up.forward(made.output.rename(EMBED, LATENT), &[LATENT]).constrain(&[
                Some(logical::ACTIVATION_BATCH),
                Some(logical::ACTIVATION_NORM_LENGTH),
                Some(logical::ACTIVATION_EMBED),
            ]),
            None => made.output,
        };
        let others = attended.others.into_iter().chain(made.others).collect();
        PartOutputs { output, others, ..attended }
    }

    fn score_weights(
        &self,
        numbers: &AttentionThenExperts<usize>,
        is_imported: bool,
    ) -> Option<PartScoreWeights> {
        self.attention.score_weights(&numbers.attention, is_imported)
    }

    fn routing_bias(&self, numbers: &AttentionThenExperts<usize>) -> Option<usize> {
        self.experts.routing_bias(&numbers.experts)
    }

    fn differs_from(&self, other: &Self) -> bool {
        let sizes = |config: &Self| (config.embed, config.width, config.norm);
        sizes(self) != sizes(other)
            || self.attention.differs_from(&other.attention)
            || self.experts.differs_from(&other.experts)
    }
}

impl PartDescription for AttentionThenExpertsConfig {
    fn state(&self, dims: &StateDims) -> Vec<StateSpec> {
        self.attention.state(dims)
    }

    fn activations(&self, batch: &BatchDims) -> Vec<Activation> {
        let narrow = self.narrow(batch);
        let mut made = self.attention.activations(&narrow);
        // The normalized output of attention.
        made.push(narrow.residual(None));
        made.extend(self.experts.activations(&narrow));
        made
    }

    fn idle_weights(&self) -> usize {
        self.experts.idle_weights()
    }

    fn scope(&self) -> &'static str {
        "attention_then_experts"
    }

    fn pair_operations(&self) -> Vec<AttentionFlops> {
        self.attention.pair_operations()
    }

    fn token_operations(&self) -> usize {
        self.attention.token_operations() + self.experts.token_operations()
    }

    fn rotary(&self) -> Option<&RotaryOptions> {
        self.attention.rotary()
    }
}
