//! What all optimizers have in common.

use mt_shape::{Axis, DType, Path};
use mt_trace::Tensor;

use crate::AdamW;

/// What an optimizer knows of a parameter.
#[derive(Clone, Debug, PartialEq)]
pub struct Parameter {
    pub path: Path,
    pub axes: Vec<Axis>,
    /// For each axis the logical name that placement rules know.
    pub logical_axes: Vec<Option<&'static str>>,
    pub dtype: DType,
    /// The first axis counts layers, each of which is a parameter of its own.
    pub is_stacked: bool,
}

/// An array that an optimizer keeps from step to step; it begins with zeros.
#[derive(Clone, Debug, PartialEq)]
pub struct Slot {
    /// What it is called, such as `mu`.
    pub name: &'static str,
    /// Which parameter it is kept for.
    pub parameter: usize,
    /// Those axes of the parameter that it has, in the parameter's order.
    pub axes: Vec<usize>,
    pub dtype: DType,
    /// The power of gradients that it holds: what is kept for a parameter scaled by `s` is scaled by `s` to the power
    /// of minus this.
    pub order: i32,
}

/// The values of a step, each list in the order of the parameters, and slots in that of [`Optimizer::slots`].
#[derive(Clone, Debug)]
pub struct Values<'t> {
    pub parameters: Vec<Tensor<'t>>,
    pub slots: Vec<Tensor<'t>>,
}

/// How parameters follow their gradients.
#[derive(Clone, Debug, PartialEq)]
pub enum Optimizer {
    AdamW(AdamW),
}

impl Optimizer {
    /// What is kept for the parameters: all slots of one name, then those of the next.
    pub fn slots(&self, parameters: &[Parameter]) -> Vec<Slot> {
        let mut slots: Vec<Slot> = parameters
            .iter()
            .enumerate()
            .flat_map(|(index, parameter)| self.slots_of(index, parameter))
            .collect();
        let mut names: Vec<&str> = Vec::new();
        for slot in &slots {
            if !names.contains(&slot.name) {
                names.push(slot.name);
            }
        }
        slots.sort_by_key(|slot| names.iter().position(|name| *name == slot.name));
        slots
    }

    fn slots_of(&self, index: usize, parameter: &Parameter) -> Vec<Slot> {
        match self {
            Self::AdamW(adamw) => adamw.slots(index, parameter),
        }
    }

    /// One step: the new values. `count` is the number of earlier steps, an integer scalar.
    #[track_caller]
    pub fn update<'t>(
        &self,
        parameters: &[Parameter],
        values: &Values<'t>,
        gradients: &[Tensor<'t>],
        count: Tensor<'t>,
        learning_rate: Tensor<'t>,
    ) -> Values<'t> {
        let slots = self.slots(parameters);
        let step = match self {
            Self::AdamW(adamw) => adamw.step(count),
        };
        let mut next = values.clone();
        for (index, gradient) in gradients.iter().enumerate() {
            let own: Vec<usize> =
                (0..slots.len()).filter(|position| slots[*position].parameter == index).collect();
            let kept: Vec<Tensor<'t>> = own.iter().map(|position| values.slots[*position]).collect();
            let value = values.parameters[index];
            let wide = value.cast(DType::F32);
            let gradient = gradient.cast(DType::F32);
            let (update, kept) = step.update(wide, gradient, &kept);
            next.parameters[index] = (wide - update * learning_rate).cast(value.dtype());
            for (position, kept) in own.into_iter().zip(kept) {
                next.slots[position] = kept.cast(slots[position].dtype);
            }
        }
        next
    }
}

impl Slot {
    /// A slot of the parameter's shape.
    pub(crate) fn like(
        name: &'static str,
        index: usize,
        parameter: &Parameter,
        dtype: DType,
        order: i32,
    ) -> Self {
        Self { name, parameter: index, axes: (0..parameter.axes.len()).collect(), dtype, order }
    }
}
