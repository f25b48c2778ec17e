//! Steps in the form in which MaxText stores weights, compared with JAX and optax. `tests/goldens/optimizer_space.py`
//! generates the golden values.

use std::sync::Arc;

use mt_data::{
    Batch, NamedArray,
    arrays::{INPUTS, INPUTS_POSITION, INPUTS_SEGMENTATION, TARGETS, TARGETS_SEGMENTATION},
};
use mt_models::{Affine, StateArray};
use mt_optim::StepForm;
use mt_runtime::{Array, testing::cpu};
use mt_shape::{DType, HostArray};
use mt_testing::{Golden, assert_close, norm};

use super::training::{Setup, compile};
use crate::{
    batch::to_devices,
    measured::Measured,
    metrics::names::{GRADIENT_NORM, LOSS, PARAMETER_NORM, RAW_GRADIENT_NORM},
    state::{StateEntry, StateLayout, TrainState},
};

/// These constants match the generator's.
pub(super) const ROWS: usize = 4;
const STEPS: usize = 5;
const CLIP: f64 = 0.7;
/// The model, the schedule and the optimizer.
pub(super) const SHARED: &[&str] = &[
    "vocab_size=24",
    "base_emb_dim=12",
    "base_num_query_heads=2",
    "base_num_kv_heads=1",
    "head_dim=6",
    "base_mlp_dim=16",
    "max_target_length=10",
    "per_device_batch_size=4",
    "normalize_embedding_logits=true",
    "normalization_layer_epsilon=1e-6",
    "learning_rate=0.02",
    "learning_rate_schedule_steps=8",
    "warmup_steps_fraction=0.25",
    "gradient_clipping_threshold=0.7",
    "adam_eps=1e-3",
    "adam_eps_root=1e-6",
    "adam_weight_decay=0.3",
];
const KEYS: &[&str] = &["optimizer_space=maxtext", "steps=5", "muon_weight_decay=0.2"];

/// The reference values of all cases.
struct References(Golden);

impl References {
    fn open() -> Self {
        Self(Golden::open(env!("CARGO_MANIFEST_DIR"), "optimizer_space.safetensors"))
    }

    fn numbers(&self, name: &str) -> Vec<f64> {
        self.0.numbers(name)
    }

    /// The golden values of an array of the state, one vector per layer that the array holds.
    fn of(&self, prefix: &str, array: &StateArray) -> Vec<Vec<f64>> {
        let of_layer = |layer: Option<usize>| match layer {
            None => self.numbers(&format!("{prefix}.{}", array.role)),
            Some(layer) => {
                let all = self.0.array(&format!("{prefix}.layers.{}", array.role));
                let size = all.to_f64().len() / all.dims()[0];
                all.to_f64()[layer * size..][..size].to_vec()
            }
        };
        array.layers().into_iter().map(of_layer).collect()
    }
}

/// The batch of golden values.
pub(super) fn stored_batch(golden: &Golden) -> Batch {
    let array = |(name, of): (&'static str, &str)| NamedArray {
        name,
        values: Arc::new(golden.array(&format!("batch.{of}"))),
    };
    let arrays = [
        (INPUTS, "inputs"),
        (INPUTS_POSITION, "positions"),
        (INPUTS_SEGMENTATION, "segmentation"),
        (TARGETS, "targets"),
        (TARGETS_SEGMENTATION, "segmentation"),
    ];
    Batch { rows: ROWS, arrays: arrays.map(array).into(), target_bytes: 0 }
}

/// The initial state: weights from the golden, and zeros.
fn first(golden: &References, model: &str, layout: &StateLayout) -> Vec<HostArray> {
    let value = |(index, entry): (usize, &StateEntry)| {
        let array = &entry.array;
        if !layout.parameters().contains(&index) {
            return HostArray::zeros(array.dtype, &array.dims);
        }
        for form in golden.of(&format!("{model}.form"), array) {
            let Affine { scale, offset } = array.affine;
            assert_eq!([scale as f32, offset as f32], [form[0] as f32, form[1] as f32], "{}", entry.name);
        }
        let stored = golden.of(&format!("{model}.start"), array).concat();
        let published = stored.iter().map(|stored| (stored - array.affine.offset) / array.affine.scale);
        let published: Vec<f32> = published.map(|number| number as f32).collect();
        HostArray::from_slice(DType::F32, &array.dims, &published).unwrap()
    };
    layout.entries.iter().enumerate().map(value).collect()
}

