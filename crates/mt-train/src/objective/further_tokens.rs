//! The loss of the tokens that prediction modules predict (multi-token prediction).

use mt_config::ObjectiveGroup;
use mt_data::arrays::{INPUTS_SEGMENTATION, TARGETS, TARGETS_SEGMENTATION};
use mt_nn::{
    axes::{BATCH, POSITION},
    divisor, following, token_weights,
};
use mt_shape::DType;
use mt_trace::Tensor;

use super::{BatchTensors, BoundModel};

/// The prediction of further tokens. The module `k`, from 1 on, predicts the token `k` places after the next one, if it is
/// of the same document.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FurtherTokens {
    /// The number of modules.
    pub count: usize,
    /// The weight of their mean loss.
    pub weight: f64,
    /// The module whose predictions evaluations compare with the model's.
    pub scored: Option<usize>,
}

impl FurtherTokens {
    pub(super) fn of_config(group: &ObjectiveGroup) -> Option<Self> {
        (group.mtp_num_layers > 0).then_some(Self {
            count: group.mtp_num_layers,
            weight: group.mtp_loss_scaling_factor,
            scored: Some(group.mtp_eval_target_module).filter(|module| *module > 0),
        })
    }

    /// The number of predicted tokens of all modules.
    pub(super) fn weights<'t>(&self, batch: &BatchTensors<'t>) -> Tensor<'t> {
        let of_module = |module| token_weights(self.later(batch, TARGETS_SEGMENTATION, module));
        let sums = (1..=self.count).map(|module| of_module(module).sum(&[BATCH, POSITION]));
        sums.reduce(|one, other| one + other).expect("there are modules")
    }

    /// The summed loss of all modules over a batch, not weighted. `hidden` are their hidden states.
    pub(super) fn total_loss<'t>(
        &self,
        model: &BoundModel<'_, 't>,
        hidden: &[Tensor<'t>],
        batch: &BatchTensors<'t>,
    ) -> Tensor<'t> {
        let losses = hidden.iter().zip(1..).map(|(hidden, module)| {
            let later = |name| self.later(batch, name, module);
            model.token_loss(*hidden, later(TARGETS), later(TARGETS_SEGMENTATION), 0.0).total
        });
        losses.reduce(|one, other| one + other).expect("there are modules")
    }

    /// The percentage of the scored module's predictions that equal the model's own for the same tokens.
    pub(super) fn acceptance<'t>(
        &self,
        model: &BoundModel<'_, 't>,
        hidden: Tensor<'t>,
        predictions: &[Tensor<'t>],
        batch: &BatchTensors<'t>,
    ) -> Option<Tensor<'t>> {
        const BEST: &str = "best";
        let module = self.scored?;
        let best = |hidden| model.logits(hidden).top_k(1, BEST).1.squeeze(BEST);
        // The model predicts the same token from the place `module` tokens later.
        let own = following(best(hidden), batch.of(INPUTS_SEGMENTATION), module, batch.order);
        let counted = token_weights(self.later(batch, TARGETS_SEGMENTATION, module));
        let is_equal = best(predictions[module - 1]).equals(own).cast(DType::F32);
        let over = [BATCH, POSITION];
        Some((is_equal * counted).sum(&over) / divisor(counted.sum(&over)) * 100.0)
    }

    /// An array of the batch, `module` tokens later; 0 behind the end of a document.
    fn later<'t>(&self, batch: &BatchTensors<'t>, name: &str, module: usize) -> Tensor<'t> {
        following(batch.of(name), batch.of(INPUTS_SEGMENTATION), module, batch.order)
    }
}
