//! Mixtures of experts of each form on 8 devices: losses and gradients of one device, and the bytes that devices
//! exchange about experts.

use std::fmt::Write as _;

use super::{
    placement::{Sent, differences, exchanges, wrong_numbers},
    training::{LATENT_MIXTURE, LENGTH, NUM_DEVICES, NUM_ROWS, Trained, on_one_device, train, train_in_f64},
};

const EXPERT: &[&str] = &["ici_expert_parallelism=8", "ici_fsdp_parallelism=1"];
const WITH_FSDP: &[&str] = &["ici_expert_parallelism=4", "ici_fsdp_parallelism=2"];
const WITH_TENSOR: &[&str] =
    &["ici_expert_parallelism=2", "ici_tensor_parallelism=2", "ici_fsdp_parallelism=2"];
const WITH_CONTEXT: &[&str] =
    &["ici_context_parallelism=4", "ici_expert_parallelism=2", "ici_fsdp_parallelism=1"];
const MESHES: [&[&str]; 4] = [EXPERT, WITH_FSDP, WITH_TENSOR, WITH_CONTEXT];

const EXPERTS: &[&str] = &["num_experts=8", "num_experts_per_tok=2", "base_moe_mlp_dim=16"];
const DEEPSEEK3: &[&str] =
    &["q_lora_rank=12", "shared_experts=1", "norm_topk_prob=true", "load_balance_loss_weight=0.01"];
const DEEPSEEK32: &[&str] = &[
    "q_lora_rank=8",
    "use_indexer=true",
    "indexer_n_heads=6",
    "indexer_head_dim=8",
    "indexer_topk=7",
    "indexer_loss_scaling_factor=0.5",
    "indexer_sparse_training=true",
];
const LLAMA4: &[&str] = &[
    "decoder_block=llama4",
    "num_experts_per_tok=1",
    "shared_experts=1",
    "interleave_moe_layer_step=2",
    "nope_layer_interval=2",
    "chunk_attn_window_size=10",
    "use_qk_norm=true",
    "temperature_tuning=true",
    "temperature_tuning_floor_scale=7",
];
const GPT_OSS: &[&str] = &[
    "decoder_block=gpt_oss",
    "mlp_activations=sigmoid,linear",
    "mlp_activations_limit=2.0",
    "sliding_window_size=10",
    "attention_bias=true",
    "attention_sink=true",
    "mlp_bias=true",
    "routed_bias=true",
];

const GEMMA4: &[&str] = &[
    "decoder_block=gemma4",
    "shared_experts=1",
    "sliding_window_size=10",
    "attention_pattern=local,global",
    "norm_topk_prob=true",
];

const MIXTRAL: &[&str] =
    &["decoder_block=mixtral", "sliding_window_size=10", "load_balance_loss_weight=0.01"];
/// Each expert takes a quarter more tokens than its share, and drops the others.
const WITH_CAPACITY: &[&str] = &["sparse_matmul=false", "capacity_factor=1.25"];
const CHOSEN_CHUNKS: &[&str] = &["decoder_block=mixtral", "moba=true", "moba_chunk_size=5", "moba_topk=3"];
const ENVY: &[&str] = &["decoder_block=envy", "num_experts_per_tok=1", "interleave_moe_layer_step=2"];
const QWEN3_NEXT: &[&str] = &[
    "decoder_block=qwen3_next",
    "inhomogeneous_layer_cycle_interval=2",
    "shared_experts=1",
    "gdn_num_key_heads=2",
    "gdn_num_value_heads=4",
    "gdn_key_head_dim=8",
    "gdn_value_head_dim=4",
    "gdn_chunk_size=7",
    "partial_rotary_factor=0.5",
];
const DEEPSEEK4: &[&str] = &[
    "decoder_block=deepseek4",
    "attention_type=compressed",
    "base_num_kv_heads=1",
    "head_dim=12",
    "compress_ratios=[5,4]",
    "shared_experts=1",
    "first_num_hash_layers=1",
    "mlp_activations_limit=0.5",
    // Gradients of equal streams cancel; streams have a test of their own.
    "mhc_expansion_rate=1",
    "q_lora_rank=8",
    "qk_rope_head_dim=4",
    "o_groups=2",
    "o_lora_rank=8",
    "indexer_n_heads=2",
    "indexer_head_dim=8",
    "indexer_topk=2",
    "sliding_window_size=3",
];
const STREAMS: &[&str] = &["mhc_expansion_rate=2", "sinkhorn_iterations=3"];
const STREAMS_LITE: &[&str] = &["mhc_expansion_rate=2", "enable_mhc_lite=true"];

/// Compares all meshes with one device.
fn check(model: &[&str]) {
    let expected = on_one_device(model);
    let mut report = String::new();
    for mesh in MESHES {
        let problems = wrong_numbers(&train(model, mesh, NUM_DEVICES), &expected);
        if !problems.is_empty() {
            let _ = writeln!(report, "{mesh:?}:\n{problems}");
        }
    }
    assert!(report.is_empty(), "\n{report}");
}

/// As [`check`], in `f64`, and as exactly as `f64` allows: for models with gradients so small beside their summands
/// that
/// `f32` rounds them away.
fn check_exactly(model: &[&str]) {
    check_in_f64(model, 1e-9);
}

