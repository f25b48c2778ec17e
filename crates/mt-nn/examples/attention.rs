//! Times dense and blockwise attention, forward and backward, at several lengths, with and without kernels.
//!
//! `cargo run --release -p mt-nn --example attention` prints the processor time in milliseconds and its ratio to that
//! of dense attention. Other processes disturb processor time less than elapsed time. `FEWEST_IN_BLOCKS` and `block_size`
//! are chosen from these measurements.

mod common;

use mt_derive::Tree;
use mt_ir::Target;
use mt_nn::{
    NormOptions, SequenceOrder,
    attention::{
        Additions, AttentionKernel, AttentionOptions, Context, KeysValues, MaskSpec, PassBlocks, Segments,
        TpuKernels, block_size, blockwise, dense,
    },
    axes::{BATCH, GROUP, HEAD_DIM, KV_HEADS, KV_POSITION, POSITION, VALUE_DIM},
};
use mt_runtime::{CompileSettings, Executable, Platform, target_of, testing::cpu};
use mt_shape::{DType, axis};
use mt_trace::{ProgramOptions, program};

/// Tokens per batch, whatever the length.
const NUM_TOKENS: usize = 4096;
const BLOCKS: [usize; 4] = [64, 128, 256, 512];
const REPEATS: usize = 5;

#[derive(Tree)]
struct Operands<L>(Vec<L>);

fn main() {
    for dtype in [DType::F32, DType::BF16] {
        for length in [64, 128, 256, 512, 1024, 2048, 4096] {
            let target = Target::CPU;
            let dense = milliseconds(target, dtype, length, None);
            let kernels =
                target_of(Platform::Cpu, true, false).expect("the environment names features that exist");
            let dense_kernels = milliseconds(kernels, dtype, length, None);
            let kernel =
                milliseconds(kernels, dtype, length, Some(length.min(block_size(target, 1, length))));
            let blocks: Vec<String> = BLOCKS
                .iter()
                .filter(|block| **block <= length)
                .map(|block| {
                    let blockwise = milliseconds(target, dtype, length, Some(*block));
                    format!("blocks of {block} {blockwise:.0} ({:.2})", blockwise / dense)
                })
                .collect();
            println!(
                "{dtype}, length {length}: dense {dense:.0}, {}, dense with kernels {dense_kernels:.0} ({:.2}), \
                 kernels {kernel:.0} ({:.2})",
                blocks.join(", "),
                dense_kernels / dense,
                kernel / dense,
            );
        }
    }
}

/// The processor time of context and gradients, the minimum over several runs.
fn milliseconds(target: Target, dtype: DType, length: usize, block: Option<usize>) -> f64 {
    let step = compiled(target, dtype, length, block);
    common::milliseconds(&step, REPEATS, |_| {})
}

fn compiled(target: Target, dtype: DType, length: usize, block: Option<usize>) -> Executable {
    let options = AttentionOptions {
        scale: 1.0,
        kernel: AttentionKernel::Automatic,
        float32_product: false,
        float32_scores: true,
        mask: MaskSpec::CAUSAL,
        soft_cap: None,
        norm: NormOptions { epsilon: 1e-6, offset: 0.0 },
        normalize_values: false,
        chosen_chunks: None,
        normalize_projected: None,
        normalize_rotated: false,
        is_interleaved: false,
        is_gated: false,
        blocks: PassBlocks::NONE,
        local_blocks: PassBlocks::NONE,
        tpu_kernels: TpuKernels::Never,
    };
    let [batch, queries, keys] =
        [axis(BATCH, NUM_TOKENS / length), axis(POSITION, length), axis(KV_POSITION, length)];
    let [kv_heads, group, head_dim] = [axis(KV_HEADS, 4), axis(GROUP, 2), axis(HEAD_DIM, 64)];
    let program_options = ProgramOptions::new("attention", target);
    let program = program(&program_options, |inputs| {
        let input = |name: &str, axes: &[mt_shape::Axis], dtype: DType| {
            inputs.input(name, dtype, axes, &vec![None; axes.len()], false)
        };
        let operands = vec![
            input("query", &[batch, queries, kv_heads, group, head_dim], DType::F32),
            input("key", &[batch, keys, kv_heads, head_dim], DType::F32),
            input("value", &[batch, keys, kv_heads, axis(VALUE_DIM, 64)], DType::F32),
        ];
        let segments = input("segments", &[batch, queries], DType::I32);
        let (loss, [], gradients) = inputs.region().value_and_grad(&Operands(operands), |_, operands| {
            let [query, key, value] = [0, 1, 2].map(|index| operands.0[index].cast(dtype));
            let keys_values = KeysValues { key, value };
            let segments = Segments::within(segments, SequenceOrder::AsRead);
            let Context { context, .. } = match block {
                None => dense(
                    query,
                    keys_values,
                    segments.mask(options.mask),
                    Additions::default(),
                    &options,
                    false,
                ),
                Some(_) => blockwise(query, keys_values, segments, None, &options, block, false),
            };
            (context.cast(DType::F32).square().sum_all(), [])
        });
        let results = std::iter::once(loss).chain(gradients.0);
        results.map(|tensor| inputs.replicated("result", tensor)).collect()
    })
    .expect("attention can be traced");
    cpu(1).compile(&program, &CompileSettings::default()).expect("the program compiles")
}
