//! Elements of any type, taken a block at a time as `f32`.

use crate::Element;

/// How many elements are taken at once: several vectors, as each takes a while.
pub(crate) const BLOCK: usize = 64;

/// Numbers on their way between memory and vectors: no vector lies in two lines of the cache.
#[repr(align(64))]
pub(crate) struct Wide(pub [f32; BLOCK]);

#[inline(always)]
pub(crate) fn widened<E: Element>(block: &[E; BLOCK]) -> Wide {
    let mut wide = Wide([0.0; BLOCK]);
    for (wide, element) in wide.0.iter_mut().zip(block) {
        *wide = element.to_f32();
    }
    wide
}

#[inline(always)]
pub(crate) fn narrowed<E: Element>(wide: &Wide, block: &mut [E; BLOCK]) {
    for (element, number) in block.iter_mut().zip(wide.0) {
        *element = E::from_f32(number);
    }
}

/// What is left behind the last block, filled up to one.
#[inline(always)]
pub(crate) fn filled<E: Element>(rest: &[E], value: f32) -> [E; BLOCK] {
    let mut block = [E::from_f32(value); BLOCK];
    block[..rest.len()].copy_from_slice(rest);
    block
}
