//! The state of training on the devices, to and from checkpoints.

use std::ops::Range;

use mt_checkpoint::{
    Checkpoint, CheckpointError, Comparison, Empty, Entry, ExpectedArray, ExtraItem, KeySegment, entry_name,
};
use mt_ir::Memory;
use mt_models::{
    Affine, EXACT_ITEM, Model, StateArray, StateEntries, StateReader, StoredParameter, moment_scale,
    parameter_key,
};
use mt_nn::{LayerPlace, ParamSpec};
use mt_optim::{History, Slot, Values};
use mt_runtime::{Array, Executable, Input, Runtime};
use mt_shape::{Axis, DType, HostArray, Path, Placement};
use mt_trace::{Inputs, Output, Tensor};

use crate::{
    TrainError,
    optimizer_tree::OptimizerTree,
    update::{StateTensors, UpdateRule},
};

/// What the state of training consists of: arrays in the order in which programs take and return them.
pub(crate) struct StateLayout {
    pub entries: Vec<StateEntry>,
    groups: Groups,
    /// The mesh axis over which these are split besides those that rules name.
    slots_over: Option<&'static str>,
    /// Places in checkpoints with what is always in them.
    constants: Vec<(Vec<KeySegment>, HostArray)>,
    /// Places in checkpoints that hold nothing.
    empty: Vec<Vec<KeySegment>>,
    /// The state of the same training with layers scanned if these are not, or the other way round.
    other: Option<Box<Self>>,
}

/// Where each group of the state is among its entries.
#[derive(Clone, Debug)]
struct Groups {
    /// In the model's order. Programs that need nothing else take these entries alone, so they are the first.
    parameters: Range<usize>,
    /// What the optimizer keeps for parameters.
    slots: Range<usize>,
    /// What tells spikes, if steps are judged.
    guard: Option<GuardEntries>,
    /// The number of steps done.
    step: usize,
}

/// The entries of what tells spikes.
#[derive(Clone, Copy, Debug)]
struct GuardEntries {
    losses: usize,
    gradient_norms: usize,
    count: usize,
    /// The number of steps that were no spikes.
    updates: usize,
}

/// One array of the state.
pub(crate) struct StateEntry {
    /// Its name in programs.
    pub name: String,
    pub axes: Vec<Axis>,
    pub array: StateArray,
    /// The memory that it is in between steps.
    pub memory: Memory,
    /// Other places in checkpoints that hold the same.
    copies: Vec<Vec<KeySegment>>,
}

const STEP: &str = "step";

