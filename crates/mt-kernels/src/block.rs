//! Elements of any type, taken a block at a time as `f32`.

use crate::{Element, simd::Simd};

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

/// Vectors that are kept side by side; a block has at least as many.
pub(crate) const SIDE_BY_SIDE: usize = 4;

/// The largest of the numbers, those that are none left out; infinity below zero if there is none.
// Loops call no closures: these would not be compiled for the instructions.
#[inline(always)]
pub(crate) fn largest_of<S: Simd, E: Element>(simd: S, elements: &[E]) -> f32 {
    let (blocks, rest) = elements.as_chunks::<BLOCK>();
    let rest = filled(rest, f32::NEG_INFINITY);
    let mut places = [simd.splat(f32::NEG_INFINITY); SIDE_BY_SIDE];
    for block in blocks.iter().chain([&rest]) {
        let wide = widened(block);
        for (place, vector) in wide.0.chunks_exact(S::WIDTH).enumerate() {
            let largest = &mut places[place % SIDE_BY_SIDE];
            *largest = simd.max(simd.load(vector), *largest);
        }
    }
    let mut numbers = [f32::NEG_INFINITY; BLOCK];
    for (vector, to) in places.iter().zip(numbers.chunks_exact_mut(S::WIDTH)) {
        simd.store(*vector, to);
    }
    let mut largest = f32::NEG_INFINITY;
    for number in numbers {
        largest = largest.max(number);
    }
    largest
}