/// As [`check_exactly`], with this tolerance of gradients.
fn check_in_f64(model: &[&str], of_gradients: f64) {
    let mut expected = train_in_f64(model, &[], 1);
    without_cancelled(&mut expected);
    let mut report = String::new();
    for mesh in MESHES {
        let mut trained = train_in_f64(model, mesh, NUM_DEVICES);
        without_cancelled(&mut trained);
        let problems = differences(&trained, &expected, [1e-9, of_gradients]);
        if !problems.is_empty() {
            let _ = writeln!(report, "{mesh:?}:\n{problems}");
        }
    }
    assert!(report.is_empty(), "\n{report}");
}

/// Removes gradients that are 0 but for rounding, which have no relative error.
fn without_cancelled(trained: &mut Trained) {
    let largest = |values: &[f64]| values.iter().fold(0.0, |largest: f64, value| largest.max(value.abs()));
    trained.gradients.retain(|_, gradient| largest(gradient) > 1e-15);
}

#[test]
fn latent_attention() {
    check(&[LATENT_MIXTURE, EXPERTS, DEEPSEEK3].concat());
}

#[test]
fn latent_attention_to_chosen_keys() {
    check(&[LATENT_MIXTURE, EXPERTS, DEEPSEEK32].concat());
}

#[test]
fn weighted_inputs_in_every_second_layer() {
    check(&[EXPERTS, LLAMA4].concat());
}

#[test]
fn experts_with_biases() {
    check(&[EXPERTS, GPT_OSS].concat());
}

#[test]
fn softmax_routers_with_windows() {
    check(&[EXPERTS, MIXTRAL].concat());
}

/// Projections that are named inside per-device code are kept.
#[test]
fn kept_projections_of_experts() {
    let kept =
        ["remat_policy=custom", "moe_mlpwi_0=device", "moe_mlpwi_1=device", "decoder_layer_input=device"];
    check(&[EXPERTS, MIXTRAL, &kept].concat());
    check(&[EXPERTS, MIXTRAL, &kept, &["scan_layers=false"]].concat());
}

#[test]
fn bounded_numbers_of_tokens() {
    check(&[EXPERTS, MIXTRAL, WITH_CAPACITY].concat());
}

#[test]
fn attention_to_chosen_chunks() {
    check(&[EXPERTS, CHOSEN_CHUNKS].concat());
}

#[test]
fn one_expert_that_scales_its_input() {
    check(&[EXPERTS, ENVY].concat());
}

#[test]
fn gated_delta_and_gated_attention() {
    check(&[EXPERTS, QWEN3_NEXT].concat());
}

#[test]
fn compressed_attention_and_choices_by_token() {
    check(&[EXPERTS, DEEPSEEK4].concat());
}

#[test]
fn further_tokens() {
    check(&[LATENT_MIXTURE, EXPERTS, DEEPSEEK3, &["mtp_num_layers=2"]].concat());
}

/// The streams begin equal, so that the gradients of the weights that mix them cancel to 1e-8 of their summands, and
/// those of the first layer of mHC-lite, whose mixing keeps equal streams, are 0.
#[test]
fn residual_streams() {
    check_in_f64(&[LATENT_MIXTURE, EXPERTS, DEEPSEEK3, STREAMS].concat(), 1e-5);
    check_in_f64(&[LATENT_MIXTURE, EXPERTS, DEEPSEEK3, STREAMS_LITE].concat(), 1e-5);
}

#[test]
fn experts_beside_an_mlp() {
    check_exactly(&[EXPERTS, GEMMA4].concat());
}

/// Devices gather the tokens, choices and weights of those that hold other experts, and scatter sums: in the forward
/// pass of outputs, in the backward pass of the gradients of tokens and weights.
#[test]
fn devices_exchange_each_token_once_in_each_direction() {
    const WIDTH: usize = 32;
    const CHOICES: usize = 2;
    const LAYERS: usize = 2;
    let model = [LATENT_MIXTURE, EXPERTS, DEEPSEEK3, &["scan_layers=false", "remat_policy=none"]].concat();
    // The devices along `expert`, and the groups of them, which have different tokens.
    for (mesh, shards, groups) in
        [(EXPERT, 8, 1), (WITH_FSDP, 4, 2), (WITH_TENSOR, 2, 2), (WITH_CONTEXT, 2, 4)]
    {
        let trained = train(&model, mesh, NUM_DEVICES);
        let sum = |kind: &str| -> usize {
            let all = exchanges(&trained).into_iter();
            // Per-device code repeats the scope in which it runs. The router is outside.
            let is_inside = |source: &str| source.matches("/experts").count() == 2;
            let own = all.filter(|(own, sent, _, source)| {
                *own == kind && *sent == Sent::Activations && is_inside(source)
            });
            own.map(|(_, _, bytes, _)| bytes).sum()
        };
        let tokens = NUM_ROWS * LENGTH / groups;
        let (wide, narrow) = (4 * tokens * WIDTH, 4 * tokens * CHOICES);
        assert_eq!(sum("all-gather"), LAYERS * (2 * wide + 2 * narrow), "{mesh:?}: {:#?}", trained.exchanges);
        // A reduce-scatter leaves each device its share.
        assert_eq!(sum("reduce-scatter") * shards, LAYERS * (2 * wide + narrow), "{mesh:?}");
    }
}
