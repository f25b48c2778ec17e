//! Learned linear maps from a teacher's attention to its student's (MaxText's learn-to-init).
//!
//! A projection of the student, `W[embed, u, v]` with heads `u` of width `v`, is computed from the teacher's
//! `C[embed, x, y]`, which stays as it is: `W = Σxy C[·, x, y] A[x, u] B[y, v]`, or `Σxy C[·, x, y] W[x, y, u, v]` with one map
//! of both axes. The output projection maps the same axes of `C[x, y, embed]`; its `B` is `[v, y]`. The equations hold for
//! kernels as MaxText stores them, with its constants folded in.

use std::collections::BTreeSet;

use mt_config::DistillationGroup;
use mt_models::{Affine, Model, StateArray, StoredParameter};
use mt_nn::{Initializer, LayerPlace, ParamSpec, axes::EMBED};
use mt_shape::{Axis, DType, Path, axis};
use mt_trace::Tensor;

use crate::{
    TrainError,
    copied::COPY_MAP,
    name_pairs::{Names, name_pairs},
    update::stored_names,
};

const MODE: &str = "learn_to_init_mode";
const PROJECTIONS: [&str; 4] = ["query", "key", "value", "out"];

const TEACHER_HEADS: &str = "teacher_heads";
const TEACHER_DIM: &str = "teacher_head_dim";

/// The tree of the maps in checkpoints. Readers of parameters see the student alone.
const TREE: &str = "learned_maps";

/// The share of random values in the structured first values, which lets gradients reach all elements.
const NOISE: f64 = 0.01;

/// A projection of the student and the map that computes it.
#[derive(Clone, Debug)]
pub(super) struct LearnedMap {
    /// The index of the student's parameter.
    pub student: usize,
    /// The index of the teacher's parameter.
    pub teacher: usize,
    /// The name under which MaxText's recipes copy the teacher's parameter into the map.
    pub name_of_frozen: String,
    pub arrays: Vec<MapArray>,
    spec: ParamSpec,
    /// The teacher's axes of heads and of their width.
    heads: &'static str,
    widths: &'static str,
    /// The factor between kernels as they are in memory, because the models fold different constants into stored ones.
    factor: f64,
}

/// A trained array of a map.
#[derive(Clone, Debug)]
pub(super) struct MapArray {
    pub path: Path,
    pub spec: ParamSpec,
    kind: Kind,
    stored: StoredParameter,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// `A`, the map of heads.
    Heads,
    /// `B`, the map within heads.
    Widths,
    /// `W`, the map of both.
    Both,
}

impl Kind {
    /// The name in MaxText.
    fn name(self) -> &'static str {
        match self {
            Self::Heads => "A",
            Self::Widths => "B",
            Self::Both => "W",
        }
    }
}

fn wrong(problem: String) -> TrainError {
    TrainError::StudentWeights { key: MODE, problem }
}

/// The maps of a configuration.
pub(super) fn of_config(
    group: &DistillationGroup,
    student: &dyn Model,
    teacher: &dyn Model,
) -> Result<Vec<LearnedMap>, TrainError> {
    let storage = student.storage();
    let specs = student.parameters();
    let names = [stored_names(student), stored_names(teacher)];
    let chosen = mapped_weights(group, &storage, &specs)?;
    let frozen_name = |index: usize| {
        let key = &storage[index].key;
        format!("{}/C", key[..key.len() - 1].join("/"))
    };
    let of_maps: Vec<String> = chosen.iter().map(|index| frozen_name(*index)).collect();
    let targets = [names[0].clone(), of_maps.clone()].concat();
    let copied = name_pairs(
        COPY_MAP,
        &group.distill_weights_copy_map,
        &Names { of: "teacher", names: &names[1] },
        &Names { of: "student", names: &targets },
    )?;
    let maps = chosen.iter().zip(of_maps).enumerate().map(|(number, (index, name_of_frozen))| {
        let named = copied.iter().find(|(_, to)| *to == names[0].len() + number).map(|(from, _)| *from);
        let same = || names[1].iter().position(|name| *name == names[0][*index]);
        let from = named.or_else(same).ok_or_else(|| {
            wrong(format!(
                "the teacher has no parameter `{}`, from which that of the student would be learned\nhint: give both \
                 models the same value of `scan_layers`, or name another one with `{COPY_MAP}`, whose target is \
                 `{name_of_frozen}`",
                names[0][*index]
            ))
        })?;
        LearnedMap::new(
            group.lti_use_general_linear_map,
            (*index, &specs[*index].1, &storage[*index]),
            (from, &teacher.parameters()[from].1, &teacher.storage()[from]),
            name_of_frozen,
        )
    });
    maps.collect()
}

