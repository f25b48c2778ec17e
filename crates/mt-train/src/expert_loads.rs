//! The load of experts: metrics, and the routing biases that even it out.
//!
//! Biases that only choose experts have no gradient. After each step, those of experts with less than the mean load of
//! their layer grow by a fixed rate, and the others fall by it (Wang et al., 2024: Auxiliary-Loss-Free Load Balancing).

use mt_config::OptimizerGroup;
use mt_models::{
    LayerOutput, Model, OfLayers, RoutingBias,
    expert_loads::{CHOSEN, DROPPED},
};
use mt_nn::axes::EXPERT;
use mt_trace::Tensor;

use crate::{TrainError, masks, metrics::names, objective::NamedTensors};

/// The routing biases that a run updates or records.
pub(crate) struct RoutingBiases {
    /// The change of a bias per step; 0 leaves biases as they are.
    rate: f64,
    updated: Vec<RoutingBias>,
    /// Those whose norms are metrics.
    recorded: Vec<RoutingBias>,
}

impl RoutingBiases {
    /// The biases of a model. `names` are those of its parameters.
    ///
    /// # Errors
    /// The mask of trained parameters matches none.
    pub fn new(group: &OptimizerGroup, model: &dyn Model, names: &[String]) -> Result<Self, TrainError> {
        let all = model.routing_biases();
        let selected = masks::trained(&group.trainable_parameters_mask, names)?;
        let updated =
            all.iter().copied().filter(|bias| selected[bias.index] && group.routed_bias_update_rate > 0.0);
        Ok(Self {
            rate: group.routed_bias_update_rate,
            updated: updated.collect(),
            recorded: if group.log_moe_bias_norms { all } else { Vec::new() },
        })
    }

    /// The parameters after the step's update of the biases.
    pub fn update<'t>(&self, mut parameters: Vec<Tensor<'t>>, outputs: &[OfLayers<'t>]) -> Vec<Tensor<'t>> {
        for bias in &self.updated {
            let loads = named(outputs, CHOSEN).find(|loads| loads.place == bias.place);
            let loads = loads.expect("every layer with experts outputs their loads").value;
            let change = (loads.mean(&[EXPERT]) - loads).sign() * self.rate;
            let parameter = &mut parameters[bias.index];
            *parameter = *parameter + change.cast(parameter.dtype());
        }
        parameters
    }

    /// The norm of each recorded bias.
    pub fn norms<'t>(&self, parameters: &[Tensor<'t>]) -> NamedTensors<'t> {
        let norm = |bias: &RoutingBias| OfLayers {
            label: LayerOutput::ExpertLoads.label(),
            place: bias.place,
            value: parameters[bias.index].square().sum(&[EXPERT]).sqrt(),
        };
        let mut each: Vec<_> = self.recorded.iter().flat_map(|bias| norm(bias).of_each()).collect();
        each.sort_by_key(|(layer, _)| *layer);
        let named = |(layer, norm)| (format!("{}/layer_{layer:03}", names::ROUTING_BIAS_NORM).into(), norm);
        each.into_iter().map(named).collect()
    }
}

fn named<'a, 't>(outputs: &'a [OfLayers<'t>], name: &'static str) -> impl Iterator<Item = &'a OfLayers<'t>> {
    outputs.iter().filter(move |made| made.label == LayerOutput::ExpertLoads.named(name))
}

/// The shares of choices that experts receive, over all layers with experts; none without experts.
pub(crate) fn metrics<'t>(outputs: &[OfLayers<'t>]) -> NamedTensors<'t> {
    let loads: Vec<Tensor<'t>> = named(outputs, CHOSEN).map(|loads| loads.value).collect();
    let shares: Vec<Tensor<'t>> =
        loads.iter().map(|loads| *loads / loads.sum(&[EXPERT]).maximum(1.0)).collect();
    let layers_of = |share: &Tensor<'t>| -> usize {
        share.axes().iter().filter(|axis| axis.name != EXPERT).map(|axis| axis.size).product()
    };
    let num_layers: usize = shares.iter().map(layers_of).sum();
    // x log x tends to 0 with x.
    let entropy = |share: &Tensor<'t>| {
        all(*share * share.maximum(f64::from(f32::MIN_POSITIVE)).log(), Tensor::sum) * -1.0
    };
    let added = |terms: Vec<Tensor<'t>>| terms.into_iter().reduce(|one, other| one + other);
    let largest = shares.iter().map(|share| all(*share, Tensor::max)).reduce(Tensor::maximum);
    let smallest = shares.iter().map(|share| all(*share, Tensor::min)).reduce(Tensor::minimum);
    let entropies = added(shares.iter().map(entropy).collect());
    let num_dropped = added(named(outputs, DROPPED).map(|dropped| all(dropped.value, Tensor::sum)).collect());
    let num_chosen = added(loads.iter().map(|loads| all(*loads, Tensor::sum)).collect());
    let metrics = [
        (names::LARGEST_EXPERT_SHARE, largest),
        (names::SMALLEST_EXPERT_SHARE, smallest),
        (names::EXPERT_ENTROPY, entropies.map(|sum| sum * (1.0 / num_layers as f64))),
        (names::DROPPED_SHARE, num_dropped.zip(num_chosen).map(|(dropped, all)| dropped / all.maximum(1.0))),
    ];
    metrics.into_iter().filter_map(|(name, value)| Some((name.into(), value?))).collect()
}

/// A reduction of a tensor over all its axes.
fn all<'t>(tensor: Tensor<'t>, reduce: impl FnOnce(Tensor<'t>, &[&'static str]) -> Tensor<'t>) -> Tensor<'t> {
    let axes: Vec<&'static str> = tensor.axes().iter().map(|axis| axis.name).collect();
    reduce(tensor, &axes)
}
