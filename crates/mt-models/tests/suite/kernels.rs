//! Models with CPU kernels compared with models without them.

use mt_ir::{CpuKernels, Target};

use crate::harness::{Batch, by_name, gradient_program_for, model, parameters, relative_error, run};

const KERNELS: Target = Target::Cpu(CpuKernels { f32: true, bf16: true, ..CpuKernels::NONE });
const ROWS: usize = 2;
const LENGTH: usize = 72;

#[track_caller]
fn check(arguments: &[&str], tolerance: f64) {
    check_on(KERNELS, &[&["attention=flash"], arguments].concat(), tolerance);
    let invariant = [&["batch_invariant=true"], arguments].concat();
    check_on(Target::Cpu(CpuKernels::INVARIANT), &invariant, tolerance);
}

/// Checks programs of a target with kernels.
#[track_caller]
fn check_on(target: Target, arguments: &[&str], tolerance: f64) {
    let model = &*model(&[&["vocab_size=256"], arguments].concat());
    let batch = Batch::packed(&[&[30, 42], &[72]], LENGTH, 256);
    let inputs = [parameters(model).as_slice(), &batch.arrays].concat();
    let [(loss, gradients), (wanted_loss, wanted)] = [target, Target::CPU].map(|target| {
        let program = gradient_program_for(model, target, ROWS, LENGTH);
        let num_calls = program.text.matches("maxtext.attention_backward").count();
        assert_eq!(num_calls != 0, target != Target::CPU, "{arguments:?}");
        let mut outputs = run(&program, &inputs);
        let gradients = outputs.split_off(2);
        (outputs[0].to_f64()[0], by_name(model, &gradients))
    });
    let error = (loss - wanted_loss).abs() / wanted_loss;
    assert!(error <= tolerance, "{arguments:?}: the loss differs by {error:e}");
    for (name, gradient) in &gradients {
        let error = relative_error(gradient, &wanted[name]);
        assert!(error <= tolerance, "{arguments:?}: the gradient of {name} differs by {error:e}");
    }
}

#[test]
fn gradients_are_those_without_kernels() {
    check(&[], 1e-5);
    check(&["scan_layers=false", "remat_policy=full"], 1e-5);
    check(&["remat_policy=minimal"], 1e-5);
    check(&["decoder_block=gemma2", "sliding_window_size=20", "attn_logits_soft_cap=3"], 1e-5);
    check(&["decoder_block=gemma3", "sliding_window_size=20"], 1e-5);
    // The sizes of groups are slices of arrays that the forward scan saved.
    let experts = ["decoder_block=mixtral", "num_experts=4", "num_experts_per_tok=2", "base_moe_mlp_dim=40"];
    check(&[&experts[..], &["remat_policy=none"]].concat(), 1e-5);
    check(&[&experts[..], &["remat_policy=full"]].concat(), 1e-5);
}
