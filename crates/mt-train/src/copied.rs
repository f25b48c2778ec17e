//! Weights of a teacher with which those of its student begin (`distill_weights_copy_map`).

use mt_config::DistillationGroup;
use mt_models::Model;
use mt_nn::ParamSpec;
use mt_runtime::{Array, Runtime};

use crate::{
    TrainError,
    derived::Derived,
    name_pairs::{Names, name_pairs},
    objective::{FrozenModel, FrozenSource},
    state::TrainState,
    update::stored_names,
};

pub(crate) const COPY_MAP: &str = "distill_weights_copy_map";

/// A parameter of the teacher and the student's parameter that begins with its values, by their indices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Copied {
    pub from: usize,
    pub to: usize,
}

/// The teacher, if its model runs.
pub(crate) fn teacher_of(frozen: &[FrozenModel]) -> Option<&dyn Model> {
    match frozen.first() {
        Some(FrozenModel { source: FrozenSource::Loaded { model, .. }, .. }) => Some(&**model),
        _ => None,
    }
}

/// The parameters that a configuration copies. Those that `derived` copies into learned maps are not among them.
///
/// # Errors
/// A model has no parameter of that name, or the parameters differ in shape or type; a parameter is derived from others.
pub(crate) fn copied(
    group: &DistillationGroup,
    student: &dyn Model,
    frozen: &[FrozenModel],
    derived: &Derived,
) -> Result<Vec<Copied>, TrainError> {
    let Some(teacher) = teacher_of(frozen) else { return Ok(Vec::new()) };
    let [of_teacher, own] = [stored_names(teacher), stored_names(student)];
    let targets = [own.clone(), derived.names_of_frozen()].concat();
    let specs = [teacher.parameters(), student.parameters()];
    let wrong = |problem: String| TrainError::StudentWeights { key: COPY_MAP, problem };
    let pairs = name_pairs(
        COPY_MAP,
        &group.distill_weights_copy_map,
        &Names { of: "teacher", names: &of_teacher },
        &Names { of: "student", names: &targets },
    )?;
    let copied = pairs.into_iter().filter(|(_, to)| *to < own.len()).map(|(from, to)| {
        if let Some(reason) = derived.origin_of(to) {
            return Err(wrong(format!(
                "`{}` of the student is not copied, because {reason}\nhint: leave it out",
                own[to]
            )));
        }
        let [one, other] = [&specs[0][from].1, &specs[1][to].1];
        if (one.dims(), one.dtype) != (other.dims(), other.dtype) {
            let shape = |spec: &ParamSpec| format!("{}{:?}", spec.dtype, spec.dims());
            return Err(wrong(format!(
                "`{}` of the teacher is `{}`, but `{}` of the student is `{}`\nhint: copy parameters of the same \
                 shape and type (`weight_dtype`)",
                of_teacher[from],
                shape(one),
                own[to],
                shape(other)
            )));
        }
        Ok(Copied { from, to })
    });
    copied.collect()
}

/// Copies parameters of a teacher into the state of a fresh run. `teacher` are all its parameters.
pub(crate) fn copy(
    runtime: &Runtime,
    copied: &[Copied],
    teacher: &[Array],
    state: &mut TrainState,
) -> Result<(), TrainError> {
    for Copied { from, to } in copied {
        let (values, own) = (teacher[*from].to_host()?, &state.parameters()[*to]);
        let array = Array::from_host(runtime, &values, own.sharding())?.moved_to(runtime, own.memory())?;
        state.replace([(*to, array)]);
    }
    Ok(())
}
