//! Where a run begins: its own newest checkpoint, another run's state or parameters, or fresh values.

use mt_checkpoint::{Checkpoint, CheckpointManager, latest_valid};
use mt_config::CheckpointGroup;
use mt_data::IteratorState;
use mt_models::{
    Model, check_parameters,
    hugging_face::{Weights, is_hugging_face},
};
use mt_runtime::Runtime;
use mt_shape::Placement;

use crate::{
    TrainError,
    state::{StateLayout, TrainState, load_checked_parameters, steps_done},
};

/// Where the iterator's state is in a step.
pub(crate) const ITERATOR_ITEM: &str = "iter";
pub(crate) const ITERATOR_FILE: &str = "process_0-of-1.json";

/// The state a run begins with.
pub(crate) struct Restored {
    pub state: TrainState,
    /// The first step to do, counted from 0.
    pub first_step: u64,
    /// The data's position, if the run goes on.
    pub iterator: Option<IteratorState>,
}

/// Checks what a new run is to begin from, before the long work of compiling.
pub(crate) fn check_sources(
    model: &dyn Model,
    layout: &StateLayout,
    group: &CheckpointGroup,
    steps: u64,
) -> Result<(), TrainError> {
    if let Some(path) = &group.load_full_state_path {
        let checkpoint = Checkpoint::open_path(path)?;
        layout.check(&checkpoint)?;
        let done = steps_done(&checkpoint)?;
        if done >= steps {
            return Err(TrainError::AlreadyPast { path: path.clone(), done, steps });
        }
    } else if let Some(path) = group.parameters_path() {
        if is_hugging_face(path) {
            Weights::open(model, path)?;
        } else {
            check_parameters(model, &Checkpoint::open_path(path)?)?;
        }
    }
    Ok(())
}

/// Loads or makes the first state of a run.
pub(crate) fn restore(
    runtime: &Runtime,
    placement: &Placement,
    model: &dyn Model,
    layout: &StateLayout,
    group: &CheckpointGroup,
    manager: &mut CheckpointManager,
    newest: Option<u64>,
    initialize: impl FnOnce() -> Result<TrainState, TrainError>,
) -> Result<Restored, TrainError> {
    if newest.is_some() {
        let mut failure = None;
        let latest = latest_valid(manager.directory(), |checkpoint| {
            // Reading checks every byte that is read.
            match resume(runtime, placement, layout, checkpoint) {
                Ok(restored) => Ok(Some(restored)),
                Err(TrainError::Checkpoint(error)) => Err(error),
                Err(TrainError::State(mt_models::StateError::Checkpoint(error))) => Err(error),
                Err(other) => {
                    failure = Some(other);
                    Ok(None)
                }
            }
        })?;
        if let Some(failure) = failure {
            return Err(failure);
        }
        if let Some(latest) = latest {
            for skipped in &latest.skipped {
                eprintln!("warning: checkpoint {} is passed over: {}", skipped.step, skipped.reason);
                manager.set_aside(skipped.step)?;
            }
            if let Some(restored) = latest.value {
                return Ok(restored);
            }
        }
    }
    if let Some(path) = &group.load_full_state_path {
        let checkpoint = Checkpoint::open_path(path)?;
        let state = TrainState::load(runtime, placement, layout, &checkpoint)?;
        return Ok(Restored { state, first_step: steps_done(&checkpoint)?, iterator: None });
    }
    let mut state = initialize()?;
    if let Some(path) = group.parameters_path() {
        state.replace_parameters(|| {
            let parameters = if is_hugging_face(path) {
                Weights::open(model, path)?.load(runtime, placement, model, None)?
            } else {
                load_checked_parameters(runtime, placement, model, &Checkpoint::open_path(path)?)?
            };
            let memory = layout.parameters_in();
            parameters.into_iter().map(|array| Ok(array.moved_to(runtime, memory)?)).collect()
        })?;
    }
    Ok(Restored { state, first_step: 0, iterator: None })
}

fn resume(
    runtime: &Runtime,
    placement: &Placement,
    layout: &StateLayout,
    checkpoint: &Checkpoint,
) -> Result<Restored, TrainError> {
    let state = TrainState::load(runtime, placement, layout, checkpoint)?;
    let iterator = checkpoint
        .read_json(ITERATOR_ITEM, ITERATOR_FILE)?
        .map(|json| IteratorState::from_json(&json.to_string()))
        .transpose()?;
    Ok(Restored { state, first_step: steps_done(checkpoint)?, iterator })
}
