//! Training with kernels against training without.

use super::{
    placement::wrong_numbers,
    training::{on_one_device, train},
};

#[track_caller]
fn check(model: &[&str]) {
    let expected = on_one_device(model);
    let actual = train(model, &["cpu_kernels=true"], 1);
    let problems = wrong_numbers(&actual, &expected);
    assert!(problems.is_empty(), "{model:?}:\n{problems}");
    // XLA counts its own products only.
    assert!(actual.flops < 0.7 * expected.flops, "{model:?}: kernels compute little");
}

#[test]
fn numbers_are_those_of_programs_without_kernels() {
    check(&["scan_layers=true"]);
    check(&["scan_layers=false", "remat_policy=none"]);
    check(&["scan_layers=true", "remat_policy=minimal_with_context", "num_vocab_tiling=4"]);
    check(&["base_num_query_heads=6", "base_num_kv_heads=3", "base_emb_dim=48", "attention=flash"]);
}
