//! The planned state of a run equals the arguments of its programs.

use mt_runtime::{MemoryNeed, Platform, format_bytes};
use mt_shape::DeviceAttributes;

use super::training::{NUM_DEVICES, NUM_ROWS, Setup};
use crate::{Devices, Intended, Needs, TrainPlan};

#[track_caller]
fn check(arguments: &[&str]) {
    let setup = Setup::new(arguments, NUM_DEVICES);
    let program = setup.programs().train_step(NUM_ROWS).unwrap().program;
    let intended = Intended::new(setup.settings).unwrap();
    let devices =
        Devices { platform: Platform::Cpu, number: NUM_DEVICES, attributes: DeviceAttributes::default() };
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

#[test]
fn what_helps_is_not_there_yet_and_for_what_takes_most() {
    let remedies = |arguments: &[&str], platform, state, available| {
        let setup = Setup::new(arguments, NUM_DEVICES);
        let intended = Intended::new(setup.settings).unwrap();
        let devices = Devices { platform, number: NUM_DEVICES, attributes: DeviceAttributes::default() };
        let plan = TrainPlan::on(intended, &devices).unwrap();
        plan.remedies(Needs { state, activations: 10, logits: 5 }, available).join("\n")
    };
    let check = |found: &str, there: &[&str], absent: &[&str]| {
        let places: Vec<_> = there.iter().map(|text| found.find(text)).collect();
        assert!(places.iter().all(Option::is_some) && places.is_sorted(), "{there:?} in {found}");
        assert!(absent.iter().all(|text| !found.contains(text)), "none of {absent:?} in {found}");
    };
    let copied = ["ici_data_parallelism=8", "ici_fsdp_parallelism=1", "remat_policy=minimal"];
    check(
        &remedies(&copied, Platform::Tpu, 20, None),
        &[
            "along `data`",
            "mu_dtype",
            "host_offload",
            "more devices",
            "remat_policy=full",
            "num_vocab_tiling",
        ],
        &[],
    );
    check(&remedies(&copied, Platform::Tpu, 20, Some(24)), &["along `data`"], &["remat_policy", "vocab"]);
    check(
        &remedies(&["num_vocab_tiling=2", "mu_dtype=bfloat16"], Platform::Cpu, 1, None),
        &["max_target_length"],
        &["along `data`", "more devices", "remat_policy", "num_vocab_tiling", "mu_dtype"],
    );
}

#[test]
fn the_default_policy_is_said_to_save_what_need_not_be_saved() {
    let advice = |arguments: &[&str], available| {
        let setup = Setup::new(arguments, NUM_DEVICES);
        let intended = Intended::new(setup.settings).unwrap();
        let devices =
            Devices { platform: Platform::Cpu, number: NUM_DEVICES, attributes: DeviceAttributes::default() };
        let plan = TrainPlan::on(intended, &devices).unwrap();
        let kept = plan.kept_bytes(&plan.settings().model.remat).device;
        (plan.less_remat(MemoryNeed { needed: 1 << 20, available, num_devices: NUM_DEVICES as u64 }), kept)
    };
    let (found, kept) = advice(&["dtype=float32"], Some(1 << 30));
    let found = found.unwrap();
    assert!(found.contains("remat_policy=minimal_with_context"), "{found}");
    let (none, kept_by_it) = advice(&["dtype=float32", "remat_policy=minimal_with_context"], Some(1 << 30));
    assert_eq!(none, None);
    assert!(
        found.contains(&format_bytes(NUM_DEVICES as u64 * (kept_by_it - kept))),
        "{found}: {kept}, {kept_by_it}"
    );
    // The memory is too small, unknown, or the user chose the policy.
    assert_eq!(advice(&["dtype=float32"], Some(1 << 20)).0, None);
    assert_eq!(advice(&["dtype=float32"], None).0, None);
    assert_eq!(advice(&["dtype=float32", "remat_policy=full"], Some(1 << 30)).0, None);
}
