//! Storage formats of matrix operands: words of 32 bits that hold one number or two.
//!
//! A product reads rows of words from its left operand and columns of words from its right one. If a word holds two
//! numbers, they are neighbors in a row of the left operand and neighbors in a column of the right one.

use std::marker::PhantomData;

use half::bf16;

use super::{
    product::Product,
    simd::{Simd, SimdBf16, Work},
};
#[cfg(test)]
use crate::amx::Emulated;
use crate::{
    Element,
    amx::{Session, TILE, Unit},
};
#[cfg(target_arch = "x86_64")]
use crate::{Feature, Features, amx::Processor};

/// Vectors of `f32` for a format's instructions.
pub(super) type Floats<F> = <<F as Format>::Simd as Simd>::Floats;
/// Vectors of words for a format's instructions.
pub(super) type Words<F> = <<F as Format>::Simd as Simd>::Words;

/// How operands are stored and multiplied.
pub(super) trait Format: Copy + Send + Sync {
    type Simd: Simd;
    type Element: Element;
    /// Numbers in a word.
    const STEP: usize;
    /// The multiple to which products round up the number of rows and of words.
    const WHOLE: usize = 1;

    fn simd(self) -> Self::Simd;
    /// Begins the session in which a thread may use the matrix unit, if the format has one.
    #[inline(always)]
    fn session(self) -> Option<Session> {
        None
    }
    /// Runs a task that computes products.
    #[inline(always)]
    fn run(self, task: impl Work) {
        let _session = self.session();
        self.simd().run(task);
    }
    #[inline(always)]
    fn multiply(self, product: Product<'_, Self>) {
        self.simd().run(product);
    }
    /// Adds to each sum the products of the numbers in a pair of words.
    fn add_products(self, sum: Floats<Self>, left: Words<Self>, right: Words<Self>) -> Floats<Self>;
    /// Stores two rows: if a word holds two numbers, as one row of words, otherwise as two rows `apart` words from each
    /// other.
    fn store_rows(self, first: Floats<Self>, second: Floats<Self>, to: &mut [u32], apart: usize);
    /// Stores two vectors that are neighbors in one row.
    #[inline(always)]
    fn store_row(self, first: Floats<Self>, second: Floats<Self>, to: &mut [u32]) {
        self.store_rows(first, second, to, Self::Simd::WIDTH);
    }
    /// Copies the elements of one row and fills the rest of `to` with zeros.
    fn copy_row(self, from: &[Self::Element], to: &mut [u32]);
}

/// `f32`, one in a word.
#[derive(Clone, Copy)]
pub(super) struct Single<S>(pub S);

impl<S: Simd> Format for Single<S> {
    type Simd = S;
    type Element = f32;
    const STEP: usize = 1;

    #[inline(always)]
    fn simd(self) -> S {
        self.0
    }

    #[inline(always)]
    fn add_products(self, sum: S::Floats, left: S::Words, right: S::Words) -> S::Floats {
        self.0.mul_add(self.0.floats(left), self.0.floats(right), sum)
    }

    #[inline(always)]
    fn store_rows(self, first: S::Floats, second: S::Floats, to: &mut [u32], apart: usize) {
        store_words(self.0, self.0.bits(first), to);
        store_words(self.0, self.0.bits(second), &mut to[apart..]);
    }

    #[inline(always)]
    fn copy_row(self, from: &[f32], to: &mut [u32]) {
        copy_singles(from, to);
    }
}

/// `bf16` widened to `f32`, one in a word, for processors that cannot multiply `bf16`.
#[derive(Clone, Copy)]
pub(super) struct Widened<S>(pub S);

impl<S: Simd> Format for Widened<S> {
    type Simd = S;
    type Element = bf16;
    const STEP: usize = 1;

    #[inline(always)]
    fn simd(self) -> S {
        self.0
    }

    #[inline(always)]
    fn add_products(self, sum: S::Floats, left: S::Words, right: S::Words) -> S::Floats {
        self.0.mul_add(self.0.floats(left), self.0.floats(right), sum)
    }

    #[inline(always)]
    fn store_rows(self, first: S::Floats, second: S::Floats, to: &mut [u32], apart: usize) {
        let (first, second) = (self.0.round_bf16(first), self.0.round_bf16(second));
        Single(self.0).store_rows(first, second, to, apart);
    }

    #[inline(always)]
    fn copy_row(self, from: &[bf16], to: &mut [u32]) {
        copy_singles(from, to);
    }
}

/// `bf16`, two in a word.
#[derive(Clone, Copy)]
pub(super) struct Pairs<S>(pub S);

impl<S: SimdBf16> Format for Pairs<S> {
    type Simd = S;
    type Element = bf16;
    const STEP: usize = 2;

    #[inline(always)]
    fn simd(self) -> S {
        self.0
    }

