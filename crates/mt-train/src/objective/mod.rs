//! Objectives: the losses that runs minimize.
//!
//! The loop, micro-batches, placement, rematerialization, vocabulary tiling, evaluation and resuming work with any
//! [`Objective`]; none of them knows which one it is. An objective is added in a file of its own, beside
//! [`NextToken`], and chosen in `of_config`.

mod bound;
mod next_token;

use std::{path::PathBuf, sync::Arc};

use mt_config::TrainConfig;
use mt_models::Model;
use mt_nn::SequenceOrder;
use mt_shape::{Axis, DType};
use mt_trace::Tensor;

pub use crate::data::{DataRequest, RunData};
pub use bound::{BoundModel, HiddenStates, SideOutputs};
pub use next_token::NextToken;

pub(crate) use bound::ModelUse;

use crate::TrainError;

/// Scalars under the names of metrics, in the order in which they are recorded.
pub type NamedTensors<'t> = Vec<(&'static str, Tensor<'t>)>;

/// An array of a batch, as programs take it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchArray {
    pub name: &'static str,
    pub dtype: DType,
    /// The rows of the batch (`axes::BATCH`) come first. Along `axes::POSITION` elements are stored in the order of
    /// the run's sequences, which differs from that of the text where sequences are split over devices.
    pub axes: Vec<Axis>,
    /// Elements are integers from 0 up to, not including, this.
    pub below: Option<usize>,
}

impl BatchArray {
    /// The sizes of its axes.
    pub fn dims(&self) -> Vec<usize> {
        self.axes.iter().map(|axis| axis.size).collect()
    }
}

/// A batch in a program, by the names of [`Objective::arrays`].
#[derive(Clone)]
pub struct BatchTensors<'t> {
    arrays: Vec<(&'static str, Tensor<'t>)>,
    /// The order in which the tokens of a row are stored.
    pub order: SequenceOrder,
}

impl<'t> BatchTensors<'t> {
    pub(crate) fn new(
        names: impl IntoIterator<Item = &'static str>,
        tensors: impl IntoIterator<Item = Tensor<'t>>,
        order: SequenceOrder,
    ) -> Self {
        Self { arrays: names.into_iter().zip(tensors).collect(), order }
    }

    /// The array of this name.
    ///
    /// # Panics
    /// The objective did not declare it.
    pub fn of(&self, name: &str) -> Tensor<'t> {
        let array = self.arrays.iter().find(|(known, _)| *known == name);
        array.unwrap_or_else(|| panic!("`{name}` is not an array of the objective's batch")).1
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &'static str> + '_ {
        self.arrays.iter().map(|(name, _)| *name)
    }

    pub(crate) fn tensors(&self) -> impl Iterator<Item = Tensor<'t>> + '_ {
        self.arrays.iter().map(|(_, tensor)| *tensor)
    }
}

/// A model that takes part in an objective and is not trained.
pub struct FrozenModel {
    /// The name of its arrays in programs.
    pub name: &'static str,
    pub model: Arc<dyn Model>,
    pub source: FrozenSource,
}

/// Where the parameters of a frozen model come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FrozenSource {
    /// They are those with which the trained model began: from the path or the seed that the configuration names.
    /// Parameters that are not trained are not held twice: both models take the same arrays.
    FirstValues,
    /// A checkpoint or a Hugging Face directory.
    Path(PathBuf),
}

/// The models of an objective in a program.
pub struct Models<'a, 't> {
    pub trained: BoundModel<'a, 't>,
    /// In the order of [`Objective::frozen`].
    pub frozen: Vec<BoundModel<'a, 't>>,
}

/// The loss of a micro-batch.
pub struct Loss<'t> {
    /// The micro-batch's share of the batch's loss, a scalar: sums over its rows, divided by what belongs to the whole
    /// batch ([`Objective::loss`]).
    pub share: Tensor<'t>,
    /// Summands of `share` that are reported under names of their own, and other sums over the micro-batch.
    pub terms: NamedTensors<'t>,
    /// Further outputs of the trained model ([`HiddenStates::side`]). Auxiliary losses are added to the loss.
    pub side: SideOutputs<'t>,
}

/// An objective of training: the arrays of a batch, the models that take part, and a loss.
pub trait Objective: Send + Sync {
    /// Its name in messages.
    fn name(&self) -> &'static str;

    /// The arrays of a batch of `rows` rows, in the order in which programs take them.
    fn arrays(&self, rows: usize) -> Vec<BatchArray>;

    /// How many sequences of which length the trained model processes for a batch of `rows` rows.
    fn sequences(&self, rows: usize) -> [usize; 2];

    /// The data of a run, whose batches have [`Objective::arrays`].
    ///
    /// # Errors
    /// Data that cannot be read or does not fit the model.
    fn data(&self, request: &DataRequest<'_>) -> Result<RunData, TrainError>;

    /// The models beside the trained one.
    fn frozen(&self) -> Vec<FrozenModel> {
        Vec::new()
    }

    /// Whether the loss is the cross-entropy of tokens in nats, so that perplexity and bits per byte follow from it.
    fn is_cross_entropy(&self) -> bool {
        false
    }

    /// The divisors of sums over a batch, such as its number of tokens: scalars that follow from the whole batch
    /// alone, before it is cut into micro-batches. The first is reported as the batch's weight.
    fn weights<'t>(&self, batch: &BatchTensors<'t>) -> Vec<Tensor<'t>>;

    /// The loss of a micro-batch. `divisors` are the [`Objective::weights`] of the whole batch, kept from 0.
    fn loss<'t>(
        &self,
        models: &Models<'_, 't>,
        batch: &BatchTensors<'t>,
        divisors: &[Tensor<'t>],
    ) -> Loss<'t>;

    /// Sums over a batch that an evaluation adds up over batches: `eval/total_loss`, `eval/total_weights`, and further
    /// sums `eval/total_…`, of each of which the mean `eval/avg_…` is reported.
    fn evaluate<'t>(&self, models: &Models<'_, 't>, batch: &BatchTensors<'t>) -> NamedTensors<'t>;
}

/// The objective of a configuration.
pub(crate) fn of_config(settings: &TrainConfig) -> Arc<dyn Objective> {
    Arc::new(NextToken {
        length: settings.data.max_target_length,
        vocab_size: settings.model.vocab_size,
        z_loss_multiplier: settings.objective.z_loss_multiplier,
    })
}
