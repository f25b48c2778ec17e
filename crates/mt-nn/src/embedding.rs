//! Token embeddings.

use mt_derive::Tree;
use mt_shape::DType;
use mt_trace::Tensor;

use crate::{
    Weight,
    axes::{EMBED, VOCAB},
};

/// A table of one vector for each token.
#[derive(Clone, Debug, Tree)]
pub struct Embedding<L> {
    pub embedding: Weight<L>,
}

impl<'t> Embedding<Tensor<'t>> {
    /// Looks tokens up.
    ///
    /// # Shapes
    /// `i32[batch, position] -> [batch, position, embed]`
    #[track_caller]
    pub fn lookup(&self, tokens: Tensor<'t>, dtype: DType) -> Tensor<'t> {
        self.embedding.lookup(VOCAB, "vocab", tokens).cast(dtype)
    }

    /// Scores every token by the product of its vector with `x`.
    ///
    /// # Shapes
    /// `[batch, position, embed] -> [batch, position, vocab]`
    #[track_caller]
    pub fn attend(&self, x: Tensor<'t>) -> Tensor<'t> {
        self.embedding.dot(x, &[EMBED])
    }
}