/// The indices of the student's parameters that maps compute.
fn mapped_weights(
    group: &DistillationGroup,
    storage: &[StoredParameter],
    specs: &[(Path, ParamSpec)],
) -> Result<Vec<usize>, TrainError> {
    /// The module that holds a projection, its own name, and the name of the projection.
    fn split(key: &[String]) -> Option<(&[String], &str, &str)> {
        let [module @ .., projection, kernel] = key else { return None };
        let is_projection = PROJECTIONS.contains(&projection.as_str()) && kernel == "kernel";
        is_projection.then(|| (module, module.last().map_or("", String::as_str), projection.as_str()))
    }
    let has = |module: &[String], projection: &str| {
        let found = |stored: &StoredParameter| {
            split(&stored.key).is_some_and(|(other, _, own)| other == module && own == projection)
        };
        storage.iter().any(found)
    };
    let is_attention = |module: &[String]| PROJECTIONS.iter().all(|projection| has(module, projection));
    let mut modules = BTreeSet::new();
    let mut chosen = Vec::new();
    for (index, stored) in storage.iter().enumerate() {
        let Some((_, name, _)) = split(&stored.key).filter(|(module, ..)| is_attention(module)) else {
            continue;
        };
        modules.insert(name);
        if group.attn_module_name.as_deref().is_some_and(|wanted| wanted != name) {
            continue;
        }
        let layer = match specs[index].1.place {
            LayerPlace::One(layer) => Some(layer),
            LayerPlace::None | LayerPlace::Stacked { .. } => None,
        };
        let is_wanted = |layers: &Vec<usize>| layer.is_some_and(|layer| layers.contains(&layer));
        if group.lti_layer_indices.as_ref().is_none_or(is_wanted) {
            chosen.push(index);
        }
    }
    if !chosen.is_empty() {
        return Ok(chosen);
    }
    let known: Vec<String> = modules.into_iter().map(|name| format!("`{name}`")).collect();
    Err(wrong(match (&group.attn_module_name, known.is_empty()) {
        (_, true) => {
            "no layer of the student has attention with the projections `query`, `key`, `value` and `out`\n\
                      hint: choose another family as student, or leave out `learn_to_init_mode`"
                .to_owned()
        }
        (Some(name), false) if !known.contains(&format!("`{name}`")) => format!(
            "`attn_module_name` is `{name}`, and no attention of the student has that name\nhint: use {}, or leave it \
             out for all attention",
            known.join(" or ")
        ),
        _ => {
            "no layer of `lti_layer_indices` has attention\nhint: name layers of the student, counted from 0"
                .to_owned()
        }
    }))
}

impl LearnedMap {
    fn new(
        is_general: bool,
        (student, spec, stored): (usize, &ParamSpec, &StoredParameter),
        (teacher, from, stored_from): (usize, &ParamSpec, &StoredParameter),
        name_of_frozen: String,
    ) -> Result<Self, TrainError> {
        let name = stored.key.join("/");
        let stacked = usize::from(matches!(spec.place, LayerPlace::Stacked { .. }));
        let is_output = spec.axes.last().is_some_and(|axis| axis.name == EMBED);
        let of_heads = stacked + usize::from(!is_output);
        let in_place = |spec: &ParamSpec| -> Option<([Axis; 2], Vec<Axis>)> {
            let [heads, width] = spec.axes.get(of_heads..of_heads + 2)?.try_into().ok()?;
            let others = spec.axes.iter().filter(|axis| **axis != heads && **axis != width).copied();
            Some(([heads, width], others.collect()))
        };
        let fits = from.encoded.is_none() && from.axes.len() == spec.axes.len();
        let pair = in_place(spec).zip(in_place(from).filter(|_| fits));
        let Some((([heads, width], _), ([from_heads, from_width], _))) =
            pair.filter(|(own, other)| own.1 == other.1)
        else {
            let dims = |spec: &ParamSpec| format!("{:?}", spec.dims());
            return Err(wrong(format!(
                "`{name}` of the student is {}, but the teacher's `{}` is {}: a map changes heads and their width, not \
                 `emb_dim` or the number of scanned layers\nhint: give both models the same `base_emb_dim` and \
                 `base_num_decoder_layers`; with `scan_layers=false` `{COPY_MAP}` chooses a layer of the teacher for \
                 each of the student",
                dims(spec),
                stored_from.key.join("/"),
                dims(from)
            )));
        };
        let [x, y] = [axis(TEACHER_HEADS, from_heads.size), axis(TEACHER_DIM, from_width.size)];
        let kinds = if is_general { vec![Kind::Both] } else { vec![Kind::Heads, Kind::Widths] };
        let declare = |kind: Kind| {
            let (inputs, outputs) = match (kind, is_output) {
                (Kind::Heads, _) => (vec![x], vec![heads]),
                (Kind::Widths, false) => (vec![y], vec![width]),
                (Kind::Widths, true) => (vec![width], vec![y]),
                (Kind::Both, _) => (vec![x, y], vec![heads, width]),
            };
            MapArray::new(kind, [inputs, outputs], spec, stored)
        };
        Ok(Self {
            student,
            teacher,
            name_of_frozen,
            arrays: kinds.into_iter().map(declare).collect(),
            spec: spec.clone(),
            heads: from_heads.name,
            widths: from_width.name,
            factor: stored_from.scale / stored.scale,
        })
    }

