//! The processor's AMX instructions, and the permission to use them.

use std::arch::{asm, x86_64::__cpuid_count};
use std::sync::OnceLock;

use super::{Block, Extent, Multiplication, Streamed, TILE, Unit};

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

/// Runs instructions on all tiles. A block of instructions first loads the initial sums and finally stores the sums, so
/// no tile holds data between blocks. `a0` and `a1` point to the two tiles of rows, `b` to the tiles of columns, `i`
/// and `c` to the initial and the final sums. A name that begins with `s` is a stride, and `t` holds 16 strides.
macro_rules! tiles {
    ($block:ident, $($line:expr),* $(,)?) => {{
        let Block { count, left, left_stride, right, right_stride, .. } = *$block;
        let Block { initial, initial_stride, sums, sums_stride, .. } = *$block;
        asm!(
            $($line,)*
            a0 = inout(reg) left => _,
            a1 = inout(reg) left.wrapping_add(TILE * left_stride) => _,
            sa = in(reg) left_stride,
            b = inout(reg) right => _,
            sb = in(reg) right_stride,
            t = out(reg) _,
            count = inout(reg) count => _,
            i = inout(reg) initial => _,
            si = in(reg) initial_stride,
            c = inout(reg) sums => _,
            sc = in(reg) sums_stride,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        )
    }};
}

