//! Both kernels of attention against each other, and what the options on types do.

use mt_nn::{
    NormOptions,
    attention::{AttentionKernel, AttentionOptions, MaskSpec, Segments, blockwise, dense},
    axes::{BATCH, GROUP, HEAD_DIM, KV_HEADS, KV_POSITION, POSITION},
};
use mt_shape::{DType, HostArray, axis};
use mt_trace::Tensor;

use crate::harness::{Argument, assert_close, gradients, integers, numbers, relative_error, text};

const OPTIONS: AttentionOptions = AttentionOptions {
    scale: 1.0,
    kernel: AttentionKernel::Automatic,
    float32_product: false,
    float32_scores: true,
    mask: MaskSpec::CAUSAL,
    soft_cap: None,
    norm: NormOptions { epsilon: 1e-6, offset: 0.0 },
    normalize_values: false,
};

#[derive(Clone, Copy)]
struct Case {
    batch: usize,
    length: usize,
    kv_heads: usize,
    group: usize,
    head_dim: usize,
    block: usize,
}

const CASE: Case = Case { batch: 2, length: 37, kv_heads: 2, group: 3, head_dim: 6, block: 8 };

impl Case {
    /// Queries, keys, values and segments: documents of odd lengths, then padding.
    fn arguments(self) -> Vec<Argument> {
        let Self { batch, length, kv_heads, group, head_dim, .. } = self;
        let [batch, keys] = [axis(BATCH, batch), axis(KV_POSITION, length)];
        let [kv_heads, group, head_dim] =
            [axis(KV_HEADS, kv_heads), axis(GROUP, group), axis(HEAD_DIM, head_dim)];
        let queries = axis(POSITION, length);
        let tensor = |seed, axes: Vec<_>| {
            let dims: Vec<usize> = axes.iter().map(|axis: &mt_shape::Axis| axis.size).collect();
            (axes, numbers(seed, &dims))
        };
        let segments: Vec<i32> = (0..batch.size)
            .flat_map(|row| {
                let (first, padding) = (length / (row + 2), length - length / 7);
                (0..length).map(move |place| if place >= padding { 0 } else { 1 + i32::from(place >= first) })
            })
            .collect();
        vec![
            tensor(1, vec![batch, queries, kv_heads, group, head_dim]),
            tensor(2, vec![batch, keys, kv_heads, head_dim]),
            tensor(3, vec![batch, keys, kv_heads, head_dim]),
            (vec![batch, queries], integers(&[batch.size, length], &segments)),
        ]
    }

    /// The context in `f32` and the gradients of queries, keys and values.
    fn run(self, dtype: DType, options: &AttentionOptions, is_dense: bool) -> Vec<HostArray> {
        let cotangent = numbers(4, &[self.batch * self.kv_heads * self.length * self.group * self.head_dim]);
        let block = self.block;
        let (context, gradients) = gradients("attention", &self.arguments(), &cotangent, |t| {
            context([t[0], t[1], t[2], t[3]], dtype, options, if is_dense { 0 } else { block })
        });
        [vec![context], gradients].concat()
    }
}

/// Dense for blocks of 0.
fn context<'t>(t: [Tensor<'t>; 4], dtype: DType, options: &AttentionOptions, block: usize) -> Tensor<'t> {
    let [query, key, value] = [t[0], t[1], t[2]].map(|tensor| tensor.cast(dtype));
    if block == 0 {
        dense(query, key, value, Segments::within(t[3]).mask(options.mask), None, options)
    } else {
        blockwise(query, key, value, t[3], None, options, block)
    }
}

const PARTS: [&str; 4] = ["context", "query's gradient", "key's gradient", "value's gradient"];

#[track_caller]
fn check(case: Case, dtype: DType, tolerance: f64) {
    let dense = case.run(dtype, &OPTIONS, true);
    let blockwise = case.run(dtype, &OPTIONS, false);
    for ((part, dense), blockwise) in PARTS.iter().zip(&dense).zip(&blockwise) {
        assert!(blockwise.to_f64().iter().all(|value| value.is_finite()), "{part}");
        assert_close(part, blockwise, dense, tolerance);
    }
}

