use mt_testing::Random;
use proptest::prelude::*;

use super::*;

/// The bytes of a row of a tile.
const LINE: usize = 4 * TILE;

/// The distances between the tiles of an operand and between their rows, in bytes.
#[derive(Clone, Copy, Debug)]
struct Layout {
    start: usize,
    stride: usize,
    second: usize,
    step: usize,
}

impl Layout {
    /// Each tile is contiguous.
    fn contiguous(start: usize) -> Self {
        Self { start, stride: LINE, second: LINE * TILE, step: 2 * LINE * TILE }
    }

    /// Rows hold all tiles along the contraction.
    fn along(start: usize, gap: usize, tiles: usize) -> Self {
        let stride = LINE * tiles + gap;
        Self { start, stride, second: TILE * stride, step: LINE }
    }

    /// Rows hold both tiles across the contraction.
    fn across(start: usize, gap: usize) -> Self {
        let stride = 2 * LINE + gap;
        Self { start, stride, second: LINE, step: TILE * stride }
    }

    /// The position of a tile's word.
    fn at(self, [second, step]: [usize; 2], [row, word]: [usize; 2]) -> usize {
        self.start + second * self.second + step * self.step + row * self.stride + 4 * word
    }

    fn tiles(self, memory: &[u8]) -> OperandTiles {
        let Self { start, stride, second, step } = self;
        OperandTiles { start: memory[start..].as_ptr(), stride, second, step }
    }
}

/// The words of a row of sums, and of a row of initial sums.
const SUMS: usize = BLOCK + 1;
const INITIAL: usize = BLOCK + 7;

/// The sums from which a block begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Begin {
    Zeros,
    Elsewhere,
    InPlace,
}

struct Operands {
    multiplication: Multiplication,
    extent: Extent,
    count: usize,
    layouts: [Layout; 2],
    left: Vec<u8>,
    right: Vec<u8>,
    /// `[row, INITIAL]`
    initial: Vec<u32>,
}

impl Operands {
    fn new(multiplication: Multiplication, extent: Extent, count: usize, word: impl FnMut() -> u32) -> Self {
        let tiles = count * multiplication.halves();
        let layouts = [Layout::along(0, 8 * LINE, tiles), Layout::across(0, LINE)];
        Self::with(multiplication, extent, count, layouts, word)
    }

    fn with(
        multiplication: Multiplication,
        extent: Extent,
        count: usize,
        layouts: [Layout; 2],
        word: impl FnMut() -> u32,
    ) -> Self {
        let last = [1, count * multiplication.halves() - 1];
        let sizes = layouts.map(|layout| layout.at(last, [TILE - 1, TILE]).div_ceil(4));
        let mut words = std::iter::repeat_with(word);
        let [left, right] = sizes.map(|size| words.by_ref().take(size).flat_map(u32::to_le_bytes).collect());
        let initial = words.take(BLOCK * INITIAL).collect();
        Self { multiplication, extent, count, layouts, left, right, initial }
    }

    /// The sums, `[row, SUMS]`. Elements that are not written stay [`u32::MAX`].
    fn sums<U: Unit>(&self, begin: Begin) -> Vec<u32> {
        // SAFETY: tests use a unit that the processor has.
        unsafe {
            let _session = Session::begin::<U>();
            self.sums_in_session::<U>(begin)
        }
    }

