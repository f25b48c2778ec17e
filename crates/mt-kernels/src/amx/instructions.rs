//! The processor's AMX instructions, and the permission to use them.

use std::arch::{asm, x86_64::__cpuid_count};
use std::mem::offset_of;
use std::sync::OnceLock;

use super::{Block, Extent, Fetch, Multiplication, OperandTiles, Streamed, TILE, Unit};

/// The processor's own matrix unit.
#[derive(Clone, Copy)]
pub(crate) struct Processor;

/// Whether this process may multiply tiles of `bf16`. The first call asks the system for permission, which then holds for
/// all threads.
pub(crate) fn has_bf16() -> bool {
    is_permitted() && leaf_7_edx() >> 22 & 1 == 1
}

/// Whether this process may multiply tiles of `i8`; see [`has_bf16`].
pub(crate) fn has_int8() -> bool {
    is_permitted() && leaf_7_edx() >> 25 & 1 == 1
}

/// EDX of CPUID leaf 7, which describes tiles. It is cached, because CPUID is slow in virtual machines.
fn leaf_7_edx() -> u32 {
    static LEAF_7_EDX: OnceLock<u32> = OnceLock::new();
    // Leaf 0 returns the highest leaf.
    *LEAF_7_EDX.get_or_init(|| if __cpuid_count(0, 0).eax < 7 { 0 } else { __cpuid_count(7, 0).edx })
}

fn is_permitted() -> bool {
    static IS_PERMITTED: OnceLock<bool> = OnceLock::new();
    *IS_PERMITTED.get_or_init(|| {
        let has_tiles = leaf_7_edx() >> 24 & 1 == 1;
        // The system must save extended state, which includes tiles.
        let saves_state = __cpuid_count(1, 0).ecx >> 27 & 1 == 1;
        has_tiles
            && saves_state
            && enabled_state() & TILE_STATE == TILE_STATE
            && has_one_palette()
            && permit()
    })
}

/// The bits of `XCR0` for the configuration and the content of tiles.
const TILE_STATE: u64 = 0b11 << 17;

/// The state that the system saves.
fn enabled_state() -> u64 {
    let (low, high): (u32, u32);
    // SAFETY: the caller has checked that the system uses `XSAVE`, so the instruction exists. It only reads.
    unsafe {
        asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") high, options(nomem, nostack, preserves_flags));
    }
    u64::from(high) << 32 | u64::from(low)
}

/// Whether palette 1 has eight tiles of 16 rows of 64 bytes.
fn has_one_palette() -> bool {
    let palette = __cpuid_count(0x1d, 1);
    let (row_bytes, num_tiles, num_rows) = (palette.ebx & 0xffff, palette.ebx >> 16, palette.ecx & 0xffff);
    __cpuid_count(0x1d, 0).eax >= 1 && row_bytes == 64 && num_tiles >= 8 && num_rows == 16
}

/// Requests permission to use tiles, whose state is too large to be allocated for every thread.
///
/// Source: the Linux kernel's `Documentation/arch/x86/xstate.rst`.
#[cfg(target_os = "linux")]
fn permit() -> bool {
    const ARCH_PRCTL: usize = 158;
    const ARCH_REQ_XCOMP_PERM: usize = 0x1023;
    const XFEATURE_XTILEDATA: usize = 18;
    let result: isize;
    // SAFETY: the call changes only the permissions of the process. It preserves all other registers.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => result,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") XFEATURE_XTILEDATA,
            out("rcx") _,
            out("r11") _,
            options(nostack),
        );
    }
    result == 0
}

#[cfg(not(target_os = "linux"))]
fn permit() -> bool {
    false
}

/// The operand of the instruction that configures tiles.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// Eight full tiles.
static CONFIGURATION: Configuration = Configuration {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    row_bytes: {
        let mut bytes = [0; 16];
        let mut tile = 0;
        while tile < 8 {
            bytes[tile] = 4 * TILE as u16;
            tile += 1;
        }
        bytes
    },
    rows: {
        let mut rows = [0; 16];
        let mut tile = 0;
        while tile < 8 {
            rows[tile] = TILE as u8;
            tile += 1;
        }
        rows
    },
};

