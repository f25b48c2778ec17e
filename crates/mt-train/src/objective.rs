//! What training minimizes: the loss of a batch, and its gradients.

use mt_derive::Tree;
use mt_models::{Forward, Model, Tokens};
use mt_nn::{ParamSpec, token_cross_entropy};
use mt_shape::{DType, Path};
use mt_trace::{Key, Tensor};

use crate::{measured::NamedTensors, metrics::names};

/// A batch on its devices, each array `i32[batch, position]`.
#[derive(Clone, Copy)]
pub(crate) struct BatchTensors<'t> {
    pub tokens: Tokens<'t>,
    pub targets: Tensor<'t>,
    pub targets_segmentation: Tensor<'t>,
}

/// How the loss of a batch is computed.
#[derive(Clone, Copy)]
pub(crate) struct Objective<'a> {
    pub model: &'a dyn Model,
    /// The type that gradients are handed on in.
    pub gradient_dtype: DType,
}

/// The loss of a batch and what follows from it.
pub(crate) struct LossAndGradients<'t> {
    /// The loss that was differentiated, per unit of weight.
    pub loss: Tensor<'t>,
    /// The sum of the tokens' weights.
    pub weights: Tensor<'t>,
    /// Parts of the loss and other values of interest.
    pub metrics: NamedTensors<'t>,
    /// In the order of the parameters, placed as they are.
    pub gradients: Vec<Tensor<'t>>,
}

/// A list of parameters, to be differentiated.
#[derive(Tree)]
struct Parameters<L>(Vec<L>);

impl Objective<'_> {
    /// The loss of a batch with its gradients, the parameters being described by `specs`.
    pub fn loss_and_gradients<'t>(
        &self,
        specs: &[(Path, ParamSpec)],
        parameters: &[Tensor<'t>],
        batch: BatchTensors<'t>,
        dropout: Key<'t>,
    ) -> LossAndGradients<'t> {
        let region = batch.targets.region();
        let (loss, [weights], gradients) =
            region.value_and_grad(&Parameters(parameters.to_vec()), |_, parameters| {
                let forward = Forward { dropout: Some(dropout), ..Forward::default() };
                let (logits, _) = self.model.logits(&parameters.0, batch.tokens, forward);
                let loss = token_cross_entropy(logits, batch.targets, batch.targets_segmentation);
                (loss.mean(), [loss.weights])
            });
        // Without these the partitioner may leave gradients, and with them the optimizer, on every device.
        let gradients = gradients
            .0
            .iter()
            .zip(specs)
            .map(|(gradient, (_, spec))| gradient.cast(self.gradient_dtype).constrain(&spec.logical_axes))
            .collect();
        LossAndGradients { loss, weights, metrics: Vec::new(), gradients }
    }

    /// The sums over a batch that an evaluation adds up.
    pub fn evaluate<'t>(&self, parameters: &[Tensor<'t>], batch: BatchTensors<'t>) -> NamedTensors<'t> {
        let (logits, _) = self.model.logits(parameters, batch.tokens, Forward::default());
        let loss = token_cross_entropy(logits, batch.targets, batch.targets_segmentation);
        vec![(names::EVALUATION_TOTAL_LOSS, loss.total), (names::EVALUATION_TOTAL_WEIGHTS, loss.weights)]
    }
}
