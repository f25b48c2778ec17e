//! What training minimizes: the loss of a batch, and its gradients.

use mt_derive::Tree;
use mt_models::{Forward, Model, OfLayers, Tokens};
use mt_nn::{
    LayerPlace, ParamSpec, TiledHead, TokenLoss,
    axes::{BATCH, POSITION},
    divisor, token_loss, token_weights,
};
use mt_shape::{Axis, DType, Path, axis};
use mt_trace::{Key, Memory, Region, ScanOptions, Tensor};

use crate::{measured::NamedTensors, metrics::names, query_key_clip::SCORES};

/// A batch on its devices, each array `i32[batch, position]`.
#[derive(Clone, Copy)]
pub(crate) struct BatchTensors<'t> {
    pub tokens: Tokens<'t>,
    pub targets: Tensor<'t>,
    pub targets_segmentation: Tensor<'t>,
}

/// How the loss of a batch is computed.
#[derive(Clone)]
pub(crate) struct Objective<'a> {
    pub model: &'a dyn Model,
    /// The type that gradients are handed on in. Those of parts are added up in `f32`.
    pub gradient_dtype: DType,
    /// The weight of the squared log-partition function.
    pub z_loss_multiplier: f64,
    /// In how many tiles of positions logits are computed.
    pub num_vocab_tiling: usize,
    /// Whether the head's parameters are gathered once for all tiles.
    pub gather_head_once: bool,
    /// Into how many parts a batch is cut, one after the other, whose gradients are added up.
    pub accumulation_steps: usize,
    /// The logical axes of batches.
    pub batch_axes: [String; 2],
    /// The memory that the parameters of layers are in; all others are on the device.
    pub layers_in: Memory,
    /// Whether the largest scores of attention are found besides.
    pub with_scores: bool,
    /// Whether there are several devices.
    pub is_split: bool,
}

/// What a loss is computed from.
#[derive(Clone, Copy)]
struct Given<'a, 't> {
    parameters: &'a [Tensor<'t>],
    batch: BatchTensors<'t>,
    dropout: Key<'t>,
    /// What sums over all tokens of the whole batch are divided by.
    divisor: Tensor<'t>,
}

/// The loss of a batch and what follows from it.
pub(crate) struct LossAndGradients<'t> {
    /// The loss that was differentiated, per unit of weight.
    pub loss: Tensor<'t>,
    /// The sum of the tokens' weights.
    pub weights: Tensor<'t>,
    /// The parts of the loss, if it has several.
    pub metrics: NamedTensors<'t>,
    /// In the order of the parameters, placed as they are.
    pub gradients: Vec<Tensor<'t>>,
    /// The largest scores of each head, if they are wanted: `[q_heads]`, or stacked.
    pub scores: Vec<OfLayers<'t>>,
}

/// What there is besides a loss, in the order of the values.
#[derive(Default)]
struct Besides {
    /// The names of the loss's parts.
    names: Vec<&'static str>,
    /// The layers whose largest scores follow.
    places: Vec<LayerPlace>,
}

/// A list of parameters, to be differentiated.
#[derive(Tree)]
struct Parameters<L>(Vec<L>);

/// What a scan over the parts of a batch slices.
#[derive(Tree)]
struct Part<L> {
    index: L,
    tokens: L,
    positions: L,
    segmentation: L,
    targets: L,
    targets_segmentation: L,
}

const PART: &str = "part";

