//! Decoders that draft for another model from its states.
//!
//! In EAGLE (Li et al., 2024: EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty), a decoder reads the state
//! of each token that the model's head receives, and the embedding of the token that follows it. It predicts the state of that
//! token, to which the model's head is applied. Published directories have a `config.json` of the model's type with one layer,
//! and tensors without the prefix `model.`: `embed_tokens`, `fc`, and the layer without the norm before its attention. There
//! is no norm behind the layer, and no head.
//!
//! In EAGLE-3 (Li et al., 2025: EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test),
//! `fc` projects the residual streams behind several of the model's layers. The decoder's one layer, `midlayer`, has that
//! projection as its residual stream. Its attention reads the normalized embedding and the normalized projection side by side.
//! A final norm and a head of its own follow, whose vocabulary may be a part of the model's. The embedding table may be the
//! model's.

use mt_config::ModelGroup;
use mt_derive::Tree;
use mt_nn::{Embedding, Linear, Norm, ParamSpec, Weight, axes::EMBED};
use mt_shape::{Axis, axis, logical};
use mt_trace::Tensor;

use super::{
    AttentionConfig, Decoder, DecoderConfig, DecoderParameters, FusionConfig, HeadConfig, NormKind,
    part::SpecBuilder, prediction::BOTH, stack::StackInputs,
};
use crate::{ModelError, Prediction, families::build_decoder};

/// The axis of the states of several layers of a token, side by side.
pub const STATES_OF_LAYERS: &str = "states_of_layers";

/// The parameters of a drafting decoder before its layer.
#[derive(Clone, Debug, Tree)]
pub struct Fusion<L> {
    /// `[both, embed]`, or `[states_of_layers, embed]`
    #[tree(flatten)]
    pub projection: Linear<L>,
    /// The norms of attention's inputs, in a decoder that reads states of several layers.
    pub embedding_norm: Option<Norm<L>>,
    pub hidden_norm: Option<Norm<L>>,
}

impl FusionConfig {
    pub(super) fn specs(self, builder: &SpecBuilder, embed: Axis) -> Fusion<ParamSpec> {
        let inputs = match self.states {
            Some(states) => axis(STATES_OF_LAYERS, states.width),
            None => axis(BOTH, 2 * embed.size),
        };
        let projection = builder.linear(1, [(inputs, logical::EMBED), (embed, logical::NORM)]);
        let norm = || self.states.map(|_| builder.residual_norm(NormKind::RootMeanSquare));
        Fusion {
            projection: builder.with_bias(projection, self.has_bias, [(embed, logical::NORM)]),
            embedding_norm: norm(),
            hidden_norm: norm(),
        }
    }
}

impl Decoder {
    /// Builds the decoder that drafts for another model.
    ///
    /// # Errors
    /// The configuration's values describe no valid model, or its layers cannot read states of several layers.
    pub fn drafting(group: &ModelGroup, fusion: FusionConfig) -> Result<Self, ModelError> {
        let decoder = build_decoder(group)?;
        let mut config = decoder.config().clone();
        let width = config.embed.size;
        let num_layers = config.layers.len();
        if let Some(first) = config.layers.first_mut() {
            first.norms.pre_attention = None;
            if fusion.states.is_some() {
                let is_only = num_layers == 1 && !first.parallel;
                let mixer = first.mixer.as_mut().filter(|_| is_only);
                let attention = mixer.and_then(|mixer| mixer.get_mut::<AttentionConfig>());
                attention.ok_or(ModelError::NotOneAttention { num_layers })?.input_width = Some(2 * width);
            }
        }
        let has_own_head = fusion.states.is_some();
        let config = DecoderConfig {
            fusion: Some(fusion),
            final_norm: config.final_norm.filter(|_| has_own_head),
            head: HeadConfig { tied: !has_own_head, ..config.head },
            predictions: Vec::new(),
            scan_layers: false,
            ..config
        };
        Ok(Self::new(config, decoder.family()))
    }
}

/// Applies all layers to states and the embeddings of the tokens that follow them. `parameters` are those of the decoder, and
/// behind them the model's embedding table if the decoder has none.
pub(super) fn predict<'t>(
    specs: &DecoderParameters<ParamSpec>,
    parameters: &[Tensor<'t>],
    config: &DecoderConfig,
    carried: Tensor<'t>,
    inputs: StackInputs<'t>,
) -> Prediction<'t> {
    use mt_shape::Tree as _;
    let (own, shared) = parameters.split_at(specs.leaves().len());
    let model = specs.with_leaves(own.iter().copied());
    let shared = shared.first().map(|table| Embedding { embedding: Weight::dense(*table) });
    let table = model.token_embedder.or(shared).expect("a decoder without a table receives the model's");
    let embedded = config.embedded(&table, inputs.tokens);
    let fusion = model.fusion.as_ref().expect("a drafting decoder fuses states and embeddings");
    let projected = |x: Tensor<'t>, name| config.residual.constrain(fusion.projection.forward(x, &[name]));
    let carried = carried.cast(embedded.dtype());
    let (x, mixer_input) = match (&fusion.embedding_norm, &fusion.hidden_norm) {
        (Some(of_embedding), Some(of_states)) => {
            // Predicted states are residual streams of the decoder itself.
            let x = match carried.has_axis(STATES_OF_LAYERS) {
                true => projected(carried, STATES_OF_LAYERS),
                false => carried,
            };
            let normalized = of_states.forward(x, EMBED, config.norm);
            let embedded = of_embedding.forward(embedded, EMBED, config.norm);
            let begins_normalized =
                config.fusion.and_then(|fusion| fusion.states).is_some_and(|states| states.begins_normalized);
            (if begins_normalized { normalized } else { x }, Some(embedded.concatenate(&[normalized], EMBED)))
        }
        _ => (projected(embedded.concatenate(&[carried], EMBED).rename(EMBED, BOTH), BOTH), None),
    };
    let inputs = StackInputs { mixer_input, ..inputs };
    let made = x.scope("eagle", |x| model.layers.forward(x, config, &inputs, 0..config.layers.len()));
    let hidden = model.final_norm.as_ref().map_or(made.x, |norm| norm.forward(made.x, EMBED, config.norm));
    Prediction { hidden, carried: made.x, state: made.state }
}
