//! Products of matrices of words.

use super::{
    format::Format,
    simd::{Simd, Work},
};
use crate::amx::{BLOCK, Block, Extent, Fetch, Multiplication, OperandTiles, Streamed, TILE, Unit};

/// The initial values of the sums.
#[derive(Clone, Copy)]
pub(super) enum Start<'a> {
    Zero,
    /// The present content of the output.
    Old,
    /// The present content of the output, multiplied by a factor for each column.
    Scaled(&'a [f32]),
}

/// Rows of a matrix, `apart` words from each other.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    pub words: &'a [u32],
    pub apart: usize,
}

/// Computes `to[row][column] = start + Σ left[row][word] · right[word][column]`.
pub(super) struct Product<'a, F> {
    pub format: F,
    pub num_rows: usize,
    /// A multiple of a vector's width.
    pub num_columns: usize,
    pub num_words: usize,
    pub left: Rows<'a>,
    pub right: Rows<'a>,
    pub start: Start<'a>,
    pub to: &'a mut [f32],
    pub to_apart: usize,
}

impl<F: Format> Work for Product<'_, F> {
    #[inline(always)]
    fn run(self) {
        let Self { num_rows, num_columns, num_words, left, right, .. } = self;
        let width = F::Simd::WIDTH;
        assert!(num_rows != 0 && num_words != 0 && num_columns.is_multiple_of(width));
        assert!((num_rows - 1) * left.apart + num_words <= left.words.len());
        assert!((num_words - 1) * right.apart + num_columns <= right.words.len());
        assert!((num_rows - 1) * self.to_apart + num_columns <= self.to.len());
        let factors = match self.start {
            Start::Scaled(factors) => {
                assert!(factors.len() >= num_columns);
                Factors::Given(factors.as_ptr().cast())
            }
            Start::Zero => Factors::Zero,
            Start::Old => Factors::One,
        };
        let tiles = Tiles {
            format: self.format,
            num_rows,
            num_words,
            left: left.words.as_ptr(),
            left_apart: left.apart,
            right: right.words.as_ptr(),
            right_apart: right.apart,
            factors,
            to: self.to.as_mut_ptr().cast(),
            to_apart: self.to_apart,
        };
        let mut column = 0;
        while column < num_columns {
            let vectors = (num_columns - column) / width;
            // SAFETY: the assertions above check that rows, columns and words lie within the slices.
            unsafe {
                column += width
                    * match F::Simd::TILE.1 {
                        4 if vectors >= 4 => tiles.columns::<4>(column),
                        2 | 4 if vectors >= 2 => tiles.columns::<2>(column),
                        _ => tiles.columns::<1>(column),
                    };
            }
        }
    }
}

impl<F: Format> Product<'_, F> {
    /// Computes the product by tiles. Rounds the numbers of rows and words up to whole tiles. The calling thread is in
    /// a session of the unit.
    #[inline(always)]
    pub(super) fn by_tiles<U: Unit>(self) {
        let Self { format, num_columns, left, right, to_apart, .. } = self;
        let num_rows = self.num_rows.next_multiple_of(TILE);
        let num_words = self.num_words.next_multiple_of(TILE);
        assert!(num_rows != 0 && num_words != 0 && num_columns.is_multiple_of(TILE));
        assert!((num_rows - 1) * left.apart + num_words <= left.words.len());
        assert!((num_words - 1) * right.apart + num_columns <= right.words.len());
        assert!((num_rows - 1) * to_apart + num_columns <= self.to.len());
        if let Start::Scaled(factors) = self.start {
            let simd = format.simd();
            for row in self.to.chunks_mut(to_apart).take(num_rows) {
                for column in (0..num_columns).step_by(F::Simd::WIDTH) {
                    let scaled = simd.mul(simd.load(&row[column..]), simd.load(&factors[column..]));
                    simd.store(scaled, &mut row[column..]);
                }
            }
        }
        for column in (0..num_columns).step_by(BLOCK) {
            for row in (0..num_rows).step_by(BLOCK) {
                let sums = &mut self.to[row * to_apart + column..];
                let sums = sums.as_mut_ptr();
                let (initial, initial_stride) = match self.start {
                    Start::Zero => (std::ptr::null(), 0),
                    Start::Old | Start::Scaled(_) => (sums.cast_const().cast(), 4 * to_apart),
                };
                let block = Block {
                    multiplication: Multiplication::Bf16,
                    extent: Extent {
                        two_rows: num_rows - row > TILE,
                        two_columns: num_columns - column > TILE,
                    },
                    streamed: Streamed::Left,
                    count: num_words / TILE,
                    left: OperandTiles {
                        start: left.words[row * left.apart..].as_ptr().cast(),
                        stride: 4 * left.apart,
                        second: 4 * left.apart * TILE,
                        step: 4 * TILE,
                    },
                    right: OperandTiles {
                        start: right.words[column..].as_ptr().cast(),
                        stride: 4 * right.apart,
                        second: 4 * TILE,
                        step: 4 * right.apart * TILE,
                    },
                    initial,
                    initial_stride,
                    sums: sums.cast(),
                    sums_stride: 4 * to_apart,
                    fetch: Fetch::nothing(),
                };
                // SAFETY: the assertions above check that rows, columns and words lie within the slices. The format's
                // session lasts while attention computes a task.
                unsafe { U::multiply(&block) };
            }
        }
    }
}

