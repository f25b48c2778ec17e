//! A checkpoint of any mesh, restored on any other, is the same state to the bit.

use mt_checkpoint::{Checkpoint, CheckpointManager, ManagerOptions, RunLock, SaveRequest};
use mt_models::load_parameters;
use mt_runtime::{Array, testing::cpu};
use mt_shape::{DType, HostArray};

use super::training::{Setup, numbers};
use crate::state::{StateLayout, TrainState};

/// Keys of a placement, and how many devices it has.
type Mesh = (&'static [&'static str], usize);

const ONE: Mesh = (&[], 1);
const FSDP: Mesh = (&["ici_fsdp_parallelism=8"], 8);
const FSDP_AND_TENSOR: Mesh = (&["ici_fsdp_parallelism=4", "ici_tensor_parallelism=2"], 8);
const FSDP_ON_FOUR: Mesh = (&["ici_fsdp_parallelism=4"], 4);
const DATA_WITH_SPLIT_STATE: Mesh =
    (&["ici_data_parallelism=8", "ici_fsdp_parallelism=1", "shard_optimizer_over_data=true"], 8);
const DATA: Mesh = (&["ici_data_parallelism=8", "ici_fsdp_parallelism=1"], 8);
/// Devices that are not in their own order.
const OVER_SLICES: Mesh = (
    &[
        "num_cpu_slices=2",
        "ici_data_parallelism=4",
        "ici_fsdp_parallelism=1",
        "dcn_data_parallelism=1",
        "dcn_fsdp_parallelism=2",
    ],
    8,
);
const AUTOREGRESSIVE: Mesh = (&["ici_fsdp_parallelism=4", "ici_autoregressive_parallelism=2"], 8);

fn setup(model: &[&str], (keys, num_devices): Mesh) -> (Setup, StateLayout) {
    let setup = Setup::new(&[model, keys].concat(), num_devices);
    let layout = setup.layout();
    (setup, layout)
}

/// Numbers without a pattern for every array of a state.
fn values(layout: &StateLayout) -> Vec<HostArray> {
    let value = |(index, entry): (usize, &crate::state::StateEntry)| {
        let dims = &entry.array.dims;
        let numbers = numbers(index as u64 + 1, dims.iter().product(), 1 << 20);
        match entry.array.dtype {
            DType::F32 => {
                let numbers: Vec<f32> = numbers.iter().map(|number| *number as f32 / 12_347.0).collect();
                HostArray::from_slice(DType::F32, dims, &numbers).unwrap()
            }
            _ => HostArray::from_slice(DType::I32, dims, &numbers).unwrap(),
        }
    };
    layout.entries.iter().enumerate().map(value).collect()
}

#[track_caller]
fn check(model: &[&str], from: Mesh, to: &[Mesh]) {
    let directory = tempfile::tempdir().unwrap();
    let (setup, layout) = setup(model, from);
    let values = values(&layout);
    let place = |(entry, value): (&crate::state::StateEntry, &HostArray)| {
        Array::from_host(cpu(from.1), value, &entry.array.sharding(&setup.placement)).unwrap()
    };
    let arrays = layout.entries.iter().zip(&values).map(place).collect();
    let (state, _) = TrainState::from_outputs(arrays, &layout);
    let (entries, extra_items) = state.entries(&layout).unwrap();
    let lock = RunLock::acquire(directory.path()).unwrap();
    let mut manager = CheckpointManager::open(directory.path(), &lock, ManagerOptions::default()).unwrap();
    manager.save(3, SaveRequest { entries, extra_items, ..SaveRequest::default() }).unwrap();
    manager.wait_until_finished().unwrap();
    let checkpoint = Checkpoint::open(directory.path(), 3).unwrap();
    for mesh in to {
        let (setup, layout) = self::setup(model, *mesh);
        let runtime = cpu(mesh.1);
        let restored = TrainState::load(runtime, &setup.placement, &layout, &checkpoint).unwrap();
        for ((entry, value), array) in layout.entries.iter().zip(&values).zip(&restored.arrays) {
            let name = &entry.name;
            assert_eq!(array.to_host().unwrap().bytes(), value.bytes(), "`{name}` of {from:?} on {mesh:?}");
            assert_eq!(*array.sharding(), entry.array.sharding(&setup.placement), "`{name}` on {mesh:?}");
        }
        let parameters = load_parameters(runtime, &setup.placement, &*setup.model, &checkpoint).unwrap();
        for (array, value) in parameters.iter().zip(&values) {
            assert_eq!(array.to_host().unwrap().bytes(), value.bytes(), "{from:?} on {mesh:?}");
        }
    }
}

#[test]
fn a_state_is_the_same_on_any_mesh() {
    for scan in ["scan_layers=true", "scan_layers=false"] {
        check(&[scan], ONE, &[FSDP, AUTOREGRESSIVE]);
        check(&[scan], FSDP, &[ONE, FSDP_AND_TENSOR, OVER_SLICES]);
        check(&[scan], FSDP_AND_TENSOR, &[FSDP_ON_FOUR, AUTOREGRESSIVE]);
        check(&[scan], DATA_WITH_SPLIT_STATE, &[DATA, FSDP_ON_FOUR]);
        check(&[scan], OVER_SLICES, &[ONE, DATA_WITH_SPLIT_STATE]);
    }
}

#[test]
fn so_is_one_that_checkpoints_hold_in_another_form() {
    let folded = &["decoder_block=gemma", "head_dim=24", "logits_via_embedding=true"];
    check(folded, FSDP_AND_TENSOR, &[ONE, FSDP]);
    check(folded, DATA_WITH_SPLIT_STATE, &[FSDP_AND_TENSOR]);
}
