//! Mixtures of experts: MLPs, of which a router chooses some for each token.

mod dispatch;
mod grouped;
mod router;
mod sorted;

use mt_derive::Tree;
use mt_shape::{DType, LogicalAxis, axis, logical};
use mt_trace::Tensor;

pub use grouped::{RowGroups, grouped_dot};
pub use router::{
    ExpertGroups, GroupScore, RandomChoice, Router, RouterBias, RouterOptions, Routing, Scores,
};

use crate::{
    Activation, SequenceOrder, Weight,
    axes::{BATCH, CHOICE, EMBED, EXPERT, MLP, POSITION, SLOT, TOKEN, VOCAB},
    gated, in_f32_if,
};
use router::one_hot;
use sorted::sorted;

/// The experts of a layer and their router.
#[derive(Clone, Debug, Tree)]
pub struct Experts<L> {
    pub gate: Router<L>,
    /// `i32[vocab, choice]`: the experts of each token of the vocabulary, if they do not depend on activations (Roller et
    /// al., 2021: hash layers).
    pub tid2eid: Option<L>,
    /// `[expert]`: factors of the weights of chosen experts.
    pub per_expert_scale: Option<L>,
    /// `[expert, embed, mlp]`
    pub wi_0: Weight<L>,
    /// `[expert, mlp]`
    pub wi_0_bias: Option<L>,
    /// `[expert, embed, mlp]`
    pub wi_1: Weight<L>,
    /// `[expert, mlp]`
    pub wi_1_bias: Option<L>,
    /// `[expert, mlp, embed]`
    pub wo: Weight<L>,
    /// `[expert, embed]`
    pub wo_bias: Option<L>,
}

/// The function of experts, and how it is computed.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertOptions {
    pub router: RouterOptions,
    pub unit: GatedUnit,
    /// Whether weights multiply the experts' inputs instead of their outputs (Llama 4).
    pub weighs_inputs: bool,
    /// Whether the experts' functions are computed in `f32`.
    pub functions_in_f32: bool,
    /// Whether weighted outputs are summed in `f32`.
    pub sums_in_f32: bool,
    pub computation: ExpertComputation,
    /// Whether [`ExpertComputation::Sorted`] multiplies tokens by both input projections in one product.
    pub merges_inputs: bool,
}

/// The function of an expert's two input projections.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GatedUnit {
    /// The product of both after their activation functions.
    Product([Activation; 2]),
    /// As [`Self::Product`], with the first projection at most the limit, and the second one at most the limit in
    /// magnitude.
    Clamped { activations: [Activation; 2], limit: f64 },
    /// `(u + 1) · g · σ(1.702 g)`, with `g` at most the limit, and `u` at most the limit in magnitude (gpt-oss).
    ClampedSwish { limit: f64 },
}

/// The computation of experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ExpertComputation {
    /// Each token with its own experts, by grouped products over sorted tokens. No token is dropped.
    Sorted,
    /// Every token with every expert.
    All,
    /// Each expert processes at most this multiple of an even share of a sequence's choices. Later choices are dropped.
    Capacity(f64),
}

// The axis of experts comes first, so that it is the one that the mesh axis `expert` splits; batches follow the same axis
// elsewhere.

/// Logical axes of the hidden units of all experts: `[expert, batch, position, mlp]`.
const HIDDEN: [Option<LogicalAxis>; 4] = [
    Some(logical::ACTIVATION_EXP),
    Some(logical::ACTIVATION_BATCH_MOE),
    Some(logical::ACTIVATION_LENGTH_MOE),
    Some(logical::ACTIVATION_MLP_MOE),
];
/// Logical axes of the slots of experts: `[expert, batch, slot, …]`.
const SLOTS: [Option<LogicalAxis>; 3] =
    [Some(logical::ACTIVATION_EXP), Some(logical::ACTIVATION_BATCH_MOE), None];

impl ExpertOptions {
    /// The type in which weighted outputs of type `dtype` are summed.
    fn sum_type(&self, dtype: DType) -> DType {
        if self.sums_in_f32 { DType::F32 } else { dtype }
    }

