//! What all optimizers have in common.

use mt_shape::{Axis, DType, Path};
use mt_trace::Tensor;

use crate::{
    Adafactor, Adam, Muon,
    adafactor::AdafactorStep,
    adam::AdamStep,
    clip::sum_of_squares,
    muon::{MuonStep, matrix},
};

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
    /// If it is the kernel of a linear map, how many axes after that of layers are those of the map's input.
    pub num_input_axes: usize,
    /// Whether it changes at all.
    pub is_trained: bool,
    /// Whether weight decay applies to it.
    pub decays: bool,
}

/// An array that an optimizer keeps from step to step; it begins with zeros.
#[derive(Clone, Debug, PartialEq)]
pub struct Slot {
    /// What it is called, such as `mu`.
    pub name: &'static str,
    /// What keeps it, if an optimizer treats some parameters in another way than others.
    pub part: Option<&'static str>,
    /// Which parameter it is kept for.
    pub parameter: usize,
    /// Those axes of the parameter that it has, in the parameter's order.
    pub axes: Vec<usize>,
    pub dtype: DType,
    /// The power of gradients that it holds: what is kept for a parameter scaled by `s` is scaled by `s` to the power
    /// of minus this.
    pub order: i32,
}

/// The values of a step, parameters in their order, and slots in that of [`Optimizer::slots`].
#[derive(Clone, Debug)]
pub struct Values<'t> {
    pub parameters: Vec<Tensor<'t>>,
    pub slots: Vec<Tensor<'t>>,
}

/// What a step is taken with.
#[derive(Clone, Copy, Debug)]
pub struct StepInputs<'a, 't> {
    /// One for each parameter. Those of parameters that are not trained are not looked at.
    pub gradients: &'a [Tensor<'t>],
    /// What gradients are multiplied by, if they are clipped: an `f32` scalar.
    pub clipping_factor: Option<Tensor<'t>>,
    /// The number of earlier steps, an integer scalar.
    pub count: Tensor<'t>,
    pub learning_rate: Tensor<'t>,
    /// Whether something besides the step reads the values before it, which kernels would overwrite.
    pub keeps_values: bool,
}

/// What comes of a step.
#[derive(Clone, Debug)]
pub struct Updated<'t> {
    pub values: Values<'t>,
    /// The sum of squares of each parameter.
    pub squares: Vec<Tensor<'t>>,
}

/// How parameters follow their gradients.
#[derive(Clone, Debug, PartialEq)]
pub enum Optimizer {
    Adam(Adam),
    /// Gradients times the learning rate.
    Sgd,
    Muon(Muon),
    Adafactor(Adafactor),
}