impl StateLayout {
    /// The state of a model whose parameters are changed like this.
    pub fn new(model: &dyn Model, rule: &UpdateRule) -> Self {
        let parameters = &rule.parameters;
        let arrays = StateArray::parameters(model);
        let mut entries: Vec<StateEntry> = parameters
            .iter()
            .zip(&arrays)
            .map(|(parameter, array)| StateEntry {
                name: format!("params.{}", parameter.path),
                axes: parameter.axes.clone(),
                array: array.clone(),
                memory: Memory::Device,
                copies: Vec::new(),
            })
            .collect();
        let tree = OptimizerTree::new(rule);
        let slots = rule.optimizer.slots(parameters);
        let mut empty = tree.empty.clone();
        for slot in &slots {
            let holder = [tree.of_part(slot.part), &[slot.name.into()]].concat();
            let (parameter, array) = (&parameters[slot.parameter], &arrays[slot.parameter]);
            entries.push(StateEntry {
                name: format!("{}.{}", slot.name, parameter.path),
                axes: slot.axes.iter().map(|axis| parameter.axes[*axis]).collect(),
                array: kept_for(array, slot, &holder),
                memory: Memory::Device,
                copies: Vec::new(),
            });
        }
        let mut constants = tree.constants.clone();
        for (part, name) in rule.optimizer.slot_names() {
            // optax marks the parameters for which nothing is kept.
            let holder = [tree.of_part(*part), &[(*name).into()]].concat();
            let has = |index: usize| {
                let same = |slot: &&Slot| (slot.part, slot.name) == (*part, *name);
                slots.iter().filter(same).any(|slot| slot.parameter == index)
            };
            for index in (0..arrays.len()).filter(|index| !has(*index)) {
                let key = parameter_key(&holder, &arrays[index].stored);
                // Parameters in one stored array have one place.
                if constants.iter().any(|(known, _)| *known == key) || empty.contains(&key) {
                    continue;
                }
                match &tree.placeholder {
                    Some(value) if parameters[index].is_trained => constants.push((key, value.clone())),
                    _ => empty.push(key),
                }
            }
        }
        let mut step = StateEntry::number(STEP, vec![STEP.into()]);
        let mut guard_entries = None;
        if let (Some(guard), Some(keys)) = (rule.guard, tree.history) {
            let mut add = |entry: StateEntry| {
                entries.push(entry);
                entries.len() - 1
            };
            let mut counts = tree.counts.into_iter();
            let first = counts.next().expect("optimizers count their updates");
            guard_entries = Some(GuardEntries {
                losses: add(StateEntry::ring("spikes.losses", guard.axis(), keys.losses)),
                gradient_norms: add(StateEntry::ring(
                    "spikes.gradient_norms",
                    guard.axis(),
                    keys.gradient_norms,
                )),
                count: add(StateEntry::number("spikes.count", keys.count)),
                updates: add(StateEntry { copies: counts.collect(), ..StateEntry::number("updates", first) }),
            });
        } else {
            step.copies = tree.counts;
        }
        entries.push(step);
        let num_parameters = parameters.len();
        let groups = Groups {
            parameters: 0..num_parameters,
            slots: num_parameters..num_parameters + slots.len(),
            guard: guard_entries,
            step: entries.len() - 1,
        };
        Self { entries, groups, slots_over: None, constants, empty, other: None }
    }

    /// The entries of the parameters, in the model's order. They are the first.
    pub fn parameters(&self) -> Range<usize> {
        self.groups.parameters.clone()
    }

    /// The entries of what the optimizer keeps for parameters.
    pub fn slots(&self) -> Range<usize> {
        self.groups.slots.clone()
    }

