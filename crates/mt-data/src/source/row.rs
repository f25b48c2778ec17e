//! Rows of token ids.

use crate::tokenizer::EncodedDocument;

/// The endings of the names of columns that accompany a column of token ids.
pub(super) const SEGMENTATION: &str = "_segmentation";
pub(super) const POSITION: &str = "_position";

/// A row of token ids, as a file holds it.
#[derive(Debug, Default, Clone, PartialEq)]
pub(super) struct TokenRow {
    pub tokens: Vec<i32>,
    /// The document of each token, 0 for padding; empty if all are of one.
    pub segments: Vec<i32>,
    /// The position of each token in its document; empty if they count from 0.
    pub positions: Vec<i32>,
}

impl TokenRow {
    /// The row without padding.
    ///
    /// # Errors
    /// The lists have different lengths.
    pub(super) fn into_document(mut self) -> Result<EncodedDocument, String> {
        let length = self.tokens.len();
        for (name, list) in [("segments", &self.segments), ("positions", &self.positions)] {
            if !list.is_empty() && list.len() != length {
                return Err(format!("it has {length} tokens, but {} {name}", list.len()));
            }
        }
        let mut trained = Vec::new();
        if !self.segments.is_empty() {
            let used = length - self.segments.iter().rev().take_while(|segment| **segment == 0).count();
            self.tokens.truncate(used);
            self.segments.truncate(used);
            self.positions.truncate(used);
            if self.segments.contains(&0) {
                return Err("padding (segment 0) precedes tokens of a document".into());
            }
            // The first token of a document has no token before it from which it could be predicted.
            let starts = self.segments.windows(2).map(|pair| pair[0] != pair[1]);
            if starts.clone().any(|starts| starts) {
                trained = std::iter::once(true).chain(starts.map(|starts| !starts)).collect();
            }
        }
        let Self { tokens, segments, positions } = self;
        Ok(EncodedDocument { tokens, segments, positions, trained, ..EncodedDocument::default() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn padding_is_dropped_and_first_tokens_are_not_trained() {
        let row = |segments: &[i32]| TokenRow {
            tokens: (5..5 + segments.len() as i32).collect(),
            segments: segments.to_vec(),
            positions: Vec::new(),
        };
        let document = row(&[1, 1, 2, 2, 2, 0, 0]).into_document().unwrap();
        assert_eq!(document.tokens, [5, 6, 7, 8, 9]);
        assert_eq!(document.segments, [1, 1, 2, 2, 2]);
        assert_eq!(document.trained, [true, true, false, true, true]);
        assert!(row(&[1, 1]).into_document().unwrap().trained.is_empty());
        assert!(row(&[0, 0]).into_document().unwrap().tokens.is_empty());
        assert!(row(&[1, 0, 2]).into_document().unwrap_err().contains("padding"));
        let uneven = TokenRow { positions: vec![0], ..row(&[1, 1]) };
        assert_eq!(uneven.into_document().unwrap_err(), "it has 2 tokens, but 1 positions");
    }
}
