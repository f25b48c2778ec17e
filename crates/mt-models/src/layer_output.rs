//! What layers make besides the residual stream, for those who ask for it.

use mt_nn::{LayerPlace, axes::LAYERS};
use mt_trace::Tensor;

/// Something that layers make. Whoever runs a model says what of it is returned; what nobody asks for is not computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerOutput {
    /// What attention added to the residual stream: `[batch, position, embed]`.
    Attention,
    /// What the feed-forward layer added: `[batch, position, embed]`.
    Mlp,
    /// The residual stream behind the layer: `[batch, position, embed]`.
    Residual,
    /// The largest score of each head of attention: [`mt_nn::attention::Attended::largest_scores`].
    LargestScores,
}

/// What one layer made, or what several made, stacked along a leading axis.
#[derive(Clone, Copy)]
pub struct OfLayers<'t> {
    pub output: LayerOutput,
    pub place: LayerPlace,
    pub value: Tensor<'t>,
}

impl<'t> OfLayers<'t> {
    /// What each layer made, with the number of the layer.
    pub(crate) fn of_each(&self) -> Vec<(usize, Tensor<'t>)> {
        match self.place {
            LayerPlace::Stacked { first, step } => {
                let count = self.value.axis(LAYERS).size;
                (0..count).map(|index| (first + index * step, self.value.at(LAYERS, index))).collect()
            }
            LayerPlace::One(layer) => vec![(layer, self.value)],
            LayerPlace::None => Vec::new(),
        }
    }
}

/// The parameters that attention's scores are made of, in one layer or in stacked ones.
#[derive(Clone, Debug, PartialEq)]
pub struct ScoreWeights {
    pub place: LayerPlace,
    /// The numbers of the parameters that queries are made with: a kernel, and a bias if there is one.
    pub queries: Vec<usize>,
    /// Those of keys, if each head of them is for the scores of one query head and for nothing else; or else none.
    pub keys: Vec<usize>,
    /// Queries and keys are normalized, so that scores do not grow with these parameters.
    pub are_normalized: bool,
}
