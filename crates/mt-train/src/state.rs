//! The state of training on the devices, and its conversion to and from checkpoints.

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
use mt_optim::{History, Parameter, Slot, Values};
use mt_runtime::{Array, Executable, Input, Runtime};
use mt_shape::{Axis, DType, HostArray, Path, Placement};
use mt_trace::{Inputs, Output, Tensor};

use crate::{
    TrainError,
    derived::Derived,
    optimizer_tree::OptimizerTree,
    update::{StateTensors, UpdateRule},
};

/// The layout of the training state: arrays in the order in which programs take and return them.
pub(crate) struct StateLayout {
    pub entries: Vec<StateEntry>,
    groups: Groups,
    /// A mesh axis that splits slots in addition to the axes that placement rules name.
    slots_over: Option<&'static str>,
    /// Checkpoint keys whose arrays never change.
    constants: Vec<(Vec<KeySegment>, HostArray)>,
    /// Checkpoint keys without a value.
    empty: Vec<Vec<KeySegment>>,
    /// The layout of the same training with the other value of `scan_layers`.
    other: Option<Box<Self>>,
}

/// The entries of each group of the state.
#[derive(Clone, Debug)]
struct Groups {
    /// In the model's order. Programs that take only parameters take these entries alone, so they come first.
    parameters: Range<usize>,
    /// The parameters, and the arrays of learned maps that follow them.
    stepped: Range<usize>,
    /// The optimizer's slots for parameters.
    slots: Range<usize>,
    /// The history for spike detection, if the run skips spikes.
    guard: Option<GuardEntries>,
    /// The number of steps done.
    step: usize,
}

/// The entries of the history for spike detection.
#[derive(Clone, Copy, Debug)]
struct GuardEntries {
    losses: usize,
    gradient_norms: usize,
    count: usize,
    /// The number of steps that were not skipped as spikes.
    updates: usize,
}

/// One array of the state.
pub(crate) struct StateEntry {
    /// The array's name in programs.
    pub name: String,
    pub axes: Vec<Axis>,
    pub array: StateArray,
    /// The memory that holds the array between steps.
    pub memory: Memory,
    /// Further checkpoint keys with the same value.
    copies: Vec<Vec<KeySegment>>,
    /// Whether the array is of the base below adapters. Steps read it and do not return it, and checkpoints do not hold it.
    pub in_base: bool,
}

const STEP: &str = "step";