/// What is the same for all parameters in one step.
enum Step<'t> {
    Adam(AdamStep<'t>),
    Sgd,
    Muon(MuonStep<'t>),
    Adafactor(AdafactorStep<'t>),
}

impl<'t> Step<'t> {
    /// The step of Adam, if that is what is taken for a parameter.
    fn adam(&self, parameter: &Parameter) -> Option<&AdamStep<'t>> {
        match self {
            Self::Adam(adam) => Some(adam),
            Self::Muon(muon) => matrix(parameter).is_none().then_some(&muon.adam),
            Self::Sgd | Self::Adafactor(_) => None,
        }
    }
}

impl Optimizer {
    /// What is kept for the parameters that are trained: all slots of one name, then those of the next.
    pub fn slots(&self, parameters: &[Parameter]) -> Vec<Slot> {
        let trained = parameters.iter().enumerate().filter(|(_, parameter)| parameter.is_trained);
        let mut slots: Vec<Slot> =
            trained.flat_map(|(index, parameter)| self.slots_of(index, parameter)).collect();
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
            Self::Adam(adam) => adam.slots(index, parameter, None),
            Self::Sgd => Vec::new(),
            Self::Muon(muon) => muon.slots(index, parameter),
            Self::Adafactor(adafactor) => adafactor.slots(index, parameter),
        }
    }

    /// One step.
    #[track_caller]
    pub fn update<'t>(
        &self,
        parameters: &[Parameter],
        values: &Values<'t>,
        inputs: &StepInputs<'_, 't>,
    ) -> Updated<'t> {
        let StepInputs { gradients, clipping_factor, count, learning_rate, .. } = *inputs;
        let slots = self.slots(parameters);
        let step = match self {
            Self::Adam(adam) => Step::Adam(adam.step(count)),
            Self::Sgd => Step::Sgd,
            Self::Muon(muon) => Step::Muon(muon.step(count)),
            Self::Adafactor(adafactor) => Step::Adafactor(adafactor.step(count)),
        };
        let mut next = values.clone();
        let mut squares = Vec::new();
        for (index, (parameter, gradient)) in parameters.iter().zip(gradients).enumerate() {
            if !parameter.is_trained {
                squares.push(sum_of_squares(values.parameters[index]));
                continue;
            }
            let own: Vec<usize> =
                (0..slots.len()).filter(|position| slots[*position].parameter == index).collect();
            let value = values.parameters[index];
            let kept: Vec<Tensor<'t>> = own.iter().map(|position| values.slots[*position]).collect();
            if let Some(adam) = step.adam(parameter)
                && !inputs.keeps_values
                && let Some(made) = adam.at_once(parameter, value, &kept, *gradient, inputs)
            {
                next.parameters[index] = made.value;
                own.iter().zip(made.moments).for_each(|(position, moment)| next.slots[*position] = moment);
                squares.push(made.squares);
                continue;
            }
            let kept: Vec<Tensor<'t>> = kept.iter().map(|kept| kept.cast(DType::F32)).collect();
            let wide = value.cast(DType::F32);
            let gradient = match clipping_factor {
                Some(factor) => *gradient * factor.cast(gradient.dtype()),
                None => *gradient,
            };
            let gradient = gradient.cast(DType::F32);
            let (update, kept) = match &step {
                Step::Adam(step) => step.update(parameter, wide, gradient, &kept),
                Step::Sgd => (gradient, Vec::new()),
                Step::Muon(step) => step.update(parameter, wide, gradient, &kept),
                Step::Adafactor(step) => step.update(parameter, wide, gradient, &kept),
            };
            next.parameters[index] = (wide - update * learning_rate).cast(value.dtype());
            for (position, kept) in own.into_iter().zip(kept) {
                next.slots[position] = kept.cast(slots[position].dtype);
            }
            squares.push(sum_of_squares(next.parameters[index]));
        }
        Updated { values: next, squares }
    }

    /// The parts that treat parameters in their own way, as [`Slot::part`] names them, whether or not there are such
    /// parameters.
    pub fn parts(&self) -> &'static [&'static str] {
        match self {
            Self::Muon(_) => &[Muon::ADAM, Muon::MUON],
            _ => &[],
        }
    }

    /// The part and name of what may be kept, whether or not there are parameters that it is kept for.
    pub fn slot_names(&self) -> &'static [(Option<&'static str>, &'static str)] {
        match self {
            Self::Adam(_) => &[(None, "mu"), (None, "nu")],
            Self::Sgd => &[],
            Self::Muon(_) => &[(Some(Muon::ADAM), "mu"), (Some(Muon::ADAM), "nu"), (Some(Muon::MUON), "mu")],
            Self::Adafactor(_) => &[(None, "v"), (None, "v_row"), (None, "v_col")],
        }
    }

    /// The part that treats a parameter.
    pub fn part_of(&self, parameter: &Parameter) -> Option<&'static str> {
        match self {
            Self::Muon(_) => Some(if matrix(parameter).is_some() { Muon::MUON } else { Muon::ADAM }),
            _ => None,
        }
    }
}

impl Parameter {
    /// The positions of the axes that are one parameter's, without that of layers.
    pub(crate) fn own_axes(&self) -> std::ops::Range<usize> {
        usize::from(self.is_stacked)..self.axes.len()
    }

    /// The names of those axes.
    pub(crate) fn own_names(&self) -> Vec<&'static str> {
        self.axes[self.own_axes()].iter().map(|axis| axis.name).collect()
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
        let axes = (0..parameter.axes.len()).collect();
        Self { name, part: None, parameter: index, axes, dtype, order }
    }
}