    /// # Safety
    /// The thread is in a session of the unit.
    unsafe fn sums_in_session<U: Unit>(&self, begin: Begin) -> Vec<u32> {
        let mut sums = vec![u32::MAX; BLOCK * SUMS];
        if begin == Begin::InPlace {
            for (sums, initial) in sums.chunks_mut(SUMS).zip(self.initial.chunks(INITIAL)) {
                sums[..BLOCK].copy_from_slice(&initial[..BLOCK]);
            }
        }
        let start = sums.as_mut_ptr();
        let (initial, initial_stride) = match begin {
            Begin::Zeros => (std::ptr::null(), 0),
            Begin::Elsewhere => (self.initial.as_ptr(), 4 * INITIAL),
            Begin::InPlace => (start.cast_const(), 4 * SUMS),
        };
        let block = Block {
            multiplication: self.multiplication,
            extent: self.extent,
            streamed: if self.count.is_multiple_of(2) { Streamed::Left } else { Streamed::Right },
            count: self.count,
            left: self.layouts[0].tiles(&self.left),
            right: self.layouts[1].tiles(&self.right),
            initial: initial.cast(),
            initial_stride,
            sums: start.cast(),
            sums_stride: 4 * SUMS,
            fetch: if self.count.is_multiple_of(3) {
                Fetch::from(self.left.as_ptr())
            } else {
                Fetch::nothing()
            },
        };
        // SAFETY: the operands hold the tiles, and the caller promises the session.
        unsafe { U::multiply(&block) };
        sums
    }

    /// The words that meet in a sum at a step.
    fn words(&self, row: usize, column: usize, step: usize) -> (u32, u32) {
        let word = |memory: &[u8], at: usize| u32::from_le_bytes(memory[at..at + 4].try_into().unwrap());
        let [left, right] = self.layouts;
        (
            word(&self.left, left.at([row / TILE, step / TILE], [row % TILE, step % TILE])),
            word(&self.right, right.at([column / TILE, step / TILE], [step % TILE, column % TILE])),
        )
    }

    fn initial(&self, row: usize, column: usize) -> u32 {
        self.initial[row * INITIAL + column]
    }
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

fn layout(tiles: usize) -> impl Strategy<Value = Layout> {
    // Elements of `bf16` may begin at any even address.
    (0..32_usize, 0..40_usize, 0..3).prop_map(move |(start, gap, kind)| match kind {
        0 => Layout::contiguous(2 * start),
        1 => Layout::along(2 * start, 2 * gap, tiles),
        _ => Layout::across(2 * start, 2 * gap),
    })
}

fn operands(word: fn(u64) -> Box<dyn FnMut() -> u32>) -> impl Strategy<Value = Operands> {
    let multiplications = [Multiplication::Bf16, Multiplication::SplitF32, Multiplication::Int8];
    let extent =
        (any::<bool>(), any::<bool>()).prop_map(|(two_rows, two_columns)| Extent { two_rows, two_columns });
    (prop::sample::select(multiplications.to_vec()), extent, 1..8_usize, any::<u64>()).prop_flat_map(
        move |(multiplication, extent, count, seed)| {
            let tiles = count * multiplication.halves();
            [layout(tiles), layout(tiles)]
                .prop_map(move |layouts| Operands::with(multiplication, extent, count, layouts, word(seed)))
        },
    )
}

impl std::fmt::Debug for Operands {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { multiplication, extent, count, layouts, .. } = self;
        write!(f, "{multiplication:?}, {extent:?}, {count} steps, {layouts:?}")
    }
}

const BEGINNINGS: [Begin; 3] = [Begin::Zeros, Begin::Elsewhere, Begin::InPlace];

/// The pairs of halves that a multiplication of split numbers multiplies; otherwise the only one.
fn halves(multiplication: Multiplication) -> &'static [[usize; 2]] {
    match multiplication {
        Multiplication::SplitF32 => &[[0, 0], [1, 0], [0, 1]],
        Multiplication::Bf16 | Multiplication::Int8 => &[[0, 0]],
    }
}