impl Objective<'_> {
    /// The loss of a batch with its gradients, the parameters being described by `specs`.
    ///
    /// However many parts the batch is cut into, the loss is that of the whole batch: each token counts the same,
    /// whichever part it is in, as the weights of all of them are known before the first part is computed. Losses
    /// that are not sums over tokens are averaged over the parts.
    pub fn loss_and_gradients<'t>(
        &self,
        specs: &[(Path, ParamSpec)],
        parameters: &[Tensor<'t>],
        batch: BatchTensors<'t>,
        dropout: Key<'t>,
    ) -> LossAndGradients<'t> {
        let region = batch.targets.region();
        let weights = token_weights(batch.targets_segmentation).sum(&[BATCH, POSITION]);
        let divisor = divisor(weights);
        let mut besides = Besides::default();
        let (loss, others, gradients) = if self.accumulation_steps == 1 {
            let given = Given { parameters, batch, dropout, divisor };
            self.differentiate(region, specs, given, &mut besides)
        } else {
            let zeros: Vec<Tensor<'t>> = specs
                .iter()
                .map(|(_, spec)| region.full(DType::F32, &spec.axes, 0.0).constrain(&spec.logical_axes))
                .collect();
            let parts = self.cut(batch);
            let options = ScanOptions::over(axis(PART, self.accumulation_steps));
            let (sums, stacked) = region.scan_lists(options, &zeros, &parts, |region, sums, part| {
                let parameters: Vec<Tensor<'_>> = parameters.to_vec();
                let batch = BatchTensors {
                    tokens: Tokens {
                        tokens: part.tokens,
                        positions: part.positions,
                        segmentation: part.segmentation,
                        order: batch.tokens.order,
                    },
                    targets: part.targets,
                    targets_segmentation: part.targets_segmentation,
                };
                // Rows of different parts are dropped from differently.
                let dropout = Key::fold_in(dropout, part.index);
                let given = Given { parameters: &parameters, batch, dropout, divisor };
                let (loss, others, gradients) = self.differentiate(*region, specs, given, &mut besides);
                let sums = sums.iter().zip(&gradients).zip(specs).map(|((sum, gradient), (_, spec))| {
                    // They stay split from one part to the next.
                    (*sum + gradient.cast(DType::F32)).constrain(&spec.logical_axes)
                });
                (sums.collect(), [vec![loss], others].concat())
            });
            let (sums_of_parts, maxima_of_parts) = stacked.split_at(1 + besides.names.len());
            let totals: Vec<Tensor<'t>> = sums_of_parts
                .iter()
                .map(|values| values.sum(&[PART]))
                .chain(maxima_of_parts.iter().map(|values| values.max(&[PART])))
                .collect();
            let gradients = sums.iter().map(|sum| sum.cast(self.gradient_dtype)).collect();
            (totals[0], totals[1..].to_vec(), gradients)
        };
        let (parts, scores) = others.split_at(besides.names.len());
        let scores = besides.places.iter().zip(scores);
        LossAndGradients {
            loss,
            weights,
            metrics: besides.names.iter().copied().zip(parts.iter().copied()).collect(),
            gradients,
            scores: scores
                .map(|(place, value)| OfLayers { output: SCORES, place: *place, value: *value })
                .collect(),
        }
    }

    /// The share of a batch's loss that some of its rows have, what there is `besides`, and its gradients.
    fn differentiate<'t>(
        &self,
        region: Region<'t>,
        specs: &[(Path, ParamSpec)],
        Given { parameters, batch, dropout, divisor }: Given<'_, 't>,
        besides: &mut Besides,
    ) -> (Tensor<'t>, Vec<Tensor<'t>>, Vec<Tensor<'t>>) {
        let (loss, others, gradients) =
            region.value_and_grad_list(&Parameters(parameters.to_vec()), |_, parameters| {
                let layer_outputs = if self.with_scores { vec![SCORES] } else { Vec::new() };
                let forward = Forward { dropout: Some(dropout), layer_outputs, ..self.forward() };
                let hidden = self.model.hidden(&parameters.0, batch.tokens, forward);
                let tokens = if self.is_split {
                    let (parameters, hidden) = self.before_head(specs, &parameters.0, hidden.hidden);
                    self.token_loss(&parameters, hidden, batch)
                } else {
                    self.token_loss(&parameters.0, hidden.hidden, batch)
                };
                let mut loss = tokens.total / divisor;
                let mut parts: NamedTensors<'_> = Vec::new();
                let share = 1.0 / self.accumulation_steps as f64;
                for (name, auxiliary) in hidden.auxiliary_losses {
                    let auxiliary = auxiliary.cast(DType::F32) * share;
                    loss = loss + auxiliary;
                    parts.push((name, auxiliary));
                }
                let z_loss = tokens.z_loss.map(|z_loss| z_loss / divisor);
                if z_loss.is_some() || !parts.is_empty() {
                    let tokens = tokens.total / divisor;
                    let cross_entropy = z_loss.map_or(tokens, |z_loss| tokens - z_loss);
                    parts.splice(0..0, [(names::LM_LOSS, cross_entropy)]);
                    parts.extend(z_loss.map(|z_loss| (names::Z_LOSS, z_loss)));
                }
                besides.names = parts.iter().map(|(name, _)| *name).collect();
                besides.places = hidden.layer_outputs.iter().map(|scores| scores.place).collect();
                let scores = hidden.layer_outputs.iter().map(|scores| scores.value.max(&[BATCH]));
                (loss, parts.into_iter().map(|(_, value)| value).chain(scores).collect())
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

    /// The parameters and the hidden states as the head takes them, so that the gradients of its parameters are split
    /// before those of layers are begun. Otherwise each device keeps whole sums of the former until all are made.
    fn before_head<'t>(
        &self,
        specs: &[(Path, ParamSpec)],
        parameters: &[Tensor<'t>],
        hidden: Tensor<'t>,
    ) -> (Vec<Tensor<'t>>, Tensor<'t>) {
        let of_head = self.model.head_parameters();
        let mut held: Vec<Tensor<'t>> = of_head.iter().map(|index| parameters[*index]).collect();
        held.push(hidden);
        let mut held = hidden.region().optimization_barrier_list(&held);
        let hidden = held.pop().expect("as many come out as go in");
        let mut parameters = parameters.to_vec();
        for (index, tensor) in of_head.into_iter().zip(held) {
            parameters[index] = tensor.constrain(&specs[index].1.logical_axes);
        }
        (parameters, hidden)
    }

    fn forward<'t>(&self) -> Forward<'t> {
        Forward { layers_in: self.layers_in, ..Forward::default() }
    }

    /// The sums over a batch that an evaluation adds up.
    pub fn evaluate<'t>(&self, parameters: &[Tensor<'t>], batch: BatchTensors<'t>) -> NamedTensors<'t> {
        let hidden = self.model.hidden(parameters, batch.tokens, self.forward());
        let loss = self.token_loss(parameters, hidden.hidden, batch);
        let sums =
            [(names::EVALUATION_TOTAL_LOSS, loss.total), (names::EVALUATION_TOTAL_WEIGHTS, loss.weights)];
        let z_loss = loss.z_loss.map(|z_loss| (names::EVALUATION_TOTAL_Z_LOSS, z_loss));
        sums.into_iter().chain(z_loss).collect()
    }

    fn token_loss<'t>(
        &self,
        parameters: &[Tensor<'t>],
        hidden: Tensor<'t>,
        batch: BatchTensors<'t>,
    ) -> TokenLoss<'t> {
        let (targets, segmentation) = (batch.targets, batch.targets_segmentation);
        if self.num_vocab_tiling == 1 {
            let logits = self.model.head(parameters, hidden);
            return token_loss(logits, targets, segmentation, self.z_loss_multiplier);
        }
        let specs = self.model.parameters();
        let of_head = self.model.head_parameters();
        let logical_axes: Vec<_> = of_head.iter().map(|index| specs[*index].1.logical_axes.clone()).collect();
        let parameters: Vec<Tensor<'t>> = of_head.iter().map(|index| parameters[*index]).collect();
        TiledHead {
            tiles: self.num_vocab_tiling,
            z_loss_multiplier: self.z_loss_multiplier,
            head: &|parameters, hidden| self.model.apply_head(parameters, hidden),
            logical_axes: &logical_axes,
            gathered: if self.gather_head_once { &["embed_vocab"] } else { &[] },
        }
        .token_loss(&parameters, hidden, targets, segmentation)
    }

    /// A batch of `[batch, position]` in parts of `[part, batch, position]`. Neighbouring rows go to different parts,
    /// so that each part has rows of every device and nothing moves between them.
    fn cut<'t>(&self, batch: BatchTensors<'t>) -> Part<Tensor<'t>> {
        let [of_rows, of_positions] = self.batch_axes.each_ref().map(|name| Some(name.as_str()));
        let parts = axis(PART, self.accumulation_steps);
        let cut = |tensor: Tensor<'t>| {
            let rows = tensor.axis(BATCH).size / parts.size;
            let cut = tensor.split(BATCH, &[axis(BATCH, rows), parts]);
            let rest: Vec<Axis> = cut.axes().iter().filter(|axis| axis.name != PART).copied().collect();
            cut.broadcast(&[&[parts], rest.as_slice()].concat()).constrain(&[None, of_rows, of_positions])
        };
        Part {
            index: batch.targets.region().iota(DType::I32, parts),
            tokens: cut(batch.tokens.tokens),
            positions: cut(batch.tokens.positions),
            segmentation: cut(batch.tokens.segmentation),
            targets: cut(batch.targets),
            targets_segmentation: cut(batch.targets_segmentation),
        }
    }
}
