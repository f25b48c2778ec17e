//! Routers, which choose experts for tokens and weigh them.

use mt_derive::Tree;
use mt_shape::{Axis, DType, LogicalAxis, axis, logical};
use mt_trace::Tensor;

use super::capacity;
use crate::{
    Weight,
    axes::{BATCH, CHOICE, EMBED, EXPERT, POSITION},
};

/// The parameters of a router.
#[derive(Clone, Debug, Tree)]
pub struct Router<L> {
    /// `[embed, expert]`
    pub kernel: Weight<L>,
    /// `[expert]`, used as [`RouterOptions::bias`] says.
    pub bias: Option<L>,
}

/// The way in which a router chooses and weighs experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouterOptions {
    pub experts: Axis,
    /// The number of experts that process a token.
    pub num_chosen: usize,
    pub scores: Scores,
    pub bias: RouterBias,
    /// Whether the weights of the chosen experts are divided by their sum.
    pub normalized: bool,
    /// The factor of the weights.
    pub scale: f64,
    pub groups: Option<ExpertGroups>,
    /// Whether logits are computed in `f32`.
    pub in_f32: bool,
}

/// The function that turns logits into scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scores {
    /// The softmax over all experts.
    Softmax,
    /// The softmax over the chosen experts, which are those with the largest logits.
    SoftmaxOfChosen,
    Sigmoid,
    /// The square root of softplus.
    SqrtSoftplus,
}

/// The use of a router's bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouterBias {
    /// Added to the logits.
    OfLogits,
    /// Added to the scores when experts are chosen, but not to their weights. It has no gradient.
    OfChoice,
}

/// Selection that is limited to groups of consecutive experts (DeepSeek-V2 and -V3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertGroups {
    pub count: usize,
    /// The number of groups that a token may choose from.
    pub num_chosen: usize,
    pub score: GroupScore,
}

/// The score of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupScore {
    /// That of its best expert.
    Largest,
    /// The sum of those of its two best experts.
    SumOfTwo,
}

/// The experts of each token.
pub struct Routing<'t> {
    /// `i32[batch, position, choice]`, without repetitions, the best one first.
    pub chosen: Tensor<'t>,
    /// `f32[batch, position, choice]`
    pub weights: Tensor<'t>,
    /// `f32[batch, position, expert]`
    pub logits: Tensor<'t>,
}

/// Logical axes of logits.
const LOGITS: [Option<LogicalAxis>; 3] =
    [Some(logical::ACTIVATION_BATCH_MOE), Some(logical::ACTIVATION_LENGTH_MOE), None];

const GROUP: &str = "expert_group";
const MEMBER: &str = "expert_of_group";
const GROUP_CHOICE: &str = "group_choice";
const BEST: &str = "best_of_group";

/// Numbers from which experts are chosen at random, for measurements under an even load. A token of the same number and
/// position has the same experts in every layer and every step, however the batch is packed and placed.
#[derive(Clone, Copy)]
pub struct RandomChoice<'t> {
    /// `i32[batch, position]`
    pub tokens: Tensor<'t>,
    /// `i32[batch, position]`
    pub positions: Tensor<'t>,
}

impl<'t> RandomChoice<'t> {
    /// A preference for each expert, from a hash of token, position and expert.
    ///
    /// # Shapes
    /// `f32[batch, position, expert]`
    fn preference(self, experts: Axis) -> Tensor<'t> {
        let region = self.tokens.region();
        let axes = [&*self.tokens.axes(), &[experts]].concat();
        let wide = |tensor: Tensor<'t>, factor: u32| {
            let factor = region.integer(DType::U32, i64::from(factor)).broadcast(&axes);
            tensor.cast(DType::U32).broadcast(&axes) * factor
        };
        // Odd factors, so that different numbers stay different.
        let mut bits = wide(self.tokens, 0x9e37_79b1)
            + wide(self.positions, 0x85eb_ca6b)
            + wide(region.iota(DType::I32, experts), 0xc2b2_ae35);
        // The mixing of MurmurHash3 (Appleby, 2011), where each bit changes each other with probability 1/2.
        for (shift, factor) in [(16, 0x85eb_ca6b), (13, 0xc2b2_ae35), (16, 1)] {
            let shift = region.integer(DType::U32, shift).broadcast(&axes);
            let factor = region.integer(DType::U32, factor).broadcast(&axes);
            bits = bits.logical_xor(bits.shift_right(shift)) * factor;
        }
        // 24 bits are exact in `f32`.
        bits.shift_right(region.integer(DType::U32, 8).broadcast(&axes)).cast(DType::F32)
    }
}

