//! The loss of a batch and its gradients, in micro-batches, for any objective.

use std::sync::Arc;

use mt_derive::Tree;
use mt_models::{Model, OfLayers};
use mt_nn::{
    LayerPlace, ParamSpec,
    axes::{BATCH, POSITION},
    divisor,
};
use mt_shape::{Axis, DType, Path, axis};
use mt_trace::{Key, Region, ScanOptions, Tensor};

use crate::{
    objective::{
        BatchArray, BatchTensors, BoundModel, FrozenModel, ModelUse, Models, NamedTensors, Objective,
    },
    query_key_clip::SCORES,
};

/// How the loss of a batch and its gradients are computed.
#[derive(Clone)]
pub(crate) struct LossRule {
    pub objective: Arc<dyn Objective>,
    pub model: Arc<dyn Model>,
    pub frozen: Arc<[FrozenModel]>,
    pub usage: ModelUse,
    /// The type that gradients are handed on in. Those of micro-batches are added up in `f32`.
    pub gradient_dtype: DType,
    /// The number of micro-batches, which run one after the other.
    pub accumulation_steps: usize,
    /// The logical axes of a batch's rows and positions.
    pub batch_axes: [String; 2],
}

/// The parameters of all models in a program.
#[derive(Clone)]
pub(crate) struct ModelTensors<'t> {
    pub trained: Vec<Tensor<'t>>,
    /// In the order of the frozen models.
    pub frozen: Vec<Vec<Tensor<'t>>>,
}

/// The loss of a batch and what follows from it.
pub(crate) struct LossAndGradients<'t> {
    /// The loss that was differentiated, per unit of weight.
    pub loss: Tensor<'t>,
    /// The weight of the batch, such as its number of tokens.
    pub weights: Tensor<'t>,
    /// The terms of the loss, if it has several.
    pub metrics: NamedTensors<'t>,
    /// In the order of the parameters, placed as they are.
    pub gradients: Vec<Tensor<'t>>,
    /// The largest scores of each head, if they are wanted: `[q_heads]`, or stacked.
    pub scores: Vec<OfLayers<'t>>,
}

/// The inputs of a micro-batch's loss.
#[derive(Clone, Copy)]
struct MicroBatch<'a, 't> {
    parameters: &'a [Tensor<'t>],
    frozen: &'a [Vec<Tensor<'t>>],
    batch: &'a BatchTensors<'t>,
    dropout: Key<'t>,
    /// Divisors of sums over the whole batch.
    divisors: &'a [Tensor<'t>],
}

/// Names and layers of the values that a loss returns beside itself, in their order.
#[derive(Default)]
struct SideNames {
    /// Terms of the loss.
    terms: Vec<&'static str>,
    /// The layers whose largest scores follow.
    places: Vec<LayerPlace>,
}

/// A list of parameters, to be differentiated.
#[derive(Tree)]
struct Parameters<L>(Vec<L>);

/// The arrays that a scan over micro-batches slices.
#[derive(Tree)]
struct Slice<L> {
    index: L,
    arrays: Vec<L>,
}

const MICRO_BATCH: &str = "part";

