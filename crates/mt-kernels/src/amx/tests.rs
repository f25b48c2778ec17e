use mt_testing::Random;

use super::*;

/// Operands with gaps between rows, and sums.
struct Operands {
    block: Block,
    left: Vec<u32>,
    right: Vec<u32>,
    /// `[row, BLOCK + 1]`
    initial: Vec<u32>,
}

const STRIDES: [usize; 2] = [20 * TILE, 3 * TILE];

impl Operands {
    fn new(multiplication: Multiplication, extent: Extent, count: usize, word: impl FnMut() -> u32) -> Self {
        let mut words = std::iter::repeat_with(word);
        let left: Vec<u32> = words.by_ref().take(BLOCK * STRIDES[0]).collect();
        let right: Vec<u32> = words.by_ref().take(2 * count * TILE * STRIDES[1]).collect();
        let initial = words.take(BLOCK * (BLOCK + 1)).collect();
        let block = Block {
            multiplication,
            extent,
            streamed: if count.is_multiple_of(2) { Streamed::Left } else { Streamed::Right },
            count,
            left: OperandTiles {
                start: left.as_ptr().cast(),
                stride: 4 * STRIDES[0],
                second: 4 * STRIDES[0] * TILE,
                step: 4 * TILE,
            },
            right: OperandTiles {
                start: right.as_ptr().cast(),
                stride: 4 * STRIDES[1],
                second: 4 * TILE,
                step: 4 * STRIDES[1] * TILE,
            },
            initial: std::ptr::null(),
            initial_stride: 0,
            fetch: if count.is_multiple_of(3) {
                Fetch::nothing()
            } else {
                Fetch::from(right.as_ptr().cast())
            },
            sums: std::ptr::null_mut(),
            sums_stride: 4 * (BLOCK + 1),
        };
        Self { block, left, right, initial }
    }

    /// [`Self::sums`], starting from the initial sums.
    fn sums_from_initial<U: Unit>(&self) -> Vec<u32> {
        let initial_stride = 4 * (BLOCK + 1);
        let block = Block { initial: self.initial.as_ptr().cast(), initial_stride, ..self.block };
        Self { block, left: Vec::new(), right: Vec::new(), initial: Vec::new() }.sums::<U>()
    }

    /// The sums, `[row, BLOCK + 1]`. Elements that are not written stay [`u32::MAX`].
    fn sums<U: Unit>(&self) -> Vec<u32> {
        let mut sums = vec![u32::MAX; BLOCK * (BLOCK + 1)];
        let block = Block { sums: sums.as_mut_ptr().cast(), ..self.block };
        // SAFETY: the operands hold the tiles. Tests use a unit that the processor has.
        unsafe {
            let _session = Session::begin::<U>();
            U::multiply(&block);
        }
        sums
    }

    fn words(&self, row: usize, column: usize, step: usize) -> (u32, u32) {
        (self.left[row * STRIDES[0] + step], self.right[step * STRIDES[1] + column])
    }
}

fn extents() -> impl Iterator<Item = Extent> {
    [(false, false), (false, true), (true, false), (true, true)]
        .into_iter()
        .map(|(two_rows, two_columns)| Extent { two_rows, two_columns })
}

fn random(seed: u64) -> impl FnMut() -> u32 {
    let mut random = Random::new(seed);
    move || (random.bits() >> 32) as u32
}

/// Pairs of numbers about as large as 1, of both signs.
fn moderate(seed: u64) -> impl FnMut() -> u32 {
    let mut bits = random(seed);
    move || bits() & 0x83ff_83ff | 0x3c00_3c00
}

fn number(word: u32, half: usize) -> f64 {
    f32::from_bits(if half == 0 { word << 16 } else { word & 0xffff_0000 }).into()
}

#[test]
fn sums_of_bf16_are_right_within_their_rounding() {
    for extent in extents() {
        let operands = Operands::new(Multiplication::Bf16, extent, 3, moderate(7));
        let sums = operands.sums::<Emulated>();
        for row in 0..BLOCK {
            for column in 0..=BLOCK {
                let sum = sums[row * (BLOCK + 1) + column];
                let is_inside = row < if extent.two_rows { BLOCK } else { TILE }
                    && column < if extent.two_columns { BLOCK } else { TILE };
                if !is_inside {
                    assert_eq!(sum, u32::MAX, "{extent:?}: {row}, {column} is not written");
                    continue;
                }
                let (mut exact, mut absolute) = (0.0, 0.0);
                for step in 0..3 * TILE {
                    let (left, right) = operands.words(row, column, step);
                    for half in 0..2 {
                        let product = number(left, half) * number(right, half);
                        exact += product;
                        absolute += product.abs();
                    }
                }
                // Each product passes 16 sums of its half, the sum of both halves, and 3 sums of tiles.
                let bound = 20.0 * f64::from(f32::EPSILON) / 2.0 * absolute;
                let error = (f64::from(f32::from_bits(sum)) - exact).abs();
                assert!(error <= bound, "{extent:?}: {row}, {column}: {error:e} above {bound:e}");
            }
        }
    }
}

