//! Masked tokens for block diffusion (Arriola et al., 2025).

use std::sync::Arc;

use crate::batch::arrays::{INPUTS, INPUTS_POSITION, INPUTS_SEGMENTATION, TARGETS, TARGETS_SEGMENTATION};
use crate::corruption::{BatchUse, Corruption};
use crate::random::{key, mix, uniform};
use crate::{Batch, NamedArray};
use mt_shape::{DType, HostArray};

/// How tokens are masked. Each document is cut into blocks from its first position in a row on. For each block a
/// probability is drawn, with which each of its tokens is masked; at least one is.
///
/// The masks depend only on the seed, the number of the batch and the place in it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BlockMasking {
    /// Tokens per block.
    pub block: usize,
    /// The token that replaces masked ones.
    pub mask_id: i32,
    /// The smallest probability. Probabilities are uniform from it to 1.
    pub min_noise: f64,
    /// Whether the first token of a block is never masked, and each token is predicted at the position before it. First
    /// tokens are predicted, too, except that of a document.
    pub has_seeds: bool,
    pub seed: u64,
}

/// The place of a block in a row.
struct Block {
    first: usize,
    end: usize,
    /// Whether the block is the first of its document.
    starts: bool,
}

impl Corruption for BlockMasking {
    /// Inputs are targets with masks, and targets have a loss where masks hide them.
    fn corrupted(&self, batch: &Batch, kind: BatchUse, number: u64) -> Batch {
        let clean = batch.integers(TARGETS);
        let (positions, segments) = (batch.integers(INPUTS_POSITION), batch.integers(INPUTS_SEGMENTATION));
        let length = clean.len() / batch.rows.max(1);
        let (mut inputs, mut targets) = (clean.to_vec(), clean.to_vec());
        let mut counted = vec![0; clean.len()];
        for row in 0..batch.rows {
            let own = row * length..(row + 1) * length;
            let row_key = key(&[self.seed, kind as u64, number, row as u64]);
            for block in self.blocks(&positions[own.clone()], &segments[own.clone()]) {
                let hidden = self.hidden(&block, row_key);
                let given = usize::from(self.has_seeds);
                for place in block.first..block.end {
                    let (index, offset) = (own.start + place, place - block.first);
                    let is_hidden = offset >= given && hidden[offset - given];
                    if is_hidden {
                        inputs[index] = self.mask_id;
                    }
                    let is_target = is_hidden || (offset < given && !block.starts);
                    if is_target {
                        let predicted_at = index - given;
                        targets[predicted_at] = clean[index];
                        counted[predicted_at] = segments[index];
                    }
                }
            }
        }
        let array = |values: &[i32]| {
            let dims = [batch.rows, length];
            Arc::new(HostArray::from_slice(DType::I32, &dims, values).expect("one value for each position"))
        };
        let replaced = [(INPUTS, &inputs), (TARGETS, &targets), (TARGETS_SEGMENTATION, &counted)];
        let of = |given: &NamedArray| {
            let values = replaced.iter().find(|(name, _)| *name == given.name);
            NamedArray {
                name: given.name,
                values: values.map_or_else(|| given.values.clone(), |(_, values)| array(values)),
            }
        };
        Batch { arrays: batch.arrays.iter().map(of).collect(), ..*batch }
    }

    fn lost_position(&self) -> &'static str {
        "it does not count the batches that were masked"
    }
}

impl BlockMasking {
    /// The blocks of a row's documents.
    fn blocks(&self, positions: &[i32], segments: &[i32]) -> Vec<Block> {
        let block_of = |place: usize| (segments[place], positions[place] as usize / self.block);
        let mut blocks: Vec<Block> = Vec::new();
        for place in (0..segments.len()).filter(|place| segments[*place] != 0) {
            match blocks.last_mut() {
                Some(last) if last.end == place && block_of(last.first) == block_of(place) => last.end += 1,
                _ => {
                    let starts = block_of(place).1 == 0;
                    blocks.push(Block { first: place, end: place + 1, starts });
                }
            }
        }
        blocks
    }

    /// Whether each token of a block that may be masked is masked.
    fn hidden(&self, block: &Block, row_key: u64) -> Vec<bool> {
        let count = block.end - block.first - usize::from(self.has_seeds);
        let block_key = mix(row_key ^ mix(block.first as u64));
        let draw = |index: usize| uniform(mix(block_key ^ mix(index as u64)));
        let noise = self.min_noise + (1.0 - self.min_noise) * draw(0);
        let mut hidden: Vec<bool> = (0..count).map(|offset| draw(2 + offset) < noise).collect();
        if !hidden.is_empty() && !hidden.contains(&true) {
            hidden[(draw(1) * count as f64) as usize] = true;
        }
        hidden
    }
}
