//! Parameters of a student that other arrays determine: attention that is a learned linear map of a teacher's
//! (`learn_to_init_mode`), and parameters that share an array (`distill_student_weights_share_map`); and the value model that
//! is trained beside a policy.
//!
//! The arrays of the maps are trained beside the model's parameters and follow them in the state. Each step computes the
//! derived parameters from them within the loss, which gives the maps their gradients, and once more after the update. So the
//! state, and with it every checkpoint, holds the student as a plain model.

mod maps;
mod value_model;

use std::{collections::HashSet, sync::Arc};

use mt_config::DistillationGroup;
use mt_models::{Model, StateArray};
use mt_nn::ParamSpec;
use mt_shape::Path;
use mt_trace::{Key, Region, Tensor};

use crate::{
    TrainError,
    copied::teacher_of,
    name_pairs::{Names, name_pairs},
    objective::FrozenModel,
    update::stored_names,
};

use maps::{LearnedMap, MapArray};
use value_model::ValueModel;

const SHARE_MAP: &str = "distill_student_weights_share_map";

/// The derived parameters of a trained model.
#[derive(Debug)]
pub(crate) struct Derived {
    /// The number of the model's parameters, which the arrays of the maps follow.
    num_parameters: usize,
    maps: Vec<LearnedMap>,
    shared: Vec<Shared>,
    /// Its parameters follow the arrays of the maps.
    value_model: Option<ValueModel>,
}

/// A parameter or an array of a map that has the values of another one, by their indices.
#[derive(Clone, Debug)]
struct Shared {
    from: usize,
    to: usize,
    /// The factor and the summand between the values, which are equal in the form that MaxText stores.
    factor: f64,
    offset: f64,
    spec: ParamSpec,
}

impl Derived {
    /// No derived parameters of this model.
    pub fn none(model: &dyn Model) -> Self {
        let num_parameters = model.parameters().len();
        Self { num_parameters, maps: Vec::new(), shared: Vec::new(), value_model: None }
    }

    /// The derived parameters of a configuration.
    ///
    /// # Errors
    /// A name does not exist, or parameters do not fit each other.
    pub fn new(
        group: &DistillationGroup,
        student: &dyn Model,
        frozen: &[FrozenModel],
    ) -> Result<Self, TrainError> {
        let maps = match teacher_of(frozen).filter(|_| group.learn_to_init_mode) {
            Some(teacher) => maps::of_config(group, student, teacher)?,
            None => Vec::new(),
        };
        let mut derived = Self { maps, ..Self::none(student) };
        derived.shared = derived.shared_of(group, student)?;
        Ok(derived)
    }

    fn shared_of(&self, group: &DistillationGroup, student: &dyn Model) -> Result<Vec<Shared>, TrainError> {
        let wrong = |problem: String| TrainError::StudentWeights { key: SHARE_MAP, problem };
        let names = self.names(student);
        let of_student = Names { of: "student", names: &names };
        let pairs =
            name_pairs(SHARE_MAP, &group.distill_student_weights_share_map, &of_student, &of_student)?;
        let (specs, arrays) = (self.all_specs(student), self.all_arrays(student));
        let mut taken = HashSet::new();
        for (from, to) in &pairs {
            let [one, other] = [*from, *to].map(|index| (&names[index], &specs[index].1));
            if from == to || !taken.insert(*to) {
                let hint = "map each parameter that takes the values of another one once";
                return Err(wrong(format!("`{}` would take several values\nhint: {hint}", other.0)));
            }
            if let Some(index) = [*from, *to].into_iter().find(|index| self.map_of(*index).is_some()) {
                return Err(wrong(format!(
                    "`{}` is computed by a learned map\nhint: share the arrays of the maps, such as `…/query/A`",
                    names[index]
                )));
            }
            if one.1.dims() != other.1.dims() || one.1.dtype != other.1.dtype {
                let shape = |spec: &ParamSpec| format!("{}{:?}", spec.dtype, spec.dims());
                return Err(wrong(format!(
                    "`{}` is `{}`, but `{}` is `{}`\nhint: share parameters of the same shape and type",
                    one.0,
                    shape(one.1),
                    other.0,
                    shape(other.1)
                )));
            }
        }
        if let Some((from, to)) = pairs.iter().find(|(from, _)| taken.contains(from)) {
            let (from, to) = (&names[*from], &names[*to]);
            let hint = format!("let `{to}` take the values of the first of the chain");
            return Err(wrong(format!(
                "`{from}`, whose values `{to}` takes, takes those of another one\nhint: {hint}"
            )));
        }
        let shared = pairs.into_iter().map(|(from, to)| {
            let [one, other] = [from, to].map(|index| arrays[index].affine);
            let (factor, offset) = (one.scale / other.scale, (one.offset - other.offset) / other.scale);
            Shared { from, to, factor, offset, spec: specs[to].1.clone() }
        });
        Ok(shared.collect())
    }

    /// The same derived parameters beside a value model, if there is one.
    #[must_use]
    pub fn beside(self, value_model: Option<Arc<dyn Model>>) -> Self {
        Self { value_model: value_model.map(ValueModel), ..self }
    }

    /// The value model.
    pub fn value_model(&self) -> Option<&Arc<dyn Model>> {
        self.value_model.as_ref().map(|value_model| &value_model.0)
    }

    /// The number of the trained model's own parameters, which come first.
    pub fn num_parameters(&self) -> usize {
        self.num_parameters
    }

