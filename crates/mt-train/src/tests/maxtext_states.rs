//! Runs that MaxText began: states that Orbax wrote in MaxText's layout, continued, and compared with plain JAX and optax.
//! `tests/goldens/maxtext_states.py` generates the states and the golden values.

use std::path::Path;

use mt_checkpoint::{Checkpoint, CheckpointManager, ManagerOptions, RunLock, SaveRequest, StoredValue};
use mt_runtime::testing::cpu;
use mt_testing::{Golden, assert_close};

use super::{
    optimizer_space::{ROWS, SHARED, stored_batch},
    training::{Setup, compile},
};
use crate::{
    batch::to_devices,
    measured::Measured,
    metrics::names::LOSS,
    state::{TrainState, steps_done},
};

/// These constants match the generator's.
const BEFORE: u64 = 3;
const AFTER: u64 = 5;
const STEPS: &str = "steps=8";
const EXPERTS: &[&str] =
    &["num_experts=4", "num_experts_per_tok=2", "base_moe_mlp_dim=16", "load_balance_loss_weight=0"];
const CHOOSING: &str = ".DeepSeekMoeBlock_0.MoeBlock_0.gate.bias";
const GATED_BY_GELU: &str = "mlp_activations=['gelu','linear']";

/// Saves a state as a run does.
fn saved(directory: &Path, state: &TrainState, setup: &Setup) -> Checkpoint {
    let (entries, extra_items) = state.entries(&setup.layout()).unwrap();
    let lock = RunLock::acquire(directory).unwrap();
    let mut manager = CheckpointManager::open(directory, &lock, ManagerOptions::default()).unwrap();
    let step = BEFORE + AFTER - 1;
    manager.save(step, SaveRequest { entries, extra_items, ..SaveRequest::default() }).unwrap();
    manager.wait_until_finished().unwrap();
    Checkpoint::open(directory, step).unwrap()
}

#[track_caller]
fn check(case: &str, family: &[&str]) {
    let scanned = format!("scan_layers={}", case.ends_with("_scanned"));
    let tied = format!("logits_via_embedding={}", case.contains("_tied_"));
    let keys = [SHARED, family, &[STEPS, &scanned, &tied]].concat();
    let (setup, golden) =
        (Setup::new(&keys, 1), Golden::open(env!("CARGO_MANIFEST_DIR"), "maxtext_states.safetensors"));
    let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/maxtext_states");
    let before = Checkpoint::open_path(&goldens.join(case)).unwrap();
    assert_eq!(steps_done(&before).unwrap(), BEFORE);

    let programs = setup.programs();
    let Measured { program, names } = programs.train_step(ROWS).unwrap();
    let (step, layout, runtime) = (compile(&program), &*programs.layout, cpu(1));
    let mut state = TrainState::load(runtime, &setup.placement, layout, &before).unwrap();
    let (_, of_batch) = step.inputs().split_at(layout.entries.len());
    let declared = programs.loss.objective.arrays(ROWS);
    let batch = to_devices(runtime, &declared, of_batch, &stored_batch(&golden), programs.order).unwrap();
    let losses = golden.numbers(&format!("{case}.losses"));
    let loss = names.iter().position(|name| *name == LOSS).unwrap();
    for (index, expected) in losses.iter().enumerate() {
        let (next, rest) = state.step(&step, layout, batch.iter()).unwrap();
        let found = rest[0].to_host().unwrap().to_f64()[loss];
        assert_close(&format!("{case}, loss of step {index}"), &[found][..], &[*expected][..], 1e-5);
        state = next;
    }

    // A run then saves the names that MaxText would have saved, with the same changes of their numbers.
    let directory = tempfile::tempdir().unwrap();
    let after = saved(directory.path(), &state, &setup);
    assert_eq!(steps_done(&after).unwrap(), BEFORE + AFTER);
    let names = |checkpoint: &Checkpoint| -> Vec<String> {
        let arrays =
            checkpoint.entries().iter().filter(|entry| matches!(entry.value, StoredValue::Array { .. }));
        let mut names: Vec<String> = arrays.map(|entry| entry.name.clone()).collect();
        // MaxText decays the biases that only choose experts and keeps moments of them, which are zero; here they are
        // no parameters of the optimizer.
        names.retain(|name| !name.ends_with(CHOOSING));
        names.sort();
        names
    };
    assert_eq!(names(&after), names(&before), "{case}");
    for name in names(&before) {
        let stored = [
            ("params.params.", "params"),
            ("opt_state.0.mu.params.", "mu"),
            ("opt_state.0.nu.params.", "nu"),
        ];
        let found = stored.iter().find_map(|(start, kind)| Some((*kind, name.strip_prefix(start)?)));
        let Some((kind, path)) = found else {
            assert_eq!(after.read_all(&name).unwrap().to_f64(), [(BEFORE + AFTER) as f64], "{case}, {name}");
            continue;
        };
        let [first, last] = [&before, &after].map(|checkpoint| checkpoint.read_all(&name).unwrap().to_f64());
        let expected = golden.numbers(&format!("{case}.{kind}.{path}"));
        let change = |last: &[f64]| -> Vec<f64> {
            last.iter().zip(&first).map(|(last, first)| last - first).collect()
        };
        assert_close(&format!("{case}, {name}"), &change(&last), &change(&expected), 1e-3);
    }
}

