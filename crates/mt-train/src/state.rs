//! The state of training on the devices, to and from checkpoints.

use mt_checkpoint::{Checkpoint, CheckpointError, Empty, Entry, ExpectedArray, ExtraItem, KeySegment};
use mt_data::Batch;
use mt_ir::ProgramValue;
use mt_models::{EXACT_ITEM, Model, Slot, expected_arrays, load_slot, slot_entries};
use mt_runtime::{Array, Executable, Input, Runtime, RuntimeError};
use mt_shape::{DType, HostArray, Placement, Sharding};

use crate::{TrainError, program::BATCH_ARRAYS};

/// Parameters, moments and the number of steps done.
pub(crate) struct TrainState {
    pub parameters: Vec<Array>,
    pub first_moments: Vec<Array>,
    pub second_moments: Vec<Array>,
    pub step: Array,
}

/// The type in which each slot is kept.
#[derive(Clone, Copy)]
pub(crate) struct SlotTypes {
    pub first_moment: DType,
}

const STEP: &str = "step";

/// The numbers of steps done: ours, and those that optax's Adam and learning rate keep.
const COUNTS: [&str; 3] = [STEP, "opt_state.0.count", "opt_state.2.count"];

impl TrainState {
    /// The state from the outputs of a program; what follows the state is returned, too.
    pub fn from_outputs(mut outputs: Vec<Array>, num_parameters: usize) -> (Self, Vec<Array>) {
        let rest = outputs.split_off(3 * num_parameters + 1);
        let step = outputs.pop().expect("the step count follows the moments");
        let second_moments = outputs.split_off(2 * num_parameters);
        let first_moments = outputs.split_off(num_parameters);
        (Self { parameters: outputs, first_moments, second_moments, step }, rest)
    }

    /// The arguments of a training step, given up to it.
    pub fn into_inputs<'a>(self) -> Vec<Input<'a>> {
        let arrays = self.parameters.into_iter().chain(self.first_moments).chain(self.second_moments);
        arrays.chain([self.step]).map(Input::Donate).collect()
    }

    /// A fresh state.
    pub fn initialize(program: &Executable, num_parameters: usize) -> Result<Self, TrainError> {
        Ok(Self::from_outputs(program.run(Vec::new())?, num_parameters).0)
    }

    /// Checks that a checkpoint has the whole state of a model, without reading it.
    pub fn check(model: &dyn Model, checkpoint: &Checkpoint) -> Result<(), CheckpointError> {
        let mut expected: Vec<ExpectedArray> = [Slot::Parameters, Slot::FirstMoment, Slot::SecondMoment]
            .into_iter()
            .flat_map(|slot| expected_arrays(model, slot))
            .collect();
        expected.extend(COUNTS.map(|name| ExpectedArray {
            name: name.to_owned(),
            dtype: DType::I32,
            dims: Vec::new(),
        }));
        checkpoint.compare(&expected).check()
    }

    /// Checks that a checkpoint has the parameters of a model, without reading them.
    pub fn check_parameters(model: &dyn Model, checkpoint: &Checkpoint) -> Result<(), CheckpointError> {
        let comparison = checkpoint.compare(&expected_arrays(model, Slot::Parameters));
        // Moments may be there, too; only parameters matter.
        let unexpected =
            comparison.unexpected.iter().filter(|name| name.starts_with("params.")).cloned().collect();
        mt_checkpoint::Comparison { unexpected, ..comparison }.check()
    }

    /// The whole state of a checkpoint.
    pub fn load(
        runtime: &Runtime,
        placement: &Placement,
        model: &dyn Model,
        types: SlotTypes,
        checkpoint: &Checkpoint,
    ) -> Result<Self, TrainError> {
        Self::check(model, checkpoint)?;
        let load = |slot, dtype| load_slot(runtime, placement, model, slot, dtype, checkpoint);
        let count = checkpoint.read_all(STEP)?;
        let replicated = Sharding::replicated(placement.mesh().clone(), 0);
        Ok(Self {
            parameters: load(Slot::Parameters, None)?,
            first_moments: load(Slot::FirstMoment, Some(types.first_moment))?,
            second_moments: load(Slot::SecondMoment, Some(DType::F32))?,
            step: Array::from_host(runtime, &count, &replicated)?,
        })
    }

