//! Multi-token prediction: equal losses however a model is run and placed, and losses that equal plain sums.

use super::training::{NUM_STEPS, on_one_device, train};
use crate::metrics::names;

const PREDICTING: &[&str] = &[
    "decoder_block=deepseek",
    "attention_type=mla",
    "q_lora_rank=0",
    "kv_lora_rank=8",
    "qk_nope_head_dim=8",
    "qk_rope_head_dim=4",
    "v_head_dim=8",
    "base_num_kv_heads=4",
    "base_num_decoder_layers=3",
    "first_num_dense_layers=1",
    "num_experts=4",
    "num_experts_per_tok=2",
    "base_moe_mlp_dim=16",
    "routed_score_func=sigmoid",
    "routed_bias=true",
    "routed_bias_update_rate=0.015625",
    "mtp_num_layers=2",
    "mtp_loss_scaling_factor=0.25",
];

#[test]
fn losses_begin_at_those_of_even_predictions_and_fall() {
    let trained = on_one_device(PREDICTING);
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
    let (expected, trained) = (on_one_device(PREDICTING), train(PREDICTING, way, num_devices));
    for name in [names::LOSS, names::PREDICTION_LOSS] {
        for (own, value) in trained.reported[name].iter().zip(&expected.reported[name]) {
            assert!((own - value).abs() <= 1e-5 * value, "{way:?}, {name}: {own}, not {value}");
        }
    }
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
