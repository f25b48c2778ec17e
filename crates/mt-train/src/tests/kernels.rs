//! Training with CPU kernels compared with training without them.

use mt_runtime::Platform;

use super::{
    placement::wrong_numbers,
    training::{NUM_ROWS, Setup, on_one_device, train},
};

#[track_caller]
fn check(model: &[&str]) {
    let expected = on_one_device(model);
    let actual = train(model, &["cpu_kernels=true"], 1);
    let problems = wrong_numbers(&actual, &expected);
    assert!(problems.is_empty(), "{model:?}:\n{problems}");
    // XLA counts only its own products.
    assert!(actual.flops < 0.7 * expected.flops, "{model:?}: kernels compute little");
}

#[test]
fn numbers_are_those_of_programs_without_kernels() {
    check(&["scan_layers=true"]);
    check(&["scan_layers=false", "remat_policy=none"]);
    check(&["scan_layers=true", "remat_policy=minimal_with_context", "num_vocab_tiling=4"]);
    check(&["base_num_query_heads=6", "base_num_kv_heads=3", "base_emb_dim=48", "attention=flash"]);
}

#[test]
fn products_of_f32_have_the_precision_of_the_configuration() {
    let text = |precision: &str, platform: Platform| {
        let precision = format!("matmul_precision={precision}");
        let setup = Setup::new(&["cpu_kernels=true", &precision], 1);
        setup.programs_for(platform).train_step(NUM_ROWS).unwrap().program.text
    };
    for (precision, printed) in [
        ("default", "DEFAULT"),
        ("bfloat16", "DEFAULT"),
        ("high", "HIGH"),
        ("highest", "HIGHEST"),
        ("float32", "HIGHEST"),
    ] {
        let text = text(precision, Platform::Gpu);
        let products: Vec<&str> = text.lines().filter(|line| line.contains("dot_general")).collect();
        assert!(!products.is_empty());
        let config = format!("[#stablehlo<precision {printed}>, #stablehlo<precision {printed}>]");
        let other = products.iter().find(|product| !product.contains(&config));
        assert_eq!(other, None, "{precision}");
    }
    assert!(text("high", Platform::Cpu).contains("arithmetic = 2"));
    assert!(!text("highest", Platform::Cpu).contains("arithmetic = 2"));
}

#[test]
fn three_products_of_bf16_train_as_f32_does() {
    let losses = |precision: &str| train(&[], &["cpu_kernels=true", precision], 1).losses;
    let (expected, actual) = (losses("matmul_precision=default"), losses("matmul_precision=high"));
    for (step, (actual, expected)) in actual.iter().zip(&expected).enumerate() {
        assert!((actual - expected).abs() <= 1e-4, "step {step}: {actual}, not {expected}");
    }
}
