//! Rotary position embeddings (Su et al., 2021).

use std::f64::consts::PI;

use mt_shape::{DType, HostArray, axis};
use mt_trace::Tensor;

use crate::axes::{HEAD_DIM, ROTARY_PAIR};

/// What rotary embeddings are made of.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RotaryOptions {
    pub head_dim: usize,
    /// The period of the fastest pair, over 2π.
    pub min_timescale: f64,
    /// The period that the slowest pair nears, over 2π; often called θ.
    pub max_timescale: f64,
    pub extent: RotaryExtent,
    pub scaling: RotaryScaling,
}

/// How much of a head is turned.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RotaryExtent {
    /// All pairs `(i, i + head_dim/2)`.
    Full,
    /// The pairs `(i, i + n/2)` of the first `n` dimensions, which are this share of the head. The others stay.
    Leading(f64),
    /// The pairs `(i, i + head_dim/2)` of this share with the highest frequencies of the whole head. The others stay.
    Frequencies(f64),
}

/// How frequencies are changed for sequences longer than a model was first trained on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RotaryScaling {
    None,
    /// All divided by the factor (Chen et al., 2023).
    Linear {
        factor: f64,
    },
    /// The slowest divided by the factor, faster ones by less: `max_timescale · factor^(d/(d-2))`.
    Ntk {
        factor: f64,
    },
    /// Those with a period above `original_length / low_frequency_factor` divided by the factor, those with one below
    /// `original_length / high_frequency_factor` kept, and between the two a mixture (Llama 3.1).
    Llama3 {
        factor: f64,
        low_frequency_factor: f64,
        high_frequency_factor: f64,
        original_length: usize,
    },
    /// As Llama 3, with bounds in turns over the original length and a mixture linear in the pair's number; angles'
    /// cosines and sines are multiplied as well (Peng et al., 2023).
    Yarn {
        factor: f64,
        beta_fast: f64,
        beta_slow: f64,
        original_length: usize,
        /// Whether bounds are rounded outwards to whole pairs.
        truncate: bool,
        /// What cosines and sines are multiplied by; by default `0.1 ln(factor) + 1`.
        attention_factor: Option<f64>,
    },
}

impl RotaryScaling {
    /// The scaling that "dynamic NTK" has for sequences of up to `length` positions: none up to the original length,
    /// and from there on one that grows with the length.
    pub fn dynamic_ntk(factor: f64, original_length: usize, length: usize) -> Self {
        let stretch = length.max(original_length) as f64 / original_length as f64;
        Self::Ntk { factor: factor * stretch - (factor - 1.0) }
    }
}

/// How positions turn pairs of a head's dimensions.
#[derive(Clone, Debug, PartialEq)]
pub struct Rotary {
    /// Radians per position of each pair that is turned.
    frequencies: Vec<f32>,
    /// What cosines and sines are multiplied by.
    magnitude: f64,
}

/// Cosines and sines of the angles at each position.
#[derive(Clone, Copy)]
pub struct RotaryAngles<'t> {
    cos: Tensor<'t>,
    sin: Tensor<'t>,
}

impl Rotary {
    /// Computes the frequencies.
    pub fn new(options: &RotaryOptions) -> Self {
        let RotaryOptions { head_dim, min_timescale, max_timescale, extent, scaling } = *options;
        // The dimensions whose pairs are turned, the width that exponents are relative to, and the pairs turned.
        let share = |share: f64| (share * head_dim as f64) as usize;
        let (pairs, width, turned) = match extent {
            RotaryExtent::Full => (head_dim / 2, head_dim, head_dim / 2),
            RotaryExtent::Leading(leading) => (share(leading) / 2, share(leading), share(leading) / 2),
            RotaryExtent::Frequencies(real) => (head_dim / 2, head_dim, share(real) / 2),
        };
        let width = width as f64;
        let max_timescale = match scaling {
            RotaryScaling::Ntk { factor } => max_timescale * factor.powf(width / (width - 2.0)),
            _ => max_timescale,
        };
        let ratio = max_timescale / min_timescale;
        let frequency = |pair: usize| 1.0 / (min_timescale * ratio.powf(2.0 * pair as f64 / width));
        let frequencies = (0..pairs).map(|pair| {
            if pair < turned { scaling.scaled(frequency(pair), pair, width, ratio) as f32 } else { 0.0 }
        });
        Self { frequencies: frequencies.collect(), magnitude: scaling.magnitude() }
    }