/// The instructions that load initial sums, or zeros. Sums are in the tiles 0 and 1 (first rows), 2 and 3 (second rows).
macro_rules! begin {
    ($zero:expr, $load:expr) => {
        concat!(
            "mov {t}, qword ptr [{k} + {initial}]\n",
            "test {t}, {t}\n",
            "jnz 3f\n",
            $zero,
            "jmp 4f\n",
            "3:\n",
            "mov {u}, qword ptr [{k} + {initial_stride}]\n",
            $load,
            "4:\n",
        )
    };
}

/// The instructions that move a pointer down by the 16 rows of a tile.
macro_rules! next_rows {
    () => {
        "lea {t}, [{t} + {u}*8]\nlea {t}, [{t} + {u}*8]\n"
    };
}

/// The instructions that store sums.
macro_rules! end {
    ($store:expr) => {
        concat!("mov {t}, qword ptr [{k} + {sums}]\n", "mov {u}, qword ptr [{k} + {sums_stride}]\n", $store,)
    };
}

/// The instructions that advance along the contraction.
macro_rules! advance {
    () => {
        concat!(
            "add {a0}, qword ptr [{k} + {left_step}]\n",
            "add {a1}, qword ptr [{k} + {left_step}]\n",
            "add {b0}, qword ptr [{k} + {right_step}]\n",
            "add {b1}, qword ptr [{k} + {right_step}]\n",
        )
    };
}

/// The instructions that prefetch four cache lines.
macro_rules! prefetch {
    () => {
        concat!(
            "prefetcht1 [{p}]\nprefetcht1 [{p} + 64]\nprefetcht1 [{p} + 128]\nprefetcht1 [{p} + 192]\n",
            "add {p}, qword ptr [{k} + {fetched}]\n",
        )
    };
}

/// Runs instructions on all tiles: `begin`, then `step` for each step along the contraction, then `end`, so no tile
/// holds data between blocks. `k` points to the block, `a0` and `a1` to the two tiles of rows, `b0` and `b1` to those of
/// columns, `p` to the prefetched memory; `sa` and `sb` are strides.
macro_rules! run {
    ($block:ident, $begin:expr, $step:expr, $end:expr) => {{
        let Block { left, right, .. } = *$block;
        asm!(
            $begin,
            "2:",
            $step,
            advance!(),
            "dec {count}",
            "jnz 2b",
            $end,
            "/* {a1} {b1} {p} {fetched} */",
            k = in(reg) std::ptr::from_ref($block),
            a0 = inout(reg) left.start => _,
            a1 = inout(reg) left.start.wrapping_add(left.second) => _,
            sa = in(reg) left.stride,
            b0 = inout(reg) right.start => _,
            b1 = inout(reg) right.start.wrapping_add(right.second) => _,
            sb = in(reg) right.stride,
            p = inout(reg) $block.fetch.start => _,
            count = inout(reg) $block.count => _,
            t = out(reg) _,
            u = out(reg) _,
            initial = const offset_of!(Block, initial),
            initial_stride = const offset_of!(Block, initial_stride),
            sums = const offset_of!(Block, sums),
            sums_stride = const offset_of!(Block, sums_stride),
            left_step = const offset_of!(Block, left) + offset_of!(OperandTiles, step),
            right_step = const offset_of!(Block, right) + offset_of!(OperandTiles, step),
            fetched = const offset_of!(Block, fetch) + offset_of!(Fetch, step),
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        )
    }};
}

