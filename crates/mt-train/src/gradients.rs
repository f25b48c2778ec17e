//! The loss of a batch and its gradients, accumulated over micro-batches, for any objective.

use std::sync::Arc;

use mt_derive::Tree;
use mt_models::{LayerOutput, Model, OfLayers, OutputLabel, Reduce};
use mt_nn::{
    LayerPlace, ParamSpec,
    axes::{BATCH, POSITION},
    divisor,
};
use mt_shape::{Axis, DType, LogicalAxis, Path, axis};
use mt_trace::{Key, Region, ScanOptions, Tensor};

use crate::derived::Derived;
use crate::objective::{
    BatchArray, BatchTensors, BoundModel, FrozenModel, MetricName, ModelUse, Models, NamedTensors, Objective,
    Score,
};

/// How the loss of a batch and its gradients are computed.
#[derive(Clone)]
pub(crate) struct LossRule {
    pub objective: Arc<dyn Objective>,
    pub model: Arc<dyn Model>,
    pub frozen: Arc<[FrozenModel]>,
    pub derived: Arc<Derived>,
    /// The model that computes an array of batches before training ([`Objective::precomputed`]).
    pub precomputed: Option<FrozenModel>,
    pub usage: ModelUse,
    /// The type of the returned gradients. Gradients of micro-batches are accumulated in `f32`.
    pub gradient_dtype: DType,
    /// The number of micro-batches, which run one after the other.
    pub accumulation_steps: usize,
    /// The logical axes of a batch's rows and of its positions.
    pub batch_axes: [LogicalAxis; 2],
}

/// The traced parameters of all models.
#[derive(Clone)]
pub(crate) struct ModelTensors<'t> {
    pub trained: Vec<Tensor<'t>>,
    /// The parameters of each frozen model, in the order of [`LossRule::frozen`].
    pub frozen: Vec<Vec<Tensor<'t>>>,
}

/// The loss of a batch, its gradients and its other outputs.
pub(crate) struct LossAndGradients<'t> {
    /// The differentiated loss, divided by the weight of the batch.
    pub loss: Tensor<'t>,
    /// The weight of the batch, such as its number of tokens.
    pub weights: Tensor<'t>,
    /// The terms of the loss, if it has several.
    pub metrics: NamedTensors<'t>,
    /// In the order of the parameters and with their placement; zero for parameters that training cannot change.
    pub gradients: Vec<Tensor<'t>>,
    /// The outputs of layers in addition to the residual stream that [`ModelUse`] requests.
    pub layer_outputs: Vec<OfLayers<'t>>,
}

/// The inputs of a micro-batch's loss.
#[derive(Clone, Copy)]
struct MicroBatch<'a, 't> {
    parameters: &'a [Tensor<'t>],
    frozen: &'a [Vec<Tensor<'t>>],
    batch: &'a BatchTensors<'t>,
    dropout: Key<'t>,
    /// The divisors of sums over the whole batch.
    divisors: &'a [Tensor<'t>],
    step: Tensor<'t>,
}

/// The parameters that training can change.
fn trainable(specs: &[(Path, ParamSpec)]) -> impl Iterator<Item = &(Path, ParamSpec)> {
    specs.iter().filter(|(_, spec)| spec.is_trainable)
}

/// Names and layers of the auxiliary outputs of a loss, in output order.
#[derive(Default)]
struct SideNames {
    /// Terms of the loss.
    terms: Vec<MetricName>,
    /// The layer outputs that follow the terms.
    layer_outputs: Vec<(OutputLabel, LayerPlace)>,
}

/// A list of parameters to differentiate.
#[derive(Tree)]
struct Parameters<L>(Vec<L>);

/// The arrays that a scan over micro-batches slices.
#[derive(Tree)]
struct Slice<L> {
    index: L,
    arrays: Vec<L>,
}

const MICRO_BATCH: &str = "micro_batch";

impl LossRule {
    /// The parameters to differentiate: those of the model, the arrays of learned maps, and the parameters of the value
    /// model.
    pub fn specs(&self) -> Vec<(Path, ParamSpec)> {
        self.derived.all_specs(&*self.model)
    }

    /// The logical names of an array's axes.
    pub fn logical_axes(&self, array: &BatchArray) -> Vec<Option<LogicalAxis>> {
        array.axes.iter().map(|axis| self.logical_axis(axis)).collect()
    }

