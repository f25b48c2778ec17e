//! Counting floating-point operations, by MaxText's formula.

/// What a training step's operations follow from.
#[derive(Clone, Debug, PartialEq)]
pub struct FlopCount {
    /// Weights that multiply each token: projections and the output head, not the embedding's lookup.
    pub weights_per_token: usize,
    /// Those of them that are the output head's.
    pub head_weights: usize,
    /// One for each layer with attention.
    pub attention: Vec<AttentionFlops>,
}

/// The attention of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionFlops {
    /// Query heads times the width of a head's key and value together.
    pub width: usize,
    /// How many positions are seen at most.
    pub window: Option<usize>,
}

impl FlopCount {
    /// Operations of one training step over `rows` sequences of `length` tokens: 6 for each weight and token, and
    /// for attention 6 for each pair of positions and dimension of keys and values, of which the mask leaves part.
    pub fn training_step(&self, rows: usize, length: usize) -> f64 {
        let tokens = (rows * length) as f64;
        let attention: f64 = self
            .attention
            .iter()
            .map(|layer| {
                let length = length as f64;
                let pairs = match layer.window.map(|window| window as f64).filter(|window| *window < length) {
                    // The first tokens of a row see fewer than the window.
                    Some(window) => window * (length - window / 2.0),
                    None => length * length / 2.0,
                };
                6.0 * layer.width as f64 * pairs * rows as f64
            })
            .sum();
        6.0 * self.weights_per_token as f64 * tokens + attention
    }
}