    /// Declares the whole state as arguments of a program, which are given up to it.
    pub fn declare_all<'t>(&self, inputs: &Inputs<'t>) -> StateTensors<'t> {
        let all = self.declare(inputs, 0..self.entries.len(), true);
        let Groups { parameters, slots, guard, step } = self.groups.clone();
        let spikes = guard.map(|guard| {
            let history = History {
                losses: all[guard.losses],
                gradient_norms: all[guard.gradient_norms],
                count: all[guard.count],
            };
            (history, all[guard.updates])
        });
        let values = Values { parameters: all[parameters].to_vec(), slots: all[slots].to_vec() };
        StateTensors { values, spikes, step: all[step] }
    }

    /// Results of a program that are the whole state.
    pub fn outputs_of<'t>(&self, inputs: &Inputs<'t>, state: StateTensors<'t>) -> Vec<Output<'t>> {
        let StateTensors { values: Values { parameters, slots }, spikes, step } = state;
        let groups = &self.groups;
        let mut all = vec![step; self.entries.len()];
        all[groups.parameters.clone()].copy_from_slice(&parameters);
        all[groups.slots.clone()].copy_from_slice(&slots);
        if let Some((guard, (history, updates))) = groups.guard.zip(spikes) {
            all[guard.losses] = history.losses;
            all[guard.gradient_norms] = history.gradient_norms;
            all[guard.count] = history.count;
            all[guard.updates] = updates;
        }
        self.outputs(inputs, &all)
    }

    /// Reads checkpoints that hold the state like this as well.
    pub fn or_held_as(self, other: Option<Self>) -> Self {
        Self { other: other.map(Box::new), ..self }
    }

    /// Whether the state is the same with layers scanned if these are not, or the other way round.
    pub fn may_be_otherwise_scanned(&self) -> bool {
        self.other.is_some()
    }

    /// Splits what the optimizer keeps for each parameter over a mesh axis besides those that rules name.
    pub fn with_slots_over(mut self, mesh_axis: &'static str) -> Self {
        for entry in &mut self.entries[self.groups.slots.clone()] {
            entry.array.split_over = Some(mesh_axis);
        }
        self.slots_over = Some(mesh_axis);
        self
    }

    /// Parameters, or what is of their shape, where the optimizer works on them.
    pub fn at_slots<'t>(&self, placement: &Placement, tensors: Vec<Tensor<'t>>) -> Vec<Tensor<'t>> {
        let Some(mesh_axis) = self.slots_over else { return tensors };
        let place = |(entry, tensor): (&StateEntry, Tensor<'t>)| {
            let array = StateArray { split_over: Some(mesh_axis), ..entry.array.clone() };
            tensor.constrain_to(&array.sharding(placement))
        };
        self.entries.iter().zip(tensors).map(place).collect()
    }

    /// The same state, with parameters and what is kept for them in these memories.
    pub fn kept_in(mut self, parameters: Memory, slots: Memory) -> Self {
        for (group, memory) in [(self.parameters(), parameters), (self.slots(), slots)] {
            self.entries[group].iter_mut().for_each(|entry| entry.memory = memory);
        }
        self
    }

    /// The memory that parameters are in between steps.
    pub fn parameters_in(&self) -> Memory {
        self.entries.first().map_or(Memory::Device, |entry| entry.memory)
    }

    /// Declares the first entries, or all, as arguments of a program, each in its memory.
    pub fn declare<'t>(&self, inputs: &Inputs<'t>, entries: Range<usize>, donated: bool) -> Vec<Tensor<'t>> {
        let declare = |entry: &StateEntry| {
            let sharding = entry.array.sharding(inputs.placement());
            inputs.placed_input(entry.memory, &entry.name, entry.array.dtype, &entry.axes, sharding, donated)
        };
        self.entries[entries].iter().map(declare).collect()
    }

    /// The state, brought to the device.
    pub fn on_device<'t>(&self, state: StateTensors<'t>) -> StateTensors<'t> {
        let fetched = |entries: &[StateEntry], tensors: &[Tensor<'t>]| -> Vec<Tensor<'t>> {
            entries.iter().zip(tensors).map(|(entry, tensor)| on_device(*tensor, entry.memory)).collect()
        };
        let Values { parameters, slots } = &state.values;
        let values = Values {
            parameters: fetched(&self.entries[self.parameters()], parameters),
            slots: fetched(&self.entries[self.slots()], slots),
        };
        StateTensors { values, ..state }
    }

    /// Parameters as models take them: those of layers where they are, the others on the device.
    pub fn for_model<'t>(&self, specs: &[(Path, ParamSpec)], tensors: &[Tensor<'t>]) -> Vec<Tensor<'t>> {
        let place = |spec: &ParamSpec, tensor: Tensor<'t>| match spec.place {
            LayerPlace::None => on_device(tensor, self.parameters_in()),
            LayerPlace::One(_) | LayerPlace::Stacked { .. } => tensor,
        };
        specs.iter().zip(tensors).map(|((_, spec), tensor)| place(spec, *tensor)).collect()
    }

    /// Results of a program that are the state, each in its memory.
    pub fn outputs<'t>(&self, inputs: &Inputs<'t>, state: &[Tensor<'t>]) -> Vec<Output<'t>> {
        let output = |(entry, tensor): (&StateEntry, &Tensor<'t>)| {
            let sharding = entry.array.sharding(inputs.placement());
            inputs.placed_output(&entry.name, *tensor, sharding).moved_to(entry.memory)
        };
        self.entries.iter().zip(state).map(output).collect()
    }

    /// Checks that a checkpoint has the whole state, without reading it.
    pub fn check(&self, checkpoint: &Checkpoint) -> Result<(), CheckpointError> {
        let same = |array: &StateArray| array.clone();
        let forms = std::iter::once(self).chain(self.other.as_deref());
        let fits = |form: &Self| {
            form.compared(checkpoint, same).fits() || form.compared(checkpoint, StateArray::as_earlier).fits()
        };
        if forms.into_iter().any(fits) { Ok(()) } else { self.compared(checkpoint, same).check() }
    }

    fn compared(&self, checkpoint: &Checkpoint, form: impl Fn(&StateArray) -> StateArray) -> Comparison {
        let named = |(key, array): (Vec<KeySegment>, Option<(DType, Vec<usize>)>)| {
            array.map(|(dtype, dims)| ExpectedArray { name: entry_name(&key), dtype, dims })
        };
        let expected: Vec<ExpectedArray> = self.described_as(form).into_iter().filter_map(named).collect();
        checkpoint.compare(&expected)
    }

    /// The places in a checkpoint, with the types and dimensions of the arrays there; other places hold nothing.
    #[cfg(test)]
    pub fn described(&self) -> Vec<(Vec<KeySegment>, Option<(DType, Vec<usize>)>)> {
        self.described_as(StateArray::clone)
    }

    fn described_as(
        &self,
        form: impl Fn(&StateArray) -> StateArray,
    ) -> Vec<(Vec<KeySegment>, Option<(DType, Vec<usize>)>)> {
        let arrays = self.entries.iter().flat_map(|entry| {
            let array = form(&entry.array);
            // Of several parameters in one stored array the first stands for it.
            let is_first = array.stored.slice.is_none_or(|slice| slice.index == 0);
            let ExpectedArray { dtype, dims, .. } = array.expected();
            let keys = std::iter::once(array.key).chain(entry.copies.clone()).filter(|_| is_first);
            keys.map(|key| (key, Some((dtype, dims.clone())))).collect::<Vec<_>>()
        });
        let constants = self
            .constants
            .iter()
            .map(|(key, value)| (key.clone(), Some((value.dtype(), value.dims().to_vec()))));
        let empty = self.empty.iter().map(|key| (key.clone(), None));
        arrays.chain(constants).chain(empty).collect()
    }
}