impl StateLayout {
    /// The state of a model that `rule` updates, with the arrays of learned maps.
    pub fn new(model: &dyn Model, rule: &UpdateRule, derived: &Derived) -> Self {
        let parameters = &rule.parameters;
        let arrays = derived.all_arrays(model);
        let mut in_base = in_base(model);
        let num_parameters = in_base.len();
        in_base.resize(arrays.len(), false);
        let mut entries: Vec<StateEntry> = parameters
            .iter()
            .zip(&arrays)
            .zip(&in_base)
            .map(|((parameter, array), in_base)| StateEntry::parameter(parameter, array, *in_base))
            .collect();
        let tree = OptimizerTree::new(rule);
        let slots = rule.optimizer.slots(parameters);
        let mut empty = tree.empty.clone();
        for slot in &slots {
            let holder = [tree.of_sub_optimizer(slot.sub_optimizer), &[slot.name.into()]].concat();
            let (parameter, array) = (&parameters[slot.parameter], &arrays[slot.parameter]);
            entries.push(StateEntry {
                name: format!("{}.{}", slot.name, parameter.path),
                axes: slot.axes.iter().map(|axis| parameter.axes[*axis]).collect(),
                array: kept_for(array, slot, &holder),
                memory: Memory::Device,
                copies: Vec::new(),
                in_base: false,
            });
        }
        let mut constants = tree.constants.clone();
        for (sub_optimizer, name) in rule.optimizer.slot_names() {
            // optax writes placeholders for parameters without the slot.
            let holder = [tree.of_sub_optimizer(*sub_optimizer), &[(*name).into()]].concat();
            let has = |index: usize| {
                let same = |slot: &&Slot| (slot.sub_optimizer, slot.name) == (*sub_optimizer, *name);
                slots.iter().filter(same).any(|slot| slot.parameter == index)
            };
            for index in (0..arrays.len()).filter(|index| !has(*index) && !in_base[*index]) {
                let key = parameter_key(&holder, &arrays[index].stored);
                // Parameters that share a stored array share a key.
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
        let num_stepped = parameters.len();
        let groups = Groups {
            parameters: 0..num_parameters,
            stepped: 0..num_stepped,
            slots: num_stepped..num_stepped + slots.len(),
            guard: guard_entries,
            step: entries.len() - 1,
        };
        Self { entries, groups, slots_over: None, constants, empty, other: None }
    }

    /// The entries of the parameters, in the model's order. They come first.
    pub fn parameters(&self) -> Range<usize> {
        self.groups.parameters.clone()
    }

    /// The entries that the optimizer steps: the parameters, and the arrays of learned maps.
    pub fn stepped(&self) -> Range<usize> {
        self.groups.stepped.clone()
    }

    /// The entries of the optimizer's slots.
    pub fn slots(&self) -> Range<usize> {
        self.groups.slots.clone()
    }

    /// Declares the whole state as donated arguments of a program.
    pub fn declare_all<'t>(&self, inputs: &Inputs<'t>) -> StateTensors<'t> {
        let all = self.declare(inputs, 0..self.entries.len(), true);
        let Groups { stepped, slots, guard, step, .. } = self.groups.clone();
        let spikes = guard.map(|guard| {
            let history = History {
                losses: all[guard.losses],
                gradient_norms: all[guard.gradient_norms],
                count: all[guard.count],
            };
            (history, all[guard.updates])
        });
        let values = Values { parameters: all[stepped].to_vec(), slots: all[slots].to_vec() };
        StateTensors { values, spikes, step: all[step] }
    }

    /// The outputs of a program that returns the next state, without the base below adapters.
    pub fn outputs_of<'t>(&self, inputs: &Inputs<'t>, state: StateTensors<'t>) -> Vec<Output<'t>> {
        let StateTensors { values: Values { parameters, slots }, spikes, step } = state;
        let groups = &self.groups;
        let mut all = vec![step; self.entries.len()];
        all[groups.stepped.clone()].copy_from_slice(&parameters);
        all[groups.slots.clone()].copy_from_slice(&slots);
        if let Some((guard, (history, updates))) = groups.guard.zip(spikes) {
            all[guard.losses] = history.losses;
            all[guard.gradient_norms] = history.gradient_norms;
            all[guard.count] = history.count;
            all[guard.updates] = updates;
        }
        self.outputs(inputs, &all, |entry| !entry.in_base)
    }

    /// Also accepts checkpoints with the layout `other`.
    pub fn or_held_as(self, other: Option<Self>) -> Self {
        Self { other: other.map(Box::new), ..self }
    }

    /// Whether the state can be converted to the other value of `scan_layers`.
    pub fn may_be_otherwise_scanned(&self) -> bool {
        self.other.is_some()
    }

    /// Splits the optimizer's slots over a mesh axis in addition to the axes that placement rules name.
    pub fn with_slots_over(mut self, mesh_axis: &'static str) -> Self {
        for entry in &mut self.entries[self.groups.slots.clone()] {
            entry.array.split_over = Some(mesh_axis);
        }
        self.slots_over = Some(mesh_axis);
        self
    }

