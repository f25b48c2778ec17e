//! Models as objectives use them: with their parameters, in one program.

use mt_models::{Forward, Model, OfLayers, Tokens};
use mt_nn::{ParamSpec, TiledHead, TokenLoss, cross_entropy, narrow_token_loss, token_loss};
use mt_shape::Path;
use mt_trace::{Key, Memory, Tensor};

use super::NamedTensors;
use crate::query_key_clip::SCORES;

/// How the trained model is run, whatever the objective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ModelUse {
    /// In how many tiles of positions logits are computed.
    pub num_vocab_tiling: usize,
    /// Whether the head's parameters are gathered once for all tiles.
    pub gather_head_once: bool,
    /// Whether the loss of each token is computed in `f32` rather than in the type of its logits.
    pub loss_in_f32: bool,
    /// The memory that the parameters of layers are in; all others are on the device.
    pub layers_in: Memory,
    /// Whether the largest scores of attention are side outputs.
    pub with_scores: bool,
    /// Whether there are several devices.
    pub is_split: bool,
}

/// Outputs of a forward pass beside hidden states.
#[derive(Clone, Default)]
pub struct SideOutputs<'t> {
    /// Losses of layers under the names of metrics, each of the whole micro-batch and not a sum over its tokens.
    pub(crate) auxiliary_losses: NamedTensors<'t>,
    /// Outputs of layers that the run needs for other purposes than the loss.
    pub(crate) layer_outputs: Vec<OfLayers<'t>>,
}

impl SideOutputs<'_> {
    /// Whether layers add losses of their own.
    pub fn has_losses(&self) -> bool {
        !self.auxiliary_losses.is_empty()
    }
}

/// The result of [`BoundModel::hidden`].
pub struct HiddenStates<'t> {
    /// `[batch, position, embed]`
    pub hidden: Tensor<'t>,
    /// Handed on by objectives in their [`super::Loss`].
    pub side: SideOutputs<'t>,
}

/// A model with its parameters.
#[derive(Clone)]
pub struct BoundModel<'a, 't> {
    pub(crate) model: &'a dyn Model,
    pub(crate) specs: &'a [(Path, ParamSpec)],
    pub(crate) parameters: &'a [Tensor<'t>],
    pub(crate) usage: ModelUse,
    pub(crate) dropout: Option<Key<'t>>,
    /// Whether gradients of the parameters are taken.
    pub(crate) is_differentiated: bool,
}

impl<'t> BoundModel<'_, 't> {
    /// The hidden states that the head takes.
    ///
    /// # Shapes
    /// `i32[batch, position] -> [batch, position, embed]`
    pub fn hidden(&self, tokens: Tokens<'t>) -> HiddenStates<'t> {
        let with_scores = self.usage.with_scores && self.is_differentiated;
        let forward = Forward {
            dropout: self.dropout,
            layer_outputs: if with_scores { vec![SCORES] } else { Vec::new() },
            layers_in: self.usage.layers_in,
            ..Forward::default()
        };
        let made = self.model.hidden(self.parameters, tokens, forward);
        let side = SideOutputs { auxiliary_losses: made.auxiliary_losses, layer_outputs: made.layer_outputs };
        HiddenStates { hidden: made.hidden, side }
    }

    /// Sums of the cross-entropies of `targets`, over tokens whose segment id is not 0, computed in tiles of the
    /// vocabulary's scores if the configuration says so.
    ///
    /// # Shapes
    /// `[batch, position, embed], i32[batch, position], i32[batch, position] -> f32[]`
    pub fn token_loss(
        &self,
        hidden: Tensor<'t>,
        targets: Tensor<'t>,
        segmentation: Tensor<'t>,
        z_loss_multiplier: f64,
    ) -> TokenLoss<'t> {
        let (parameters, hidden) = self.head_inputs(hidden);
        let tiles = self.usage.num_vocab_tiling;
        if tiles == 1 {
            let logits = self.model.apply_head(&parameters, hidden);
            let loss_of = if self.usage.loss_in_f32 { token_loss } else { narrow_token_loss };
            return loss_of(logits, targets, segmentation, z_loss_multiplier);
        }
        let of_head = self.model.head_parameters();
        let logical_axes: Vec<_> =
            of_head.iter().map(|index| self.specs[*index].1.logical_axes.clone()).collect();
        TiledHead {
            tiles,
            z_loss_multiplier,
            in_f32: self.usage.loss_in_f32,
            head: &|parameters, hidden| self.model.apply_head(parameters, hidden),
            logical_axes: &logical_axes,
            gathered: if self.usage.gather_head_once { &["embed_vocab"] } else { &[] },
        }
        .token_loss(&parameters, hidden, targets, segmentation)
    }

    /// The log-probability of each target.
    ///
    /// # Shapes
    /// `[batch, position, embed], i32[batch, position] -> f32[batch, position]`
    pub fn token_log_probabilities(&self, hidden: Tensor<'t>, targets: Tensor<'t>) -> Tensor<'t> {
        let (cross_entropy, _) = cross_entropy(self.logits(hidden), targets);
        -cross_entropy
    }

    /// Logits of every token of the vocabulary.
    ///
    /// # Shapes
    /// `[batch, position, embed] -> [batch, position, vocab]`
    pub fn logits(&self, hidden: Tensor<'t>) -> Tensor<'t> {
        let (parameters, hidden) = self.head_inputs(hidden);
        self.model.apply_head(&parameters, hidden)
    }

    /// The parameters of the head and the hidden states that it takes. On several devices a barrier has the gradients of
    /// the head's parameters split before those of layers are begun; otherwise each device keeps whole sums of the former
    /// until all are made.
    fn head_inputs(&self, hidden: Tensor<'t>) -> (Vec<Tensor<'t>>, Tensor<'t>) {
        let of_head = self.model.head_parameters();
        let mut held: Vec<Tensor<'t>> = of_head.iter().map(|index| self.parameters[*index]).collect();
        if !(self.usage.is_split && self.is_differentiated) {
            return (held, hidden);
        }
        held.push(hidden);
        let mut held = hidden.region().optimization_barrier_list(&held);
        let hidden = held.pop().expect("as many come out as go in");
        let constrained = of_head
            .iter()
            .zip(held)
            .map(|(index, tensor)| tensor.constrain(&self.specs[*index].1.logical_axes));
        (constrained.collect(), hidden)
    }
}