impl<'t> Router<Tensor<'t>> {
    /// Chooses the experts of each token, unless they are given: at random if numbers for that are given, otherwise by
    /// their scores, from which the weights of chosen experts follow in all cases.
    ///
    /// # Shapes
    /// `[batch, position, embed], i32[batch, position, choice]`
    #[track_caller]
    pub fn forward(
        &self,
        x: Tensor<'t>,
        given: Option<Tensor<'t>>,
        random: Option<RandomChoice<'t>>,
        options: &RouterOptions,
    ) -> Routing<'t> {
        let input = if options.in_f32 { x.cast(DType::F32) } else { x };
        let mut logits = self.kernel.dot(input, &[EMBED]).cast(DType::F32).constrain(&LOGITS);
        if let Some(bias) = self.bias.filter(|_| options.bias == RouterBias::OfLogits) {
            logits = logits + bias.cast(DType::F32);
        }
        let scores = match options.scores {
            Scores::Softmax => logits.softmax(EXPERT),
            Scores::SoftmaxOfChosen => logits,
            Scores::Sigmoid => logits.sigmoid(),
            // The maximum avoids the infinite derivative at 0, where softplus has underflowed.
            Scores::SqrtSoftplus => logits.softplus().maximum(f64::from(f32::MIN_POSITIVE)).sqrt(),
        };
        let by_scores = || match random {
            Some(random) => random.preference(options.experts).top_k(options.num_chosen, CHOICE).1,
            None => self.preferred(logits, scores, options),
        };
        let chosen = given.unwrap_or_else(by_scores);
        let choice = one_hot(chosen, options.experts);
        let mut weights = (choice * scores.broadcast(&choice.axes())).sum(&[EXPERT]);
        if options.scores == Scores::SoftmaxOfChosen {
            weights = weights.softmax(CHOICE);
        } else if options.normalized {
            // Sigmoids of chosen experts may all be 0.
            weights = weights / (weights.sum(&[CHOICE]) + 1e-20);
        }
        if options.scale != 1.0 {
            weights = weights * options.scale;
        }
        Routing { chosen, weights, logits }
    }

    /// The experts that a token prefers: `i32[batch, position, choice]`.
    #[track_caller]
    fn preferred(&self, logits: Tensor<'t>, scores: Tensor<'t>, options: &RouterOptions) -> Tensor<'t> {
        let bias = self.bias.filter(|_| options.bias == RouterBias::OfChoice);
        // Sigmoids of large logits are all 1, though the logits differ.
        let are_compared_alone = bias.is_none() && options.groups.is_none();
        let preferred = match options.scores {
            Scores::Sigmoid if are_compared_alone => logits,
            _ => scores,
        };
        let mut preference = preferred.stop_gradient();
        if let Some(bias) = bias {
            preference = preference + bias.cast(DType::F32).stop_gradient();
        }
        if let Some(groups) = options.groups {
            preference = groups.limit(preference, options.experts);
        }
        preference.top_k(options.num_chosen, CHOICE).1
    }
}