#[test]
fn split_numbers_are_multiplied_without_the_product_of_remainders() {
    let extent = Extent { two_rows: true, two_columns: true };
    let split = Operands::new(Multiplication::SplitF32, extent, 2, moderate(3));
    let sums = split.sums::<Emulated>();
    for (row, column) in [(0, 0), (5, 31), (31, 17)] {
        let mut exact = 0.0;
        for tile in 0..2 {
            for (left_half, right_half) in [(0, 0), (1, 0), (0, 1)] {
                for step in 0..TILE {
                    let place = |half: usize| (2 * tile + half) * TILE + step;
                    let left = split.words(row, column, place(left_half)).0;
                    let right = split.words(row, column, place(right_half)).1;
                    exact += number(left, 0) * number(right, 0) + number(left, 1) * number(right, 1);
                }
            }
        }
        let sum = f64::from(f32::from_bits(sums[row * (BLOCK + 1) + column]));
        assert!((sum - exact).abs() < 1e-4 * exact.abs().max(1.0), "{row}, {column}: {sum}, not {exact}");
    }
}

#[test]
fn sums_of_bytes_are_exact() {
    for extent in extents() {
        let operands = Operands::new(Multiplication::Int8, extent, 4, random(11));
        let sums = operands.sums::<Emulated>();
        let mut exact = 0;
        for step in 0..4 * TILE {
            let (left, right) = operands.words(3, 9, step);
            let bytes = |word: u32| word.to_le_bytes().map(|byte| i32::from(byte as i8));
            exact += bytes(left).into_iter().zip(bytes(right)).map(|(left, right)| left * right).sum::<i32>();
        }
        assert_eq!(sums[3 * (BLOCK + 1) + 9] as i32, exact);
    }
}

#[test]
fn subnormal_numbers_count_as_zero() {
    let extent = Extent { two_rows: false, two_columns: false };
    // 2⁻¹³⁰ times 1, and 2⁻⁷⁰ squared.
    for (left, right) in [(0x0008_u32, 0x3f80), (0x1c80, 0x1c80)] {
        let mut words = [left, right].into_iter().flat_map(|word| vec![word; BLOCK * STRIDES[0]]);
        let operands = Operands::new(Multiplication::Bf16, extent, 1, || words.next().unwrap_or(right));
        assert_eq!(operands.sums::<Emulated>()[0], 0);
    }
}

#[cfg(target_arch = "x86_64")]
mod processor {
    use super::*;

    fn check(multiplication: Multiplication, mut word: impl FnMut() -> u32) {
        for extent in extents() {
            for count in [1, 2, 5] {
                let operands = Operands::new(multiplication, extent, count, &mut word);
                let mut tiles = operands.sums::<Processor>();
                tiles.extend(operands.sums_from_initial::<Processor>());
                let mut emulated = operands.sums::<Emulated>();
                emulated.extend(operands.sums_from_initial::<Emulated>());
                let differing = tiles.iter().zip(&emulated).filter(|(tile, emulated)| {
                    let are_nan = [**tile, **emulated].map(|bits| f32::from_bits(bits).is_nan());
                    // The bits of NaN are not specified.
                    let both_nan = multiplication != Multiplication::Int8 && are_nan == [true; 2];
                    tile != emulated && !both_nan
                });
                assert_eq!(differing.count(), 0, "{multiplication:?}, {extent:?}, {count} tiles");
            }
        }
    }

    #[test]
    fn tiles_equal_the_emulator_to_the_bit() {
        if !has_bf16() {
            return;
        }
        for seed in 0..20 {
            for multiplication in [Multiplication::Bf16, Multiplication::SplitF32] {
                check(multiplication, moderate(seed));
                // All exponents: subnormal numbers, infinities and NaN.
                check(multiplication, random(seed));
                let mut bits = random(seed);
                // Small numbers, whose products and sums are subnormal.
                check(multiplication, || bits() & 0x9fff_9fff);
            }
        }
    }

    #[test]
    fn tiles_of_bytes_equal_the_emulator() {
        if has_int8() {
            (0..20).for_each(|seed| check(Multiplication::Int8, random(seed)));
        }
    }

    /// The system saves a thread's tiles when it interrupts the thread or moves it to another core. A thread that has
    /// left its session begins the next one without its sums.
    #[test]
    fn more_threads_than_cores_lose_nothing() {
        if !has_bf16() {
            return;
        }
        let extent = Extent { two_rows: true, two_columns: true };
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        std::thread::scope(|scope| {
            for thread in 0..4 * cores as u64 {
                scope.spawn(move || {
                    let operands = Operands::new(Multiplication::Bf16, extent, 9, moderate(thread));
                    let expected = operands.sums::<Emulated>();
                    for round in 0..400 {
                        assert_eq!(operands.sums::<Processor>(), expected, "round {round}");
                        if round % 8 == thread % 8 {
                            std::thread::yield_now();
                        }
                    }
                });
            }
        });
    }
}