/// Compares a sum with a plain loop. Integers are exact.
fn check_sum(operands: &Operands, begin: Begin, sum: u32, [row, column]: [usize; 2]) {
    let is_integer = operands.multiplication == Multiplication::Int8;
    let initial = match begin {
        Begin::Zeros => 0,
        Begin::Elsewhere | Begin::InPlace => operands.initial(row, column),
    };
    let (mut exact, mut absolute) =
        (f64::from(f32::from_bits(initial)), f64::from(f32::from_bits(initial)).abs());
    let mut integer = initial as i32;
    let per_step = operands.multiplication.halves();
    for step in 0..operands.count {
        for [left_half, right_half] in halves(operands.multiplication) {
            for word in 0..TILE {
                let at = |half: usize| (step * per_step + half) * TILE + word;
                let left = operands.words(row, column, at(*left_half)).0;
                let right = operands.words(row, column, at(*right_half)).1;
                for (left, right) in left.to_le_bytes().into_iter().zip(right.to_le_bytes()) {
                    integer = integer.wrapping_add(i32::from(left as i8) * i32::from(right as i8));
                }
                for half in 0..2 {
                    let product = number(left, half) * number(right, half);
                    exact += product;
                    absolute += product.abs();
                }
            }
        }
    }
    if is_integer {
        return assert_eq!(sum as i32, integer, "{operands:?}, {begin:?}: {row}, {column}");
    }
    // Each product passes 16 sums of its half, the sum of both halves, and the sums of all tiles after it.
    let terms = 18 + operands.count * halves(operands.multiplication).len();
    let bound = terms as f64 * f64::from(f32::EPSILON) / 2.0 * absolute;
    let error = (f64::from(f32::from_bits(sum)) - exact).abs();
    assert!(error <= bound, "{operands:?}, {begin:?}: {row}, {column}: {error:e} above {bound:e}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Any layout, alignment, extent and depth.
    #[test]
    fn emulated_sums_are_those_of_a_plain_loop(operands in operands(|seed| Box::new(moderate(seed)))) {
        for begin in BEGINNINGS {
            let sums = operands.sums::<Emulated>(begin);
            for (index, sum) in sums.into_iter().enumerate() {
                let [row, column] = [index / SUMS, index % SUMS];
                let is_inside = row < if operands.extent.two_rows { BLOCK } else { TILE }
                    && column < if operands.extent.two_columns { BLOCK } else { TILE };
                if is_inside {
                    check_sum(&operands, begin, sum, [row, column]);
                } else if begin != Begin::InPlace || column == BLOCK {
                    prop_assert_eq!(sum, u32::MAX, "{}, {} is not written", row, column);
                } else {
                    prop_assert_eq!(sum, operands.initial(row, column), "{}, {} stays", row, column);
                }
            }
        }
    }
}

#[test]
fn split_numbers_are_multiplied_without_the_product_of_remainders() {
    let extent = Extent { two_rows: true, two_columns: true };
    let split = Operands::new(Multiplication::SplitF32, extent, 2, moderate(3));
    let sums = split.sums::<Emulated>(Begin::Zeros);
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
        let sum = f64::from(f32::from_bits(sums[row * SUMS + column]));
        assert!((sum - exact).abs() < 1e-4 * exact.abs().max(1.0), "{row}, {column}: {sum}, not {exact}");
    }
}

#[test]
fn subnormal_numbers_count_as_zero() {
    let extent = Extent { two_rows: false, two_columns: false };
    // 2⁻¹³⁰ times 1, and 2⁻⁷⁰ squared.
    for (left, right) in [(0x0008_u32, 0x3f80), (0x1c80, 0x1c80)] {
        let mut words = [left, right].into_iter().flat_map(|word| vec![word; 4 * BLOCK * BLOCK]);
        let operands = Operands::new(Multiplication::Bf16, extent, 1, || words.next().unwrap_or(right));
        assert_eq!(operands.sums::<Emulated>(Begin::Zeros)[0], 0);
    }
}

#[cfg(target_arch = "x86_64")]
mod processor {
    use super::*;

    fn has(multiplication: Multiplication) -> bool {
        if multiplication == Multiplication::Int8 { has_int8() } else { has_bf16() }
    }