impl StateEntry {
    /// A whole number.
    fn number(name: &str, key: Vec<KeySegment>) -> Self {
        Self {
            name: name.to_owned(),
            axes: Vec::new(),
            array: plain(key, DType::I32, &[]),
            memory: Memory::Device,
            copies: Vec::new(),
        }
    }

    /// The last values of something.
    fn ring(name: &str, axis: Axis, key: Vec<KeySegment>) -> Self {
        let array = plain(key, DType::F32, &[axis.size]);
        Self { name: name.to_owned(), axes: vec![axis], array, memory: Memory::Device, copies: Vec::new() }
    }
}

/// An array that is of no parameter, and on every device.
fn plain(key: Vec<KeySegment>, dtype: DType, dims: &[usize]) -> StateArray {
    StateArray {
        key,
        stored: StoredParameter::plain(Vec::new()),
        affine: Affine::IDENTITY,
        dtype,
        dims: dims.to_vec(),
        logical_axes: vec![None; dims.len()],
        split_over: None,
        place: LayerPlace::None,
        role: String::new(),
    }
}

/// What is kept for a parameter, within `holder`.
fn kept_for(parameter: &StateArray, slot: &Slot, holder: &[KeySegment]) -> StateArray {
    let stored = &parameter.stored;
    StateArray {
        key: parameter_key(holder, stored),
        // Gradients do not see what is added.
        affine: Affine { scale: moment_scale(stored.scale, slot.order), offset: 0.0 },
        dtype: slot.dtype,
        dims: slot.axes.iter().map(|axis| parameter.dims[*axis]).collect(),
        logical_axes: slot.axes.iter().map(|axis| parameter.logical_axes[*axis]).collect(),
        split_over: None,
        place: parameter.place,
        role: parameter.role.clone(),
        stored: stored.of_axes(&slot.axes, parameter.dims.len()),
    }
}