    #[inline(always)]
    fn add_products(self, sum: S::Floats, left: S::Words, right: S::Words) -> S::Floats {
        self.0.add_products(sum, left, right)
    }

    #[inline(always)]
    fn store_rows(self, first: S::Floats, second: S::Floats, to: &mut [u32], _apart: usize) {
        store_words(self.0, self.0.zip(first, second), to);
    }

    #[inline(always)]
    fn store_row(self, first: S::Floats, second: S::Floats, to: &mut [u32]) {
        store_words(self.0, self.0.join(first, second), to);
    }

    #[inline(always)]
    fn copy_row(self, from: &[bf16], to: &mut [u32]) {
        let (pairs, last) = from.as_chunks::<2>();
        let (own, rest) = to.split_at_mut(pairs.len());
        for (word, [first, second]) in own.iter_mut().zip(pairs) {
            *word = u32::from(first.to_bits()) | u32::from(second.to_bits()) << 16;
        }
        rest.fill(0);
        if let [last] = last {
            rest[0] = last.to_bits().into();
        }
    }
}

/// The storage of [`Pairs`], multiplied by a matrix unit.
pub(super) struct Tiled<S, U> {
    pairs: Pairs<S>,
    unit: PhantomData<U>,
}

impl<S: Copy, U> Clone for Tiled<S, U> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<S: Copy, U> Copy for Tiled<S, U> {}

/// The format for the processor's matrix unit.
#[cfg(target_arch = "x86_64")]
pub(super) fn tiled<S>(simd: S) -> Tiled<S, Processor> {
    assert!(Features::detect().contains(Feature::AmxBf16), "the processor has tiles");
    Tiled { pairs: Pairs(simd), unit: PhantomData }
}

#[cfg(test)]
pub(super) fn emulated<S>(simd: S) -> Tiled<S, Emulated> {
    Tiled { pairs: Pairs(simd), unit: PhantomData }
}

impl<S: SimdBf16, U: Unit> Format for Tiled<S, U> {
    type Simd = S;
    type Element = bf16;
    const STEP: usize = 2;
    const WHOLE: usize = TILE;

    #[inline(always)]
    fn simd(self) -> S {
        self.pairs.0
    }

    #[inline(always)]
    fn session(self) -> Option<Session> {
        // SAFETY: a value of this type exists only if the unit may be used. Attention begins one session for each task.
        Some(unsafe { Session::begin::<U>() })
    }

    #[inline(always)]
    fn multiply(self, product: Product<'_, Self>) {
        product.by_tiles::<U>();
    }

    #[inline(always)]
    fn add_products(self, sum: S::Floats, left: S::Words, right: S::Words) -> S::Floats {
        self.pairs.add_products(sum, left, right)
    }

    #[inline(always)]
    fn store_rows(self, first: S::Floats, second: S::Floats, to: &mut [u32], apart: usize) {
        self.pairs.store_rows(first, second, to, apart);
    }

    #[inline(always)]
    fn store_row(self, first: S::Floats, second: S::Floats, to: &mut [u32]) {
        self.pairs.store_row(first, second, to);
    }

    #[inline(always)]
    fn copy_row(self, from: &[bf16], to: &mut [u32]) {
        self.pairs.copy_row(from, to);
    }
}

/// Copies each element to a word of its own and fills the rest with zeros.
#[inline(always)]
fn copy_singles<E: Element>(from: &[E], to: &mut [u32]) {
    let (own, rest) = to.split_at_mut(from.len());
    for (word, value) in own.iter_mut().zip(from) {
        *word = value.to_f32().to_bits();
    }
    rest.fill(0);
}

/// Converts words that pair neighbors of a row to words that pair neighbors of a column.
#[inline(always)]
pub(super) fn zip_rows<F: Format>(rows: &[u32], apart: usize, to: &mut [u32], to_apart: usize) {
    debug_assert_eq!(F::STEP, 2, "a word of one number has no neighbours");
    for (pair, to) in rows.chunks_exact(2 * apart).zip(to.chunks_exact_mut(to_apart)) {
        let (first, second) = pair.split_at(apart);
        for ((columns, first), second) in to.as_chunks_mut::<2>().0.iter_mut().zip(first).zip(second) {
            *columns = [first & 0xffff | second << 16, first >> 16 | second & 0xffff_0000];
        }
    }
}

#[inline(always)]
pub(super) fn store_words<S: Simd>(simd: S, words: S::Words, to: &mut [u32]) {
    assert!(to.len() >= S::WIDTH);
    // SAFETY: the slice holds a vector.
    unsafe { simd.store_words(words, to.as_mut_ptr()) }
}

#[inline(always)]
pub(super) fn load_words<S: Simd>(simd: S, from: &[u32]) -> S::Words {
    assert!(from.len() >= S::WIDTH);
    // SAFETY: the slice holds a vector.
    unsafe { simd.load_words(from.as_ptr()) }
}