    /// Constrains parameters, or tensors of their shapes, to the sharding with which the optimizer works.
    pub fn at_slots<'t>(&self, placement: &Placement, tensors: Vec<Tensor<'t>>) -> Vec<Tensor<'t>> {
        let Some(mesh_axis) = self.slots_over else { return tensors };
        let place = |(entry, tensor): (&StateEntry, Tensor<'t>)| {
            let array = StateArray { split_over: Some(mesh_axis), ..entry.array.clone() };
            tensor.constrain_to(&array.sharding(placement))
        };
        self.entries.iter().zip(tensors).map(place).collect()
    }

    /// The same layout, with parameters and slots in these memories.
    pub fn kept_in(mut self, parameters: Memory, slots: Memory) -> Self {
        for (group, memory) in [(self.parameters(), parameters), (self.slots(), slots)] {
            self.entries[group].iter_mut().for_each(|entry| entry.memory = memory);
        }
        self
    }

    /// The memory that holds parameters between steps.
    pub fn parameters_in(&self) -> Memory {
        self.entries.first().map_or(Memory::Device, |entry| entry.memory)
    }

    /// Declares a range of entries as arguments of a program, each in its memory.
    pub fn declare<'t>(&self, inputs: &Inputs<'t>, entries: Range<usize>, donated: bool) -> Vec<Tensor<'t>> {
        let declare = |entry: &StateEntry| {
            let sharding = entry.array.sharding(inputs.placement());
            let donated = donated && !entry.in_base;
            inputs.placed_input(entry.memory, &entry.name, entry.array.dtype, &entry.axes, sharding, donated)
        };
        self.entries[entries].iter().map(declare).collect()
    }

    /// Moves offloaded parameters and slots to the device.
    pub fn on_device<'t>(&self, state: StateTensors<'t>) -> StateTensors<'t> {
        let fetched = |entries: &[StateEntry], tensors: &[Tensor<'t>]| -> Vec<Tensor<'t>> {
            entries.iter().zip(tensors).map(|(entry, tensor)| on_device(*tensor, entry.memory)).collect()
        };
        let Values { parameters, slots } = &state.values;
        let values = Values {
            parameters: fetched(&self.entries[self.stepped()], parameters),
            slots: fetched(&self.entries[self.slots()], slots),
        };
        StateTensors { values, ..state }
    }

    /// Parameters as models take them: those of layers stay in their memory, the others are moved to the device.
    pub fn for_model<'t>(&self, specs: &[(Path, ParamSpec)], tensors: &[Tensor<'t>]) -> Vec<Tensor<'t>> {
        let place = |spec: &ParamSpec, tensor: Tensor<'t>| match spec.place {
            LayerPlace::None => on_device(tensor, self.parameters_in()),
            LayerPlace::One(_) | LayerPlace::Stacked { .. } => tensor,
        };
        specs.iter().zip(tensors).map(|((_, spec), tensor)| place(spec, *tensor)).collect()
    }

    /// The outputs of a program that returns the `wanted` ones of the first entries of the state, each in its memory.
    pub fn outputs<'t>(
        &self,
        inputs: &Inputs<'t>,
        state: &[Tensor<'t>],
        wanted: impl Fn(&StateEntry) -> bool,
    ) -> Vec<Output<'t>> {
        let output = |(entry, tensor): (&StateEntry, &Tensor<'t>)| {
            let sharding = entry.array.sharding(inputs.placement());
            inputs.placed_output(&entry.name, *tensor, sharding).moved_to(entry.memory)
        };
        self.entries.iter().zip(state).filter(|(entry, _)| wanted(entry)).map(output).collect()
    }

    /// The entries that checkpoints hold.
    fn saved(&self) -> impl Iterator<Item = &StateEntry> {
        self.entries.iter().filter(|entry| !entry.in_base)
    }

    /// Checks that a checkpoint has the whole state, without reading arrays.
    ///
    /// # Errors
    /// The checkpoint lacks arrays or has unexpected ones, in every supported form.
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
        let mut expected: Vec<ExpectedArray> =
            self.described_as(form).into_iter().filter_map(named).collect();
        // Slots of parameters that this run does not train, such as MaxText keeps of routing biases, are not used.
        expected.extend(self.empty.iter().filter_map(|key| {
            let name = entry_name(key);
            let (dtype, dims) = checkpoint.array(&name).ok()?;
            Some(ExpectedArray { dtype, dims: dims.to_vec(), name })
        }));
        checkpoint.compare(&expected)
    }

    /// The checkpoint's keys with the types and dimensions of their arrays; `None` for keys without a value.
    #[cfg(test)]
    pub fn described(&self) -> Vec<(Vec<KeySegment>, Option<(DType, Vec<usize>)>)> {
        self.described_as(StateArray::clone)
    }

    fn described_as(
        &self,
        form: impl Fn(&StateArray) -> StateArray,
    ) -> Vec<(Vec<KeySegment>, Option<(DType, Vec<usize>)>)> {
        let arrays = self.saved().flat_map(|entry| {
            let array = form(&entry.array);
            let is_first = array.is_first_stored();
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

/// Whether each parameter is of the base below adapters.
fn in_base(model: &dyn Model) -> Vec<bool> {
    let has_adapters = model.adapters().is_some();
    model.parameters().iter().map(|(_, spec)| has_adapters && spec.adapter.is_none()).collect()
}

impl StateEntry {
    fn parameter(parameter: &Parameter, array: &StateArray, in_base: bool) -> Self {
        Self {
            name: format!("params.{}", parameter.path),
            axes: parameter.axes.clone(),
            array: array.clone(),
            memory: Memory::Device,
            copies: Vec::new(),
            in_base,
        }
    }

    /// A scalar integer.
    fn number(name: &str, key: Vec<KeySegment>) -> Self {
        Self {
            name: name.to_owned(),
            axes: Vec::new(),
            array: plain(key, DType::I32, &[]),
            memory: Memory::Device,
            copies: Vec::new(),
            in_base: false,
        }
    }

    /// A ring buffer of recent values.
    fn ring(name: &str, axis: Axis, key: Vec<KeySegment>) -> Self {
        let array = plain(key, DType::F32, &[axis.size]);
        Self {
            name: name.to_owned(),
            axes: vec![axis],
            array,
            memory: Memory::Device,
            copies: Vec::new(),
            in_base: false,
        }
    }
}

/// A replicated array that belongs to no parameter.
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
        encoded: None,
    }
}

/// The slot of a parameter, with its checkpoint key within `holder`.
fn kept_for(parameter: &StateArray, slot: &Slot, holder: &[KeySegment]) -> StateArray {
    let stored = &parameter.stored;
    StateArray {
        key: parameter_key(holder, stored),
        // An offset does not change gradients.
        affine: Affine { scale: moment_scale(stored.scale, slot.order), offset: 0.0 },
        dtype: slot.dtype,
        dims: slot.axes.iter().map(|axis| parameter.dims[*axis]).collect(),
        logical_axes: slot.axes.iter().map(|axis| parameter.logical_axes[*axis]).collect(),
        split_over: None,
        place: parameter.place,
        role: parameter.role.clone(),
        encoded: None,
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
    /// Runs a training step, and returns the next state and the outputs that follow it. The arrays of a base below
    /// adapters stay where they are.
    pub fn step<'a>(
        self,
        program: &Executable,
        layout: &StateLayout,
        others: impl Iterator<Item = &'a Array>,
    ) -> Result<(Self, Vec<Array>), TrainError> {
        let (base, given) = self.split(layout);
        let num_given = given.len();
        let (mut borrowed, mut donated) = (base.iter(), given.into_iter());
        let input = |entry: &StateEntry| match entry.in_base {
            true => borrowed.next().map(Input::Borrow),
            false => donated.next().map(Input::Donate),
        };
        let mut inputs: Vec<Input<'_>> = layout.entries.iter().filter_map(input).collect();
        for array in others {
            inputs.push(Input::Borrow(array));
        }
        let mut outputs = program.run(inputs)?;
        let rest = outputs.split_off(num_given);
        let mut next = Self::of(outputs, layout);
        next.insert_base(layout, base);
        Ok((next, rest))
    }

    /// The arrays of the base below adapters, and the others.
    fn split(self, layout: &StateLayout) -> (Vec<Array>, Vec<Array>) {
        let (mut base, mut others) = (Vec::new(), Vec::new());
        for (entry, array) in layout.entries.iter().zip(self.arrays) {
            if entry.in_base { base.push(array) } else { others.push(array) }
        }
        (base, others)
    }

    /// The arrays of the base below adapters of a complete state.
    pub fn into_base(self, layout: &StateLayout) -> Vec<Array> {
        self.split(layout).0
    }

    /// Completes a state that lacks the base below adapters.
    pub fn insert_base(&mut self, layout: &StateLayout, base: Vec<Array>) {
        let (mut base, mut others) = (base.into_iter(), std::mem::take(&mut self.arrays).into_iter());
        let next = |entry: &StateEntry| if entry.in_base { base.next() } else { others.next() };
        self.arrays = layout.entries.iter().filter_map(next).collect();
    }

    /// A state of these arrays, in the order of the layout's entries.
    pub fn of(arrays: Vec<Array>, layout: &StateLayout) -> Self {
        Self { arrays, num_parameters: layout.parameters().len() }
    }

    /// Runs the program that creates the state of a fresh run. The state lacks the base below adapters if that is loaded.
    pub fn initialize(program: &Executable, layout: &StateLayout) -> Result<Self, TrainError> {
        Ok(Self::of(program.run(Vec::new())?, layout))
    }

    /// Waits until all arrays are computed.
    pub fn wait(&self) -> Result<(), TrainError> {
        self.arrays.iter().try_for_each(|array| Ok(array.wait()?))
    }

    /// Loads the whole state from a checkpoint. It lacks the base below adapters.
    pub fn load(
        runtime: &Runtime,
        placement: &Placement,
        layout: &StateLayout,
        checkpoint: &Checkpoint,
    ) -> Result<Self, TrainError> {
        layout.check(checkpoint)?;
        let reader = StateReader::open(runtime, placement, checkpoint)?;
        let described = |layout: &StateLayout| -> Vec<StateArray> {
            layout.saved().map(|entry| entry.array.clone()).collect()
        };
        let memories: Vec<Memory> = layout.saved().map(|entry| entry.memory).collect();
        let other = layout.other.as_deref().map(described);
        let arrays = reader.read_all(&described(layout), other.as_deref(), |index, array| {
            array.moved_to(runtime, memories[index])
        })?;
        Ok(Self::of(arrays, layout))
    }

    /// Replaces parameters by index.
    pub fn replace(&mut self, parameters: impl IntoIterator<Item = (usize, Array)>) {
        for (index, array) in parameters {
            self.arrays[index] = array;
        }
    }

    /// The parameters, in the model's order.
    pub fn parameters(&self) -> &[Array] {
        &self.arrays[..self.num_parameters]
    }

    /// Replaces the parameters. The present ones are released first, because memory may not suffice for both.
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

    /// The contents of a checkpoint of the state. Copies to the host are started.
    pub fn entries(&self, layout: &StateLayout) -> Result<(Vec<Entry>, Vec<ExtraItem>), TrainError> {
        let mut entries = StateEntries::default();
        // Parameters and slots are written in the model's order, the rest in the order of the keys.
        let mut num_ordered = 0;
        for (index, (entry, array)) in layout.entries.iter().zip(&self.arrays).enumerate() {
            if entry.in_base {
                continue;
            }
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

/// The number of training steps of a checkpoint's state.
pub(crate) fn steps_done(checkpoint: &Checkpoint) -> Result<u64, CheckpointError> {
    let count = checkpoint.read_all(STEP)?;
    Ok(count.to_f64().first().copied().unwrap_or_default() as u64)
}
