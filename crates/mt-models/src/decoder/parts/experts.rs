//! Mixtures of experts, with or without experts that process every token.

use mt_derive::Tree;
use mt_nn::{
    Activation as Function, Dropout, Initializer, Linear, Mlp, ParamSpec, Weight,
    axes::EMBED,
    experts::{ExpertComputation, ExpertOptions, Experts, Router, RouterBias, Routing, capacity},
};
use mt_shape::{Axis, DType, LogicalAxis, axis, logical};
use mt_trace::Tensor;

use crate::{
    LayerOutput, OutputLabel,
    decoder::{
        Activation,
        part::{BatchDims, Part, PartDescription, PartInputs, PartOutputs, SpecBuilder},
    },
};

/// Routed experts, of which each token uses some, and shared experts, which every token uses.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertsConfig {
    pub routed: ExpertOptions,
    /// The width of the residual stream.
    pub embed: usize,
    /// The width of an expert.
    pub width: Axis,
    /// Whether the projections of experts have biases.
    pub bias: bool,
    /// Whether the router has a bias.
    pub router_bias: bool,
    /// Whether the weight of each expert has a learned factor.
    pub per_expert_scale: bool,
    pub shared: Option<SharedExperts>,
    /// The weight of the loss that grows with the imbalance of tokens over experts.
    pub balance_loss_weight: f64,
}

/// An MLP whose output is added to that of the routed experts.
#[derive(Clone, Debug, PartialEq)]
pub struct SharedExperts {
    pub width: Axis,
    pub activations: [Function; 2],
    /// Whether the output is multiplied by the sigmoid of a linear map of the input to one number.
    pub gated: bool,
}

/// The parameters of a mixture of experts.
#[derive(Clone, Debug, Tree)]
pub struct Mixture<L> {
    #[tree(flatten)]
    pub routed: Experts<L>,
    pub shared: Option<Mlp<L>>,
    /// `[embed, one]`
    pub shared_gate: Option<Linear<L>>,
}

/// The name of the loss of imbalance.
const BALANCE_LOSS: &str = "learning/moe_lb_loss";

const ONE: &str = "one";

impl ExpertsConfig {
    fn experts(&self) -> Axis {
        self.routed.router.experts
    }

    fn num_chosen(&self) -> usize {
        self.routed.router.num_chosen
    }

    fn routed_specs(&self, builder: &SpecBuilder) -> Experts<ParamSpec> {
        let experts = (self.experts(), logical::EXP);
        let (embed, width) = ((builder.embed, logical::EMBED_MOE), (self.width, logical::MLP_MOE));
        let matrix = |inputs: (Axis, LogicalAxis), outputs: (Axis, LogicalAxis)| {
            let initializer = Initializer::fan_in(builder.init_scale, inputs.0.size);
            Weight::dense(builder.array([experts, inputs, outputs], initializer))
        };
        let bias = |outputs: Axis, logical_axis: LogicalAxis| {
            self.bias.then(|| builder.array([experts, (outputs, logical_axis)], Initializer::Zeros))
        };
        let of_gate = (self.experts(), logical::EXPERTS_OF_ROUTER);
        let gate =
            builder.array([embed, of_gate], Initializer::fan_in(builder.init_scale, builder.embed.size));
        Experts {
            gate: Router {
                kernel: Weight::dense(gate),
                // A bias that only chooses experts has no gradient.
                bias: self.router_bias.then(|| ParamSpec {
                    is_trainable: self.routed.router.bias == RouterBias::OfLogits,
                    ..builder.array([of_gate], Initializer::Zeros)
                }),
            },
            per_expert_scale: self.per_expert_scale.then(|| builder.array([of_gate], Initializer::Ones)),
            wi_0: matrix(embed, width),
            wi_0_bias: bias(self.width, logical::MLP_MOE),
            wi_1: matrix(embed, width),
            wi_1_bias: bias(self.width, logical::MLP_MOE),
            wo: matrix(width, embed),
            wo_bias: bias(builder.embed, logical::NORM),
        }
    }
}

impl Part for ExpertsConfig {
    type Parameters<L> = Mixture<L>;

    fn specs(&self, builder: &SpecBuilder) -> Mixture<ParamSpec> {
        let embed = (builder.embed, logical::EMBED);
        let shared = |shared: &SharedExperts| {
            let width = (shared.width, logical::MLP);
            Mlp {
                wi_0: builder.linear(1, [embed, width]),
                wi_1: Some(builder.linear(1, [embed, width])),
                wo: builder.linear(1, [width, embed]),
            }
        };
        let is_gated = self.shared.as_ref().is_some_and(|shared| shared.gated);
        Mixture {
            routed: self.routed_specs(builder),
            shared: self.shared.as_ref().map(shared),
            shared_gate: is_gated.then(|| builder.linear(1, [embed, (axis(ONE, 1), logical::NORM)])),
        }
    }