#[test]
fn llama2_of_maxtext_goes_on() {
    check("llama2_tied_scanned", &["decoder_block=llama2"]);
    check("llama2_untied_unscanned", &["decoder_block=llama2"]);
}

#[test]
fn gemma2_of_maxtext_goes_on() {
    let family = [
        "decoder_block=gemma2",
        "base_num_decoder_layers=1",
        "sliding_window_size=3",
        "attn_logits_soft_cap=2.5",
        "query_pre_attn_scalar=10",
        GATED_BY_GELU,
    ];
    check("gemma2_tied_scanned", &family);
    check("gemma2_untied_unscanned", &family);
}

#[test]
fn gemma3_of_maxtext_goes_on() {
    let family = [
        "decoder_block=gemma3",
        "attention_pattern=local,global",
        "sliding_window_size=3",
        "use_qk_norm=true",
        "query_pre_attn_scalar=5",
        "rope_max_timescale=1000000",
        "rope_linear_scaling_factor=8",
        "local_rope_max_timescale=10000",
        GATED_BY_GELU,
    ];
    check("gemma3_tied_scanned", &family);
    check("gemma3_untied_unscanned", &family);
}

#[test]
fn mixtral_of_maxtext_goes_on() {
    let family = [&["decoder_block=mixtral", "rope_max_timescale=1000000"], EXPERTS].concat();
    check("mixtral_untied_scanned", &family);
    check("mixtral_untied_unscanned", &family);
}

#[test]
fn gpt_oss_of_maxtext_goes_on() {
    let family = [
        "decoder_block=gpt_oss",
        "sliding_window_size=3",
        "attention_bias=true",
        "attention_sink=true",
        "rope_type=default",
        "rope_max_timescale=150000",
        "mlp_activations=['sigmoid','linear']",
        "mlp_activations_limit=7.0",
        "routed_bias=true",
        "mlp_bias=true",
        "inhomogeneous_layer_cycle_interval=2",
    ];
    let family = [&family[..], EXPERTS].concat();
    check("gpt_oss_untied_scanned", &family);
    check("gpt_oss_untied_unscanned", &family);
}

#[test]
fn deepseek_of_maxtext_goes_on() {
    let family = [
        "decoder_block=deepseek",
        "base_num_kv_heads=2",
        "first_num_dense_layers=1",
        "shared_experts=1",
        "routed_scaling_factor=2.5",
        "routed_score_func=sigmoid",
        "routed_bias=true",
        "attention_type=mla",
        "q_lora_rank=8",
        "kv_lora_rank=7",
        "qk_nope_head_dim=4",
        "qk_rope_head_dim=2",
        "v_head_dim=5",
        "rope_type=default",
        "rope_max_timescale=10000",
    ];
    let family = [&family[..], EXPERTS].concat();
    check("deepseek_untied_scanned", &family);
    check("deepseek_untied_unscanned", &family);
}