    /// The hidden units of two input projections.
    #[track_caller]
    fn hidden<'t>(&self, gate: Tensor<'t>, up: Tensor<'t>) -> Tensor<'t> {
        in_f32_if(self.functions_in_f32, [gate, up], |[gate, up]| self.unit.apply(gate, up))
    }
}

impl GatedUnit {
    /// # Shapes
    /// `[…], […] -> […]`
    #[track_caller]
    pub fn apply<'t>(self, gate: Tensor<'t>, up: Tensor<'t>) -> Tensor<'t> {
        match self {
            Self::Product(activations) => gated(activations, gate, up),
            Self::Clamped { activations, limit } => {
                gated(activations, gate.minimum(limit), up.clamp(-limit, limit))
            }
            Self::ClampedSwish { limit } => {
                let (gate, up) = (gate.minimum(limit), up.clamp(-limit, limit));
                (up + 1.0) * gate * (gate * 1.702).sigmoid()
            }
        }
    }
}

impl<'t> Experts<Tensor<'t>> {
    /// Applies each token's experts and returns the routing, too.
    ///
    /// # Shapes
    /// `[batch, position, embed] -> [batch, position, embed]`
    #[track_caller]
    pub fn forward(&self, x: Tensor<'t>, options: &ExpertOptions) -> (Tensor<'t>, Routing<'t>) {
        self.forward_routed_by(x, x, None, None, SequenceOrder::AsRead, options)
    }

    /// As [`Self::forward`], with another input for the router, and with the tokens, which a table of experts needs. The
    /// router chooses experts at random if it is given numbers for that. The order is that in which the tokens are stored:
    /// experts of limited capacity drop those that come last in the text.
    ///
    /// # Shapes
    /// `[batch, position, embed], [batch, position, embed], i32[batch, position] -> [batch, position, embed]`
    #[track_caller]
    pub fn forward_routed_by(
        &self,
        x: Tensor<'t>,
        router_input: Tensor<'t>,
        tokens: Option<Tensor<'t>>,
        random: Option<RandomChoice<'t>>,
        order: SequenceOrder,
        options: &ExpertOptions,
    ) -> (Tensor<'t>, Routing<'t>) {
        let given = self.tid2eid.zip(tokens).map(|(table, tokens)| table.take(VOCAB, tokens));
        let mut routing = self.gate.forward(router_input, given, random, &options.router);
        if let Some(scale) = self.per_expert_scale {
            let choice = one_hot(routing.chosen, options.router.experts);
            routing.weights = routing.weights * choice.contract(scale.cast(DType::F32), &[EXPERT]);
        }
        let output = match options.computation {
            ExpertComputation::Sorted => sorted(self, x, &routing, options),
            ExpertComputation::All => self.all(x, &routing, options),
            ExpertComputation::Capacity(factor) => self.within_capacity(x, &routing, order, options, factor),
        };
        let output = output.cast(x.dtype()).constrain(&[
            Some(logical::ACTIVATION_BATCH),
            Some(logical::ACTIVATION_NORM_LENGTH),
            Some(logical::ACTIVATION_EMBED),
        ]);
        (output.named("moe_mlpwo"), routing)
    }