impl LossRule {
    /// The logical names of an array's axes.
    pub fn logical_axes<'a>(&'a self, array: &BatchArray) -> Vec<Option<&'a str>> {
        array.axes.iter().map(|axis| self.logical_axis(axis)).collect()
    }

    fn logical_axis(&self, axis: &Axis) -> Option<&str> {
        let [rows, positions] = &self.batch_axes;
        match axis.name {
            BATCH => Some(rows),
            POSITION => Some(positions),
            _ => None,
        }
    }

    /// The loss of a batch with its gradients, the parameters being described by `specs`.
    ///
    /// However many micro-batches there are, the loss is that of the whole batch: each row or token counts the same in
    /// any of them, as the weights of all are known before the first micro-batch is computed. Losses that are not sums
    /// over the batch are averaged over micro-batches.
    pub fn loss_and_gradients<'t>(
        &self,
        specs: &[(Path, ParamSpec)],
        models: &ModelTensors<'t>,
        batch: &BatchTensors<'t>,
        dropout: Key<'t>,
    ) -> LossAndGradients<'t> {
        let region = dropout.value().region();
        let weights = self.objective.weights(batch);
        let divisors: Vec<Tensor<'t>> = weights.iter().map(|weights| divisor(*weights)).collect();
        let mut names = SideNames::default();
        let (loss, others, gradients) = if self.accumulation_steps == 1 {
            let ModelTensors { trained, frozen } = models;
            let given = MicroBatch { parameters: trained, frozen, batch, dropout, divisors: &divisors };
            self.differentiate(region, specs, given, &mut names)
        } else {
            self.accumulate(region, specs, models, (batch, dropout, &divisors), &mut names)
        };
        let (terms, scores) = others.split_at(names.terms.len());
        let scores = names.places.iter().zip(scores);
        LossAndGradients {
            loss,
            weights: weights[0],
            metrics: names.terms.iter().copied().zip(terms.iter().copied()).collect(),
            gradients,
            scores: scores
                .map(|(place, value)| OfLayers { label: SCORES.label(), place: *place, value: *value })
                .collect(),
        }
    }

    /// Adds up micro-batches, one after the other.
    fn accumulate<'t>(
        &self,
        region: Region<'t>,
        specs: &[(Path, ParamSpec)],
        models: &ModelTensors<'t>,
        (batch, dropout, divisors): (&BatchTensors<'t>, Key<'t>, &[Tensor<'t>]),
        names: &mut SideNames,
    ) -> (Tensor<'t>, Vec<Tensor<'t>>, Vec<Tensor<'t>>) {
        let zeros: Vec<Tensor<'t>> = specs
            .iter()
            .map(|(_, spec)| region.full(DType::F32, &spec.axes, 0.0).constrain(&spec.logical_axes))
            .collect();
        let slices = self.cut(region, batch);
        let options = ScanOptions::over(axis(MICRO_BATCH, self.accumulation_steps));
        let (sums, stacked) = region.scan_lists(options, &zeros, &slices, |region, sums, slice| {
            let ModelTensors { trained, frozen } = models.clone();
            let batch = BatchTensors::new(batch.names(), slice.arrays, batch.order);
            // Rows of different micro-batches are dropped from differently.
            let dropout = Key::fold_in(dropout, slice.index);
            let divisors: Vec<Tensor<'_>> = divisors.to_vec();
            let given = MicroBatch {
                parameters: &trained,
                frozen: &frozen,
                batch: &batch,
                dropout,
                divisors: &divisors,
            };
            let (loss, others, gradients) = self.differentiate(*region, specs, given, names);
            let sums = sums.iter().zip(&gradients).zip(specs).map(|((sum, gradient), (_, spec))| {
                // They stay split from one micro-batch to the next.
                (*sum + gradient.cast(DType::F32)).constrain(&spec.logical_axes)
            });
            (sums.collect(), [vec![loss], others].concat())
        });
        let (sums_of_terms, maxima) = stacked.split_at(1 + names.terms.len());
        let totals: Vec<Tensor<'t>> = sums_of_terms
            .iter()
            .map(|values| values.sum(&[MICRO_BATCH]))
            .chain(maxima.iter().map(|values| values.max(&[MICRO_BATCH])))
            .collect();
        let gradients = sums.iter().map(|sum| sum.cast(self.gradient_dtype)).collect();
        (totals[0], totals[1..].to_vec(), gradients)
    }

    /// The share of a batch's loss that a micro-batch has, the values that `names` tells, and its gradients.
    fn differentiate<'t>(
        &self,
        region: Region<'t>,
        specs: &[(Path, ParamSpec)],
        given: MicroBatch<'_, 't>,
        names: &mut SideNames,
    ) -> (Tensor<'t>, Vec<Tensor<'t>>, Vec<Tensor<'t>>) {
        let frozen_specs = self.frozen_specs();
        let (loss, others, gradients) =
            region.value_and_grad_list(&Parameters(given.parameters.to_vec()), |_, parameters| {
                let trained = BoundModel {
                    model: &*self.model,
                    specs,
                    parameters: &parameters.0,
                    usage: self.usage,
                    dropout: Some(given.dropout),
                    is_differentiated: true,
                };
                let models = Models { trained, frozen: self.bind_frozen(&frozen_specs, given.frozen) };
                let loss = self.objective.loss(&models, given.batch, given.divisors);
                let mut share = loss.share;
                let mut terms = loss.terms;
                let part = 1.0 / self.accumulation_steps as f64;
                for (name, auxiliary) in loss.side.auxiliary_losses {
                    let auxiliary = auxiliary.cast(DType::F32) * part;
                    share = share + auxiliary;
                    terms.push((name, auxiliary));
                }
                let scores = loss.side.layer_outputs;
                names.terms = terms.iter().map(|(name, _)| *name).collect();
                names.places = scores.iter().map(|scores| scores.place).collect();
                let scores = scores.iter().map(|scores| scores.value.max(&[BATCH]));
                (share, terms.into_iter().map(|(_, value)| value).chain(scores).collect())
            });
        // Without these the partitioner may leave gradients, and with them the optimizer, on every device.
        let gradients = gradients
            .0
            .iter()
            .zip(specs)
            .map(|(gradient, (_, spec))| gradient.cast(self.gradient_dtype).constrain(&spec.logical_axes))
            .collect();
        (loss, others, gradients)
    }

    /// The sums over a batch that an evaluation adds up.
    pub fn evaluate<'t>(
        &self,
        specs: &[(Path, ParamSpec)],
        models: &ModelTensors<'t>,
        batch: &BatchTensors<'t>,
    ) -> NamedTensors<'t> {
        let frozen_specs = self.frozen_specs();
        let trained = BoundModel {
            model: &*self.model,
            specs,
            parameters: &models.trained,
            usage: self.usage,
            dropout: None,
            is_differentiated: false,
        };
        let models = Models { trained, frozen: self.bind_frozen(&frozen_specs, &models.frozen) };
        self.objective.evaluate(&models, batch)
    }

    fn frozen_specs(&self) -> Vec<Vec<(Path, ParamSpec)>> {
        self.frozen.iter().map(|frozen| frozen.model.parameters()).collect()
    }

    fn bind_frozen<'a, 't>(
        &'a self,
        specs: &'a [Vec<(Path, ParamSpec)>],
        parameters: &'a [Vec<Tensor<'t>>],
    ) -> Vec<BoundModel<'a, 't>> {
        let models = self.frozen.iter().zip(specs).zip(parameters);
        let bound = models.map(|((frozen, specs), parameters)| BoundModel {
            model: &*frozen.model,
            specs,
            parameters,
            usage: self.usage,
            dropout: None,
            is_differentiated: false,
        });
        bound.collect()
    }

    /// A batch in micro-batches: `[part, batch, …]`. Neighbouring rows go to different micro-batches, so that each has
    /// rows of every device and nothing moves between them.
    fn cut<'t>(&self, region: Region<'t>, batch: &BatchTensors<'t>) -> Slice<Tensor<'t>> {
        let parts = axis(MICRO_BATCH, self.accumulation_steps);
        let cut = |tensor: Tensor<'t>| {
            let rows = tensor.axis(BATCH).size / parts.size;
            let cut = tensor.split(BATCH, &[axis(BATCH, rows), parts]);
            let rest: Vec<Axis> =
                cut.axes().iter().filter(|axis| axis.name != MICRO_BATCH).copied().collect();
            let logical: Vec<Option<&str>> =
                std::iter::once(None).chain(rest.iter().map(|axis| self.logical_axis(axis))).collect();
            cut.broadcast(&[&[parts], rest.as_slice()].concat()).constrain(&logical)
        };
        let index = region.iota(DType::I32, parts);
        Slice { index, arrays: batch.tensors().map(cut).collect() }
    }
}