    fn logical_axis(&self, axis: &Axis) -> Option<LogicalAxis> {
        let [rows, positions] = self.batch_axes;
        match axis.name {
            BATCH => Some(rows),
            POSITION => Some(positions),
            _ => None,
        }
    }

    /// The gradients of a batch's loss with respect to the parameters that `specs` describes ([`Self::specs`]), and the loss
    /// itself.
    ///
    /// The loss is that of the whole batch, whatever the number of micro-batches: each row or token has the same weight
    /// in any micro-batch, because the weights of the whole batch are computed before the first micro-batch. Losses
    /// that are not sums over the batch are averaged over micro-batches. `step` is the step of the run.
    pub fn loss_and_gradients<'t>(
        &self,
        specs: &[(Path, ParamSpec)],
        models: &ModelTensors<'t>,
        batch: &BatchTensors<'t>,
        dropout: Key<'t>,
        step: Tensor<'t>,
    ) -> LossAndGradients<'t> {
        let region = dropout.value().region();
        let weights = self.objective.weights(batch);
        let divisors: Vec<Tensor<'t>> = weights.iter().map(|weights| divisor(*weights)).collect();
        let mut names = SideNames::default();
        let (loss, others, gradients) = if self.accumulation_steps == 1 {
            let ModelTensors { trained, frozen } = models;
            let given = MicroBatch { parameters: trained, frozen, batch, dropout, divisors: &divisors, step };
            self.differentiate(region, specs, given, &mut names)
        } else {
            self.accumulate(region, specs, models, (batch, dropout, &divisors, step), &mut names)
        };
        let (terms, of_layers) = others.split_at(names.terms.len());
        let of_layers = names.layer_outputs.iter().zip(of_layers);
        let of_layers =
            of_layers.map(|((label, place), value)| OfLayers { label: *label, place: *place, value: *value });
        let mut gradients = gradients.into_iter();
        let gradient_of = |(_, spec): &(Path, ParamSpec)| match spec.is_trainable {
            true => gradients.next().expect("every parameter that can be trained has a gradient"),
            false => region.full(self.gradient_dtype, &spec.axes, 0.0),
        };
        LossAndGradients {
            loss,
            weights: weights[0],
            metrics: names.terms.iter().cloned().zip(terms.iter().copied()).collect(),
            gradients: specs.iter().map(gradient_of).collect(),
            layer_outputs: of_layers.collect(),
        }
    }

    /// Scans over micro-batches and sums their terms and the gradients of trainable parameters. Outputs of layers are
    /// reduced as their labels say.
    fn accumulate<'t>(
        &self,
        region: Region<'t>,
        specs: &[(Path, ParamSpec)],
        models: &ModelTensors<'t>,
        (batch, dropout, divisors, step): (&BatchTensors<'t>, Key<'t>, &[Tensor<'t>], Tensor<'t>),
        names: &mut SideNames,
    ) -> (Tensor<'t>, Vec<Tensor<'t>>, Vec<Tensor<'t>>) {
        let zeros: Vec<Tensor<'t>> = trainable(specs)
            .map(|(_, spec)| region.full(DType::F32, &spec.axes, 0.0).constrain(&spec.logical_axes))
            .collect();
        let slices = self.cut(region, batch);
        let options = ScanOptions::over(axis(MICRO_BATCH, self.accumulation_steps));
        let (sums, stacked) = region.scan_lists(options, &zeros, &slices, |region, sums, slice| {
            let ModelTensors { trained, frozen } = models.clone();
            let batch = BatchTensors::new(batch.names(), slice.arrays, batch.order);
            // Each micro-batch drops other elements.
            let dropout = Key::fold_in(dropout, slice.index);
            let divisors: Vec<Tensor<'_>> = divisors.to_vec();
            let given = MicroBatch {
                parameters: &trained,
                frozen: &frozen,
                batch: &batch,
                dropout,
                divisors: &divisors,
                step,
            };
            let (loss, others, gradients) = self.differentiate(*region, specs, given, names);
            let sums =
                sums.iter().zip(&gradients).zip(trainable(specs)).map(|((sum, gradient), (_, spec))| {
                    // Accumulated gradients stay sharded from one micro-batch to the next.
                    (*sum + gradient.cast(DType::F32)).constrain(&spec.logical_axes)
                });
            (sums.collect(), [vec![loss], others].concat())
        });
        let (sums_of_terms, of_layers) = stacked.split_at(1 + names.terms.len());
        let of_batch =
            |((label, _), values): (&(OutputLabel, LayerPlace), &Tensor<'t>)| match reduction(label) {
                Reduce::Largest => values.max(&[MICRO_BATCH]),
                Reduce::Mean => values.mean(&[MICRO_BATCH]),
                Reduce::Sum => values.sum(&[MICRO_BATCH]),
            };
        let totals: Vec<Tensor<'t>> = sums_of_terms
            .iter()
            .map(|values| values.sum(&[MICRO_BATCH]))
            .chain(names.layer_outputs.iter().zip(of_layers).map(of_batch))
            .collect();
        let gradients = sums.iter().map(|sum| sum.cast(self.gradient_dtype)).collect();
        (totals[0], totals[1..].to_vec(), gradients)
    }

    /// A micro-batch's share of the batch's loss, the auxiliary outputs that `names` lists, and the gradients of trainable
    /// parameters.
    fn differentiate<'t>(
        &self,
        region: Region<'t>,
        specs: &[(Path, ParamSpec)],
        given: MicroBatch<'_, 't>,
        names: &mut SideNames,
    ) -> (Tensor<'t>, Vec<Tensor<'t>>, Vec<Tensor<'t>>) {
        let frozen_specs = self.frozen_specs();
        let with_specs = given.parameters.iter().zip(specs);
        let differentiated = with_specs.filter(|(_, (_, spec))| spec.is_trainable).map(|(tensor, _)| *tensor);
        let (loss, others, gradients) =
            region.value_and_grad_list(&Parameters(differentiated.collect()), |_, differentiated| {
                let mut differentiated = differentiated.0.iter();
                let parameter = |(tensor, (_, spec)): (&Tensor<'t>, &(Path, ParamSpec))| {
                    if spec.is_trainable { *differentiated.next().expect("one for each") } else { *tensor }
                };
                let mut parameters: Vec<_> = given.parameters.iter().zip(specs).map(parameter).collect();
                self.derived.apply(&mut parameters, given.frozen);
                let (trained, value) = self.bind_trained(specs, &parameters);
                let models = Models {
                    trained: trained.differentiated(given.dropout),
                    value: value.map(|value| value.differentiated(given.dropout)),
                    frozen: self.bind_frozen(&frozen_specs, given.frozen),
                };
                let loss = self.objective.loss(&models, given.batch, given.divisors, given.step);
                let mut share = loss.share;
                let mut terms = loss.terms;
                let per_batch = 1.0 / self.accumulation_steps as f64;
                for (name, auxiliary) in loss.side.auxiliary_losses {
                    let auxiliary = auxiliary.cast(DType::F32) * per_batch;
                    share = share + auxiliary;
                    terms.push((name, auxiliary));
                }
                let of_layers = loss.side.layer_outputs;
                names.terms = terms.iter().map(|(name, _)| name.clone()).collect();
                names.layer_outputs = of_layers.iter().map(|made| (made.label, made.place)).collect();
                let of_layers = of_layers.iter().map(over_rows);
                (share, terms.into_iter().map(|(_, value)| value).chain(of_layers).collect())
            });
        // Without these constraints the partitioner may replicate gradients, and with them the optimizer, on every
        // device.
        let gradients = gradients
            .0
            .iter()
            .zip(trainable(specs))
            .map(|(gradient, (_, spec))| gradient.cast(self.gradient_dtype).constrain(&spec.logical_axes))
            .collect();
        (loss, others, gradients)
    }

    /// The sums over one batch that an evaluation accumulates.
    pub fn evaluate<'t>(
        &self,
        specs: &[(Path, ParamSpec)],
        models: &ModelTensors<'t>,
        batch: &BatchTensors<'t>,
    ) -> NamedTensors<'t> {
        let frozen_specs = self.frozen_specs();
        let trained = self.without_gradients(&*self.model, specs, &models.trained);
        let models = Models { trained, value: None, frozen: self.bind_frozen(&frozen_specs, &models.frozen) };
        self.objective.evaluate(&models, batch)
    }

    /// The scores of answers, from the parameters that `specs` describes ([`Self::specs`]).
    pub fn scores<'t>(
        &self,
        specs: &[(Path, ParamSpec)],
        models: &ModelTensors<'t>,
        batch: &BatchTensors<'t>,
    ) -> Vec<(Score, Tensor<'t>)> {
        let frozen_specs = self.frozen_specs();
        let (trained, value) = self.bind_trained(specs, &models.trained);
        let models = Models { trained, value, frozen: self.bind_frozen(&frozen_specs, &models.frozen) };
        self.objective.scores(&models, batch)
    }

    /// The trained model and the value model, from the parameters of both.
    fn bind_trained<'a, 't>(
        &'a self,
        specs: &'a [(Path, ParamSpec)],
        parameters: &'a [Tensor<'t>],
    ) -> (BoundModel<'a, 't>, Option<BoundModel<'a, 't>>) {
        let (end, first) = (self.derived.num_parameters(), self.derived.first_of_value_model());
        let trained = self.without_gradients(&*self.model, &specs[..end], &parameters[..end]);
        let value = self
            .derived
            .value_model()
            .map(|model| self.without_gradients(&**model, &specs[first..], &parameters[first..]));
        (trained, value)
    }

    /// The array of a batch that `model` computes before training.
    ///
    /// # Panics
    /// The objective has no such array.
    pub fn precompute<'t>(&self, model: &BoundModel<'_, 't>, batch: &BatchTensors<'t>) -> Tensor<'t> {
        let array = self.objective.precomputed().expect("the objective has an array to compute");
        array.compute(model, batch)
    }

    /// A frozen model with these parameters.
    pub fn bound<'a, 't>(
        &'a self,
        model: &'a FrozenModel,
        specs: &'a [(Path, ParamSpec)],
        parameters: &'a [Tensor<'t>],
    ) -> BoundModel<'a, 't> {
        self.without_gradients(model.model(&*self.model), specs, parameters)
    }

    /// A model with these parameters, of which no gradients are taken.
    fn without_gradients<'a, 't>(
        &'a self,
        model: &'a dyn Model,
        specs: &'a [(Path, ParamSpec)],
        parameters: &'a [Tensor<'t>],
    ) -> BoundModel<'a, 't> {
        BoundModel { model, specs, parameters, usage: self.usage, dropout: None, is_differentiated: false }
    }

    fn frozen_specs(&self) -> Vec<Vec<(Path, ParamSpec)>> {
        self.frozen.iter().map(|frozen| frozen.model(&*self.model).parameters()).collect()
    }

    fn bind_frozen<'a, 't>(
        &'a self,
        specs: &'a [Vec<(Path, ParamSpec)>],
        parameters: &'a [Vec<Tensor<'t>>],
    ) -> Vec<BoundModel<'a, 't>> {
        let models = self.frozen.iter().zip(specs).zip(parameters);
        models.map(|((frozen, specs), parameters)| self.bound(frozen, specs, parameters)).collect()
    }

    /// Cuts a batch into micro-batches: `[micro_batch, batch, …]`. Adjacent rows go to different micro-batches, so each
    /// micro-batch has rows of every device and no row moves between devices.
    fn cut<'t>(&self, region: Region<'t>, batch: &BatchTensors<'t>) -> Slice<Tensor<'t>> {
        let micro_batches = axis(MICRO_BATCH, self.accumulation_steps);
        let cut = |tensor: Tensor<'t>| {
            let rows = tensor.axis(BATCH).size / micro_batches.size;
            let cut = tensor.split(BATCH, &[axis(BATCH, rows), micro_batches]);
            let rest: Vec<Axis> =
                cut.axes().iter().filter(|axis| axis.name != MICRO_BATCH).copied().collect();
            let logical: Vec<Option<LogicalAxis>> =
                std::iter::once(None).chain(rest.iter().map(|axis| self.logical_axis(axis))).collect();
            cut.broadcast(&[&[micro_batches], rest.as_slice()].concat()).constrain(&logical)
        };
        let index = region.iota(DType::I32, micro_batches);
        Slice { index, arrays: batch.tensors().map(cut).collect() }
    }
}

/// How a side output of micro-batches becomes that of the batch.
fn reduction(label: &OutputLabel) -> Reduce {
    label.reduce.expect("training takes no output of single tokens")
}

/// A side output of layers, for all rows of a micro-batch.
fn over_rows<'t>(made: &OfLayers<'t>) -> Tensor<'t> {
    match made.label.kind {
        LayerOutput::LargestScores => made.value.max(&[BATCH]),
        _ => made.value,
    }
}
