//! Multi-token prediction: modules behind the layers that each predict one token further than the one before (DeepSeek-AI,
//! 2024: DeepSeek-V3 Technical Report, section 2.2).

use mt_derive::Tree;
use mt_nn::{LayerPlace, Linear, Norm, ParamSpec, RESIDUAL, axes::EMBED, following};
use mt_shape::{DType, axis, logical};
use mt_trace::Tensor;

use super::{
    DecoderConfig, DecoderLayer, LayerConfig, NormKind,
    layer::layer_specs,
    part::SpecBuilder,
    stack::{Sliced, StackInputs, recomputed},
};
use crate::OfLayers;

/// A module that predicts one token further than the module before it, or than the decoder.
#[derive(Clone, Debug, Tree)]
pub struct PredictionModule<L> {
    /// Normalizes the embedding of the token before the predicted one.
    pub embedding_norm: Norm<L>,
    /// Normalizes the residual stream of the module before this one, or of the last layer.
    pub hidden_norm: Norm<L>,
    /// `[both, embed]`. The inputs are both norms' outputs, the embedding's first.
    pub projection: Linear<L>,
    pub layer: DecoderLayer<L>,
    /// Normalizes the module's output for the head; absent if the model's final norm does.
    pub final_norm: Option<Norm<L>>,
}

/// The results of all modules.
pub(super) struct Predicted<'t> {
    /// The hidden states that the head receives from each module.
    pub hidden: Vec<Tensor<'t>>,
    pub others: Vec<OfLayers<'t>>,
}

/// The inputs of the projection.
const BOTH: &str = "embedding_and_hidden";

/// The parameters of all modules.
pub(super) fn module_specs(
    builder: &SpecBuilder,
    config: &DecoderConfig,
) -> Vec<PredictionModule<ParamSpec>> {
    let (embed, both) = (config.embed, axis(BOTH, 2 * config.embed.size));
    let kind = config.final_norm.unwrap_or(NormKind::RootMeanSquare);
    let module = |layer: &LayerConfig| PredictionModule {
        embedding_norm: builder.residual_norm(kind),
        hidden_norm: builder.residual_norm(kind),
        projection: builder.linear(1, [(both, logical::EMBED), (embed, logical::NORM)]),
        layer: layer_specs(builder, config, layer),
        final_norm: config.own_prediction_norms.then(|| builder.residual_norm(kind)),
    };
    config.prediction_layers().map(module).collect()
}

/// Applies the modules to the residual stream behind the last layer, `[batch, position, embed]`. `embedded` looks up
/// tokens, and `normalized` applies the model's final norm.
pub(super) fn predict<'t>(
    modules: &[PredictionModule<Tensor<'t>>],
    x: Tensor<'t>,
    config: &DecoderConfig,
    inputs: &StackInputs<'t>,
    embedded: impl Fn(Tensor<'t>) -> Tensor<'t>,
    normalized: impl Fn(Tensor<'t>) -> Tensor<'t>,
) -> Predicted<'t> {
    let mut x = if config.own_prediction_norms { normalized(x) } else { x };
    let mut predicted = Predicted { hidden: Vec::new(), others: Vec::new() };
    for ((module, layer), number) in modules.iter().zip(config.prediction_layers()).zip(1..) {
        let tokens = following(inputs.tokens, inputs.segments.query, number, inputs.segments.order);
        let embedding = module.embedding_norm.forward(embedded(tokens), EMBED, config.norm);
        let hidden = module.hidden_norm.forward(x, EMBED, config.norm);
        let both = embedding.concatenate(&[hidden], EMBED).rename(EMBED, BOTH);
        let projected = module.projection.forward(both, &[BOTH]).constrain(&RESIDUAL);
        let index = config.layers.len() + number - 1;
        let key = inputs.dropout.map(|key| key.fold_in(x.region().integer(DType::U64, index as i64)).value());
        let arguments = Sliced {
            layers: vec![module.layer.clone()],
            keys: key.into_iter().collect(),
            state: vec![Vec::new()],
            imports: Vec::new(),
            per_layer: None,
        };
        let made = projected.scope(&format!("mtp_{number}"), |projected| {
            recomputed(projected, config, layer, inputs, &arguments, false)
        });
        let others = made.wanted(&inputs.wanted).into_iter();
        predicted.others.extend(others.map(|(label, value)| OfLayers {
            label,
            place: LayerPlace::One(index),
            value,
        }));
        x = made.x;
        predicted.hidden.push(match &module.final_norm {
            Some(norm) => norm.forward(x, EMBED, config.norm),
            None => normalized(x),
        });
    }
    predicted
}
