//! Mixtures of experts, with or without experts that process every token.

use mt_derive::Tree;
use mt_nn::{
    Activation as Function, Dropout, Initializer, Linear, Mlp, ParamSpec, Weight,
    axes::{CHOICE, EMBED},
    experts::{
        ExpertComputation, ExpertOptions, Experts, RandomChoice, Router, RouterBias, Routing, capacity,
    },
};
use mt_shape::{Axis, DType, LogicalAxis, axis, logical};
use mt_trace::Tensor;

use crate::{
    LayerOutput, OutputLabel,
    decoder::{
        Activation,
        part::{BatchDims, Part, PartDescription, PartInputs, PartOutputs, SpecBuilder},
    },
    expert_loads,
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
    pub placement: ExpertPlacement,
    /// Whether tokens choose experts at random.
    pub is_random: bool,
    /// Whether the router has a bias.
    pub router_bias: bool,
    /// Whether the weight of each expert has a learned factor.
    pub per_expert_scale: bool,
    /// The vocabulary, if a table gives each token's experts.
    pub by_token: Option<Axis>,
    pub shared: Option<SharedExperts>,
    /// The weight of the loss that grows with the imbalance of tokens over experts.
    pub balance_loss_weight: f64,
    /// The weight of the loss that grows with the router's logits.
    pub z_loss_weight: f64,
}

/// The dimensions of experts' matrices that the mesh splits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertPlacement {
    /// Experts over the mesh axis of experts, and both widths as those of other layers.
    Usual,
    /// Experts over the mesh axes that split the residual stream's width elsewhere, and the experts' width.
    ExpertsOverFsdp,
    /// Experts as in [`Self::ExpertsOverFsdp`], and the input width of each matrix.
    ExpertsAndInputs,
}

impl ExpertPlacement {
    /// The logical axes of a matrix `[expert, inputs, outputs]`. `usual` are those of both widths.
    fn logical_axes(self, usual: [LogicalAxis; 2]) -> [Option<LogicalAxis>; 3] {
        let width = |axis: LogicalAxis| Some(axis).filter(|axis| *axis == logical::MLP_MOE);
        match self {
            Self::Usual => [Some(logical::EXP), Some(usual[0]), Some(usual[1])],
            Self::ExpertsOverFsdp => [Some(logical::EMBED_MOE), width(usual[0]), width(usual[1])],
            Self::ExpertsAndInputs => [Some(logical::EMBED_MOE), Some(logical::MLP_MOE), None],
        }
    }
}

