//! Kernels of attention compared with attention in `f64`.

#![forbid(unsafe_code)]

mod support;

use mt_mosaic::flash::{Flash, Mask, Sizes, block_of};
use mt_shape::DType;
use support::{CASE, CAUSAL, Case, Pass, are_small};

/// Sizes with values as wide as queries.
fn sizes(batch: usize, kv_heads: usize, group: usize, length: usize, width: usize) -> Sizes {
    Sizes { batch, kv_heads, group, length, head_dim: width, value_dim: width }
}

#[track_caller]
fn check_pass(pass: Pass, case: &Case) {
    let errors = pass.prepare(case).errors(&pass.kernel(case)).unwrap();
    assert!(are_small(&errors), "{pass:?} of {case:?}: {errors:?}");
}

#[track_caller]
fn check(case: &Case) {
    check_pass(Pass::Forward, case);
    if case.mask.causal {
        check_pass(Pass::Backward, case);
    }
}

#[test]
fn causal_rows_of_any_length() {
    check(&CASE);
    check(&Case { length: 128, ..CASE });
    check(&Case { length: 131, kv_heads: 2, group: 1, ..CASE });
    check(&Case { length: 256, block: 256, ..CASE });
}

#[test]
fn masks_caps_and_sinks() {
    check(&Case { mask: Mask { window: Some(100), ..CAUSAL }, ..CASE });
    check(&Case { mask: Mask { window: Some(3), ..CAUSAL }, ..CASE });
    check(&Case { mask: Mask { causal: false, ..CAUSAL }, ..CASE });
    check(&Case { mask: Mask { causal: false, window: Some(40), ..CAUSAL }, ..CASE });
    check(&Case { mask: Mask { chunk: Some(256), ..CAUSAL }, ..CASE });
    check(&Case { soft_cap: Some(0.8), ..CASE });
    check(&Case { sink: 0.7, ..CASE });
}

#[test]
fn wide_heads() {
    check(&Case { head_dim: 256, value_dim: 128, length: 128, ..CASE });
    check(&Case { head_dim: 128, value_dim: 256, length: 128, ..CASE });
}

#[test]
fn segments_hide_blocks() {
    let case = Case { segments: &[(1, 128), (2, 128), (3, 30)], ..CASE };
    check(&case);
    let runs = |case: &Case| case.flash().forward().unwrap().branch_runs(&case.tables()).unwrap()[1];
    let all = Case { segments: &[(1, 286)], ..CASE };
    // Three of the six pairs of the triangle are within a segment of the first row; in the second row all have
    // blocks whose segments overlap.
    assert_eq!([runs(&all), runs(&case)], [24, 18]);
    // The block of places 128 to 255 has the end of one segment and the beginning of another.
    assert_eq!(runs(&Case { segments: &[(1, 200), (2, 86)], ..CASE }), 22);
    check(&Case { segments: &[(2, 64), (1, 100), (0, 122)], ..CASE });
}

#[test]
fn hidden_pairs_are_no_steps() {
    let steps = |mask: Mask, length: usize| {
        let flash = Flash::new(sizes(1, 1, 1, length, 128), DType::BF16, mask, None, 512).unwrap();
        flash.forward().unwrap().num_steps()
    };
    assert_eq!(steps(CAUSAL, 8192), 16 * 17 / 2);
    assert_eq!(steps(Mask { causal: false, ..CAUSAL }, 8192), 16 * 16);
    // A window of two blocks reaches into a third.
    assert_eq!(steps(Mask { window: Some(1024), ..CAUSAL }, 8192), 1 + 2 + 3 * 14);
    assert_eq!(steps(Mask { chunk: Some(2048), ..CAUSAL }, 8192), 4 * 10);
}

#[test]
fn blocks_are_large_where_that_pads_little() {
    let lengths = [2048, 8192, 1024, 600, 1100, 2176, 128, 1];
    assert_eq!(lengths.map(block_of), [512, 512, 512, 128, 384, 384, 128, 128]);
}

#[test]
fn other_attention_is_refused() {
    let of = |sizes: Sizes, dtype: DType, mask: Mask, block: usize| {
        Flash::new(sizes, dtype, mask, None, block).unwrap_err().to_string()
    };
    let fitting = sizes(1, 1, 1, 1024, 128);
    assert_eq!(of(fitting, DType::F32, CAUSAL, 512), "queries, keys and values are of `float32`, not `bf16`");
    assert_eq!(
        of(sizes(1, 1, 1, 1024, 64), DType::BF16, CAUSAL, 512),
        "heads have 64 dimensions, not a multiple of 128"
    );
    assert_eq!(
        of(fitting, DType::BF16, Mask { chunk: Some(600), ..CAUSAL }, 512),
        "chunks of 600 positions are not whole blocks of 512"
    );
    assert!(of(sizes(1, 1, 1, 4096, 128), DType::BF16, CAUSAL, 2048).contains("bytes of vector memory"),);
    assert!(of(sizes(1, 1, 1, 1 << 18, 128), DType::BF16, CAUSAL, 512).contains("bytes of scalar memory"),);
}
