//! The sizes of attention's blocks.

use super::group;
use crate::{config::Config, error::Problem};

group! {
    /// The sizes of blocks in blockwise attention, where a configuration sets them.
    pub struct BlocksGroup {
        sa_block_q: Option<usize>,
        sa_block_kv: Option<usize>,
        sa_block_kv_compute: Option<usize>,
        sa_block_q_dkv: Option<usize>,
        sa_block_kv_dkv: Option<usize>,
        sa_block_kv_dkv_compute: Option<usize>,
        local_sa_block_q: Option<usize>,
        local_sa_block_kv: Option<usize>,
        local_sa_block_kv_compute: Option<usize>,
        local_sa_block_q_dkv: Option<usize>,
        local_sa_block_kv_dkv: Option<usize>,
        local_sa_block_kv_dkv_compute: Option<usize>,
    }
}

/// The most positions in a block of queries and in one of keys, in both passes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AttentionBlocks {
    pub forward: [Option<usize>; 2],
    pub backward: [Option<usize>; 2],
}

impl BlocksGroup {
    /// Any sizes do: blocks are bounded by the length.
    fn check(&self, _config: &Config, _problems: &mut Vec<Problem>) {}

    /// The sizes in layers of global attention.
    pub fn sizes(&self) -> AttentionBlocks {
        AttentionBlocks {
            forward: [self.sa_block_q, smaller(self.sa_block_kv, self.sa_block_kv_compute)],
            backward: [self.sa_block_q_dkv, smaller(self.sa_block_kv_dkv, self.sa_block_kv_dkv_compute)],
        }
    }

    /// The sizes in layers of local attention: their own, or else those of the others.
    pub fn local_sizes(&self) -> AttentionBlocks {
        let keys = smaller(
            self.local_sa_block_kv.or(self.sa_block_kv),
            self.local_sa_block_kv_compute.or(self.sa_block_kv_compute),
        );
        let keys_backward = smaller(
            self.local_sa_block_kv_dkv.or(self.sa_block_kv_dkv),
            self.local_sa_block_kv_dkv_compute.or(self.sa_block_kv_dkv_compute),
        );
        AttentionBlocks {
            forward: [self.local_sa_block_q.or(self.sa_block_q), keys],
            backward: [self.local_sa_block_q_dkv.or(self.sa_block_q_dkv), keys_backward],
        }
    }
}

/// The block that is multiplied at a time: that of `compute`, within one of `loaded` positions.
fn smaller(loaded: Option<usize>, compute: Option<usize>) -> Option<usize> {
    [loaded, compute].into_iter().flatten().min()
}
