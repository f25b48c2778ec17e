//! Decoders that draft for another model from its states (Li et al., 2024: EAGLE: Speculative Sampling Requires Rethinking
//! Feature Uncertainty).
//!
//! A decoder reads the state of each token that the model's head receives, and the embedding of the token that follows it.
//! It predicts the state of that token, to which the model's head is applied. Published directories have a `config.json` of
//! the model's type with one layer, and tensors without the prefix `model.`: `embed_tokens`, `fc`, and the layer without the
//! norm before its attention. There is no norm behind the layer, and no head.

use mt_config::ModelGroup;
use mt_nn::{Linear, ParamSpec};
use mt_shape::{Axis, axis, logical};
use mt_trace::Tensor;

use super::{
    Decoder, DecoderConfig, FusionConfig, HeadConfig, Layers, part::SpecBuilder, prediction::BOTH,
    stack::StackInputs,
};
use crate::{ModelError, Prediction, families::build_decoder};
use mt_nn::axes::EMBED;

impl FusionConfig {
    pub(super) fn specs(self, builder: &SpecBuilder, embed: Axis) -> Linear<ParamSpec> {
        let inputs = axis(BOTH, 2 * embed.size);
        let projection = builder.linear(1, [(inputs, logical::EMBED), (embed, logical::NORM)]);
        builder.with_bias(projection, self.has_bias, [(embed, logical::NORM)])
    }
}

impl Decoder {
    /// Builds the decoder that drafts for another model.
    ///
    /// # Errors
    /// The configuration's values describe no valid model.
    pub fn drafting(group: &ModelGroup, fusion: FusionConfig) -> Result<Self, ModelError> {
        let decoder = build_decoder(group)?;
        let mut config = decoder.config().clone();
        if let Some(first) = config.layers.first_mut() {
            first.norms.pre_attention = None;
        }
        let head = HeadConfig { tied: true, ..config.head };
        let config = DecoderConfig {
            fusion: Some(fusion),
            final_norm: None,
            head,
            predictions: Vec::new(),
            scan_layers: false,
            ..config
        };
        Ok(Self::new(config, decoder.family()))
    }
}

/// Applies all layers to states and the embeddings of the tokens that follow them.
pub(super) fn predict<'t>(
    fusion: &Linear<Tensor<'t>>,
    layers: &Layers<Tensor<'t>>,
    config: &DecoderConfig,
    states: Tensor<'t>,
    embedded: Tensor<'t>,
    inputs: &StackInputs<'t>,
) -> Prediction<'t> {
    let both = embedded.concatenate(&[states.cast(embedded.dtype())], EMBED).rename(EMBED, BOTH);
    let x = config.residual.constrain(fusion.forward(both, &[BOTH]));
    let made = x.scope("eagle", |x| layers.forward(x, config, inputs, 0..config.layers.len()));
    Prediction { hidden: made.x, carried: made.x, state: made.state }
}
