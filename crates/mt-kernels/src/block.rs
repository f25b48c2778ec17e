//! Blocks of elements, converted to `f32` for computation.

use crate::{Element, simd::Simd};

/// Elements of a block: several vectors, because the instructions of independent vectors overlap.
pub(crate) const BLOCK: usize = 64;

/// A block of `f32`, aligned so that no vector crosses a cache line.
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

/// The elements after the last whole block, padded with `value`.
#[inline(always)]
pub(crate) fn filled<E: Element>(rest: &[E], value: f32) -> [E; BLOCK] {
    let mut block = [E::from_f32(value); BLOCK];
    block[..rest.len()].copy_from_slice(rest);
    block
}

/// The number of independent vectors of partial results. A block has at least as many vectors.
pub(crate) const SIDE_BY_SIDE: usize = 4;

/// The largest element, NaN ignored; negative infinity if all elements are NaN or there are none.
// Loops call no closures, because closures would not be compiled for these instructions.
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
