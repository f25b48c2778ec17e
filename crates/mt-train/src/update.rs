//! The update of parameters: clipping, the schedule, the optimizer, and skipped steps.

use std::collections::BTreeMap;

use mt_config::{LearningRateSchedule, OptimizerGroup, OptimizerSpace, OptimizerType, WsdDecayStyle};
use mt_models::{Affine, Model, OfLayers, StateArray};
use mt_nn::LayerPlace;
use mt_optim::{
    Adafactor, Adam, AdamForm, History, Muon, NewtonSchulz, Optimizer, Parameter, Schedule, ScheduleShape,
    SpikeGuard, StepForm, StepInputs, Updated, Values, clipping_factor, gradient_norm, norm,
};
use mt_shape::DType;
use mt_trace::Tensor;

use crate::{
    TrainError,
    derived::Derived,
    expert_loads::RoutingBiases,
    masks,
    metrics::names,
    query_key_clip::{QueryKeyClip, largest},
};

/// The rule by which gradients change the parameters.
pub(crate) struct UpdateRule {
    pub optimizer: Optimizer,
    /// The parameters as optimizers describe them, in the model's order, and the arrays of learned maps.
    pub parameters: Vec<Parameter>,
    /// Whether training can change each parameter. Others may be codes, whose squares mean nothing, or derived from others.
    are_trainable: Vec<bool>,
    pub schedule: Schedule,
    pub clipping_norm: Option<f64>,
    /// Detects spikes. A step that counts as a spike changes neither parameters nor slots.
    pub guard: Option<SpikeGuard>,
    /// Whether a training mask is set, even one that matches everything.
    pub masks_training: bool,
    /// Whether a mask of decaying parameters is set.
    pub masks_decay: bool,
    pub query_key_clip: Option<QueryKeyClip>,
    pub routing_biases: RoutingBiases,
    /// Patterns of `adamw_mask` that match no parameter name.
    pub idle_patterns: Vec<String>,
}

/// The state of training in a program.
#[derive(Clone)]
pub(crate) struct StateTensors<'t> {
    pub values: Values<'t>,
    /// The history for spike detection, and the number of steps that were not spikes.
    pub spikes: Option<(History<'t>, Tensor<'t>)>,
    /// The number of steps done.
    pub step: Tensor<'t>,
}

impl UpdateRule {
    /// The rule of a configuration.
    ///
    /// # Errors
    /// A mask does not fit the model's parameters, or QK-clip cannot be applied to the model.
    pub fn new(group: &OptimizerGroup, model: &dyn Model, derived: &Derived) -> Result<Self, TrainError> {
        let (parameters, idle) = parameters(group, model, derived)?;
        let idle_patterns = idle.into_iter().cloned().collect();
        Ok(Self { idle_patterns, ..Self::of_parameters(group, model, derived, parameters)? })
    }

    /// The same rule for `other`, which is `model` with the other value of `scan_layers`. `None` if the masks select
    /// other parameters in that model. No parameter is derived from others.
    pub fn of_other(&self, group: &OptimizerGroup, model: &dyn Model, other: &dyn Model) -> Option<Self> {
        let derived = Derived::none(other);
        let (parameters, _) = parameters(group, other, &derived).ok()?;
        let chosen = |model: &dyn Model, parameters: &[Parameter]| -> BTreeMap<_, _> {
            let arrays = StateArray::parameters(model);
            let of_array = |(array, parameter): (&StateArray, &Parameter)| {
                let chosen = (parameter.is_trained, parameter.decays);
                array
                    .layers()
                    .into_iter()
                    .map(|layer| ((array.role.clone(), layer), chosen))
                    .collect::<Vec<_>>()
            };
            arrays.iter().zip(parameters).flat_map(of_array).collect()
        };
        let is_same = chosen(model, &self.parameters) == chosen(other, &parameters);
        if is_same { Self::of_parameters(group, other, &derived, parameters).ok() } else { None }
    }

