//! Multi-token prediction: equal losses however a model is run and placed, and losses that equal plain sums.

use super::training::{LATENT_MIXTURE, NUM_STEPS, check_same_metrics, on_one_device, train};
use crate::metrics::names;

const PREDICTING: &[&str] =
    &["q_lora_rank=0", "num_experts=4", "mtp_num_layers=2", "mtp_loss_scaling_factor=0.25"];

fn predicting() -> Vec<&'static str> {
    [LATENT_MIXTURE, PREDICTING].concat()
}

#[test]
fn losses_begin_at_those_of_even_predictions_and_fall() {
    let trained = on_one_device(&predicting());
    let of = |name: &str| trained.reported[name].clone();
    let [total, tokens, further] = [names::LOSS, names::LM_LOSS, names::PREDICTION_LOSS].map(of);
    for step in 0..NUM_STEPS {
        let sum = tokens[step] + further[step];
        assert!((total[step] - sum).abs() < 1e-5 * sum, "{total:?}, {tokens:?}, {further:?}");
    }
    // The same untrained model predicts all tokens about as badly, and the weight is a quarter.
    assert!((further[0] / tokens[0] - 0.25).abs() < 0.02, "{further:?}, {tokens:?}");
    assert!(further[NUM_STEPS - 1] < further[0], "{further:?}");
    // The biases of the modules' routers are updated, too.
    let moved = trained.states[1].iter().filter(|(name, values)| {
        name.contains("predictions.1")
            && name.ends_with("gate.bias")
            && values.iter().any(|bias| *bias != 0.0)
    });
    assert_eq!(moved.count(), 1, "{:?}", trained.states[1].keys());
}

#[track_caller]
fn check_same(way: &[&str], num_devices: usize) {
    let (expected, trained) = (on_one_device(&predicting()), train(&predicting(), way, num_devices));
    check_same_metrics(&trained, &expected, |name| [names::LOSS, names::PREDICTION_LOSS].contains(&name));
}

#[test]
fn micro_batches_recomputation_and_tiles_change_nothing() {
    check_same(&["gradient_accumulation_steps=4", "remat_policy=full", "num_vocab_tiling=2"], 1);
}

#[test]
fn placement_changes_nothing() {
    check_same(&["ici_expert_parallelism=2", "ici_fsdp_parallelism=4"], 8);
    // The tokens that follow are on other devices, in another order.
    check_same(&["ici_context_parallelism=4", "ici_fsdp_parallelism=2"], 8);
}