#[derive(Clone, Copy)]
enum Factors {
    Zero,
    One,
    Given(*const u32),
}

/// A product whose sizes have been checked.
#[derive(Clone, Copy)]
struct Tiles<F> {
    format: F,
    num_rows: usize,
    num_words: usize,
    left: *const u32,
    left_apart: usize,
    right: *const u32,
    right_apart: usize,
    factors: Factors,
    to: *mut u32,
    to_apart: usize,
}

impl<F: Format> Tiles<F> {
    /// Computes `C` vectors of columns of all rows, and returns `C`.
    ///
    /// # Safety
    /// The columns lie within the matrices.
    #[inline(always)]
    unsafe fn columns<const C: usize>(self, column: usize) -> usize {
        let mut row = 0;
        while row < self.num_rows {
            let rows = self.num_rows - row;
            // SAFETY: the match takes at most the remaining rows.
            unsafe {
                row += match F::Simd::TILE.0 {
                    6 if rows >= 6 => self.tile::<6, C>(row, column),
                    _ if rows >= 4 => self.tile::<4, C>(row, column),
                    _ if rows >= 2 => self.tile::<2, C>(row, column),
                    _ => self.tile::<1, C>(row, column),
                };
            }
        }
        C
    }

    /// Computes `R` rows of `C` vectors, and returns `R`. The sums stay in registers.
    ///
    /// # Safety
    /// The rows and columns lie within the matrices.
    #[inline(always)]
    unsafe fn tile<const R: usize, const C: usize>(self, row: usize, column: usize) -> usize {
        let simd = self.format.simd();
        let width = F::Simd::WIDTH;
        let mut sums = [[simd.splat(0.0); C]; R];
        // SAFETY: what the caller promises.
        unsafe {
            let left = self.left.add(row * self.left_apart);
            let right = self.right.add(column);
            let to = self.to.add(row * self.to_apart + column);
            if !matches!(self.factors, Factors::Zero) {
                for (r, sums) in sums.iter_mut().enumerate() {
                    for (c, sum) in sums.iter_mut().enumerate() {
                        let old = simd.floats(simd.load_words(to.add(r * self.to_apart + c * width)));
                        *sum = match self.factors {
                            Factors::Given(factors) => {
                                let factor = simd.floats(simd.load_words(factors.add(column + c * width)));
                                simd.mul(old, factor)
                            }
                            _ => old,
                        };
                    }
                }
            }
            for word in 0..self.num_words {
                let mut columns = [simd.splat_word(0); C];
                for (c, column) in columns.iter_mut().enumerate() {
                    *column = simd.load_words(right.add(word * self.right_apart + c * width));
                }
                for (r, sums) in sums.iter_mut().enumerate() {
                    let factor = simd.splat_word(*left.add(r * self.left_apart + word));
                    for (sum, column) in sums.iter_mut().zip(columns) {
                        *sum = self.format.add_products(*sum, column, factor);
                    }
                }
            }
            for (r, sums) in sums.into_iter().enumerate() {
                for (c, sum) in sums.into_iter().enumerate() {
                    simd.store_words(simd.bits(sum), to.add(r * self.to_apart + c * width));
                }
            }
        }
        R
    }
}
