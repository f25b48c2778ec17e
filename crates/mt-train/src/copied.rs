//! Weights of a teacher with which those of its student begin (`distill_weights_copy_map`).

use mt_config::DistillationGroup;
use mt_models::Model;
use mt_runtime::{Array, Runtime};
use serde_json::Value;

use crate::{
    TrainError,
    objective::{FrozenModel, FrozenSource},
    state::TrainState,
    update::stored_names,
};

/// A parameter of the teacher and the student's parameter that begins with its values, by their indices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Copied {
    pub from: usize,
    pub to: usize,
}

/// The parameters that a configuration copies.
///
/// # Errors
/// A model has no parameter of that name, or the parameters differ in shape or type.
pub(crate) fn copied(
    group: &DistillationGroup,
    student: &dyn Model,
    frozen: &[FrozenModel],
) -> Result<Vec<Copied>, TrainError> {
    let Some(FrozenModel { source: FrozenSource::Loaded { model: teacher, .. }, .. }) = frozen.first() else {
        return Ok(Vec::new());
    };
    let names = [stored_names(&**teacher), stored_names(student)];
    let specs = [teacher.parameters(), student.parameters()];
    let wrong = |problem: String| TrainError::CopiedWeights { problem };
    let find = |whose: &str, names: &[String], name: &str| {
        names.iter().position(|known| known == name).ok_or_else(|| {
            let near = mt_config::nearest_names(name, names.iter().map(String::as_str));
            let near: Vec<String> = near.iter().map(|name| format!("`{name}`")).collect();
            let hint = match near.is_empty() {
                true => format!("its parameters are such as `{}`", names.last().map_or("", String::as_str)),
                false => format!("did you mean {}?", near.join(" or ")),
            };
            wrong(format!("the {whose} has no parameter `{name}`\nhint: {hint}"))
        })
    };
    let pair = |(from, to): (&String, &Value)| {
        let to = to.as_str().ok_or_else(|| {
            let hint = "write the name of a parameter of the student, such as `{\"decoder/decoder_norm/scale\": \
                        \"decoder/decoder_norm/scale\"}`";
            wrong(format!("`{from}` is mapped to `{to}`, which is no name\nhint: {hint}"))
        })?;
        let copied = Copied { from: find("teacher", &names[0], from)?, to: find("student", &names[1], to)? };
        let [one, other] = [&specs[0][copied.from].1, &specs[1][copied.to].1];
        if (one.dims(), one.dtype) != (other.dims(), other.dtype) {
            let shape = |spec: &mt_nn::ParamSpec| format!("{}{:?}", spec.dtype, spec.dims());
            return Err(wrong(format!(
                "`{from}` of the teacher is `{}`, but `{to}` of the student is `{}`\nhint: copy parameters of the same \
                 shape and type (`weight_dtype`)",
                shape(one),
                shape(other)
            )));
        }
        Ok(copied)
    };
    group.distill_weights_copy_map.iter().map(pair).collect()
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