fn on_device(tensor: Tensor<'_>, memory: Memory) -> Tensor<'_> {
    match memory {
        Memory::Device => tensor,
        Memory::Host => tensor.moved_to(Memory::Device),
    }
}

/// The state on the devices.
pub(crate) struct TrainState {
    /// In the order of the layout's entries.
    pub arrays: Vec<Array>,
    num_parameters: usize,
}

impl TrainState {
    /// The state from the outputs of a program; what follows the state is returned, too.
    pub fn from_outputs(mut outputs: Vec<Array>, layout: &StateLayout) -> (Self, Vec<Array>) {
        let rest = outputs.split_off(layout.entries.len());
        (Self { arrays: outputs, num_parameters: layout.parameters().len() }, rest)
    }

    /// The arguments of a training step, given up to it.
    pub fn into_inputs<'a>(self) -> Vec<Input<'a>> {
        self.arrays.into_iter().map(Input::Donate).collect()
    }

    /// A fresh state.
    pub fn initialize(program: &Executable, layout: &StateLayout) -> Result<Self, TrainError> {
        Ok(Self::from_outputs(program.run(Vec::new())?, layout).0)
    }

    /// Waits until all of it is there.
    pub fn wait(&self) -> Result<(), TrainError> {
        self.arrays.iter().try_for_each(|array| Ok(array.wait()?))
    }

    /// The whole state of a checkpoint.
    pub fn load(
        runtime: &Runtime,
        placement: &Placement,
        layout: &StateLayout,
        checkpoint: &Checkpoint,
    ) -> Result<Self, TrainError> {
        layout.check(checkpoint)?;
        let reader = StateReader::open(runtime, placement, checkpoint)?;
        let described = |layout: &StateLayout| -> Vec<StateArray> {
            layout.entries.iter().map(|entry| entry.array.clone()).collect()
        };
        let other = layout.other.as_deref().map(described);
        let arrays = reader.read_all(&described(layout), other.as_deref(), |index, array| {
            array.moved_to(runtime, layout.entries[index].memory)
        })?;
        Ok(Self { arrays, num_parameters: layout.parameters().len() })
    }

    /// The parameters.
    pub fn parameters(&self) -> &[Array] {
        &self.arrays[..self.num_parameters]
    }

    /// Puts others in the place of the parameters. The present ones go first: there may be no room for both.
    pub fn replace_parameters(
        &mut self,
        load: impl FnOnce() -> Result<Vec<Array>, TrainError>,
    ) -> Result<(), TrainError> {
        let rest = self.arrays.split_off(self.num_parameters);
        self.arrays.clear();
        self.arrays = load()?;
        self.arrays.extend(rest);
        Ok(())
    }

    /// What a checkpoint of the state holds. Copies to the host are started.
    pub fn entries(&self, layout: &StateLayout) -> Result<(Vec<Entry>, Vec<ExtraItem>), TrainError> {
        let mut entries = StateEntries::default();
        // Arrays of the model's form are in its order, the rest in that of the tree.
        let mut num_ordered = 0;
        for (index, (entry, array)) in layout.entries.iter().zip(&self.arrays).enumerate() {
            entries.add(&entry.array, array)?;
            if index < layout.slots().end {
                num_ordered = entries.num_stored();
            }
            for key in &entry.copies {
                entries.add(&StateArray { key: key.clone(), ..entry.array.clone() }, array)?;
            }
        }
        let (mut items, exact) = entries.into_entries();
        items.extend(layout.constants.iter().map(|(key, value)| Entry::new(key.clone(), value.clone())));
        items.extend(layout.empty.iter().map(|key| Entry::empty(key.clone(), Empty::None)));
        items[num_ordered..].sort_by(|left, right| left.key.cmp(&right.key));
        let extra = if exact.is_empty() {
            Vec::new()
        } else {
            vec![ExtraItem { item: EXACT_ITEM.to_owned(), entries: exact }]
        };
        Ok((items, extra))
    }
}

/// The number of steps that a checkpoint's state has done.
pub(crate) fn steps_done(checkpoint: &Checkpoint) -> Result<u64, CheckpointError> {
    let count = checkpoint.read_all(STEP)?;
    Ok(count.to_f64().first().copied().unwrap_or_default() as u64)
}