    fn all(&self, x: Tensor<'t>, routing: &Routing<'t>, options: &ExpertOptions) -> Tensor<'t> {
        let choice = one_hot(routing.chosen, options.router.experts);
        // The weight of each expert, 0 if it is not chosen: `[batch, position, expert]`.
        let weights = (choice * routing.weights.broadcast(&choice.axes())).sum(&[CHOICE]).cast(x.dtype());
        let is_chosen = choice.sum(&[CHOICE]).cast(x.dtype());
        let axes = [x.axes()[0], x.axes()[1], options.router.experts, x.axis(EMBED)];
        let input = if options.weighs_inputs { x.broadcast(&axes) * weights } else { x };
        let project = |weight: &Weight<Tensor<'t>>, bias: Option<Tensor<'t>>, name| {
            let product = weight.dot(input, &[EMBED]);
            let product = match bias {
                Some(bias) => product + bias.cast(x.dtype()),
                None => product,
            };
            product.order(&[EXPERT, BATCH, POSITION, MLP]).constrain(&HIDDEN).named(name)
        };
        let gate = project(&self.wi_0, self.wi_0_bias, "moe_mlpwi_0");
        let up = project(&self.wi_1, self.wi_1_bias, "moe_mlpwi_1");
        let factor = if options.weighs_inputs { is_chosen } else { weights };
        let hidden = options.hidden(gate, up) * factor;
        let output = self.wo.dot(hidden, &[EXPERT, MLP]);
        match self.wo_bias {
            Some(bias) => output + factor.contract(bias.cast(x.dtype()), &[EXPERT]),
            None => output,
        }
    }

    fn within_capacity(
        &self,
        x: Tensor<'t>,
        routing: &Routing<'t>,
        order: SequenceOrder,
        options: &ExpertOptions,
        factor: f64,
    ) -> Tensor<'t> {
        let (dtype, experts) = (x.dtype(), options.router.experts);
        let choices = x.axis(POSITION).size * routing.chosen.axis(CHOICE).size;
        let slots = axis(SLOT, capacity(choices, experts.size, factor));
        let choice = one_hot(routing.chosen, experts);
        // The number of the choice among those of its expert, from 1, in the order of the text.
        let flat = order.read(choice.cast(DType::I32), POSITION).merge(&[POSITION, CHOICE], TOKEN);
        let numbers = flat.cumulative_sum(TOKEN) * flat;
        let numbers = numbers.split(TOKEN, &[x.axis(POSITION), routing.chosen.axis(CHOICE)]);
        let numbers = order.store(numbers, POSITION);
        let slot = numbers.sum(&[EXPERT]) - 1.0;
        let axes = [&*slot.axes(), &[slots]].concat();
        // Choices beyond the last slot have none.
        let at_slot = x.region().iota(DType::I32, slots).broadcast(&axes).equals(slot).cast(DType::F32);
        // `[batch, position, expert, slot]`: tokens, and the weights of tokens.
        let tokens = choice.contract(at_slot, &[CHOICE]);
        let weighted = (choice * routing.weights.broadcast(&choice.axes())).contract(at_slot, &[CHOICE]);
        let (put, taken) = if options.weighs_inputs { (weighted, tokens) } else { (tokens, weighted) };
        let at = |tensor: Tensor<'t>| tensor.order(&[EXPERT, BATCH, SLOT, EMBED]).constrain(&with_last(None));
        let input = at(put.cast(dtype).contract(x, &[POSITION]));
        let project = |weight: &Weight<Tensor<'t>>, bias: Option<Tensor<'t>>, name| {
            let product = weight.dot(input, &[EMBED]).order(&[EXPERT, BATCH, SLOT, MLP]);
            let product = match bias {
                Some(bias) => product + bias.cast(dtype),
                None => product,
            };
            product.constrain(&with_last(Some(logical::ACTIVATION_MLP_MOE))).named(name)
        };
        let gate = project(&self.wi_0, self.wi_0_bias, "moe_mlpwi_0");
        let up = project(&self.wi_1, self.wi_1_bias, "moe_mlpwi_1");
        let output = at(self.wo.dot(options.hidden(gate, up), &[MLP]));
        let output = match self.wo_bias {
            Some(bias) => output + bias.cast(dtype),
            None => output,
        };
        let sum_type = options.sum_type(dtype);
        taken.cast(dtype).contract_into(output, &[EXPERT, SLOT], sum_type)
    }
}

/// The number of slots of each expert for this number of choices.
pub fn capacity(choices: usize, experts: usize, factor: f64) -> usize {
    let even = choices.div_ceil(experts) as f64;
    (even * factor).max(factor).ceil().max(1.0).min(choices as f64) as usize
}

fn with_last(last: Option<LogicalAxis>) -> Vec<Option<LogicalAxis>> {
    [SLOTS.as_slice(), &[last]].concat()
}
