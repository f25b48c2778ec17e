//! The matrix unit in plain Rust, to the bit.

use super::{Block, Multiplication, OperandTiles, TILE, Unit};

/// Computes the same results as the instructions. Each sum over a tile takes the first numbers of all pairs and the
/// second numbers separately, adds both sums, and adds the result to the tile of sums. Subnormal operands and results
/// count as zero.
///
/// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, `TDPBF16PS` and `TDPBSSD`.
#[derive(Clone, Copy)]
pub(crate) struct Emulated;

type Tile<T> = [[T; TILE]; TILE];

impl Unit for Emulated {
    unsafe fn enter() {}

    unsafe fn leave() {}

    unsafe fn multiply(block: &Block) {
        let extent = |two: bool| if two { 2 } else { 1 };
        for row in 0..extent(block.extent.two_rows) {
            for column in 0..extent(block.extent.two_columns) {
                let sums = block.sums.wrapping_add(row * TILE * block.sums_stride + column * TILE * 4);
                // SAFETY: what the caller promises.
                unsafe {
                    match block.multiplication {
                        Multiplication::Int8 => {
                            store(sums, block.sums_stride, sum(block, row, column, add_int8, &[[0, 0]]));
                        }
                        Multiplication::Bf16 => {
                            store(sums, block.sums_stride, sum(block, row, column, add_bf16, &[[0, 0]]));
                        }
                        Multiplication::SplitF32 => {
                            let halves = [[0, 0], [1, 0], [0, 1]];
                            store(sums, block.sums_stride, sum(block, row, column, add_bf16, &halves));
                        }
                    }
                }
            }
        }
    }
}

/// Computes sums along the contraction. Each step multiplies the tiles of both operands that `halves` lists.
///
/// # Safety
/// See [`Unit::multiply`].
unsafe fn sum<T: Copy>(
    block: &Block,
    row: usize,
    column: usize,
    add: impl Fn(&mut Tile<T>, &Tile<u32>, &Tile<u32>),
    halves: &[[usize; 2]],
) -> Tile<T> {
    let mut sums: Tile<T> = if block.initial.is_null() {
        // SAFETY: zeros are numbers of both types.
        unsafe { std::mem::zeroed() }
    } else {
        let initial = block.initial.wrapping_add(row * TILE * block.initial_stride + column * TILE * 4);
        // SAFETY: what the caller promises.
        unsafe { load(initial, block.initial_stride) }
    };
    for step in 0..block.count {
        for half in halves {
            let [left, right] = half.map(|half| step * block.multiplication.halves() + half);
            // SAFETY: what the caller promises.
            let (left, right) =
                unsafe { (load_tile(&block.left, row, left), load_tile(&block.right, column, right)) };
            add(&mut sums, &left, &right);
        }
    }
    sums
}

/// The first or the second tile across the contraction, at a step along it.
///
/// # Safety
/// The tile's rows lie in readable memory.
unsafe fn load_tile(tiles: &OperandTiles, index: usize, step: usize) -> Tile<u32> {
    // SAFETY: what the caller promises.
    unsafe { load(tiles.start.add(index * tiles.second + step * tiles.step), tiles.stride) }
}

/// # Safety
/// The rows lie in readable memory.
unsafe fn load<T: Copy>(from: *const u8, stride: usize) -> Tile<T> {
    // SAFETY: what the caller promises.
    std::array::from_fn(|row| unsafe { from.add(row * stride).cast::<[T; TILE]>().read_unaligned() })
}

/// # Safety
/// The rows lie in writable memory.
unsafe fn store<T>(to: *mut u8, stride: usize, tile: Tile<T>) {
    for (row, numbers) in tile.into_iter().enumerate() {
        // SAFETY: what the caller promises.
        unsafe { to.add(row * stride).cast::<[T; TILE]>().write_unaligned(numbers) };
    }
}

fn add_bf16(sums: &mut Tile<f32>, left: &Tile<u32>, right: &Tile<u32>) {
    let halves = |word: u32| [f32::from_bits(word << 16), f32::from_bits(word & 0xffff_0000)].map(flushed);
    for (sums, left) in sums.iter_mut().zip(left) {
        for (column, sum) in sums.iter_mut().enumerate() {
            let mut pair = [0.0; 2];
            for (left, right) in left.iter().zip(right) {
                let (left, right) = (halves(*left), halves(right[column]));
                for index in 0..2 {
                    pair[index] = flushed(left[index].mul_add(right[index], pair[index]));
                }
            }
            *sum = flushed(flushed(*sum) + flushed(pair[0] + pair[1]));
        }
    }
}

fn add_int8(sums: &mut Tile<i32>, left: &Tile<u32>, right: &Tile<u32>) {
    for (sums, left) in sums.iter_mut().zip(left) {
        for (column, sum) in sums.iter_mut().enumerate() {
            for (left, right) in left.iter().zip(right) {
                let (left, right) = (left.to_le_bytes(), right[column].to_le_bytes());
                for (left, right) in left.into_iter().zip(right) {
                    *sum = sum.wrapping_add(i32::from(left as i8) * i32::from(right as i8));
                }
            }
        }
    }
}

/// Zero instead of a subnormal number.
fn flushed(number: f32) -> f32 {
    if number.is_subnormal() { 0.0_f32.copysign(number) } else { number }
}