    /// The parameters of a checkpoint.
    pub fn load_parameters(
        runtime: &Runtime,
        placement: &Placement,
        model: &dyn Model,
        checkpoint: &Checkpoint,
    ) -> Result<Vec<Array>, TrainError> {
        Self::check_parameters(model, checkpoint)?;
        Ok(load_slot(runtime, placement, model, Slot::Parameters, None, checkpoint)?)
    }

    /// What a checkpoint of the state holds. Copies to the host are started.
    pub fn entries(&self, model: &dyn Model) -> Result<(Vec<Entry>, Vec<ExtraItem>), TrainError> {
        let mut items = Vec::new();
        let mut exact = Vec::new();
        let slots = [
            (Slot::Parameters, &self.parameters),
            (Slot::FirstMoment, &self.first_moments),
            (Slot::SecondMoment, &self.second_moments),
        ];
        for (slot, arrays) in slots {
            let entries = slot_entries(model, slot, arrays)?;
            items.extend(entries.items);
            exact.extend(entries.exact);
        }
        // What optax's chain of Adam, weight decay and learning rate keeps.
        let slot = |index: usize| -> Vec<KeySegment> { vec!["opt_state".into(), index.into()] };
        let counter = |index: usize| -> Vec<KeySegment> { [slot(index), vec!["count".into()]].concat() };
        let count = self.step.to_host()?;
        items.push(Entry::new(counter(0), count.clone()));
        items.push(Entry::empty(slot(1), Empty::None));
        items.push(Entry::new(counter(2), count.clone()));
        items.push(Entry::new(vec![STEP.into()], count));
        let extra = if exact.is_empty() {
            Vec::new()
        } else {
            vec![ExtraItem { item: EXACT_ITEM.to_owned(), entries: exact }]
        };
        Ok((items, extra))
    }

    /// The bytes of the state on one device.
    pub fn bytes_on_device(&self, device: usize) -> usize {
        let arrays = self.parameters.iter().chain(&self.first_moments).chain(&self.second_moments);
        arrays.map(|array| array.bytes_on_device(device)).sum()
    }
}

/// The number of steps that a checkpoint's state has done.
pub(crate) fn steps_done(checkpoint: &Checkpoint) -> Result<u64, CheckpointError> {
    let count = checkpoint.read_all(STEP)?;
    Ok(count.to_f64().first().copied().unwrap_or_default() as u64)
}

/// A batch on the devices, for the arguments that programs declare in the order of [`BATCH_ARRAYS`].
pub(crate) fn batch_arrays(
    runtime: &Runtime,
    arguments: &[ProgramValue],
    batch: &Batch,
    vocab_size: usize,
) -> Result<Vec<Array>, TrainError> {
    let mut tokens = batch.inputs.iter().chain(&batch.targets);
    if let Some(token) = tokens.find(|token| usize::try_from(**token).is_ok_and(|token| token >= vocab_size))
    {
        return Err(TrainError::UnknownToken { token: *token, vocab_size });
    }
    let values: [&[i32]; BATCH_ARRAYS.len()] = [
        &batch.inputs,
        &batch.inputs_position,
        &batch.inputs_segmentation,
        &batch.targets,
        &batch.targets_segmentation,
    ];
    let dims = [batch.rows, batch.length];
    values
        .into_iter()
        .zip(arguments)
        .map(|(values, argument)| {
            let host = HostArray::from_slice(DType::I32, &dims, values).map_err(RuntimeError::from)?;
            Ok(Array::from_shared(runtime, host.into(), &argument.sharding)?)
        })
        .collect()
}