    fn of_parameters(
        group: &OptimizerGroup,
        model: &dyn Model,
        derived: &Derived,
        parameters: Vec<Parameter>,
    ) -> Result<Self, TrainError> {
        let query_key_clip =
            group.use_qk_clip.then(|| QueryKeyClip::new(group, model, &parameters)).transpose()?;
        Ok(Self {
            optimizer: optimizer(group),
            parameters,
            are_trainable: derived.all_specs(model).iter().map(|(_, spec)| spec.is_trainable).collect(),
            schedule: schedule(group),
            clipping_norm: group.clipping_norm(),
            guard: group.skip_step_on_spikes.then_some(SpikeGuard {
                interval: group.skip_step_interval,
                scaling_factor: group.skip_step_scaling_factor,
            }),
            masks_training: !group.trainable_parameters_mask.is_empty(),
            masks_decay: !group.adamw_mask.is_empty(),
            query_key_clip,
            routing_biases: RoutingBiases::new(group, model, &derived.names(model))?,
            idle_patterns: Vec::new(),
        })
    }

    /// The state after a step, and the step's metrics.
    pub fn update<'t>(
        &self,
        state: StateTensors<'t>,
        loss: Tensor<'t>,
        gradients: Vec<Tensor<'t>>,
        layer_outputs: &[OfLayers<'t>],
    ) -> (StateTensors<'t>, Vec<(&'static str, Tensor<'t>)>) {
        // The gradients of frozen parameters are dead code, which is removed from the program.
        let raw_norm = gradient_norm(&self.parameters, &gradients);
        let clipping_factor = self.clipping_norm.map(|threshold| clipping_factor(raw_norm, threshold));
        // The factor is rounded to the type of the gradients, as in the multiplication.
        let rounded = |factor: Tensor<'t>| factor.cast(gradients[0].dtype()).cast(DType::F32);
        let gradient_norm = clipping_factor.map_or(raw_norm, |factor| raw_norm * rounded(factor));
        let count = state.spikes.map_or(state.step, |(_, updates)| updates);
        let rate = self.schedule.at(count);
        let inputs = StepInputs {
            gradients: &gradients,
            clipping_factor,
            count,
            learning_rate: rate,
            keeps_values: self.guard.is_some(),
        };
        let Updated { values: mut next, squares } =
            self.optimizer.update(&self.parameters, &state.values, &inputs);
        if let Some(clip) = &self.query_key_clip {
            next.parameters = clip.clip(&next.parameters, layer_outputs);
        }
        next.parameters = self.routing_biases.update(next.parameters, layer_outputs);
        let mut reported = vec![(names::GRADIENT_NORM, gradient_norm), (names::RAW_GRADIENT_NORM, raw_norm)];
        let mut skipped = None;
        let spikes = self.guard.zip(state.spikes).map(|(guard, (history, updates))| {
            let (is_spike, history) = guard.judge(history, loss, raw_norm);
            let kept = |before: &[Tensor<'t>], after: &[Tensor<'t>]| -> Vec<Tensor<'t>> {
                before.iter().zip(after).map(|(before, after)| is_spike.select(*before, *after)).collect()
            };
            next = Values {
                parameters: kept(&state.values.parameters, &next.parameters),
                slots: kept(&state.values.slots, &next.slots),
            };
            skipped = Some((names::STEP_SKIPPED, is_spike.cast(DType::F32)));
            (history, is_spike.select(updates, updates + 1.0))
        });
        let is_changed = self.query_key_clip.is_some() || self.guard.is_some();
        let squares = match is_changed {
            true => self.squares(&next.parameters),
            false => squares,
        };
        let of_numbers = squares.iter().zip(&self.are_trainable).filter(|(_, is_trainable)| **is_trainable);
        let parameter_norm = norm(&of_numbers.map(|(squares, _)| *squares).collect::<Vec<_>>());
        reported.extend([(names::PARAMETER_NORM, parameter_norm), (names::LEARNING_RATE, rate)]);
        reported.extend(skipped);
        reported.extend(largest(layer_outputs).map(|largest| (names::LARGEST_SCORE, largest)));
        (StateTensors { values: next, spikes, step: state.step + 1.0 }, reported)
    }

    /// The sum of squares of each parameter, in the form that the optimizer steps.
    fn squares<'t>(&self, values: &[Tensor<'t>]) -> Vec<Tensor<'t>> {
        let pairs = self.parameters.iter().zip(values);
        pairs.map(|(parameter, value)| parameter.sum_of_squares(*value)).collect()
    }
}