#[test]
fn blockwise_equals_dense() {
    check(CASE, DType::F32, 1e-6);
    // Blocks that divide the length, one block, and blocks larger than documents or smaller.
    check(Case { length: 48, block: 16, ..CASE }, DType::F32, 1e-6);
    check(Case { length: 13, block: 13, ..CASE }, DType::F32, 1e-6);
    check(Case { length: 29, block: 3, kv_heads: 1, group: 5, head_dim: 2, ..CASE }, DType::F32, 1e-6);
    check(Case { length: 1, block: 1, batch: 1, ..CASE }, DType::F32, 1e-6);
    check(Case { kv_heads: 3, group: 1, ..CASE }, DType::F32, 1e-6);
}

#[test]
fn blockwise_equals_dense_in_bf16() {
    check(CASE, DType::BF16, 1.2e-2);
    // Both are as near to the exact result as `bf16` allows.
    let exact = CASE.run(DType::F32, &OPTIONS, true);
    for is_dense in [true, false] {
        let narrow = CASE.run(DType::BF16, &OPTIONS, is_dense);
        for ((part, narrow), exact) in PARTS.iter().zip(&narrow).zip(&exact) {
            assert_close(part, narrow, exact, 1.2e-2);
        }
    }
}

#[test]
fn scores_in_f32_are_nearer() {
    // Large queries make scores whose last bits matter.
    let mut arguments = CASE.arguments();
    let dims = arguments[0].1.dims().to_vec();
    let large: Vec<f32> = arguments[0].1.to_f64().iter().map(|value| (*value * 6.0) as f32).collect();
    arguments[0].1 = HostArray::from_slice(DType::F32, &dims, &large).unwrap();
    let cotangent = numbers(4, &[CASE.batch * CASE.kv_heads * CASE.length * CASE.group * CASE.head_dim]);
    let run = |dtype: DType, options: AttentionOptions| {
        // Rounded once, so that only what happens to the scores differs.
        gradients("scores", &arguments, &cotangent, |t| {
            let [query, key, value] =
                [t[0], t[1], t[2]].map(|tensor| tensor.cast(DType::BF16).cast(DType::F32));
            context([query, key, value, t[3]], dtype, &options, 0)
        })
        .0
    };
    let exact = run(DType::F32, OPTIONS);
    let error = |options| relative_error(&run(DType::BF16, options), &exact);
    let narrow = AttentionOptions { float32_scores: false, ..OPTIONS };
    let (with_narrow_scores, with_wide_scores) = (error(narrow), error(OPTIONS));
    assert!(with_wide_scores * 2.0 < with_narrow_scores, "{with_wide_scores:e} {with_narrow_scores:e}");
    // A product in `f32` has scores in `f32`, whatever is asked of scores.
    let with_wide_product = error(AttentionOptions { float32_product: true, ..narrow });
    assert!(with_wide_product * 2.0 < with_narrow_scores, "{with_wide_product:e} {with_narrow_scores:e}");
}

#[test]
fn options_choose_the_types_of_products_and_softmax() {
    let lines = |options: AttentionOptions, block: usize| {
        text(&CASE.arguments(), |_, t| vec![context([t[0], t[1], t[2], t[3]], DType::BF16, &options, block)])
            .lines()
            .filter(|line| line.contains("stablehlo.exponential") || line.contains("stablehlo.dot_general"))
            .map(str::to_owned)
            .collect::<Vec<String>>()
    };
    #[track_caller]
    fn check(lines: &[String], operation: &str, nth: usize, operand: &str) {
        let line = lines.iter().filter(|line| line.contains(operation)).nth(nth).unwrap();
        let types = line.rsplit(" : ").next().unwrap();
        assert!(types.split("->").next().unwrap().contains(&format!("x{operand}>")), "{line}");
    }
    let wide_product = AttentionOptions { float32_product: true, ..OPTIONS };
    let narrow_scores = AttentionOptions { float32_scores: false, ..OPTIONS };
    for block in [0, 8] {
        check(&lines(OPTIONS, block), "dot_general", 0, "bf16");
        check(&lines(OPTIONS, block), "exponential", 0, "f32");
        check(&lines(wide_product, block), "dot_general", 0, "f32");
        check(&lines(wide_product, block), "dot_general", 1, "bf16");
    }
    check(&lines(narrow_scores, 0), "exponential", 0, "bf16");
    // Running sums over blocks are always in `f32`.
    check(&lines(narrow_scores, 8), "exponential", 0, "f32");
}
