//! Tiles and panels with the instructions of x86 processors.

mod load;
mod panels;
mod streams;
mod tiles;

use super::Arithmetic;
use super::kernel::Kernel;
use super::pack::Format;
use super::stream::Streams;

/// The kernels that this processor can run, the fastest first.
pub(super) fn available(arithmetic: Arithmetic) -> &'static [Kernel] {
    let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
    let avx512 = avx2
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl");
    match arithmetic {
        Arithmetic::F32 if avx512 => &F32,
        Arithmetic::F32 if avx2 => &F32[1..],
        Arithmetic::Bf16 if avx512 && is_x86_feature_detected!("avx512bf16") => &BF16,
        Arithmetic::Bf16 if avx512 => &BF16[1..],
        Arithmetic::Bf16 if avx2 => &BF16[2..],
        _ => &[],
    }
}

static F32: [Kernel; 2] = [AVX512_F32, AVX2_F32];

static BF16: [Kernel; 3] = [
    Kernel {
        format: Format::Pairs,
        depth: 1024,
        multiply: tiles::multiply_avx512_bf16,
        pack: panels::pack_avx512_bf16,
        streams: Some(Streams { across: streams::across_avx512_bf16, along: streams::along_avx512_bf16 }),
        ..AVX512_F32
    },
    Kernel {
        format: Format::RoundedF32,
        streams: Some(Streams {
            across: streams::across_avx512_rounded,
            along: streams::along_avx512_rounded,
        }),
        ..AVX512_F32
    },
    Kernel { format: Format::RoundedF32, ..AVX2_F32 },
];

const AVX512_F32: Kernel = Kernel {
    rows: 14,
    columns: 32,
    lanes: 16,
    depth: 512,
    format: Format::F32,
    reads_rows: true,
    multiply: tiles::multiply_avx512,
    pack: panels::pack_avx512,
    streams: Some(Streams { across: streams::across_avx512, along: streams::along_avx512 }),
};

const AVX2_F32: Kernel = Kernel {
    rows: 6,
    columns: 16,
    lanes: 8,
    depth: 256,
    format: Format::F32,
    reads_rows: false,
    multiply: tiles::multiply_avx2,
    pack: panels::pack_avx2,
    streams: None,
};