impl ExpertGroups {
    /// Excludes experts of all but the best groups.
    fn limit<'t>(&self, preference: Tensor<'t>, experts: Axis) -> Tensor<'t> {
        let groups = axis(GROUP, self.count);
        let members = axis(MEMBER, experts.size / self.count);
        let by_group = preference.split(EXPERT, &[groups, members]);
        let score = match self.score {
            GroupScore::Largest => by_group.max(&[MEMBER]),
            GroupScore::SumOfTwo => by_group.top_k(members.size.min(2), BEST).0.sum(&[BEST]),
        };
        let (_, best) = score.top_k(self.num_chosen, GROUP_CHOICE);
        let axes = [&*best.axes(), &[groups]].concat();
        let numbers = best.region().iota(DType::I32, groups).broadcast(&axes);
        let is_allowed = numbers.equals(best).any(&[GROUP_CHOICE]).broadcast(&by_group.axes());
        let excluded = best.region().full(DType::F32, &by_group.axes(), f64::NEG_INFINITY);
        is_allowed.select(by_group, excluded).merge(&[GROUP, MEMBER], EXPERT)
    }
}

/// 1 at the chosen experts, otherwise 0.
///
/// # Shapes
/// `i32[…, choice] -> f32[…, choice, expert]`
pub(super) fn one_hot(chosen: Tensor<'_>, experts: Axis) -> Tensor<'_> {
    let axes = [&*chosen.axes(), &[experts]].concat();
    let numbers = chosen.region().iota(DType::I32, experts).broadcast(&axes);
    numbers.equals(chosen).cast(DType::F32)
}

impl<'t> Routing<'t> {
    /// The loss that grows with the imbalance of tokens over experts, averaged over sequences (Switch Transformers,
    /// equation 4, within sequences): the number of experts, squared, times the mean over experts of the share of tokens
    /// that choose an expert times its mean probability. Even routing of one choice gives 1.
    ///
    /// `is_token`, `f32[batch, position]`, is 0 for padding, which does not count.
    pub fn balance_loss(&self, is_token: Tensor<'t>) -> Tensor<'t> {
        let experts = self.logits.axis(EXPERT);
        let density = mean_over_tokens(one_hot(self.chosen, experts).sum(&[CHOICE]), is_token);
        let probability = mean_over_tokens(self.logits.softmax(EXPERT), is_token);
        (density * probability).mean(&[BATCH, EXPERT]) * (experts.size * experts.size) as f64
    }

    /// The mean over sequences of the mean square of each token's log-partition function, which keeps logits small
    /// (Zoph et al., 2022: ST-MoE, equation 5, within sequences). `is_token` as in [`Self::balance_loss`].
    pub fn z_loss(&self, is_token: Tensor<'t>) -> Tensor<'t> {
        mean_over_tokens(self.logits.log_sum_exp(EXPERT).square(), is_token).mean(&[BATCH])
    }

    /// The number of tokens that chose each expert: `f32[expert]`, without a gradient. `is_token` as in
    /// [`Self::balance_loss`].
    pub fn loads(&self, is_token: Tensor<'t>) -> Tensor<'t> {
        let choice = one_hot(self.chosen, self.logits.axis(EXPERT));
        (choice * is_token).sum(&[BATCH, POSITION, CHOICE]).stop_gradient()
    }

    /// The number of choices that have no effect because each expert processes at most this multiple of an even share of
    /// a sequence's choices: an `f32` scalar, without a gradient. `is_token` as in [`Self::balance_loss`].
    pub fn dropped(&self, is_token: Tensor<'t>, capacity_factor: f64) -> Tensor<'t> {
        let experts = self.logits.axis(EXPERT);
        let choices = self.chosen.axis(POSITION).size * self.chosen.axis(CHOICE).size;
        let slots = capacity(choices, experts.size, capacity_factor) as f64;
        let counts = (one_hot(self.chosen, experts) * is_token).sum(&[POSITION, CHOICE]);
        (counts - slots).maximum(0.0).sum(&[BATCH, EXPERT]).stop_gradient()
    }
}

/// The mean of each sequence over its tokens; 0 for a sequence of padding.
///
/// # Shapes
/// `[batch, position, …], [batch, position] -> [batch, …]`
fn mean_over_tokens<'t>(values: Tensor<'t>, is_token: Tensor<'t>) -> Tensor<'t> {
    let count = is_token.sum(&[POSITION]).maximum(1.0);
    (values * is_token).sum(&[POSITION]) / count
}
