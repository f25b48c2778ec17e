//! Counting floating-point operations, by MaxText's formula.

/// What a training step's operations follow from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FlopCount {
    /// Weights that multiply each token: projections and the output head, not the embedding's lookup.
    pub weights_per_token: usize,
    pub num_layers: usize,
    pub num_query_heads: usize,
    pub head_dim: usize,
}

impl FlopCount {
    /// Operations of one training step over `rows` sequences of `length` tokens: 6 for each weight and token, and
    /// for attention 12 for each pair of positions and head dimension, of which the causal mask leaves half.
    pub fn training_step(&self, rows: usize, length: usize) -> f64 {
        let tokens = (rows * length) as f64;
        let attention =
            12.0 * (self.num_layers * self.num_query_heads * self.head_dim * length) as f64 * tokens;
        6.0 * self.weights_per_token as f64 * tokens + attention / 2.0
    }
}
