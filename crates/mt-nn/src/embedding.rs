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
        // Devices that split the vectors gather them first. Otherwise the partitioner looks up parts of vectors for the
        // tokens of all devices, and exchanges activations.
        let table = self.embedding.constrain(&whole_rows(self.embedding, "vocab"));
        // Rows are gathered in the table's own type, so that the gradient's sums over equal tokens are, too.
        table.take(VOCAB, tokens).constrain(&looked_up(self.embedding)).cast(dtype)
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

/// Logical axes of a table that is split along its leading axis alone.
pub(crate) fn whole_rows(table: Tensor<'_>, leading: &'static str) -> Vec<Option<&'static str>> {
    std::iter::once(Some(leading)).chain(table.axes().iter().skip(1).map(|_| None)).collect()
}

/// Logical axes of what is looked up for a batch: its vectors are whole, and so are the gradients that are added to rows.
pub(crate) fn looked_up(table: Tensor<'_>) -> Vec<Option<&'static str>> {
    let batch = [Some("activation_batch"), Some("activation_norm_length")];
    batch.into_iter().chain(table.axes().iter().skip(1).map(|_| None)).collect()
}