    fn check(operands: &Operands) {
        for begin in BEGINNINGS {
            let (tiles, emulated) = (operands.sums::<Processor>(begin), operands.sums::<Emulated>(begin));
            let differing = tiles.iter().zip(&emulated).filter(|(tile, emulated)| {
                let are_nan = [**tile, **emulated].map(|bits| f32::from_bits(bits).is_nan());
                // The bits of NaN are not specified.
                let both_nan = operands.multiplication != Multiplication::Int8 && are_nan == [true; 2];
                tile != emulated && !both_nan
            });
            assert_eq!(differing.count(), 0, "{operands:?}, {begin:?}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]

        #[test]
        fn tiles_equal_the_emulator_to_the_bit(
            moderate in operands(|seed| Box::new(moderate(seed))),
            // All exponents: subnormal numbers, infinities and NaN.
            any in operands(|seed| Box::new(random(seed))),
            // Small numbers, whose products and sums are subnormal.
            small in operands(|seed| {
                let mut bits = random(seed);
                Box::new(move || bits() & 0x9fff_9fff)
            }),
        ) {
            for operands in [moderate, any, small] {
                if has(operands.multiplication) {
                    check(&operands);
                }
            }
        }
    }

    /// A call of Linux on a set of cores.
    #[cfg(target_os = "linux")]
    fn run_on(core: usize) {
        unsafe extern "C" {
            fn sched_setaffinity(thread: i32, size: usize, cores: *const u64) -> i32;
        }
        let cores = [1_u64 << (core % 64)];
        // SAFETY: the set has the stated size. The call fails where the thread may not run on this core.
        let _ = unsafe { sched_setaffinity(0, size_of_val(&cores), cores.as_ptr()) };
    }

    /// Arithmetic on all vector registers, as compilers generate it.
    fn disturb(seed: u64) -> f32 {
        let numbers: Vec<f32> = (0..4096).map(|index| (index as f32 + seed as f32).sqrt()).collect();
        std::hint::black_box(&numbers)
            .iter()
            .zip(numbers.iter().rev())
            .map(|(left, right)| left * right)
            .sum()
    }

    /// The system saves a thread's tiles when it interrupts the thread or moves it to another core. Between the blocks of a
    /// session, a thread yields, moves, and runs other code. A block lasts long enough to be interrupted.
    #[test]
    fn more_threads_than_cores_lose_nothing() {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let extent = Extent { two_rows: true, two_columns: true };
        std::thread::scope(|scope| {
            for thread in 0..4 * cores {
                scope.spawn(move || {
                    let seed = thread as u64;
                    let multiplication =
                        [Multiplication::Bf16, Multiplication::SplitF32, Multiplication::Int8][thread % 3];
                    if !has(multiplication) {
                        return;
                    }
                    let count = 300;
                    let layouts = [Layout::contiguous(0); 2];
                    let bits: Box<dyn FnMut() -> u32> = match multiplication {
                        Multiplication::Int8 => Box::new(random(seed)),
                        _ => Box::new(moderate(seed)),
                    };
                    let operands = Operands::with(multiplication, extent, count, layouts, bits);
                    let expected = operands.sums::<Emulated>(Begin::Elsewhere);
                    let start = std::time::Instant::now();
                    // SAFETY: the processor has the instructions.
                    let mut session = Some(unsafe { Session::begin::<Processor>() });
                    let mut round = thread;
                    while start.elapsed() < std::time::Duration::from_millis(300) {
                        round += 1;
                        if round.is_multiple_of(50) {
                            drop(session.take());
                            // SAFETY: as above; the previous session has ended.
                            session = Some(unsafe { Session::begin::<Processor>() });
                        }
                        // SAFETY: the session has begun on this thread.
                        let sums = unsafe { operands.sums_in_session::<Processor>(Begin::Elsewhere) };
                        assert_eq!(sums, expected, "round {round}");
                        match round % 4 {
                            0 => std::thread::yield_now(),
                            #[cfg(target_os = "linux")]
                            1 => run_on(round / 4 % cores),
                            _ => assert!(disturb(seed) > 0.0),
                        }
                    }
                });
            }
        });
    }
}