/// The names of parameters by which masks select them.
pub(crate) fn stored_names(model: &dyn Model) -> Vec<String> {
    model.storage().iter().map(|stored| stored.key.join("/")).collect()
}

/// The parameters of a model and the arrays of learned maps as optimizers describe them, and the patterns of `adamw_mask`
/// that match none.
fn parameters<'a>(
    group: &'a OptimizerGroup,
    model: &dyn Model,
    derived: &Derived,
) -> Result<(Vec<Parameter>, Vec<&'a String>), TrainError> {
    let names = derived.names(model);
    let specs = derived.all_specs(model);
    let trained = masks::trained(&group.trainable_parameters_mask, &names)?;
    derived.check_trained(&trained, &names)?;
    let trained = masks::trainable(&trained, specs.iter().map(|(_, spec)| spec.is_trainable), &names)?;
    let (undecayed, idle) = masks::undecayed(&group.adamw_mask, &names)?;
    let arrays = derived.all_arrays(model);
    let forms = arrays.iter().map(|array| step_form(group.space, array.affine));
    let described = specs.into_iter().zip(forms).zip(trained).zip(undecayed);
    let parameters = described
        .map(|((((path, spec), form), is_trained), is_undecayed)| Parameter {
            path,
            axes: spec.axes,
            logical_axes: spec.logical_axes,
            dtype: spec.dtype,
            is_stacked: matches!(spec.place, LayerPlace::Stacked { .. }),
            num_group_axes: spec.num_group_axes,
            num_input_axes: spec.num_input_axes,
            is_trained,
            decays: !is_undecayed,
            form,
        })
        .collect();
    Ok((parameters, idle))
}

/// The form in which the optimizer steps a parameter, from the transform with which MaxText stores it.
fn step_form(space: OptimizerSpace, stored: Affine) -> StepForm {
    match space {
        OptimizerSpace::MaxText => StepForm { scale: stored.scale, offset: stored.offset },
        OptimizerSpace::Published => StepForm::VALUE,
    }
}

fn optimizer(group: &OptimizerGroup) -> Optimizer {
    let adam = |form: AdamForm| Adam {
        form,
        b1: group.adam_b1,
        b2: group.adam_b2,
        epsilon: group.adam_eps,
        epsilon_root: group.adam_eps_root,
        weight_decay: group.adam_weight_decay,
        first_moment_dtype: group.first_moment_dtype(),
    };
    match group.opt_type {
        OptimizerType::AdamW => Optimizer::Adam(adam(AdamForm::Standard)),
        OptimizerType::AdamPax => Optimizer::Adam(adam(AdamForm::Pax)),
        OptimizerType::Sgd => Optimizer::Sgd,
        OptimizerType::Muon => Optimizer::Muon(Muon {
            beta: group.muon_beta,
            epsilon: group.adam_eps,
            weight_decay: group.muon_weight_decay,
            consistent_rms: group.muon_consistent_rms,
            iterations: if group.is_of_deepseek4 { NewtonSchulz::Hybrid } else { NewtonSchulz::Usual },
            momentum_dtype: group.first_moment_dtype(),
            // optax passes its choice of momentum on to the Adam optimizer of the other parameters.
            adam: adam(AdamForm::Nesterov),
        }),
        OptimizerType::Adafactor => Optimizer::Adafactor(Adafactor::default()),
    }
}

fn schedule(group: &OptimizerGroup) -> Schedule {
    let fall_steps = group.wsd_decay_steps();
    Schedule {
        peak: group.learning_rate,
        warmup_steps: group.warmup_steps(),
        total_steps: group.schedule_steps(),
        final_fraction: group.learning_rate_final_fraction,
        shape: match (group.lr_schedule_type, group.wsd_decay_style) {
            (LearningRateSchedule::Cosine, _) => ScheduleShape::Cosine,
            (LearningRateSchedule::Linear, _) => ScheduleShape::Linear,
            (LearningRateSchedule::Constant, _) => ScheduleShape::Constant,
            (LearningRateSchedule::Wsd, WsdDecayStyle::Linear) => {
                ScheduleShape::StableThenLinear { fall_steps }
            }
            (LearningRateSchedule::Wsd, WsdDecayStyle::Cosine) => {
                ScheduleShape::StableThenCosine { fall_steps }
            }
        },
    }
}
