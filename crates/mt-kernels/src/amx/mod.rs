//! Products of matrix tiles, as processors with AMX compute them.
//!
//! A tile has 16 rows of 64 bytes. A tile of the left operand holds 16 rows of 16 words along the contraction, a tile
//! of the right operand holds 16 words of each of 16 columns, and a tile of sums holds 16 × 16 numbers. A word holds
//! two `bf16` or four `i8`. Kernels access the processor only through [`Unit`]. [`Emulated`] computes the same bits in
//! plain Rust: tests of packing, blocking and edges run on every machine, and integers are multiplied on processors
//! without AMX.

mod emulator;
#[cfg(target_arch = "x86_64")]
mod instructions;
#[cfg(test)]
mod tests;

use std::marker::PhantomData;

pub(crate) use emulator::Emulated;
#[cfg(target_arch = "x86_64")]
pub(crate) use instructions::{Processor, has_bf16, has_int8};

/// The rows of a tile, and the words in each of them.
pub(crate) const TILE: usize = 16;

/// The rows and columns of the largest block of sums: two by two tiles.
pub(crate) const BLOCK: usize = 2 * TILE;

/// The numbers in a word of an operand, and their multiplication.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Multiplication {
    /// Two `bf16` a word; sums of `f32`.
    Bf16,
    /// Numbers of `f32`, each split into a `bf16` and a second `bf16` for the remainder. Every 16 words of the first
    /// halves are followed by 16 words of the second halves. The product of the two second halves is left out.
    SplitF32,
    /// Four `i8` a word; sums of `i32`, which wrap.
    Int8,
}

impl Multiplication {
    /// The tiles of each operand that hold 16 words of its lines.
    pub(crate) const fn halves(self) -> usize {
        match self {
            Self::Bf16 | Self::Int8 => 1,
            Self::SplitF32 => 2,
        }
    }
}

/// One or two tiles in each direction of a block of sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    pub two_rows: bool,
    pub two_columns: bool,
}

/// The operand that the next block does not share, and that therefore need not stay in the L1 cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Streamed {
    Left,
    Right,
}

/// The tiles of an operand. Strides and distances are in bytes.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct OperandTiles {
    pub start: *const u8,
    /// Between the rows of a tile.
    pub stride: usize,
    /// Between the two tiles across the contraction.
    pub second: usize,
    /// Between tiles along the contraction.
    pub step: usize,
}

/// Contiguous memory that blocks of two by two tiles prefetch into the L2 cache, four cache lines with each step along the
/// contraction. It may lie outside of readable memory.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Fetch {
    start: *const u8,
    /// The bytes between the lines of two steps.
    step: usize,
}

impl Fetch {
    /// The bytes that a step prefetches.
    pub const BYTES: usize = 256;

    pub fn nothing() -> Self {
        // The address is valid, because prefetching an invalid one is slow.
        static PLACE: [u8; Fetch::BYTES] = [0; Fetch::BYTES];
        Self { start: PLACE.as_ptr(), step: 0 }
    }

    /// Memory from an address on.
    pub fn from(start: *const u8) -> Self {
        Self { start, step: Self::BYTES }
    }
}

/// A block of sums and the operands that it is computed from. Strides are in bytes.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Block {
    pub multiplication: Multiplication,
    pub extent: Extent,
    pub streamed: Streamed,
    /// Steps along the contraction, each of 16 words; at least one.
    pub count: usize,
    /// `[rows, words]`
    pub left: OperandTiles,
    /// `[words, columns]`
    pub right: OperandTiles,
    /// The initial sums: `[rows, columns]`; null for zeros.
    pub initial: *const u8,
    pub initial_stride: usize,
    /// The final sums: `[rows, columns]`. May be the memory of the initial sums.
    pub sums: *mut u8,
    pub sums_stride: usize,
    pub fetch: Fetch,
}

/// A matrix unit: the processor's or the emulator.
pub(crate) trait Unit: Copy + Send + Sync + 'static {
    /// Configures the tiles of the calling thread.
    ///
    /// # Safety
    /// The processor has the instructions, and the system has permitted their use.
    unsafe fn enter();

    /// Gives up the content of the calling thread's tiles.
    ///
    /// # Safety
    /// As for [`Self::enter`].
    unsafe fn leave();

    /// Computes a block of sums.
    ///
    /// # Safety
    /// The calling thread has entered. All rows of all tiles lie in readable memory; the rows of the sums lie in
    /// writable memory that no other thread accesses meanwhile.
    unsafe fn multiply(block: &Block);
}

/// The session in which a thread may use its tiles. It ends on the thread on which it began.
pub(crate) struct Session {
    leave: unsafe fn(),
    thread: PhantomData<*mut ()>,
}

impl Session {
    /// # Safety
    /// See [`Unit::enter`]. The thread has no other session.
    pub(crate) unsafe fn begin<U: Unit>() -> Self {
        // SAFETY: what the caller promises.
        unsafe { U::enter() };
        Self { leave: U::leave, thread: PhantomData }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // SAFETY: the session began on this thread.
        unsafe { (self.leave)() };
    }
}