    fn forward<'t>(
        &self,
        parameters: &Mixture<Tensor<'t>>,
        x: Tensor<'t>,
        inputs: &PartInputs<'_, 't>,
    ) -> PartOutputs<'t> {
        self.forward_routed_by(parameters, x, x, inputs)
    }

    fn differs_from(&self, other: &Self) -> bool {
        // How experts are computed does not change the function unless tokens are dropped.
        let drops = |config: &Self| matches!(config.routed.computation, ExpertComputation::Capacity(_));
        let mut other = other.clone();
        if !drops(self) && !drops(&other) {
            other.routed.computation = self.routed.computation;
        }
        other.routed.sums_in_f32 = self.routed.sums_in_f32;
        other.routed.router.in_f32 = self.routed.router.in_f32;
        other.balance_loss_weight = self.balance_loss_weight;
        *self != other
    }
}

impl ExpertsConfig {
    /// Applies the experts, which the router chooses by another input than theirs.
    pub(super) fn forward_routed_by<'t>(
        &self,
        parameters: &Mixture<Tensor<'t>>,
        x: Tensor<'t>,
        router_input: Tensor<'t>,
        inputs: &PartInputs<'_, 't>,
    ) -> PartOutputs<'t> {
        let (mut output, routing) = parameters.routed.forward_routed_by(x, router_input, &self.routed);
        if let (Some(mlp), Some(shared)) = (&parameters.shared, &self.shared) {
            let always = shared_output(mlp, shared, parameters.shared_gate.as_ref(), x, inputs.dropout);
            output = output + always;
        }
        PartOutputs { others: self.losses(&routing), ..PartOutputs::only(output) }
    }

    fn losses<'t>(&self, routing: &Routing<'t>) -> Vec<(OutputLabel, Tensor<'t>)> {
        if self.balance_loss_weight == 0.0 {
            return Vec::new();
        }
        let loss = routing.balance_loss(self.experts()) * self.balance_loss_weight;
        vec![(LayerOutput::AuxiliaryLoss.named(BALANCE_LOSS), loss)]
    }
}

fn shared_output<'t>(
    mlp: &Mlp<Tensor<'t>>,
    shared: &SharedExperts,
    gate: Option<&Linear<Tensor<'t>>>,
    x: Tensor<'t>,
    dropout: Dropout<'t>,
) -> Tensor<'t> {
    let output = x.scope("shared_experts", |x| mlp.forward(x, &shared.activations, dropout));
    match gate {
        Some(gate) => output * gate.forward(x, &[EMBED]).squeeze(ONE).sigmoid(),
        None => output,
    }
}

impl PartDescription for ExpertsConfig {
    fn scope(&self) -> &'static str {
        "experts"
    }

    fn activations(&self, batch: &BatchDims) -> Vec<Activation> {
        let &BatchDims { rows, length, dtype, .. } = batch;
        let (experts, num_chosen) = (self.experts().size, self.num_chosen());
        let activation = |name, dims: &[usize], logical_axes: &[Option<LogicalAxis>], dtype| Activation {
            name,
            dims: dims.to_vec(),
            logical_axes: logical_axes.to_vec(),
            dtype,
        };
        let [batch_axis, length_axis, mlp, exp] = [
            logical::ACTIVATION_BATCH_MOE,
            logical::ACTIVATION_LENGTH_MOE,
            logical::ACTIVATION_MLP_MOE,
            logical::ACTIVATION_EXP,
        ]
        .map(Some);
        let logits = activation(None, &[rows, length, experts], &[batch_axis, length_axis, None], DType::F32);
        let units = |name| match self.routed.computation {
            ExpertComputation::Sorted => activation(
                name,
                &[rows, length, num_chosen, self.width.size],
                &[batch_axis, length_axis, None, mlp],
                dtype,
            ),
            ExpertComputation::All => activation(
                name,
                &[experts, rows, length, self.width.size],
                &[exp, batch_axis, length_axis, mlp],
                dtype,
            ),
            ExpertComputation::Capacity(factor) => activation(
                name,
                &[experts, rows, capacity(length * num_chosen, experts, factor), self.width.size],
                &[exp, batch_axis, None, mlp],
                dtype,
            ),
        };
        let mut made = vec![logits, units(Some("mlpwi_0")), units(Some("mlpwi_1")), units(None)];
        made.push(batch.residual(Some("mlpwo")));
        if let Some(shared) = &self.shared {
            let dims = [rows, length, shared.width.size];
            let hidden = |name| activation(name, &dims, &mt_nn::HIDDEN, dtype);
            made.extend([hidden(Some("mlpwi_0")), hidden(Some("mlpwi_1")), hidden(None)]);
            made.push(batch.residual(Some("mlpwo")));
        }
        made
    }

    fn idle_weights(&self) -> usize {
        let of_expert = |embed: usize| {
            let biases = if self.bias { 2 * self.width.size + embed } else { 0 };
            3 * embed * self.width.size + biases
        };
        (self.experts().size - self.num_chosen()) * of_expert(self.embed)
    }
}