/// An MLP whose output is added to that of the routed experts.
#[derive(Clone, Debug, PartialEq)]
pub struct SharedExperts {
    pub width: Axis,
    pub activations: [Function; 2],
    /// Whether the functions are computed in `f32`.
    pub in_f32: bool,
    /// The largest gate, and the largest magnitude of the projection beside it.
    pub limit: Option<f64>,
    /// Whether the output is multiplied by the sigmoid of a linear map of the input to one number.
    pub gated: bool,
    /// Whether MaxText's checkpoints hold the input projections as one array.
    pub stored_fused: bool,
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
/// The name of the loss of large logits.
const Z_LOSS: &str = "learning/moe_z_loss";

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
            let mut matrix = builder.array([experts, inputs, outputs], initializer).with_groups(1, 1);
            matrix.logical_axes = self.placement.logical_axes([inputs.1, outputs.1]).into();
            Weight::dense(matrix)
        };
        let bias = |outputs: Axis, logical_axis: LogicalAxis| {
            self.bias.then(|| builder.array([experts, (outputs, logical_axis)], Initializer::Zeros))
        };
        let of_gate = (self.experts(), logical::EXPERTS_OF_ROUTER);
        let gate =
            builder.array([embed, of_gate], Initializer::fan_in(builder.init_scale, builder.embed.size));
        Experts {
            gate: Router {
                kernel: Weight::dense(gate.with_input_axes(1)),
                // A bias that only chooses experts has no gradient.
                bias: self.router_bias.then(|| ParamSpec {
                    is_trainable: self.routed.router.bias == RouterBias::OfLogits,
                    ..builder.array([of_gate], Initializer::Zeros)
                }),
            },
            tid2eid: self.by_token.map(|vocab| {
                let choices = (axis(CHOICE, self.num_chosen()), logical::EXPERTS_OF_ROUTER);
                let initializer = Initializer::Counted { modulus: self.experts().size };
                let table = builder.array([(vocab, logical::VOCAB), choices], initializer);
                ParamSpec { is_trainable: false, ..table.with_dtype(DType::I32) }
            }),
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

    fn routing_bias(&self, numbers: &Mixture<usize>) -> Option<usize> {
        let bias = numbers.routed.gate.bias;
        bias.filter(|_| self.routed.router.bias == RouterBias::OfChoice)
    }

    fn differs_from(&self, other: &Self) -> bool {
        // How experts are computed does not change the function unless tokens are dropped.
        let drops = |config: &Self| matches!(config.routed.computation, ExpertComputation::Capacity(_));
        let mut other = other.clone();
        if !drops(self) && !drops(&other) {
            other.routed.computation = self.routed.computation;
        }
        other.placement = self.placement;
        other.routed.merges_inputs = self.routed.merges_inputs;
        other.routed.functions_in_f32 = self.routed.functions_in_f32;
        if let (Some(own), Some(shared)) = (&self.shared, &mut other.shared) {
            (shared.in_f32, shared.stored_fused) = (own.in_f32, own.stored_fused);
        }
        other.routed.sums_in_f32 = self.routed.sums_in_f32;
        other.routed.router.in_f32 = self.routed.router.in_f32;
        other.balance_loss_weight = self.balance_loss_weight;
        other.z_loss_weight = self.z_loss_weight;
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
        let numbers = RandomChoice { tokens: inputs.tokens, positions: inputs.positions };
        let random = self.is_random.then_some(numbers);
        let (tokens, order) = (Some(inputs.tokens), inputs.segments.order);
        let (mut output, routing) =
            parameters.routed.forward_routed_by(x, router_input, tokens, random, order, &self.routed);
        if let (Some(mlp), Some(shared)) = (&parameters.shared, &self.shared) {
            let always = shared_output(mlp, shared, parameters.shared_gate.as_ref(), x, inputs.dropout);
            output = output + always;
        }
        let mut others = self.losses(&routing, inputs);
        if inputs.wanted.contains(&LayerOutput::ExpertLoads) {
            others.extend(self.loads(&routing, inputs));
        }
        PartOutputs { others, ..PartOutputs::only(output) }
    }

    fn losses<'t>(
        &self,
        routing: &Routing<'t>,
        inputs: &PartInputs<'_, 't>,
    ) -> Vec<(OutputLabel, Tensor<'t>)> {
        let mut losses = Vec::new();
        // A table does not learn to balance experts.
        if self.balance_loss_weight != 0.0 && self.by_token.is_none() {
            let loss = routing.balance_loss(inputs.is_token()) * self.balance_loss_weight;
            losses.push((LayerOutput::AuxiliaryLoss.named(BALANCE_LOSS), loss));
        }
        if self.z_loss_weight != 0.0 {
            let loss = routing.z_loss(inputs.is_token()) * self.z_loss_weight;
            losses.push((LayerOutput::AuxiliaryLoss.named(Z_LOSS), loss));
        }
        losses
    }

    fn loads<'t>(
        &self,
        routing: &Routing<'t>,
        inputs: &PartInputs<'_, 't>,
    ) -> Vec<(OutputLabel, Tensor<'t>)> {
        let label = |name| LayerOutput::ExpertLoads.named(name);
        let mut loads = vec![(label(expert_loads::CHOSEN), routing.loads(inputs.is_token()))];
        if let ExpertComputation::Capacity(factor) = self.routed.computation {
            let dropped = routing.dropped(inputs.is_token(), factor);
            loads.push((label(expert_loads::DROPPED), dropped));
        }
        loads
    }
}

fn shared_output<'t>(
    mlp: &Mlp<Tensor<'t>>,
    shared: &SharedExperts,
    gate: Option<&Linear<Tensor<'t>>>,
    x: Tensor<'t>,
    dropout: Dropout<'t>,
) -> Tensor<'t> {
    let output = x.scope("shared_experts", |x| {
        mlp.forward_clamped(x, &shared.activations, shared.limit, shared.in_f32, dropout)
    });
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
        let [batch_axis, length_axis, mlp, exp] = [
            logical::ACTIVATION_BATCH_MOE,
            logical::ACTIVATION_LENGTH_MOE,
            logical::ACTIVATION_MLP_MOE,
            logical::ACTIVATION_EXP,
        ]
        .map(Some);
        let logits =
            Activation::new(None, &[rows, length, experts], &[batch_axis, length_axis, None], DType::F32);
        let units = |name| match self.routed.computation {
            ExpertComputation::Sorted => Activation::new(
                name,
                &[rows, length, num_chosen, self.width.size],
                &[batch_axis, length_axis, None, mlp],
                dtype,
            ),
            ExpertComputation::All => Activation::new(
                name,
                &[experts, rows, length, self.width.size],
                &[exp, batch_axis, length_axis, mlp],
                dtype,
            ),
            ExpertComputation::Capacity(factor) => Activation::new(
                name,
                &[experts, rows, capacity(length * num_chosen, experts, factor), self.width.size],
                &[exp, batch_axis, None, mlp],
                dtype,
            ),
        };
        let mut made = vec![logits, units(Some("moe_mlpwi_0")), units(Some("moe_mlpwi_1")), units(None)];
        made.push(batch.residual(Some("moe_mlpwo")));
        if let Some(shared) = &self.shared {
            let dims = [rows, length, shared.width.size];
            let hidden = |name| Activation::new(name, &dims, &mt_nn::HIDDEN, dtype);
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
        // A table is looked up.
        let table = self.by_token.map_or(0, |vocab| vocab.size * self.num_chosen());
        (self.experts().size - self.num_chosen()) * of_expert(self.embed) + table
    }
}