#[track_caller]
fn check(family: &[&str], tied: bool, optimizer: &str, way: &[&str]) {
    let name = family[0].trim_start_matches("decoder_block=");
    let model = format!("{name}_{}", if tied { "tied" } else { "untied" });
    let case = format!("{model}.{optimizer}");
    let own = [format!("logits_via_embedding={tied}"), format!("opt_type={optimizer}")];
    let keys: Vec<&str> =
        [SHARED, KEYS, family, way].concat().into_iter().chain(own.iter().map(String::as_str)).collect();
    let (setup, golden) = (Setup::new(&keys, 1), References::open());
    let programs = setup.programs();
    let Measured { program, names } = programs.train_step(ROWS).unwrap();
    let (step, layout, runtime) = (compile(&program), &*programs.layout, cpu(1));
    let first = first(&golden, &model, layout);
    let inputs = step.inputs();
    let (of_state, of_batch) = inputs.split_at(layout.entries.len());
    let arrays = of_state.iter().zip(&first);
    let arrays = arrays.map(|(input, value)| Array::from_host(runtime, value, &input.sharding).unwrap());
    let mut state = TrainState::of(arrays.collect(), layout);
    let declared = programs.loss.objective.arrays(ROWS);
    let batch = to_devices(runtime, &declared, of_batch, &stored_batch(&golden.0), programs.order).unwrap();
    let mut reported: Vec<Vec<f64>> = vec![Vec::new(); names.len()];
    for _ in 0..STEPS {
        let (next, rest) = state.step(&step, layout, batch.iter()).unwrap();
        let values = rest[0].to_host().unwrap().to_f64();
        reported.iter_mut().zip(values).for_each(|(reported, value)| reported.push(value));
        state = next;
    }

    let reported = |wanted: &str| &reported[names.iter().position(|name| *name == wanted).unwrap()];
    let what = |of: &str| format!("{case} {way:?}, {of}");
    let norms = golden.numbers(&format!("{case}.gradient_norms"));
    let clipped: Vec<f64> = norms.iter().map(|norm| norm.min(CLIP)).collect();
    assert!(norms.iter().any(|norm| *norm > CLIP), "{case}: nothing is clipped: {norms:?}");
    for (name, expected, tolerance) in [
        (LOSS, golden.numbers(&format!("{case}.losses")), 1e-5),
        (RAW_GRADIENT_NORM, norms, 1e-4),
        (GRADIENT_NORM, clipped, 1e-4),
        (PARAMETER_NORM, golden.numbers(&format!("{case}.parameter_norms")), 1e-5),
    ] {
        for (step, (actual, expected)) in reported(name).iter().zip(expected).enumerate() {
            assert_close(
                &what(&format!("{name} of step {step}")),
                &[*actual][..],
                &[expected][..],
                tolerance,
            );
        }
    }
    for (index, entry) in layout.entries.iter().enumerate().take(layout.slots().end) {
        let Affine { scale, offset: _ } = entry.array.affine;
        let last = state.arrays[index].to_host().unwrap().to_f64();
        let changes = last.iter().zip(first[index].to_f64());
        let stored: Vec<f64> = changes.map(|(last, first)| (last - first) * scale).collect();
        if layout.parameters().contains(&index) {
            let expected = golden.of(&format!("{case}.update"), &entry.array).concat();
            assert_close(&what(&entry.name), &stored, &expected, 1e-3);
            continue;
        }
        let (slot, _) = entry.name.split_once('.').unwrap();
        let expected = golden.of(&format!("{case}.{slot}"), &entry.array);
        for (actual, expected) in stored.chunks(stored.len() / expected.len()).zip(&expected) {
            let (actual, expected) = (norm(actual), expected[0]);
            // Biases of keys have no effect, so their gradients consist of rounding errors.
            let error = (actual - expected).abs();
            assert!(error <= 1e-4 * expected + 1e-7, "{}: {actual}, not {expected}", what(&entry.name));
        }
    }
}

