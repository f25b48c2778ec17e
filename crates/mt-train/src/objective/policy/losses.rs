//! Ratios of probabilities and the losses of tokens.

use mt_config::{KlEstimator, RatioLevel, RlAlgorithm, RlGroup};
use mt_nn::axes::POSITION;
use mt_shape::DType;
use mt_trace::Tensor;

/// Log-ratios beyond this are clipped, as Tunix does, so that no exponential overflows.
const MOST: f64 = 20.0;

/// The largest log-ratio of a token in GSPO-token, as in Tunix.
const MOST_BY_TOKEN: f64 = 10.0;

/// Ratios of the probabilities by the trained model to those by the policy that sampled: `f32[batch, position]`.
pub struct Ratios<'t> {
    pub ratio: Tensor<'t>,
}

impl<'t> Ratios<'t> {
    /// # Shapes
    /// `f32[batch, position], f32[batch, position], f32[batch, position]`
    pub fn new(level: RatioLevel, own: Tensor<'t>, old: Tensor<'t>, mask: Tensor<'t>) -> Self {
        let axes = own.axes();
        let log_ratios = (own - old) * mask;
        let sums = log_ratios.sum(&[POSITION]);
        let tokens = mask.sum(&[POSITION]).maximum(1.0);
        let log_ratios = match level {
            RatioLevel::Token => log_ratios.clamp(-MOST, MOST),
            RatioLevel::AnswerMean => (sums / tokens).clamp(-MOST, MOST).broadcast(&axes),
            RatioLevel::AnswerMeanByToken => {
                let means = (sums / tokens).stop_gradient().broadcast(&axes);
                (own - own.stop_gradient() + means).minimum(MOST_BY_TOKEN)
            }
            RatioLevel::Answer => sums.clamp(-MOST, MOST).broadcast(&axes),
        };
        Self { ratio: log_ratios.exp() }
    }
}

/// The losses of tokens before they are aggregated: `f32[batch, position]`.
pub struct TokenLosses<'t> {
    pub losses: Tensor<'t>,
    /// 1 where the ratio of a token with a negative advantage lies below the clipping range.
    pub clipped_below: Tensor<'t>,
    /// 1 where the ratio of a token with a positive advantage lies above it.
    pub clipped_above: Tensor<'t>,
}

/// The losses of an algorithm.
pub fn of_tokens<'t>(
    keys: &RlGroup,
    ratios: &Ratios<'t>,
    own: Tensor<'t>,
    advantages: Tensor<'t>,
) -> TokenLosses<'t> {
    let (low, high) = (1.0 - keys.grpo_epsilon, 1.0 + keys.clip_above());
    match keys.loss_algo {
        RlAlgorithm::Cispo => importance_weighted(ratios.ratio, own, advantages, keys.clip_above()),
        RlAlgorithm::Raft => likelihood(own, advantages),
        RlAlgorithm::Grpo
        | RlAlgorithm::GspoToken
        | RlAlgorithm::Gspo
        | RlAlgorithm::DrGrpo
        | RlAlgorithm::Dapo
        | RlAlgorithm::Rloo
        | RlAlgorithm::ReinforcePlusPlus
        | RlAlgorithm::ReinforcePlusPlusBaseline
        | RlAlgorithm::Ppo => clipped(ratios.ratio, advantages, (low, high), keys.dual_clip),
    }
}

/// PPO's surrogate, `−min(rho A, clip(rho, low, high) A)`. With a dual clip `c`, tokens with a negative advantage have at
/// most the loss `−c A` (Ye et al., 2020).
fn clipped<'t>(
    ratio: Tensor<'t>,
    advantages: Tensor<'t>,
    (low, high): (f64, f64),
    dual_clip: Option<f64>,
) -> TokenLosses<'t> {
    let unclipped = ratio * advantages;
    let mut losses = -unclipped.minimum(ratio.clamp(low, high) * advantages);
    let is_negative = advantages.less(0.0);
    if let Some(limit) = dual_clip {
        losses = is_negative.select(losses.minimum(advantages * -limit), losses);
    }
    let both = |one: Tensor<'t>, other: Tensor<'t>| one.logical_and(other).cast(DType::F32);
    TokenLosses {
        losses,
        clipped_below: both(is_negative, ratio.less(low)),
        clipped_above: both(advantages.greater(0.0), ratio.greater(high)),
    }
}

/// `−A log p`, which no ratio changes.
fn likelihood<'t>(own: Tensor<'t>, advantages: Tensor<'t>) -> TokenLosses<'t> {
    let none = advantages * 0.0;
    TokenLosses { losses: -(advantages * own), clipped_below: none, clipped_above: none }
}

/// CISPO: `−sg(min(rho, cap)) A log p`. The ratio only weighs, so that every token has a gradient.
fn importance_weighted<'t>(
    ratio: Tensor<'t>,
    own: Tensor<'t>,
    advantages: Tensor<'t>,
    cap: f64,
) -> TokenLosses<'t> {
    let weights = ratio.minimum(cap).stop_gradient();
    let is_above = ratio.greater(cap).logical_and(advantages.greater(0.0));
    let above = is_above.cast(DType::F32);
    TokenLosses { losses: -(weights * advantages * own), clipped_below: above * 0.0, clipped_above: above }
}

/// The squared errors of values at each token, and 1 where the clipped value counts: half the larger one of those of the
/// value and of the value within `clip` around its old one.
///
/// # Shapes
/// `f32[batch, position]` each
pub fn of_values<'t>(values: Tensor<'t>, old: Tensor<'t>, returns: Tensor<'t>, clip: f64) -> [Tensor<'t>; 2] {
    let near = old + (values - old).clamp(-clip, clip);
    let (free, clipped) = ((values - returns).square(), (near - returns).square());
    [free.maximum(clipped) * 0.5, clipped.greater(free).cast(DType::F32)]
}

/// The estimated divergence from the reference at each token.
///
/// # Shapes
/// `f32[batch, position], f32[batch, position] -> f32[batch, position]`
pub fn divergence<'t>(estimator: KlEstimator, own: Tensor<'t>, reference: Tensor<'t>) -> Tensor<'t> {
    let log_ratio = own - reference;
    match estimator {
        KlEstimator::K1 => log_ratio,
        KlEstimator::K2 => log_ratio.square() * 0.5,
        KlEstimator::K3 => (-log_ratio).exp_m1() + log_ratio,
    }
}
