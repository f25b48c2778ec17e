//! What layers make besides the residual stream, for those who ask for it.

use mt_nn::{LayerPlace, axes::LAYERS};
use mt_shape::DType;
use mt_trace::Tensor;

/// A kind of output. Callers of a model ask for kinds; outputs that nobody asks for are not computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerOutput {
    /// What the mixer added to the residual stream: `[batch, position, embed]`.
    Mixer,
    /// What the feed-forward part added: `[batch, position, embed]`.
    FeedForward,
    /// The residual stream behind the layer: `[batch, position, embed]`.
    Residual,
    /// The largest score of each head of attention: [`mt_nn::attention::Attended::largest_scores`].
    LargestScores,
    /// Numbers about the residual stream behind the layer, such as its mean: `f32` scalars without a gradient.
    Statistics,
    /// What a part adds to the loss, under the name of a metric: an `f32` scalar of the whole call, not a sum over its
    /// tokens.
    AuxiliaryLoss,
}

/// How values of several micro-batches become that of their batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduce {
    /// They are of tokens or rows, side by side.
    Concatenate,
    Largest,
    Mean,
}

/// What an output is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutputLabel {
    pub kind: LayerOutput,
    /// Tells outputs of one kind from each other.
    pub name: &'static str,
    pub reduce: Reduce,
}

impl LayerOutput {
    /// The label of an output that is alone of its kind in a layer.
    pub fn label(self) -> OutputLabel {
        let (name, reduce) = match self {
            Self::Mixer => ("mixer", Reduce::Concatenate),
            Self::FeedForward => ("feed_forward", Reduce::Concatenate),
            Self::Residual => ("output", Reduce::Concatenate),
            Self::LargestScores => ("largest_scores", Reduce::Largest),
            Self::Statistics => ("statistics", Reduce::Mean),
            Self::AuxiliaryLoss => ("auxiliary_loss", Reduce::Mean),
        };
        OutputLabel { kind: self, name, reduce }
    }

    /// The label of one of several outputs of this kind.
    pub fn named(self, name: &'static str) -> OutputLabel {
        OutputLabel { name, ..self.label() }
    }
}

/// What one layer made, or what several made, stacked along a leading axis.
#[derive(Clone, Copy)]
pub struct OfLayers<'t> {
    pub label: OutputLabel,
    pub place: LayerPlace,
    pub value: Tensor<'t>,
}

impl<'t> OfLayers<'t> {
    /// What each layer made, with the number of the layer.
    pub fn of_each(&self) -> Vec<(usize, Tensor<'t>)> {
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

/// The statistics of all layers under the names of metrics, such as `activ_mean/layer_003`, from the first layer to the
/// last.
pub fn statistics<'t>(made: &[OfLayers<'t>]) -> Vec<(String, Tensor<'t>)> {
    let statistics = made.iter().filter(|of_layers| of_layers.label.kind == LayerOutput::Statistics);
    let mut each: Vec<(usize, &str, Tensor<'t>)> = statistics
        .flat_map(|of_layers| {
            let name = of_layers.label.name;
            of_layers.of_each().into_iter().map(move |(layer, value)| (layer, name, value))
        })
        .collect();
    each.sort_by_key(|(layer, ..)| *layer);
    each.into_iter().map(|(layer, name, value)| (format!("{name}/layer_{layer:03}"), value)).collect()
}

/// The statistics of a residual stream.
pub(crate) fn statistics_of(x: Tensor<'_>) -> [(OutputLabel, Tensor<'_>); 3] {
    let x = x.stop_gradient().cast(DType::F32);
    let axes: Vec<&'static str> = x.axes().iter().map(|axis| axis.name).collect();
    let mean = x.mean(&axes);
    let deviation = (x - mean.broadcast(&x.axes())).square().mean(&axes).sqrt();
    let zeros = x.differs(0.0).cast(DType::F32).mean(&axes) * -1.0 + 1.0;
    let named = |name, value| (LayerOutput::Statistics.named(name), value);
    [named("activ_mean", mean), named("activ_stdev", deviation), named("activ_fraction_zero", zeros)]
}

/// The losses that parts of layers added, summed over the layers, by name.
pub(crate) fn auxiliary_losses<'t>(made: &[OfLayers<'t>]) -> Vec<(&'static str, Tensor<'t>)> {
    let mut losses: Vec<(&'static str, Tensor<'t>)> = Vec::new();
    for of_layers in made.iter().filter(|of_layers| of_layers.label.kind == LayerOutput::AuxiliaryLoss) {
        let value = match of_layers.place {
            LayerPlace::Stacked { .. } => of_layers.value.sum(&[LAYERS]),
            LayerPlace::One(_) | LayerPlace::None => of_layers.value,
        };
        match losses.iter_mut().find(|(name, _)| *name == of_layers.label.name) {
            Some((_, sum)) => *sum = *sum + value,
            None => losses.push((of_layers.label.name, value)),
        }
    }
    losses
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