/// Blocks of each extent for an instruction that multiplies tiles of one kind, with the instructions that load tiles of the
/// left and of the right operand.
macro_rules! multiply {
    ($block:ident, $dot:literal) => {
        match $block.streamed {
            Streamed::Left => multiply!($block, $dot, "tileloaddt1", "tileloadd"),
            Streamed::Right => multiply!($block, $dot, "tileloadd", "tileloaddt1"),
        }
    };
    ($block:ident, $dot:literal, $left:literal, $right:literal) => {
        match $block.extent {
            Extent { two_rows: true, two_columns: true } => tiles!(
                $block,
                "tileloadd tmm0, [{i} + {si}*1]",
                "tileloadd tmm1, [{i} + {si}*1 + 64]",
                "mov {t}, {si}",
                "shl {t}, 4",
                "add {i}, {t}",
                "tileloadd tmm2, [{i} + {si}*1]",
                "tileloadd tmm3, [{i} + {si}*1 + 64]",
                "mov {t}, {sb}",
                "shl {t}, 4",
                "2:",
                concat!($right, " tmm6, [{b} + {sb}*1]"),
                concat!($left, " tmm4, [{a0} + {sa}*1]"),
                concat!($dot, " tmm0, tmm4, tmm6"),
                concat!($right, " tmm7, [{b} + {sb}*1 + 64]"),
                concat!($dot, " tmm1, tmm4, tmm7"),
                concat!($left, " tmm5, [{a1} + {sa}*1]"),
                concat!($dot, " tmm2, tmm5, tmm6"),
                concat!($dot, " tmm3, tmm5, tmm7"),
                "add {a0}, 64",
                "add {a1}, 64",
                "add {b}, {t}",
                "dec {count}",
                "jnz 2b",
                "tilestored [{c} + {sc}*1], tmm0",
                "tilestored [{c} + {sc}*1 + 64], tmm1",
                "mov {t}, {sc}",
                "shl {t}, 4",
                "add {c}, {t}",
                "tilestored [{c} + {sc}*1], tmm2",
                "tilestored [{c} + {sc}*1 + 64], tmm3",
            ),
            Extent { two_rows: true, two_columns: false } => tiles!(
                $block,
                "tileloadd tmm0, [{i} + {si}*1]",
                "mov {t}, {si}",
                "shl {t}, 4",
                "add {i}, {t}",
                "tileloadd tmm2, [{i} + {si}*1]",
                "mov {t}, {sb}",
                "shl {t}, 4",
                "2:",
                concat!($right, " tmm6, [{b} + {sb}*1]"),
                concat!($left, " tmm4, [{a0} + {sa}*1]"),
                concat!($dot, " tmm0, tmm4, tmm6"),
                concat!($left, " tmm5, [{a1} + {sa}*1]"),
                concat!($dot, " tmm2, tmm5, tmm6"),
                "add {a0}, 64",
                "add {a1}, 64",
                "add {b}, {t}",
                "dec {count}",
                "jnz 2b",
                "tilestored [{c} + {sc}*1], tmm0",
                "mov {t}, {sc}",
                "shl {t}, 4",
                "add {c}, {t}",
                "tilestored [{c} + {sc}*1], tmm2",
            ),
            Extent { two_rows: false, two_columns: true } => tiles!(
                $block,
                "tileloadd tmm0, [{i} + {si}*1]",
                "tileloadd tmm1, [{i} + {si}*1 + 64]",
                "mov {t}, {sb}",
                "shl {t}, 4",
                "2:",
                concat!($right, " tmm6, [{b} + {sb}*1]"),
                concat!($left, " tmm4, [{a0} + {sa}*1]"),
                concat!($dot, " tmm0, tmm4, tmm6"),
                concat!($right, " tmm7, [{b} + {sb}*1 + 64]"),
                concat!($dot, " tmm1, tmm4, tmm7"),
                "add {a0}, 64",
                "add {b}, {t}",
                "dec {count}",
                "jnz 2b",
                "tilestored [{c} + {sc}*1], tmm0",
                "tilestored [{c} + {sc}*1 + 64], tmm1",
                "/* {a1} */",
            ),
            Extent { two_rows: false, two_columns: false } => tiles!(
                $block,
                "tileloadd tmm0, [{i} + {si}*1]",
                "mov {t}, {sb}",
                "shl {t}, 4",
                "2:",
                concat!($right, " tmm6, [{b} + {sb}*1]"),
                concat!($left, " tmm4, [{a0} + {sa}*1]"),
                concat!($dot, " tmm0, tmm4, tmm6"),
                "add {a0}, 64",
                "add {b}, {t}",
                "dec {count}",
                "jnz 2b",
                "tilestored [{c} + {sc}*1], tmm0",
                "/* {a1} */",
            ),
        }
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
        match $block.extent {
            Extent { two_rows: true, two_columns: true } => tiles!(
                $block,
                "tileloadd tmm0, [{i} + {si}*1]",
                "tileloadd tmm1, [{i} + {si}*1 + 64]",
                "mov {t}, {si}",
                "shl {t}, 4",
                "add {i}, {t}",
                "tileloadd tmm2, [{i} + {si}*1]",
                "tileloadd tmm3, [{i} + {si}*1 + 64]",
                "mov {t}, {sb}",
                "shl {t}, 4",
                "2:",
                concat!($right, " tmm6, [{b} + {sb}*1]"),
                concat!($left, " tmm4, [{a0} + {sa}*1]"),
                "tdpbf16ps tmm0, tmm4, tmm6",
                concat!($right, " tmm7, [{b} + {sb}*1 + 64]"),
                "tdpbf16ps tmm1, tmm4, tmm7",
                concat!($left, " tmm5, [{a1} + {sa}*1]"),
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                concat!($left, " tmm4, [{a0} + {sa}*1 + 64]"),
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                concat!($left, " tmm4, [{a1} + {sa}*1 + 64]"),
                "tdpbf16ps tmm2, tmm4, tmm6",
                "tdpbf16ps tmm3, tmm4, tmm7",
                "add {b}, {t}",
                concat!($right, " tmm6, [{b} + {sb}*1]"),
                concat!($left, " tmm4, [{a0} + {sa}*1]"),
                "tdpbf16ps tmm0, tmm4, tmm6",
                concat!($right, " tmm7, [{b} + {sb}*1 + 64]"),
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {a0}, 128",
                "add {a1}, 128",
                "add {b}, {t}",
                "dec {count}",
                "jnz 2b",
                "tilestored [{c} + {sc}*1], tmm0",
                "tilestored [{c} + {sc}*1 + 64], tmm1",
                "mov {t}, {sc}",
                "shl {t}, 4",
                "add {c}, {t}",
                "tilestored [{c} + {sc}*1], tmm2",
                "tilestored [{c} + {sc}*1 + 64], tmm3",
            ),
            Extent { two_rows: true, two_columns: false } => tiles!(
                $block,
                "tileloadd tmm0, [{i} + {si}*1]",
                "mov {t}, {si}",
                "shl {t}, 4",
                "add {i}, {t}",
                "tileloadd tmm2, [{i} + {si}*1]",
                "mov {t}, {sb}",
                "shl {t}, 4",
                "2:",
                concat!($right, " tmm6, [{b} + {sb}*1]"),
                concat!($left, " tmm4, [{a0} + {sa}*1]"),
                "tdpbf16ps tmm0, tmm4, tmm6",
                concat!($left, " tmm5, [{a1} + {sa}*1]"),
                "tdpbf16ps tmm2, tmm5, tmm6",
                concat!($left, " tmm3, [{a0} + {sa}*1 + 64]"),
                "tdpbf16ps tmm0, tmm3, tmm6",
                concat!($left, " tmm3, [{a1} + {sa}*1 + 64]"),
                "tdpbf16ps tmm2, tmm3, tmm6",
                "add {b}, {t}",
                concat!($right, " tmm6, [{b} + {sb}*1]"),
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "add {a0}, 128",
                "add {a1}, 128",
                "add {b}, {t}",
                "dec {count}",
                "jnz 2b",
                "tilestored [{c} + {sc}*1], tmm0",
                "mov {t}, {sc}",
                "shl {t}, 4",
                "add {c}, {t}",
                "tilestored [{c} + {sc}*1], tmm2",
            ),
            Extent { two_rows: false, two_columns: true } => tiles!(
                $block,
                "tileloadd tmm0, [{i} + {si}*1]",
                "tileloadd tmm1, [{i} + {si}*1 + 64]",
                "mov {t}, {sb}",
                "shl {t}, 4",
                "2:",
                concat!($right, " tmm6, [{b} + {sb}*1]"),
                concat!($left, " tmm4, [{a0} + {sa}*1]"),
                "tdpbf16ps tmm0, tmm4, tmm6",
                concat!($right, " tmm7, [{b} + {sb}*1 + 64]"),
                "tdpbf16ps tmm1, tmm4, tmm7",
                concat!($left, " tmm5, [{a0} + {sa}*1 + 64]"),
                "tdpbf16ps tmm0, tmm5, tmm6",
                "tdpbf16ps tmm1, tmm5, tmm7",
                "add {b}, {t}",
                concat!($right, " tmm6, [{b} + {sb}*1]"),
                "tdpbf16ps tmm0, tmm4, tmm6",
                concat!($right, " tmm7, [{b} + {sb}*1 + 64]"),
                "tdpbf16ps tmm1, tmm4, tmm7",
                "add {a0}, 128",
                "add {b}, {t}",
                "dec {count}",
                "jnz 2b",
                "tilestored [{c} + {sc}*1], tmm0",
                "tilestored [{c} + {sc}*1 + 64], tmm1",
                "/* {a1} */",
            ),
            Extent { two_rows: false, two_columns: false } => tiles!(
                $block,
                "tileloadd tmm0, [{i} + {si}*1]",
                "mov {t}, {sb}",
                "shl {t}, 4",
                "2:",
                concat!($right, " tmm6, [{b} + {sb}*1]"),
                concat!($left, " tmm4, [{a0} + {sa}*1]"),
                "tdpbf16ps tmm0, tmm4, tmm6",
                concat!($left, " tmm5, [{a0} + {sa}*1 + 64]"),
                "tdpbf16ps tmm0, tmm5, tmm6",
                "add {b}, {t}",
                concat!($right, " tmm6, [{b} + {sb}*1]"),
                "tdpbf16ps tmm0, tmm4, tmm6",
                "add {a0}, 128",
                "add {b}, {t}",
                "dec {count}",
                "jnz 2b",
                "tilestored [{c} + {sc}*1], tmm0",
                "/* {a1} */",
            ),
        }
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
