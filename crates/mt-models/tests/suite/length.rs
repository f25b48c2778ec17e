//! Long sequences need memory that grows linearly with the length, not quadratically.

use mt_runtime::{CompileSettings, testing::cpu};

use crate::harness::{Batch, gradient_program, gradients, model, parameters};

const ARGUMENTS: &[&str] = &[
    "base_emb_dim=32",
    "base_num_query_heads=2",
    "base_num_kv_heads=1",
    "head_dim=16",
    "base_mlp_dim=64",
    "base_num_decoder_layers=2",
    "vocab_size=64",
    "remat_policy=full",
];

#[test]
fn memory_grows_linearly() {
    let model = model(ARGUMENTS);
    let bytes = |length: usize| {
        let program = gradient_program(&*model, 1, length);
        let executable = cpu(1).compile(&program, &CompileSettings::default()).unwrap();
        executable.memory().unwrap().temporaries as f64
    };
    let sizes = [2048, 4096, 8192].map(bytes);
    for pair in sizes.windows(2) {
        assert!(pair[1] / pair[0] <= 2.3, "temporaries grow from {} to {}", pair[0], pair[1]);
    }
    // A single matrix of attention logits would exceed this.
    assert!(sizes[2] < 4.0 * 8192.0 * 8192.0, "{sizes:?}");
}

#[test]
fn a_step_at_length_8192_has_finite_gradients() {
    let model = model(ARGUMENTS);
    let results = gradients(&*model, &parameters(&*model), &Batch::packed(&[&[5000, 3192]], 8192, 64));
    assert!(results.loss.is_finite());
    for ((path, _), gradient) in model.parameters().iter().zip(&results.gradients) {
        let values = gradient.to_f64();
        assert!(values.iter().all(|value| value.is_finite()), "{path}");
        assert!(values.iter().any(|value| *value != 0.0), "{path}");
    }
}
