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

    /// As [`Self::lookup`], by a product with one-hot vectors: a table that is split along the vocabulary stays where it is,
    /// and its gradient is a product too, instead of sums scattered over rows.
    ///
    /// # Shapes
    /// `i32[batch, position] -> [batch, position, embed]`
    #[track_caller]
    pub fn lookup_by_product(&self, tokens: Tensor<'t>, dtype: DType) -> Tensor<'t> {
        self.embedding.lookup_by_product(VOCAB, tokens, dtype)
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