/// Checks a family with and without tied embeddings, for both optimizers, scanned and unrolled, with kernels and
/// without.
#[track_caller]
fn check_family(family: &[&str]) {
    let scanned = ["scan_layers=true", "cpu_kernels=true"];
    let unrolled = ["scan_layers=false", "cpu_kernels=false"];
    for tied in [true, false] {
        check(family, tied, "adamw", &scanned);
        check(family, tied, "adamw", &unrolled);
        check(family, tied, "muon", &unrolled);
    }
    check(family, true, "muon", &scanned);
}

const GATED_BY_GELU: &str = "mlp_activations=['gelu','linear']";

#[test]
fn steps_of_llama2_are_those_of_maxtext() {
    check_family(&["decoder_block=llama2"]);
}

#[test]
fn steps_of_gemma2_are_those_of_maxtext() {
    check_family(&[
        "decoder_block=gemma2",
        "base_num_decoder_layers=1",
        "sliding_window_size=3",
        "attn_logits_soft_cap=2.5",
        "query_pre_attn_scalar=10",
        GATED_BY_GELU,
    ]);
}

#[test]
fn steps_of_gemma3_are_those_of_maxtext() {
    check_family(&[
        "decoder_block=gemma3",
        "attention_pattern=local,global",
        "sliding_window_size=3",
        "use_qk_norm=true",
        "query_pre_attn_scalar=5",
        "rope_max_timescale=1000000",
        "rope_linear_scaling_factor=8",
        "local_rope_max_timescale=10000",
        GATED_BY_GELU,
    ]);
}

#[test]
fn steps_of_gpt3_are_those_of_maxtext() {
    check_family(&[
        "decoder_block=gpt3",
        "base_num_kv_heads=2",
        "trainable_position_size=10",
        "mlp_activations=['gelu']",
        "normalize_embedding_logits=false",
    ]);
}

/// The printed program of a step.
fn text(keys: &[&str]) -> String {
    Setup::new(keys, 1).programs().train_step(ROWS).unwrap().program.text
}

#[test]
fn forms_are_those_of_storage_only_in_the_space_of_maxtext() {
    let keys = ["decoder_block=gemma2", "base_num_decoder_layers=1", "sliding_window_size=3", GATED_BY_GELU];
    let forms = |space: &'static str| -> Vec<StepForm> {
        let setup = Setup::new(&[&keys[..], &[space]].concat(), 1);
        setup.programs().update.parameters.iter().map(|parameter| parameter.form).collect()
    };
    let model = Setup::new(&keys, 1).model;
    let stored: Vec<StepForm> = model
        .storage()
        .iter()
        .map(|stored| StepForm { scale: stored.scale, offset: stored.offset })
        .collect();
    assert!(stored.iter().any(|form| form.scale != 1.0) && stored.iter().any(|form| form.offset != 0.0));
    assert_eq!(forms("optimizer_space=maxtext"), stored);
    assert_eq!(forms("optimizer_space=auto"), stored);
    assert!(forms("optimizer_space=published").iter().all(|form| *form == StepForm::VALUE));
}

#[test]
fn programs_are_the_same_where_nothing_is_folded() {
    for optimizer in ["adamw", "adam_pax", "sgd", "muon", "adafactor"] {
        let optimizer = format!("opt_type={optimizer}");
        for kernels in ["cpu_kernels=true", "cpu_kernels=false"] {
            let text = |family: &str, space: &str| text(&[family, &optimizer, kernels, space]);
            let [plain, folded] = ["decoder_block=qwen3", "decoder_block=llama2"].map(|family| {
                text(family, "optimizer_space=maxtext") == text(family, "optimizer_space=published")
            });
            assert!(plain && !folded, "{optimizer} {kernels}");
        }
    }
}
