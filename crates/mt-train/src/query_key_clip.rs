//! Clipping of queries and keys: MuonClip (Kimi Team, 2025: Kimi K2), for attention with heads of its own.
//!
//! Where a head's largest score grew past a threshold, the weights that make the head's queries and keys are scaled
//! down after the update, so that this score would have been the threshold.

use mt_config::{OptimizerGroup, Origin};
use mt_models::{LayerOutput, Model, OfLayers, ScoreWeights};
use mt_nn::axes::{KV_HEADS, QUERY_HEADS};
use mt_optim::Parameter;
use mt_shape::DType;
use mt_trace::Tensor;

/// A model's queries and keys cannot be clipped.
#[derive(Debug, thiserror::Error)]
pub enum QueryKeyClipError {
    #[error(
        "`use_qk_clip` is `true` ({origin}), but the model has no attention\nhint: leave out `use_qk_clip`"
    )]
    NoAttention { origin: Origin },
    #[error(
        "`use_qk_clip` is `true` ({origin}), but the model normalizes queries and keys, so that smaller weights make no smaller scores\nhint: leave out `use_qk_clip`: normalized queries and keys bound the scores"
    )]
    Normalized { origin: Origin },
    #[error(
        "`use_qk_clip` is `true` ({origin}), but `trainable_parameters_mask` leaves out `{parameter}`, which it would scale\nhint: leave out `use_qk_clip`, or train the weights of queries and keys, too"
    )]
    NotTrained { origin: Origin, parameter: String },
}

/// Which weights are scaled down, and from which score on.
pub(crate) struct QueryKeyClip {
    threshold: f64,
    weights: Vec<ScoreWeights>,
}

impl QueryKeyClip {
    /// Of a model with these parameters.
    ///
    /// # Errors
    /// There is nothing to clip, or clipping it would not do.
    pub fn new(
        group: &OptimizerGroup,
        model: &dyn Model,
        parameters: &[Parameter],
    ) -> Result<Self, QueryKeyClipError> {
        let origin = || group.qk_clip_origin.clone();
        let weights = model.score_weights();
        if weights.is_empty() {
            return Err(QueryKeyClipError::NoAttention { origin: origin() });
        }
        if weights.iter().any(|weights| weights.are_normalized) {
            return Err(QueryKeyClipError::Normalized { origin: origin() });
        }
        let mut scaled = weights.iter().flat_map(|weights| weights.queries.iter().chain(&weights.keys));
        if let Some(index) = scaled.find(|index| !parameters[**index].is_trained) {
            let parameter = model.storage()[*index].key.join("/");
            return Err(QueryKeyClipError::NotTrained { origin: origin(), parameter });
        }
        Ok(Self { threshold: group.qk_clip_threshold, weights })
    }

    /// The parameters with those scaled down that make too large scores.
    ///
    /// Where each query head has a key head of its own, both take the square root of the factor. A key head that is
    /// shared, by a group of query heads, with values or by layers, stays, and the query head takes the factor whole,
    /// as the paper has it for the part of keys that all heads share.
    pub fn clip<'t>(&self, parameters: &[Tensor<'t>], scores: &[OfLayers<'t>]) -> Vec<Tensor<'t>> {
        let mut clipped = parameters.to_vec();
        for weights in &self.weights {
            let of_layers = scores.iter().find(|of_layers| of_layers.place == weights.place);
            let largest = of_layers.expect("all layers with attention tell their largest scores").value;
            // Exactly 1 up to the threshold, for scores of any sign.
            let threshold = largest.region().full(DType::F32, &largest.axes(), self.threshold);
            let factor = threshold / largest.maximum(threshold);
            let factor = if weights.keys.is_empty() { factor } else { factor.sqrt() };
            let mut scale = |index: &usize, factor: Tensor<'t>| {
                let parameter = clipped[*index];
                clipped[*index] = (parameter.cast(DType::F32) * factor).cast(parameter.dtype());
            };
            weights.queries.iter().for_each(|index| scale(index, factor));
            let of_keys = factor.rename(QUERY_HEADS, KV_HEADS);
            weights.keys.iter().for_each(|index| scale(index, of_keys));
        }
        clipped
    }
}

/// What layers are asked for.
pub(crate) const SCORES: LayerOutput = LayerOutput::LargestScores;

/// The largest of all scores.
pub(crate) fn largest<'t>(scores: &[OfLayers<'t>]) -> Option<Tensor<'t>> {
    let largest = scores.iter().map(|of_layers| {
        let axes: Vec<&'static str> = of_layers.value.axes().iter().map(|axis| axis.name).collect();
        of_layers.value.max(&axes)
    });
    largest.reduce(|one, other| one.maximum(other))
}
