//! What a step consumes.

/// The rows of one step that this host feeds, row-major, `rows` × `length` each.
///
/// Every position of a row predicts one token. `targets` are `inputs` shifted left by one inside their document, so a
/// document of `n` tokens fills `n - 1` positions: its last token is a target only, its first one an input only, and
/// nothing predicts across a document's end. A segmentation of 0 marks padding: no attention, no loss. Segments are
/// numbered from 1 in each row, and positions restart at 0 with each segment, also for the later pieces of a document
/// that was split over rows, since they do not see the earlier ones.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// Number of rows.
    pub rows: usize,
    /// Tokens in a row.
    pub length: usize,
    /// Token ids that the model reads.
    pub inputs: Vec<i32>,
    /// Position of each input in its segment.
    pub inputs_position: Vec<i32>,
    /// Segment of each input, 0 for padding.
    pub inputs_segmentation: Vec<i32>,
    /// Token ids that the model is to predict.
    pub targets: Vec<i32>,
    /// Position of each target in its segment.
    pub targets_position: Vec<i32>,
    /// Segment of each target, 0 where there is no loss.
    pub targets_segmentation: Vec<i32>,
    /// The bytes of UTF-8 text that the targets with a loss stand for; tokens added by us (BOS, EOS) stand for none.
    pub target_bytes: u64,
}

impl Batch {
    /// A batch of padding with room for `rows` rows, of which none is filled yet.
    pub(crate) fn padding(rows: usize, length: usize, pad: i32) -> Self {
        let size = rows * length;
        Self {
            rows,
            length,
            inputs: vec![pad; size],
            inputs_position: vec![0; size],
            inputs_segmentation: vec![0; size],
            targets: vec![pad; size],
            targets_position: vec![0; size],
            targets_segmentation: vec![0; size],
            target_bytes: 0,
        }
    }

    /// Number of targets that have a loss.
    pub fn num_targets(&self) -> usize {
        self.targets_segmentation.iter().filter(|&&segment| segment != 0).count()
    }

    /// The targets that have a loss, in order.
    pub fn counted_targets(&self) -> impl Iterator<Item = i32> + '_ {
        self.targets
            .iter()
            .zip(&self.targets_segmentation)
            .filter(|(_, segment)| **segment != 0)
            .map(|(id, _)| *id)
    }

    /// Writes `pairs` of consecutive tokens of one document into `row`, from column `start` on.
    pub(crate) fn write_segment(&mut self, row: usize, start: usize, segment: usize, tokens: &[i32]) {
        let base = row * self.length + start;
        for (offset, pair) in tokens.windows(2).enumerate() {
            let index = base + offset;
            self.inputs[index] = pair[0];
            self.targets[index] = pair[1];
            self.inputs_position[index] = offset as i32;
            self.targets_position[index] = offset as i32;
            self.inputs_segmentation[index] = segment as i32;
            self.targets_segmentation[index] = segment as i32;
        }
    }
}
