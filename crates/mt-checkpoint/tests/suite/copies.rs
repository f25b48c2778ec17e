//! Copies of checkpoints in other shards and formats, and means.

use std::sync::{Arc, atomic::Ordering};

use mt_checkpoint::{
    Checkpoint, CheckpointError, CopiedBytes, CopyPart, CopyShards, Entry, ManagerOptions, SaveRequest,
    average_request, copy_request,
};
use mt_shape::{DType, HostArray};

use crate::support::{Run, check_state, formats, synchronous};

#[test]
fn whole_copies_are_the_same_in_each_format_and_number_of_shards() {
    let run = Run::with_steps(&[3]);
    let original = Checkpoint::open(&run.checkpoints(), 3).unwrap();
    for format in formats() {
        for shards in [CopyShards::AsStored, CopyShards::Number(1), CopyShards::Number(6)] {
            let (copy, copied) = (Run::new(), CopiedBytes::default());
            let request = copy_request(&original, CopyPart::Whole, shards, &copied).unwrap();
            let mut manager = copy.manager(ManagerOptions { format, ..synchronous() });
            manager.save(3, request).unwrap();
            let made = Checkpoint::open(manager.directory(), 3).unwrap();
            made.verify().unwrap();
            check_state(&made, 3);
            assert_eq!(made.custom_metadata(), original.custom_metadata());
            assert_eq!(made.json_item_names().unwrap(), original.json_item_names().unwrap());
            assert!(copied.load(Ordering::Relaxed) > 0);
        }
    }
}

fn saved(values: &[(&str, &[f32])], step: u64) -> (Run, Checkpoint) {
    let run = Run::new();
    let entries = values.iter().map(|(name, values)| {
        let key = name.split('.').map(Into::into).collect();
        Entry::new(key, HostArray::from_slice(DType::F32, &[values.len()], values).unwrap())
    });
    let request = SaveRequest { entries: entries.collect(), ..SaveRequest::default() };
    run.manager(synchronous()).save(step, request).unwrap();
    let checkpoint = Checkpoint::open(&run.checkpoints(), step).unwrap();
    (run, checkpoint)
}

#[test]
fn parameters_are_copied_alone() {
    let state: [(&str, &[f32]); 3] =
        [("params.w", &[1.0, 2.0]), ("opt_state.mu.w", &[3.0]), ("step", &[1.0])];
    let (_run, checkpoint) = saved(&state, 1);
    let request =
        copy_request(&checkpoint, CopyPart::Parameters, CopyShards::AsStored, &CopiedBytes::default())
            .unwrap();
    assert_eq!(request.entries.len(), 1);
    let (_run, without) = saved(&state[1..], 1);
    let error =
        copy_request(&without, CopyPart::Parameters, CopyShards::AsStored, &Arc::default()).err().unwrap();
    assert!(error.is_user_error() && error.to_string().contains("below `params`"), "{error}");
}

#[test]
fn means_are_of_equal_trees() {
    let (_one, first) = saved(&[("params.a", &[1.0, 5.0]), ("params.b", &[0.0])], 1);
    let (_two, second) = saved(&[("params.a", &[3.0, -5.0]), ("params.b", &[1.0])], 2);
    let request = average_request(&[first, second], &[0.5, 0.5], &CopiedBytes::default()).unwrap();
    let run = Run::new();
    run.manager(synchronous()).save(2, request).unwrap();
    let mean = Checkpoint::open(&run.checkpoints(), 2).unwrap();
    assert_eq!(mean.read_all("params.a").unwrap().to_f64(), [2.0, 0.0]);
    assert_eq!(mean.read_all("params.b").unwrap().to_f64(), [0.5]);

    for other in [&[("params.a", &[1.0_f32][..])][..], &[("params.a", &[1.0, 5.0]), ("params.c", &[1.0])]] {
        let (_one, first) = saved(&[("params.a", &[1.0, 5.0])], 1);
        let (_two, second) = saved(other, 2);
        let error = average_request(&[first, second], &[0.5, 0.5], &Arc::default()).err().unwrap();
        assert!(matches!(error, CheckpointError::OtherParameters { .. }), "{error}");
    }
}
