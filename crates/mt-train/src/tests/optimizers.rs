//! Each optimizer takes the same steps on 8 devices as on one, and in scanned layers as in unrolled ones. Its state has
//! the checkpoint keys that Orbax gives MaxText's state.

use std::{collections::BTreeMap, path::Path};

use mt_checkpoint::KeySegment;
use mt_shape::DType;

use super::training::{NUM_DEVICES, Setup, Trained, on_one_device, train};

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
    // The matrices of the MLPs and the embedding are wide enough to be factored.
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

/// A case of the golden that `tests/goldens/generate.py` writes.
#[derive(serde::Deserialize)]
struct Case {
    opt_type: String,
    adamw_mask: Vec<String>,
    trainable_parameters_mask: Vec<String>,
    skip_step_on_spikes: bool,
    /// Types and shapes of arrays by key, and `None` for empty nodes.
    tree: BTreeMap<String, String>,
}

#[test]
fn their_states_lie_in_checkpoints_where_those_of_maxtext_do() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/optimizer_trees.json");
    let cases: Vec<Case> = serde_json::from_str(&std::fs::read_to_string(golden).unwrap()).unwrap();
    assert!(!cases.is_empty());
    for case in cases {
        let Case { opt_type, adamw_mask, trainable_parameters_mask, skip_step_on_spikes, tree } = case;
        let keys = [
            format!("opt_type={opt_type}"),
            format!("adamw_mask={adamw_mask:?}"),
            format!("trainable_parameters_mask={trainable_parameters_mask:?}"),
            format!("skip_step_on_spikes={skip_step_on_spikes}"),
            "skip_step_interval=4".to_owned(),
            "base_emb_dim=128".to_owned(),
            "base_mlp_dim=136".to_owned(),
        ];
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        let described = Setup::new(&keys, 1).layout().described();
        let name = |key: &[KeySegment]| {
            let text = |segment: &KeySegment| match segment {
                KeySegment::Key(key) => key.clone(),
                KeySegment::Index(index) => format!("[{index}]"),
            };
            key.iter().map(text).collect::<Vec<_>>().join(".")
        };
        let ours: BTreeMap<String, String> = described
            .iter()
            .filter(|(key, _)| key[0] == "opt_state".into())
            .map(|(key, array)| {
                let described = array.as_ref().map_or("None".to_owned(), |(dtype, dims)| {
                    let dtype = match dtype {
                        DType::F32 => "float32",
                        DType::I32 => "int32",
                        DType::Bool => "bool",
                        _ => panic!("{dtype} in the state"),
                    };
                    format!("{dtype}{dims:?}")
                });
                (name(key), described)
            })
            .collect();
        assert_eq!(ours, tree, "{keys:?}");
    }
}
