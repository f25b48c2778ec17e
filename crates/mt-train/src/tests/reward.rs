//! Losses of reward models and their gradients, compared with `tests/goldens/reward.py`.

use mt_shape::{DType, HostArray};
use mt_testing::Golden;

use super::{
    preference::{Outcome, arrays, compare, outcome},
    published::MODEL,
    training::Setup,
};
use crate::metrics::names;

const ROWS: usize = 6;
const LENGTH: usize = 13;

/// The keys of the objective.
const OBJECTIVE: &[&str] = &["use_reward=true"];

/// The stored names of losses on pairs, those of the parameters and margins, and the keys that select the losses.
const LOSSES: &[(&str, [&str; 2], &[&str])] = &[
    ("pairs", ["policy", "no_margins"], &[]),
    ("margin", ["policy", "margins"], &["margin_column=margin"]),
    ("centered", ["policy", "no_margins"], &["center_rewards_coefficient=0.3"]),
    ("ensemble", ["ensemble_policy", "margins"], &["num_reward_heads=3"]),
];

const STEPS: &[&str] = &["reward_type=process"];

/// The arrays of judged steps.
fn steps(golden: &Golden) -> Vec<HostArray> {
    let array = |values: Vec<i32>| HostArray::from_slice(DType::I32, &[ROWS, LENGTH], &values).unwrap();
    let stored = |name: &str| array(golden.array(name).to_f64().iter().map(|value| *value as i32).collect());
    let positions = array((0..ROWS * LENGTH).map(|index| (index % LENGTH) as i32).collect());
    vec![
        stored("chosen.inputs"),
        positions,
        stored("chosen.segments"),
        stored("steps.targets"),
        stored("steps.counted"),
    ]
}

/// Computes a loss and compares it, and its gradients, with the stored ones.
fn check(
    name: &str,
    trained: &str,
    keys: &[&str],
    golden: &Golden,
    batch: impl Fn() -> Vec<HostArray>,
) -> Outcome {
    let setup = Setup::new(&[MODEL, OBJECTIVE, keys].concat(), 1);
    let made = outcome(&setup, golden, trained, batch());
    compare(&format!("{name} with {keys:?}"), name, &*setup.model, &made, golden);
    made
}

#[test]
fn rewards_of_answers_equal_the_reference() {
    let golden = Golden::open(env!("CARGO_MANIFEST_DIR"), "reward.safetensors");
    for (name, [trained, margins], keys) in LOSSES {
        let batch = || [arrays(&golden, "rejected"), vec![golden.array(margins)]].concat();
        let made = check(name, trained, keys, &golden, batch);
        let reported = |metric: &str| {
            let found = made.metrics.iter().find(|(known, _)| *known == format!("learning/{metric}"));
            found.map(|(_, value)| *value)
        };
        let stored = |metric: &str| golden.array(&format!("metric.{metric}")).to_f64()[0];
        let is_close = |own: f64, expected: f64| (own - expected).abs() <= 1e-5 * expected.abs();
        match *name {
            "pairs" => {
                assert!(is_close(reported(names::REWARD_ACCURACIES).unwrap(), stored("accuracy")));
                assert!(is_close(reported(names::REWARD_MARGINS).unwrap(), stored("margin")));
                assert_eq!(reported(names::REWARD_DEVIATIONS), None);
            }
            "ensemble" => {
                assert!(is_close(reported(names::REWARD_DEVIATIONS).unwrap(), stored("deviation")));
            }
            _ => {}
        }
        for way in [&["gradient_accumulation_steps=3"][..], &["remat_policy=full"]] {
            check(name, trained, &[keys, way].concat(), &golden, batch);
        }
    }
}

#[test]
fn rewards_of_steps_equal_the_reference() {
    let golden = Golden::open(env!("CARGO_MANIFEST_DIR"), "reward.safetensors");
    for way in [&[][..], &["gradient_accumulation_steps=3"], &["remat_policy=full"]] {
        check("steps", "steps_policy", &[STEPS, way].concat(), &golden, || steps(&golden));
    }
}
