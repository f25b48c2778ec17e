//! Saved parameters at a path: a published model's, one checkpoint's, or those of a run's newest undamaged step.

use std::{fs, path::Path};

use mt_checkpoint::{
    Checkpoint, CheckpointManager, Entry, ManagerOptions, RunLock, SaveRequest, StoredEntry,
};
use mt_models::{ArrayUse, LoadedParameters, Model, SavedParameters, StateEntries, StateError};
use mt_runtime::{Array, testing::cpu};
use mt_shape::{DType, HostArray, Placement};

use crate::{
    directory::Directory,
    harness::{model, parameters},
};

fn load(model: &dyn Model, path: &Path) -> Result<LoadedParameters, StateError> {
    let saved = SavedParameters::open(model, path)?;
    let load = |array_use| saved.load(model, cpu(1), &Placement::single(), array_use);
    let (read, loaded) = (load(ArrayUse::Read)?, load(ArrayUse::Donate)?);
    assert_eq!(on_host(&read.arrays), on_host(&loaded.arrays));
    Ok(loaded)
}

fn on_host(arrays: &[Array]) -> Vec<HostArray> {
    arrays.iter().map(|array| array.to_host().unwrap()).collect()
}

/// A run with the same parameters at steps 1 and 2.
fn run(model: &dyn Model, values: &[HostArray]) -> tempfile::TempDir {
    let run = tempfile::tempdir().unwrap();
    let specs = model.parameters();
    let arrays: Vec<Array> = specs
        .iter()
        .zip(values)
        .map(|((_, spec), value)| {
            let sharding = Placement::single().sharding(&spec.logical_axes, value.dims());
            Array::from_host(cpu(1), value, &sharding).unwrap()
        })
        .collect();
    let lock = RunLock::acquire(run.path()).unwrap();
    let directory = run.path().join("checkpoints");
    let mut manager = CheckpointManager::open(&directory, &lock, ManagerOptions::default()).unwrap();
    for step in [1, 2] {
        let (entries, _) = StateEntries::of_parameters(model, &arrays).unwrap().into_entries();
        manager.save(step, SaveRequest { entries, ..SaveRequest::default() }).unwrap();
    }
    manager.wait_until_finished().unwrap();
    run
}

#[test]
fn the_newest_undamaged_step_of_a_run_is_loaded() {
    let own = model(&[]);
    let values = parameters(&*own);
    let run = run(&*own, &values);
    let checkpoints = run.path().join("checkpoints");
    for (path, step) in [(run.path(), 2), (&checkpoints, 2), (&checkpoints.join("1"), 1)] {
        let loaded = load(&*own, path).unwrap();
        assert_eq!((loaded.step, loaded.skipped.len()), (Some(step), 0), "{}", path.display());
        assert_eq!(on_host(&loaded.arrays), values);
    }

    let refused = |model: &dyn Model, path: &Path, expected: &str| {
        let error = SavedParameters::open(model, path).map(|_| ()).unwrap_err();
        assert!(error.is_user_error() && error.to_string().contains(expected), "{error}");
    };
    refused(&*model(&["base_mlp_dim=96"]), run.path(), "mlp.wi_0.kernel");
    refused(&*own, &checkpoints.join("9"), "does not exist");

    fs::remove_file(checkpoints.join("2/items/_METADATA")).unwrap();
    let older = load(&*own, run.path()).unwrap();
    let skipped: Vec<u64> = older.skipped.iter().map(|skipped| skipped.step).collect();
    assert_eq!((older.step, skipped), (Some(1), vec![2]));
    assert_eq!(on_host(&older.arrays), values);
}

#[test]
fn numbers_that_are_no_weights_are_refused_by_name() {
    let own = model(&[]);
    let run = run(&*own, &parameters(&*own));
    let checkpoint = Checkpoint::open_path(run.path()).unwrap();
    let lock = RunLock::acquire(run.path()).unwrap();
    let mut manager =
        CheckpointManager::open(run.path().join("checkpoints"), &lock, ManagerOptions::default()).unwrap();
    let kinds = [(DType::I32, 3), (DType::Bool, 4), (DType::F64, 5), (DType::U8, 6)];
    for (dtype, step) in kinds {
        let name = "params.params.decoder.decoder_norm.scale";
        let entry = |stored: &StoredEntry| {
            let array = checkpoint.read_all(&stored.name).unwrap();
            let other = HostArray::zeros(dtype, array.dims());
            Entry::new(stored.key.clone(), if stored.name == name { other } else { array })
        };
        let entries = checkpoint.entries().iter().map(entry).collect();
        manager.save(step, SaveRequest { entries, ..SaveRequest::default() }).unwrap();
        manager.wait_until_finished().unwrap();
        let error = SavedParameters::open(&*own, run.path()).map(|_| ()).unwrap_err();
        let message = error.to_string();
        assert!(error.is_user_error(), "{message}");
        assert!(message.contains(&format!("`{name}`: stored {dtype}, expected float32")), "{message}");
    }
}

#[test]
fn the_parameters_of_a_published_model_are_loaded() {
    let directory = Directory::open("llama_six_on_two");
    let model = directory.model(&[]);
    let loaded = load(&model, &directory.path).unwrap();
    assert_eq!((loaded.step, &loaded.path), (None, &directory.path));
    assert_eq!(on_host(&loaded.arrays), directory.parameters(&model));
}
