//! Token embeddings.

use mt_derive::Tree;
use mt_shape::{DType, logical};
use mt_trace::Tensor;

use crate::{
    Weight,
    axes::{EMBED, VOCAB},
};

/// A table with one vector for each token.
#[derive(Clone, Debug, Tree)]
pub struct Embedding<L> {
    pub embedding: Weight<L>,
}

impl<'t> Embedding<Tensor<'t>> {
    /// Looks up the vectors of tokens.
    ///
    /// # Shapes
    /// `i32[batch, position] -> [batch, position, embed]`
    #[track_caller]
    pub fn lookup(&self, tokens: Tensor<'t>, dtype: DType) -> Tensor<'t> {
        let table = [Some(logical::VOCAB), Some(logical::EMBED_VOCAB)];
        match self.embedding.lookup_by_exchange(&table, tokens, dtype) {
            Some(found) => found,
            None => self.embedding.lookup(VOCAB, logical::VOCAB, tokens).cast(dtype),
        }
    }

    /// As [`Self::lookup`], but as a product with one-hot vectors. A table that is split along the vocabulary stays on
    /// its devices, and its gradient is also a product, not a scatter-add over rows.
    ///
    /// # Shapes
    /// `i32[batch, position] -> [batch, position, embed]`
    #[track_caller]
    pub fn lookup_by_product(&self, tokens: Tensor<'t>, dtype: DType) -> Tensor<'t> {
        self.embedding.lookup_by_product(VOCAB, tokens, dtype)
    }

    /// The logits of all tokens: products of their vectors with `x`.
    ///
    /// # Shapes
    /// `[batch, position, embed] -> [batch, position, vocab]`
    #[track_caller]
    pub fn attend(&self, x: Tensor<'t>) -> Tensor<'t> {
        self.embedding.dot(x, &[EMBED])
    }
}