    /// The angles at `positions`.
    ///
    /// # Shapes
    /// `i32[batch, position] -> f32[batch, position, rotary_pair]`, twice
    #[track_caller]
    pub fn angles<'t>(&self, positions: Tensor<'t>) -> RotaryAngles<'t> {
        let pairs = self.frequencies.len();
        let table =
            HostArray::from_slice(DType::F32, &[pairs], &self.frequencies).expect("one number for each pair");
        let frequencies = positions.region().table(table, &[axis(ROTARY_PAIR, pairs)]);
        let angles = positions.cast(DType::F32).contract(frequencies, &[]);
        let (cos, sin) = (angles.cos(), angles.sin());
        if self.magnitude == 1.0 {
            RotaryAngles { cos, sin }
        } else {
            RotaryAngles { cos: cos * self.magnitude, sin: sin * self.magnitude }
        }
    }
}

impl RotaryScaling {
    /// The frequency of a pair. `width` and `ratio` are the number of dimensions and the ratio of periods that
    /// frequencies are spread over.
    fn scaled(self, frequency: f64, pair: usize, width: f64, ratio: f64) -> f64 {
        match self {
            Self::None | Self::Ntk { .. } => frequency,
            Self::Linear { factor } => frequency / factor,
            Self::Llama3 { factor, low_frequency_factor, high_frequency_factor, original_length } => {
                let turns = original_length as f64 * frequency / (2.0 * PI);
                let kept = (turns - low_frequency_factor) / (high_frequency_factor - low_frequency_factor);
                mixture(frequency, factor, kept.clamp(0.0, 1.0))
            }
            Self::Yarn { factor, beta_fast, beta_slow, original_length, truncate, .. } => {
                let pair_with_turns = |turns: f64| {
                    width * (original_length as f64 / (turns * 2.0 * PI)).ln() / (2.0 * ratio.ln())
                };
                let (mut first, mut last) = (pair_with_turns(beta_fast), pair_with_turns(beta_slow));
                if truncate {
                    (first, last) = (first.floor(), last.ceil());
                }
                (first, last) = (first.max(0.0), last.min(width - 1.0));
                // A ramp of no width would divide by zero.
                let ramp = if first == last { 0.001 } else { last - first };
                mixture(frequency, factor, 1.0 - ((pair as f64 - first) / ramp).clamp(0.0, 1.0))
            }
        }
    }

    fn magnitude(self) -> f64 {
        match self {
            Self::Yarn { attention_factor: Some(attention_factor), .. } => attention_factor,
            Self::Yarn { factor, .. } if factor > 1.0 => 0.1 * factor.ln() + 1.0,
            _ => 1.0,
        }
    }
}

/// `kept` of a frequency, and the rest of it divided by the factor.
fn mixture(frequency: f64, factor: f64, kept: f64) -> f64 {
    frequency * kept + frequency / factor * (1.0 - kept)
}

impl<'t> RotaryAngles<'t> {
    /// Turns pairs of each head. What lies behind the last pair stays.
    ///
    /// # Shapes
    /// `[batch, position, …, head_dim] -> [batch, position, …, head_dim]`
    #[track_caller]
    pub fn rotate(self, x: Tensor<'t>) -> Tensor<'t> {
        let [turned] = x.region().custom_vjp(
            "rotary",
            [x, self.cos, self.sin],
            [true, false, false],
            |_, [x, cos, sin]| [turn(x, cos, sin)],
            |_, [x, cos, sin]| ([turn(x, cos, sin)], vec![cos, sin]),
            |_, residuals, [of_turned]| {
                let [cos, sin] = residuals[..] else { unreachable!("forward keeps both") };
                vec![turn(of_turned, cos, -sin)]
            },
        );
        turned
    }
}

/// Turns pairs by angles with these cosines and sines. By the same angles in the other direction it is its own derivative.
#[track_caller]
fn turn<'t>(x: Tensor<'t>, cos: Tensor<'t>, sin: Tensor<'t>) -> Tensor<'t> {
    let (size, pairs) = (x.axis(HEAD_DIM).size, cos.axis(ROTARY_PAIR).size);
    let half =
        |start: usize| x.slice(HEAD_DIM, start, start + pairs).rename(HEAD_DIM, ROTARY_PAIR).cast(DType::F32);
    let (first, second) = (half(0), half(pairs));
    let turned = [first * cos - second * sin, second * cos + first * sin];
    let [first, second] = turned.map(|half| half.rename(ROTARY_PAIR, HEAD_DIM));
    let turned = first.concatenate(&[second], HEAD_DIM).cast(x.dtype());
    if 2 * pairs == size {
        return turned;
    }
    turned.concatenate(&[x.slice(HEAD_DIM, 2 * pairs, size)], HEAD_DIM)
}
