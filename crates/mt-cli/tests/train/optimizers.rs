//! Every optimizer trains, and resumes from a checkpoint as if uninterrupted.

use std::collections::BTreeSet;

use crate::support::Sandbox;

/// Compares an uninterrupted run with a resumed one. Then checks the names of the optimizer's arrays, up to the names
/// of the model's parameters.
#[track_caller]
fn check(keys: &[&str], kept: &[&str]) {
    let sandbox = Sandbox::new();
    let all = |steps: &'static str| {
        let own = [steps, "eval_interval=-1", "learning_rate_schedule_steps=4", "learning_rate=0.01"];
        [&own[..], keys].concat()
    };
    sandbox.train("whole", &all("steps=4")).succeeded();
    sandbox.train("resumed", &all("steps=2")).succeeded();
    sandbox.train("resumed", &all("steps=4")).succeeded();
    sandbox.assert_same_run("whole", "resumed");
    let norm = |step: u64| sandbox.metrics("whole").training[&step]["learning/param_norm"].clone();
    assert_ne!(norm(0), norm(3), "{keys:?}: nothing is learned");

    let state = sandbox.state("whole", 3);
    let names = state.keys().filter_map(|path| Some(path.strip_prefix("items").ok()?.to_str()?.to_owned()));
    let found: BTreeSet<String> = names
        .filter(|name| name.starts_with("opt_state"))
        .map(|name| name.split_once(".params.").map_or(name.clone(), |(holder, _)| holder.to_owned()))
        .collect();
    assert!(found.iter().map(String::as_str).eq(kept.iter().copied()), "{keys:?}: {found:?}");
}

#[test]
fn adam() {
    let kept = ["opt_state.0.count", "opt_state.0.mu", "opt_state.0.nu", "opt_state.2.count"];
    check(&["mu_dtype=bfloat16", "adam_eps_root=1e-8", "adamw_mask=['.*norm.*','embed','no such']"], &kept);
    check(
        &["opt_type=adam_pax", "lr_schedule_type=wsd", "wsd_decay_steps_fraction=0.5"],
        &["opt_state.count", "opt_state.mu", "opt_state.nu"],
    );
}

#[test]
fn gradient_descent() {
    check(&["opt_type=sgd", "lr_schedule_type=constant"], &["opt_state.1.count"]);
}

#[test]
fn muon() {
    check(
        &["opt_type=muon", "muon_weight_decay=0.1", "lr_schedule_type=linear"],
        &[
            "opt_state.inner_states.adam.inner_state.0.count",
            "opt_state.inner_states.adam.inner_state.0.mu",
            "opt_state.inner_states.adam.inner_state.0.nu",
            "opt_state.inner_states.adam.inner_state.2.count",
            "opt_state.inner_states.muon.inner_state.0.count",
            "opt_state.inner_states.muon.inner_state.0.mu",
            "opt_state.inner_states.muon.inner_state.0.ns_coeffs",
            "opt_state.inner_states.muon.inner_state.3.count",
        ],
    );
}

#[test]
fn adafactor() {
    // The model is wide enough for some second moments to be factored.
    check(
        &["opt_type=adafactor", "base_emb_dim=128", "base_mlp_dim=132"],
        &[
            "opt_state.0.count",
            "opt_state.0.v",
            "opt_state.0.v_col",
            "opt_state.0.v_row",
            "opt_state.2.count",
        ],
    );
}

#[test]
fn parameters_that_are_not_trained_stay() {
    let sandbox = Sandbox::new();
    let keys = ["steps=2", "eval_interval=-1", "trainable_parameters_mask=['mlp/','norm']"];
    sandbox.train("run", &keys).succeeded();
    let read = |step: u64| sandbox.state("run", step);
    let (before, after) = (read(0), read(1));
    for (path, contents) in &before {
        let name = path.to_str().unwrap();
        if !name.starts_with("items/params.") || name.ends_with("json") {
            continue;
        }
        let is_trained = name.contains("mlp.") || name.contains("norm");
        assert_eq!(after[path] != *contents, is_trained, "{name}");
    }
    let kept = |name: &str| before.keys().any(|path| path.to_str().unwrap().contains(name));
    assert!(kept("opt_state.inner_states.trainable.inner_state.0.mu.params.decoder.decoder_norm"));
    assert!(!kept("opt_state.inner_states.trainable.inner_state.0.mu.params.token_embedder"));
}

#[test]
fn skipped_steps_change_nothing_but_counts() {
    // With so low a limit, any value above the mean is a spike.
    let keys = [
        "skip_step_on_spikes=true",
        "skip_step_interval=4",
        "skip_step_scaling_factor=0",
        "learning_rate=0.5",
    ];
    check(
        &keys,
        &[
            "opt_state.count",
            "opt_state.grad_norms",
            "opt_state.inner_state.0.count",
            "opt_state.inner_state.0.mu",
            "opt_state.inner_state.0.nu",
            "opt_state.inner_state.2.count",
            "opt_state.is_skipped",
            "opt_state.losses",
        ],
    );
    let sandbox = Sandbox::new();
    sandbox.train("run", &[&["steps=12", "eval_interval=-1"], &keys[..]].concat()).succeeded();
    let training = sandbox.metrics("run").training;
    let value = |step: u64, name: &str| training[&step][name].as_f64().unwrap();
    let skipped: Vec<u64> = (1..12).filter(|step| value(*step, "optim/step_skipped") == 1.0).collect();
    assert!(!skipped.is_empty() && skipped.len() < 11, "{skipped:?}");
    for step in 1..12 {
        let norms = [step, step - 1].map(|step| value(step, "learning/param_norm"));
        assert_eq!(norms[0] == norms[1], skipped.contains(&step), "step {step} of {skipped:?}");
    }
}