    /// The index of the first parameter of the value model, or the end of all.
    pub fn first_of_value_model(&self) -> usize {
        self.num_parameters + self.arrays().count()
    }

    /// Whether the model has no derived parameters.
    pub fn is_empty(&self) -> bool {
        self.maps.is_empty() && self.shared.is_empty()
    }

    /// Whether the model's own parameters are all that is trained, none derived from others.
    pub fn is_plain(&self) -> bool {
        self.is_empty() && self.value_model.is_none()
    }

    /// The arrays of all maps.
    fn arrays(&self) -> impl Iterator<Item = &MapArray> {
        self.maps.iter().flat_map(|map| &map.arrays)
    }

    /// The specifications of the arrays of the maps.
    fn map_specs(&self) -> impl Iterator<Item = (Path, ParamSpec)> {
        self.arrays().map(|array| (array.path.clone(), array.spec.clone()))
    }

    /// The parameters of the model, the arrays of the maps, and the parameters of the value model. Derived ones cannot be
    /// trained.
    pub fn all_specs(&self, model: &dyn Model) -> Vec<(Path, ParamSpec)> {
        let mut specs = model.parameters();
        specs.extend(self.map_specs());
        specs.extend(self.value_model.iter().flat_map(ValueModel::specs));
        for index in self.indices() {
            specs[index].1.is_trainable = false;
        }
        specs
    }

    /// The arrays of [`Self::all_specs`] as checkpoints hold them.
    pub fn all_arrays(&self, model: &dyn Model) -> Vec<StateArray> {
        let mut arrays = StateArray::parameters(model);
        arrays.extend(self.arrays().map(MapArray::in_state));
        arrays.extend(self.value_model.iter().flat_map(ValueModel::arrays));
        arrays
    }

    /// The names of [`Self::all_specs`], by which masks and maps of names select them.
    pub fn names(&self, model: &dyn Model) -> Vec<String> {
        let mut names = stored_names(model);
        names.extend(self.arrays().map(MapArray::name));
        names.extend(self.value_model.iter().flat_map(ValueModel::names));
        names
    }

    /// The names under which MaxText's recipes copy a teacher's weights into maps.
    pub fn names_of_frozen(&self) -> Vec<String> {
        self.maps.iter().map(|map| map.name_of_frozen.clone()).collect()
    }

    /// The indices of the derived parameters and arrays.
    pub fn indices(&self) -> Vec<usize> {
        let of_maps = self.maps.iter().map(|map| map.student);
        of_maps.chain(self.shared.iter().map(|shared| shared.to)).collect()
    }

    fn map_of(&self, index: usize) -> Option<&LearnedMap> {
        self.maps.iter().find(|map| map.student == index)
    }

    /// How a parameter is derived; `None` if it has values of its own.
    pub fn origin_of(&self, index: usize) -> Option<&'static str> {
        if self.map_of(index).is_some() {
            return Some("a learned map computes it from the teacher's");
        }
        self.shared.iter().any(|shared| shared.to == index).then_some("it takes the values of another one")
    }

    /// Checks that a parameter with values of its own is trained.
    ///
    /// # Errors
    /// All chosen parameters are derived from others.
    pub fn check_trained(&self, trained: &[bool], names: &[String]) -> Result<(), TrainError> {
        let derived = self.indices();
        let mut chosen = (0..trained.len()).filter(|index| trained[*index]);
        let Some(first) = chosen.next() else { return Ok(()) };
        if !derived.contains(&first) || chosen.any(|index| !derived.contains(&index)) {
            return Ok(());
        }
        let reason = self.origin_of(first).unwrap_or_default();
        Err(TrainError::StudentWeights {
            key: "student_params_to_update",
            problem: format!(
                "`{}` is not trained, because {reason}\nhint: name the arrays of the maps, such as \
                 `self_attention/query/(A|B)$`, or the parameter whose values are shared",
                names[first]
            ),
        })
    }

    /// The first values of the arrays of the maps and of the value model.
    pub fn draw<'t>(&self, region: Region<'t>, key: Key<'t>) -> Vec<Tensor<'t>> {
        let specs: Vec<(Path, ParamSpec)> = self.map_specs().collect();
        let drawn = mt_nn::initialize(region, key, &specs);
        let mut first: Vec<Tensor<'t>> =
            self.arrays().zip(drawn).map(|(array, drawn)| array.first_values(drawn)).collect();
        if let Some(value_model) = &self.value_model {
            first.extend(mt_nn::initialize(region, key, &value_model.specs()));
        }
        first
    }

    /// Computes derived values. `all` are the model's parameters and the arrays of the maps, `frozen` the parameters of the
    /// frozen models.
    pub fn apply<'t>(&self, all: &mut [Tensor<'t>], frozen: &[Vec<Tensor<'t>>]) {
        for Shared { from, to, factor, offset, spec } in &self.shared {
            let mut value = all[*from];
            for (own, other) in value.axes().iter().zip(&spec.axes) {
                value = value.rename(own.name, other.name);
            }
            if (*factor, *offset) != (1.0, 0.0) {
                value = (value * *factor) + *offset;
            }
            all[*to] = value.constrain(&spec.logical_axes);
        }
        let mut first = self.num_parameters;
        for map in &self.maps {
            let arrays = &all[first..first + map.arrays.len()];
            first += map.arrays.len();
            all[map.student] = map.weight(arrays, frozen[0][map.teacher]);
        }
    }
}
