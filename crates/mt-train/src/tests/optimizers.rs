//! Every optimizer takes the same steps on 8 devices as on one, and in scanned layers as in unrolled ones.

use super::training::{NUM_DEVICES, Trained, on_one_device, train};

const SPLIT: &[&str] = &["ici_fsdp_parallelism=4", "ici_tensor_parallelism=2"];

#[track_caller]
fn assert_same_losses(what: &str, actual: &Trained, expected: &Trained) {
    let losses = &expected.losses;
    assert!(losses[losses.len() - 1] < losses[0], "{what}: it learns nothing: {losses:?}");
    for (actual, expected) in actual.losses.iter().zip(losses) {
        let error = (actual - expected).abs() / expected;
        assert!(error <= 1e-5, "{what}: loss {actual} is not {expected}");
    }
}

#[track_caller]
fn check(keys: &[&str]) {
    let expected = on_one_device(keys);
    let unrolled = [keys, &["scan_layers=false"]].concat();
    assert_same_losses(&format!("{keys:?} unrolled"), &on_one_device(&unrolled), &expected);
    assert_same_losses(&format!("{keys:?} on 8 devices"), &train(keys, SPLIT, NUM_DEVICES), &expected);
}

#[test]
fn muon() {
    check(&["opt_type=muon", "muon_weight_decay=0.1"]);
}

#[test]
fn adafactor() {
    // The matrices of the feed-forward layers and the embedding are wide enough to be factored.
    check(&["opt_type=adafactor", "base_emb_dim=128", "base_mlp_dim=136"]);
}

#[test]
fn some_parameters() {
    check(&["opt_type=adam_pax", "trainable_parameters_mask=['mlp/','norm']", "adamw_mask=['wi_0']"]);
}

#[test]
fn steps_that_are_no_spikes() {
    check(&["skip_step_on_spikes=true", "skip_step_interval=4", "mu_dtype=bfloat16", "opt_type=adamw"]);
}