/// The instructions of a step for each extent: those for two by two tiles, for two tiles of rows, for two tiles of
/// columns, and for a single tile.
macro_rules! by_extent {
    ($block:ident, $all:expr, $rows:expr, $columns:expr, $single:expr) => {
        match $block.extent {
            Extent { two_rows: true, two_columns: true } => run!(
                $block,
                begin!(
                    "tilezero tmm0\ntilezero tmm1\ntilezero tmm2\ntilezero tmm3\n",
                    concat!(
                        "tileloadd tmm0, [{t} + {u}*1]\ntileloadd tmm1, [{t} + {u}*1 + 64]\n",
                        next_rows!(),
                        "tileloadd tmm2, [{t} + {u}*1]\ntileloadd tmm3, [{t} + {u}*1 + 64]\n",
                    )
                ),
                $all,
                end!(concat!(
                    "tilestored [{t} + {u}*1], tmm0\ntilestored [{t} + {u}*1 + 64], tmm1\n",
                    next_rows!(),
                    "tilestored [{t} + {u}*1], tmm2\ntilestored [{t} + {u}*1 + 64], tmm3\n",
                ))
            ),
            Extent { two_rows: true, two_columns: false } => run!(
                $block,
                begin!(
                    "tilezero tmm0\ntilezero tmm2\n",
                    concat!(
                        "tileloadd tmm0, [{t} + {u}*1]\n",
                        next_rows!(),
                        "tileloadd tmm2, [{t} + {u}*1]\n"
                    )
                ),
                $rows,
                end!(concat!(
                    "tilestored [{t} + {u}*1], tmm0\n",
                    next_rows!(),
                    "tilestored [{t} + {u}*1], tmm2\n"
                ))
            ),
            Extent { two_rows: false, two_columns: true } => run!(
                $block,
                begin!(
                    "tilezero tmm0\ntilezero tmm1\n",
                    "tileloadd tmm0, [{t} + {u}*1]\ntileloadd tmm1, [{t} + {u}*1 + 64]\n"
                ),
                $columns,
                end!("tilestored [{t} + {u}*1], tmm0\ntilestored [{t} + {u}*1 + 64], tmm1\n")
            ),
            Extent { two_rows: false, two_columns: false } => run!(
                $block,
                begin!("tilezero tmm0\n", "tileloadd tmm0, [{t} + {u}*1]\n"),
                $single,
                end!("tilestored [{t} + {u}*1], tmm0\n")
            ),
        }
    };
}

/// An instruction that loads a tile from an operand.
macro_rules! load {
    ($load:literal, $tile:literal, $start:literal, $stride:literal) => {
        concat!($load, " ", $tile, ", [{", $start, "} + {", $stride, "}*1]\n")
    };
}

/// An instruction that adds the product of two tiles to a tile of sums.
macro_rules! dot {
    ($dot:literal, $sums:literal, $left:literal, $right:literal) => {
        concat!($dot, " ", $sums, ", ", $left, ", ", $right, "\n")
    };
}

/// The instructions that load the tiles of a step and multiply them, for each extent. The tiles of rows stay in the tiles 4
/// and 5, those of columns in 6 and 7.
macro_rules! products {
    (all, $dot:literal, $left:literal, $right:literal) => {
        concat!(
            products!(columns, $dot, $left, $right),
            load!($left, "tmm5", "a1", "sa"),
            dot!($dot, "tmm2", "tmm5", "tmm6"),
            dot!($dot, "tmm3", "tmm5", "tmm7"),
        )
    };
    (rows, $dot:literal, $left:literal, $right:literal) => {
        concat!(
            products!(single, $dot, $left, $right),
            load!($left, "tmm5", "a1", "sa"),
            dot!($dot, "tmm2", "tmm5", "tmm6"),
        )
    };
    (columns, $dot:literal, $left:literal, $right:literal) => {
        concat!(
            products!(single, $dot, $left, $right),
            load!($right, "tmm7", "b1", "sb"),
            dot!($dot, "tmm1", "tmm4", "tmm7"),
        )
    };
    (single, $dot:literal, $left:literal, $right:literal) => {
        concat!(
            load!($right, "tmm6", "b0", "sb"),
            load!($left, "tmm4", "a0", "sa"),
            dot!($dot, "tmm0", "tmm4", "tmm6"),
        )
    };
}

/// Blocks of each extent for an instruction that multiplies tiles of one kind.
macro_rules! multiply {
    ($block:ident, $dot:literal) => {
        match $block.streamed {
            Streamed::Left => multiply!($block, $dot, "tileloaddt1", "tileloadd"),
            Streamed::Right => multiply!($block, $dot, "tileloadd", "tileloaddt1"),
        }
    };
    ($block:ident, $dot:literal, $left:literal, $right:literal) => {
        by_extent!(
            $block,
            concat!(products!(all, $dot, $left, $right), prefetch!()),
            products!(rows, $dot, $left, $right),
            products!(columns, $dot, $left, $right),
            products!(single, $dot, $left, $right)
        )
    };
}

