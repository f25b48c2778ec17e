//! All logical axes of models have a placement rule or are deliberately unsplit.

use std::collections::BTreeSet;

use mt_models::{Model, families::FAMILIES};
use mt_shape::{LogicalAxis, logical};

use crate::harness::{model, placement};

/// Models that together contain all kinds of parameters and activations.
pub const MODELS: &[&[&str]] = &[
    &["decoder_block=default"],
    &["decoder_block=llama2", "attention_bias=true", "mlp_bias=true"],
    &["decoder_block=llama2", "scan_layers=false", "logits_via_embedding=true"],
    &["decoder_block=mistral"],
    &["decoder_block=gemma"],
    &["decoder_block=gemma2", "sliding_window_size=6"],
    &["decoder_block=gemma3", "base_num_decoder_layers=7", "sliding_window_size=6"],
    &["decoder_block=gemma4", "sliding_window_size=6"],
    &[
        "decoder_block=gemma4_small",
        "scan_layers=false",
        "hidden_size_per_layer_input=8",
        "sliding_window_size=6",
    ],
    &["decoder_block=qwen2", "attention_bias=true"],
    &["decoder_block=qwen3", "use_qk_norm=true"],
    &["decoder_block=olmo3", "sliding_window_size=6"],
    &["decoder_block=gpt3"],
    &["decoder_block=simple"],
    &["decoder_block=simple_mlp"],
];

fn used(model: &dyn Model) -> BTreeSet<LogicalAxis> {
    let mut axes: Vec<Option<LogicalAxis>> = Vec::new();
    for (_, spec) in model.parameters() {
        axes.extend(spec.logical_axes);
    }
    for spec in model.state(2, 16) {
        axes.extend(spec.logical_axes);
    }
    for region in model.activations(2, 16) {
        let all = std::iter::once(region.input).chain(region.made);
        axes.extend(all.flat_map(|activation| activation.logical_axes));
    }
    axes.extend(model.scores(2, 16).logical_axes);
    axes.into_iter().flatten().collect()
}

#[test]
fn every_name_is_known_and_has_a_rule() {
    let rules = placement(&["num_cpu_devices=8", "ici_fsdp_parallelism=8"], 8);
    let mesh_free: BTreeSet<LogicalAxis> = logical::UNSPLIT.into();
    let without_rule: BTreeSet<LogicalAxis> =
        logical::all().filter(|axis| !rules.has_rule(axis.name())).collect();
    assert_eq!(without_rule, mesh_free);
    for family in FAMILIES {
        let mut blocks = family.blocks.iter().map(|block| format!("decoder_block={}", block.name()));
        assert!(blocks.any(|block| MODELS.iter().any(|model| model[0] == block)), "{family:?}");
    }
    for arguments in MODELS {
        let unknown: Vec<LogicalAxis> =
            used(&*model(arguments)).into_iter().filter(|axis| !axis.is_known()).collect();
        assert!(unknown.is_empty(), "{arguments:?}: {unknown:?}");
    }
}
