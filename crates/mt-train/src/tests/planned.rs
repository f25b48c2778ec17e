//! What is said of a run's state before it begins is what its programs take.

use mt_runtime::Platform;

use super::training::{LENGTH, NUM_DEVICES, NUM_ROWS, Setup};
use crate::{Devices, Intended, TrainPlan};

#[track_caller]
fn check(arguments: &[&str]) {
    let setup = Setup::new(arguments, NUM_DEVICES);
    let program = setup.programs().train_step(NUM_ROWS, LENGTH).unwrap().program;
    let intended = Intended { settings: setup.settings, model: setup.model };
    let devices = Devices { platform: Platform::Cpu, number: NUM_DEVICES, slices: None };
    let planned = TrainPlan::on(intended, &devices).unwrap().state();
    assert!(program.inputs.len() > planned.len(), "a batch comes after the state");
    for (array, input) in planned.iter().zip(&program.inputs) {
        let known = (&array.name, &array.ty, &array.sharding.spec, array.memory);
        assert_eq!(known, (&input.name, &input.ty, &input.sharding.spec, input.memory), "{arguments:?}");
    }
    let whole: usize = planned.iter().map(|array| array.ty.byte_size()).sum();
    let held: usize = planned.iter().map(|array| array.bytes_on_device()).sum();
    assert!(held < whole, "{arguments:?}: {held} of {whole}");
}

#[test]
fn the_state_is_known_before_it_is_there() {
    check(&["ici_fsdp_parallelism=8"]);
    check(&["ici_fsdp_parallelism=4", "ici_tensor_parallelism=2", "scan_layers=false"]);
    check(&["ici_data_parallelism=8", "ici_fsdp_parallelism=1", "shard_optimizer_over_data=true"]);
    check(&["opt_type=muon", "skip_step_on_spikes=true"]);
}