/// [`dot!`] for `bf16`.
macro_rules! dot_bf16 {
    ($sums:literal, $left:literal, $right:literal) => {
        dot!("tdpbf16ps", $sums, $left, $right)
    };
}

/// Blocks of each extent for numbers that are split into two `bf16`. The sums take the products of both first halves, of
/// the left one's second half, and of the right one's second half.
macro_rules! multiply_split {
    ($block:ident) => {
        match $block.streamed {
            Streamed::Left => multiply_split!($block, "tileloaddt1", "tileloadd"),
            Streamed::Right => multiply_split!($block, "tileloadd", "tileloaddt1"),
        }
    };
    ($block:ident, $left:literal, $right:literal) => {
        by_extent!(
            $block,
            concat!(
                products!(all, "tdpbf16ps", $left, $right),
                "mov {t}, {a0}\n",
                advance!(),
                load!($left, "tmm4", "a0", "sa"),
                dot_bf16!("tmm0", "tmm4", "tmm6"),
                dot_bf16!("tmm1", "tmm4", "tmm7"),
                load!($left, "tmm4", "a1", "sa"),
                dot_bf16!("tmm2", "tmm4", "tmm6"),
                dot_bf16!("tmm3", "tmm4", "tmm7"),
                load!($right, "tmm6", "b0", "sb"),
                // No tile was left for the first half.
                load!($left, "tmm4", "t", "sa"),
                dot_bf16!("tmm0", "tmm4", "tmm6"),
                load!($right, "tmm7", "b1", "sb"),
                dot_bf16!("tmm1", "tmm4", "tmm7"),
                dot_bf16!("tmm2", "tmm5", "tmm6"),
                dot_bf16!("tmm3", "tmm5", "tmm7"),
                prefetch!(),
            ),
            concat!(
                products!(rows, "tdpbf16ps", $left, $right),
                advance!(),
                load!($left, "tmm3", "a0", "sa"),
                dot_bf16!("tmm0", "tmm3", "tmm6"),
                load!($left, "tmm3", "a1", "sa"),
                dot_bf16!("tmm2", "tmm3", "tmm6"),
                load!($right, "tmm6", "b0", "sb"),
                dot_bf16!("tmm0", "tmm4", "tmm6"),
                dot_bf16!("tmm2", "tmm5", "tmm6"),
            ),
            concat!(
                products!(columns, "tdpbf16ps", $left, $right),
                advance!(),
                load!($left, "tmm5", "a0", "sa"),
                dot_bf16!("tmm0", "tmm5", "tmm6"),
                dot_bf16!("tmm1", "tmm5", "tmm7"),
                load!($right, "tmm6", "b0", "sb"),
                dot_bf16!("tmm0", "tmm4", "tmm6"),
                load!($right, "tmm7", "b1", "sb"),
                dot_bf16!("tmm1", "tmm4", "tmm7"),
            ),
            concat!(
                products!(single, "tdpbf16ps", $left, $right),
                advance!(),
                load!($left, "tmm5", "a0", "sa"),
                dot_bf16!("tmm0", "tmm5", "tmm6"),
                load!($right, "tmm6", "b0", "sb"),
                dot_bf16!("tmm0", "tmm4", "tmm6"),
            )
        )
    };
}

impl Unit for Processor {
    #[inline]
    unsafe fn enter() {
        // SAFETY: the operand has the size and alignment that the instruction takes; the caller promises the rest.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &CONFIGURATION, options(readonly, nostack, preserves_flags));
        }
    }

    #[inline]
    unsafe fn leave() {
        // Kernels write some results past the caches. The fence orders these writes before the end of the thread's task.
        // SAFETY: what the caller promises.
        unsafe { asm!("sfence", "tilerelease", options(nostack, preserves_flags)) };
    }

    #[inline]
    unsafe fn multiply(block: &Block) {
        debug_assert!(block.count > 0, "a block has steps");
        // SAFETY: the instructions access only the rows of the tiles, as the caller promises. The memory that they
        // write is reached through a pointer of the block.
        unsafe {
            match block.multiplication {
                Multiplication::Bf16 => multiply!(block, "tdpbf16ps"),
                Multiplication::SplitF32 => multiply_split!(block),
                Multiplication::Int8 => multiply!(block, "tdpbssd"),
            }
        }
    }
}
