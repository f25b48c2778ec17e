//! Rotary position embeddings (Su et al., 2021).

use mt_shape::{DType, HostArray, axis};
use mt_trace::Tensor;

use crate::axes::{HEAD_DIM, ROTARY_PAIR};

/// How positions turn pairs of a head's dimensions.
#[derive(Clone, Debug, PartialEq)]
pub struct Rotary {
    /// The period of the fastest pair, over 2π.
    pub min_timescale: f64,
    /// The period of the slowest pair, over 2π.
    pub max_timescale: f64,
    pub head_dim: usize,
}

/// Cosines and sines of the angles at each position.
#[derive(Clone, Copy)]
pub struct RotaryAngles<'t> {
    cos: Tensor<'t>,
    sin: Tensor<'t>,
}

impl Rotary {
    /// The angles at `positions`.
    ///
    /// # Shapes
    /// `i32[batch, position] -> f32[batch, position, rotary_pair]`, twice
    #[track_caller]
    pub fn angles<'t>(&self, positions: Tensor<'t>) -> RotaryAngles<'t> {
        let pairs = self.head_dim / 2;
        let frequencies: Vec<f32> = (0..pairs)
            .map(|pair| {
                let fraction = (2 * pair) as f64 / self.head_dim as f64;
                (1.0 / (self.min_timescale * (self.max_timescale / self.min_timescale).powf(fraction))) as f32
            })
            .collect();
        let table =
            HostArray::from_slice(DType::F32, &[pairs], &frequencies).expect("one number for each pair");
        let frequencies = positions.region().table(table, &[axis(ROTARY_PAIR, pairs)]);
        let angles = positions.cast(DType::F32).contract(frequencies, &[]);
        RotaryAngles { cos: angles.cos(), sin: angles.sin() }
    }
}

impl<'t> RotaryAngles<'t> {
    /// Turns the pairs `(i, i + head_dim/2)` of each head.
    ///
    /// # Shapes
    /// `[batch, position, …, head_dim] -> [batch, position, …, head_dim]`
    #[track_caller]
    pub fn rotate(self, x: Tensor<'t>) -> Tensor<'t> {
        let size = x.axis(HEAD_DIM).size;
        let half = |start: usize| x.slice(HEAD_DIM, start, start + size / 2).rename(HEAD_DIM, ROTARY_PAIR);
        let (first, second) = (half(0).cast(DType::F32), half(size / 2).cast(DType::F32));
        let turned = [first * self.cos - second * self.sin, second * self.cos + first * self.sin];
        let [first, second] = turned.map(|half| half.rename(ROTARY_PAIR, HEAD_DIM));
        first.concatenate(&[second], HEAD_DIM).cast(x.dtype())
    }
}