    /// The student's parameter, from the arrays of the map and the teacher's parameter.
    pub fn weight<'t>(&self, arrays: &[Tensor<'t>], teacher: Tensor<'t>) -> Tensor<'t> {
        let from = teacher.cast(DType::F32).stop_gradient();
        let from = from.rename(self.heads, TEACHER_HEADS).rename(self.widths, TEACHER_DIM);
        let arrays: Vec<Tensor<'t>> = arrays.iter().map(|array| array.cast(DType::F32)).collect();
        let mapped = match arrays[..] {
            [heads, widths] => from.contract(heads, &[TEACHER_HEADS]).contract(widths, &[TEACHER_DIM]),
            _ => from.contract(arrays[0], &[TEACHER_HEADS, TEACHER_DIM]),
        };
        let scaled = if self.factor == 1.0 { mapped } else { mapped * self.factor };
        let names: Vec<&'static str> = self.spec.axes.iter().map(|axis| axis.name).collect();
        scaled.order(&names).cast(self.spec.dtype).constrain(&self.spec.logical_axes)
    }
}

impl MapArray {
    /// An array that maps `inputs` to `outputs`, beside the projection that `spec` declares.
    fn new(
        kind: Kind,
        [inputs, outputs]: [Vec<Axis>; 2],
        spec: &ParamSpec,
        stored: &StoredParameter,
    ) -> Self {
        let num_inputs = inputs.len();
        let own = [inputs, outputs].concat();
        // As JAX's `lecun_normal`, which takes all axes but the last as inputs.
        let fan_in = own[..own.len() - 1].iter().map(|axis| axis.size).product();
        let stacked = usize::from(matches!(spec.place, LayerPlace::Stacked { .. }));
        let logical = |axis: &Axis| {
            let position = spec.axes.iter().position(|own| own == axis);
            position.and_then(|position| spec.logical_axes[position])
        };
        let role = spec
            .role
            .rsplit_once('.')
            .map_or(kind.name().to_owned(), |(module, _)| format!("{module}.{}", kind.name()));
        let key: Vec<String> =
            stored.key[..stored.key.len() - 1].iter().cloned().chain([kind.name().to_owned()]).collect();
        let mut path = Path::default();
        for segment in &key {
            path = path.within(segment, |path| path.clone());
        }
        let declared = ParamSpec {
            logical_axes: [&spec.logical_axes[..stacked], &own.iter().map(logical).collect::<Vec<_>>()]
                .concat(),
            axes: [&spec.axes[..stacked], &own].concat(),
            dtype: spec.dtype,
            place: spec.place,
            role,
            num_input_axes: num_inputs,
            ..ParamSpec::new([], Initializer::fan_in(1.0, fan_in))
        };
        let layer_axis = (stacked == 1).then_some(1);
        Self {
            path,
            spec: declared,
            kind,
            stored: StoredParameter { layer_axis, ..StoredParameter::plain(key) },
        }
    }

    /// The name by which masks select the array.
    pub fn name(&self) -> String {
        self.stored.key.join("/")
    }

    /// The array in checkpoints.
    pub fn in_state(&self) -> StateArray {
        let key = std::iter::once(TREE).chain(self.stored.key.iter().map(String::as_str));
        StateArray {
            key: key.map(|segment| segment.to_owned().into()).collect(),
            stored: self.stored.clone(),
            affine: Affine::IDENTITY,
            dtype: self.spec.dtype,
            dims: self.spec.dims(),
            logical_axes: self.spec.logical_axes.clone(),
            split_over: None,
            place: self.spec.place,
            role: self.spec.role.clone(),
            encoded: None,
        }
    }

    /// The first values, from random ones: heads are means of groups of the teacher's heads, or the first of them; within
    /// heads, the first elements are the teacher's.
    pub fn first_values<'t>(&self, drawn: Tensor<'t>) -> Tensor<'t> {
        if self.kind == Kind::Both {
            return drawn;
        }
        let axes = drawn.axes();
        let [rows, columns] = [axes[axes.len() - 2], axes[axes.len() - 1]];
        let number = |axis: Axis| drawn.region().iota(DType::I32, axis).broadcast(&axes);
        let (row, column) = (number(rows), number(columns));
        let zeros = drawn.region().full(drawn.dtype(), &axes, 0.0);
        let group = rows.size / columns.size;
        if self.kind == Kind::Heads && group > 0 && rows.size % columns.size == 0 {
            let is_of_group = (row - row.remainder(group as f64)).equals(column * group as f64);
            return is_of_group.select(zeros + 1.0 / group as f64, zeros) + drawn * NOISE;
        }
        let structured = row.equals(column).select(zeros + 1.0, zeros) + drawn * NOISE;
        if self.kind == Kind::Heads {
            return structured;
        }
        let (number, overlap) = if columns.size > rows.size { (column, rows) } else { (row, columns) };
        number.less(overlap.size as f64).select(structured, drawn)
    }
}
