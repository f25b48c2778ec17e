//! Token embeddings.

use mt_derive::Tree;
use mt_shape::DType;
use mt_trace::Tensor;

use crate::axes::{EMBED, VOCAB};

/// A table of one vector for each token.
#[derive(Clone, Debug, Tree)]
pub struct Embedding<L> {
    pub embedding: L,
}

impl<'t> Embedding<Tensor<'t>> {
    /// Looks tokens up.
    ///
    /// # Shapes
    /// `i32[batch, position] -> [batch, position, embed]`
    #[track_caller]
    pub fn lookup(&self, tokens: Tensor<'t>, dtype: DType) -> Tensor<'t> {
        // Rows are gathered in the table's own type, so that the gradient's sums over equal tokens are, too.
        self.embedding.take(VOCAB, tokens).cast(dtype)
    }

    /// Scores every token by the product of its vector with `x`.
    ///
    /// # Shapes
    /// `[batch, position, embed] -> [batch, position, vocab]`
    #[track_caller]
    pub fn attend(&self, x: Tensor<'t>) -> Tensor<'t> {
        self.embedding.cast(x.dtype()).dot(x, &[EMBED])
    }
}
