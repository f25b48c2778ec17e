//! Keys and values of earlier tokens.

use mt_derive::Tree;
use mt_trace::Tensor;

use crate::axes::KV_POSITION;

/// Keys and values of one layer, or of a stack of layers.
///
/// # Shapes
/// `[batch, kv_position, kv_heads, head_dim]`, or with a leading `layers`
#[derive(Clone, Copy, Debug, Tree)]
pub struct KeysValues<L> {
    pub key: L,
    pub value: L,
}

/// A cache, and where the next tokens go.
#[derive(Clone, Copy)]
pub struct CachedKeysValues<'t> {
    pub cached: KeysValues<Tensor<'t>>,
    /// The first slot to write: an `i32` scalar.
    pub start: Tensor<'t>,
}

impl<'t> CachedKeysValues<'t> {
    /// The cache with new keys and values written from `start` on.
    #[track_caller]
    pub fn write(self, key: Tensor<'t>, value: Tensor<'t>) -> KeysValues<Tensor<'t>> {
        let write = |cache: Tensor<'t>, new: Tensor<'t>| {
            cache.dynamic_update(KV_POSITION, self.start, new.cast(cache.dtype()))
        };
        KeysValues { key: write(self.cached.key, key), value: write(self.cached.value, value) }
    }
}
