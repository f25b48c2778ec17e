//! The device mesh and the placement rules.

use std::collections::BTreeSet;

use mt_shape::{HybridAxis, LogicalRules, Mesh, PartitionSpec, Placement, PlacementNote, Topology};

use super::{
    FromValue, Hardware, ObjectiveGroup, ShardMode,
    data::{Sequences, is_short},
    group, read,
};
use crate::{
    CompileTopology,
    coerce::coerce,
    config::Config,
    error::{ConfigError, Problem},
    key::Class,
    named::nearest_names,
    notice::Notice,
    origin::Origin,
    resolve::MESHES,
    table,
    yaml::{self, Embedded},
};

/// Mesh axes, each with what the keys of its sizes are called: `ici_STEM_parallelism` and `dcn_STEM_parallelism`.
pub(crate) const MESH_AXES: &[(&str, &str)] = &[
    ("diloco", "diloco"),
    ("data", "data"),
    ("stage", "pipeline"),
    ("fsdp", "fsdp"),
    ("fsdp_transpose", "fsdp_transpose"),
    ("sequence", "sequence"),
    ("context", "context"),
    ("context_usp_ulysses", "context_usp_ulysses"),
    ("context_autoregressive", "context_autoregressive"),
    ("tensor", "tensor"),
    ("tensor_transpose", "tensor_transpose"),
    ("tensor_sequence", "tensor_sequence"),
    ("expert", "expert"),
    ("autoregressive", "autoregressive"),
];

/// How many devices, or slices, each mesh axis has; -1 takes those that are left.
#[derive(Clone, Debug, PartialEq)]
pub struct Parallelism {
    /// `ici` within a slice, `dcn` over slices.
    network: &'static str,
    /// The axes whose keys have an effect.
    sizes: Vec<AxisSize>,
    /// The preset whose mesh axes these are, where it is not the mesh of training.
    preset_for_eval: Option<String>,
    /// `compile_topology`, where the devices are those of hardware that is not there.
    absent: Option<String>,
}

/// The size of one mesh axis as a key sets it.
#[derive(Clone, Debug, PartialEq)]
struct AxisSize {
    axis: &'static str,
    key: &'static str,
    size: i64,
    origin: Origin,
}

impl AxisSize {
    /// The key with its value and where it comes from, as messages name it.
    fn stated(&self) -> String {
        format!("`{}` is `{}` ({})", self.key, self.size, self.origin)
    }
}

impl Parallelism {
    fn read(network: &'static str, config: &Config, problems: &mut Vec<Problem>) -> Self {
        let sizes = MESH_AXES.iter().filter_map(|(axis, stem)| {
            let key = table::lookup(&format!("{network}_{stem}_parallelism"))?;
            let entry = config.entry(key.name);
            let size = (key.class == Class::Effective).then(|| read(config, key.name, problems))??;
            Some(AxisSize { axis, key: key.name, size, origin: entry.origin.clone() })
        });
        Self {
            network,
            sizes: sizes.collect(),
            preset_for_eval: None,
            absent: config.absent_hardware().map(str::to_owned),
        }
    }
}

group! {
    /// The mesh of devices and what is split over its axes.
    pub struct PlacementGroup {
        mesh_axes: Vec<String>,
        logical_axis_rules: LogicalRules,
        input_data_sharding_logical_axes: Vec<String>,
        sharding_tolerance: f64,
        shard_mode: ShardMode,
        num_slices: i64,
        num_cpu_slices: usize,
        shard_optimizer_over_data: bool,
        logical_axis_rules_for_eval: LogicalRules,
        custom_mesh_and_rule_for_eval: Option<String>,
    }
    besides {
        ici: Parallelism = |config, problems| Some(Parallelism::read("ici", config, problems)),
        dcn: Parallelism = |config, problems| Some(Parallelism::read("dcn", config, problems)),
        slices_origin: SlicesOrigin = |config, _| {
            let origin = |name| config.entry(name).origin.clone();
            Some(SlicesOrigin { num_slices: origin("num_slices"), num_cpu_slices: origin("num_cpu_slices") })
        },
        preset_for_eval: Option<MeshAndRules> = |config, _| Some(MeshAndRules::for_evaluation(config)),
        mesh_axes_origin: Origin = |config, _| Some(config.entry("mesh_axes").origin.clone()),
        rules_origin: Origin = |config, _| Some(config.entry("logical_axis_rules").origin.clone()),
        shard_mode_origin: Origin = |config, _| Some(config.entry("shard_mode").origin.clone()),
        absent: Option<String> = |config, _| Some(config.absent_hardware().map(str::to_owned)),
    }
}

/// Mesh axes with the rules that belong to them.
#[derive(Clone, Debug, PartialEq)]
pub struct MeshAndRules {
    mesh_axes: Vec<String>,
    rules: LogicalRules,
}

impl MeshAndRules {
    /// What `custom_mesh_and_rule_for_eval` names.
    fn for_evaluation(config: &Config) -> Option<Self> {
        let name = config.entry("custom_mesh_and_rule_for_eval").value.as_str()?;
        let settings = yaml::embedded(Embedded::Preset, &format!("{MESHES}/{name}"))?;
        let value = |name: &str| {
            let setting = settings.iter().find(|setting| setting.name == name)?;
            coerce(table::lookup(name)?, &setting.value).ok()
        };
        Some(Self {
            mesh_axes: Vec::from_value(&value("mesh_axes")?)?,
            rules: LogicalRules::from_value(&value("logical_axis_rules")?)?,
        })
    }
}

/// Where the numbers of slices come from.
#[derive(Clone, Debug, PartialEq)]
pub struct SlicesOrigin {
    num_slices: Origin,
    num_cpu_slices: Origin,
}

/// The logical axis of the positions of hidden states.
const HIDDEN_POSITIONS: &str = "activation_norm_length";

/// As many as `num_cpu_devices` may be.
const MOST_CPU_DEVICES: usize = 4096;

/// As many as `compile_topology_num_slices` may be.
const MOST_ABSENT_SLICES: usize = 1024;

impl PlacementGroup {
    fn check(&self, config: &Config, problems: &mut Vec<Problem>) {
        for (index, axis) in self.mesh_axes.iter().enumerate() {
            if self.mesh_axes[..index].contains(axis) {
                problems.push(Problem::inconsistent(
                    format!("`mesh_axes` ({}) names `{axis}` twice", config.entry("mesh_axes").origin),
                    "name each mesh axis once",
                ));
            }
            // Presets for other programs have axes of theirs.
            let is_known = MESH_AXES.iter().any(|(known, _)| known == axis);
            if !is_known && !matches!(self.mesh_axes_origin, Origin::Preset { .. }) {
                let known = MESH_AXES.iter().map(|(known, _)| *known);
                let near: Vec<String> =
                    nearest_names(axis, known.clone()).into_iter().map(|name| format!("`{name}`")).collect();
                let hint = match near.is_empty() {
                    true => format!("the mesh axes are {}", known.collect::<Vec<_>>().join(", ")),
                    false => format!("did you mean {}?", near.join(" or ")),
                };
                problems.push(Problem::inconsistent(
                    format!(
                        "`mesh_axes` ({}) names `{axis}`, which there is not: no key gives it a size",
                        self.mesh_axes_origin
                    ),
                    hint,
                ));
            }
        }
        for (name, axes) in &self.logical_axis_rules.0 {
            let twice = axes.iter().enumerate().find(|(index, axis)| axes[..*index].contains(axis));
            if let Some((_, axis)) = twice {
                problems.push(Problem::inconsistent(
                    format!(
                        "the rule for `{name}` in `logical_axis_rules` ({}) names `{axis}` twice",
                        self.rules_origin
                    ),
                    "name each mesh axis once in a rule: a dimension is split over it once",
                ));
            }
        }
        for parallelism in [&self.ici, &self.dcn] {
            let sizes = &parallelism.sizes;
            let filled: Vec<String> =
                sizes.iter().filter(|axis| axis.size == -1).map(AxisSize::stated).collect();
            if filled.len() > 1 {
                problems.push(Problem::inconsistent(
                    format!("{}, but only one axis can take what is left", filled.join(" and ")),
                    "give all but one of them a size: 1 for an axis that splits nothing",
                ));
            }
            for of_axis in sizes {
                let &AxisSize { axis, key, size, .. } = of_axis;
                if size == 0 {
                    problems.push(Problem::inconsistent(
                        format!("{}, which leaves no device", of_axis.stated()),
                        "use 1 for an axis that splits nothing, or -1 for one that takes the devices that are left",
                    ));
                }
                let is_in_mesh = self.mesh_axes.iter().any(|name| name == axis);
                if size > 1 && !is_in_mesh {
                    problems.push(Problem::inconsistent(
                        format!(
                            "{}, but `mesh_axes` ({}) has no `{axis}`",
                            of_axis.stated(),
                            config.entry("mesh_axes").origin
                        ),
                        format!("add `{axis}` to `mesh_axes`, or leave out `{key}`"),
                    ));
                }
                let ruled =
                    self.logical_axis_rules.0.iter().any(|(_, axes)| axes.iter().any(|name| name == axis));
                // The one axis that is for a cache.
                let logical = if axis == "context_autoregressive" { "cache_sequence" } else { "embed" };
                if size > 1 && is_in_mesh && !ruled {
                    problems.push(Problem::inconsistent(
                        format!(
                            "{}, but no rule of `logical_axis_rules` ({}) names `{axis}`",
                            of_axis.stated(),
                            config.entry("logical_axis_rules").origin
                        ),
                        format!("add a rule such as `['{logical}', '{axis}']`, or leave out `{key}`"),
                    ));
                }
            }
        }
    }

    /// The devices by slice: as they say of themselves, or as `num_cpu_slices` deals those that do not.
    ///
    /// # Errors
    /// The slices have different sizes, or they are not as many as `num_slices` says.
    pub fn topology(&self, num_devices: usize, slices: Option<&[i64]>) -> Result<Topology, ConfigError> {
        if let (Some(name), None, 2..) = (&self.absent, slices, self.num_cpu_slices) {
            let (slices, origin) = (self.num_cpu_slices, &self.slices_origin.num_cpu_slices);
            return Err(Problem::inconsistent(
                format!(
                    "`num_cpu_slices` is `{slices}` ({origin}), but the devices are those of `compile_topology={name}`"
                ),
                format!("leave it out; `compile_topology_num_slices={slices}` is for as many slices"),
            )
            .into());
        }
        let topology = match slices {
            Some(slices) => Topology::of_slices(slices).map_err(|error| {
                Problem::inconsistent(error.to_string(), "use slices of one size: a mesh is a grid")
            })?,
            None => Topology::even(num_devices, self.num_cpu_slices).map_err(|_| {
                let (slices, origin) = (self.num_cpu_slices, &self.slices_origin.num_cpu_slices);
                Problem::inconsistent(
                    format!(
                        "`num_cpu_slices` is `{slices}` ({origin}), which does not divide the {num_devices} devices"
                    ),
                    "choose a number of slices that divides that of the devices, which `num_cpu_devices` is",
                )
            })?,
        };
        let found = topology.num_slices();
        if self.num_slices > 0 && self.num_slices != found as i64 {
            let (slices, origin) = (self.num_slices, &self.slices_origin.num_slices);
            let as_many = match self.absent {
                Some(_) => format!("`compile_topology_num_slices={slices}` is for as many"),
                None => format!("on a CPU, `num_cpu_slices={slices}` deals its devices to as many"),
            };
            return Err(Problem::inconsistent(
                format!(
                    "`num_slices` is `{slices}` ({origin}), but the devices are of {}",
                    counted(found, "slice")
                ),
                format!("leave out `num_slices`, which are counted; {as_many}"),
            )
            .into());
        }
        Ok(topology)
    }

    /// The mesh of these devices, with the axes of size -1 filled in.
    ///
    /// # Errors
    /// The parallelisms and the number of devices do not fit.
    pub fn mesh(&self, devices: impl Into<Topology>) -> Result<Mesh, ConfigError> {
        let topology = devices.into();
        let ici = self.ici.filled(topology.slice_size(), topology.num_slices())?;
        let dcn = self.dcn.filled(topology.num_slices(), topology.num_slices())?;
        for (parallelism, sizes) in [(&self.ici, &ici), (&self.dcn, &dcn)] {
            for (of_axis, (name, size)) in parallelism.sizes.iter().zip(sizes) {
                if *size > 1 && !self.mesh_axes.iter().any(|axis| axis == name) {
                    return Err(Problem::inconsistent(
                        format!(
                            "{}, which takes {size} {}, but `mesh_axes` ({}) has no `{name}`",
                            of_axis.stated(),
                            if parallelism.network == "dcn" { "slices" } else { "devices" },
                            self.mesh_axes_origin
                        ),
                        format!("set `{}=1`, and give another axis -1", of_axis.key),
                    )
                    .into());
                }
            }
        }
        let size = |sizes: &[(&str, usize)], axis: &str| {
            sizes.iter().find(|(name, _)| *name == axis).map_or(1, |(_, size)| *size)
        };
        let axes: Vec<HybridAxis> = self
            .mesh_axes
            .iter()
            .map(|axis| HybridAxis {
                name: axis.clone(),
                within_slice: size(&ici, axis),
                over_slices: size(&dcn, axis),
            })
            .collect();
        Mesh::hybrid(&axes, &topology).map_err(|error| {
            Problem::inconsistent(error.to_string(), "`maxtext config explain mesh_axes` lists the axes")
                .into()
        })
    }

    /// The mesh together with the rules.
    ///
    /// # Errors
    /// The parallelisms and the number of devices do not fit.
    pub fn placement(&self, devices: impl Into<Topology>) -> Result<Placement, ConfigError> {
        Ok(Placement::new(self.mesh(devices)?, self.logical_axis_rules.clone()))
    }

    /// Checks that no rule asked for a split that the size of a dimension does not allow.
    fn check_carried_out(&self, placement: &Placement) -> Result<(), ConfigError> {
        let problem = |note: &PlacementNote| {
            Problem::inconsistent(
                format!("`shard_mode` is `explicit` ({}), but {note}", self.shard_mode_origin),
                "change the mesh or the rule so that the size divides the dimension, or use \
                 `shard_mode=auto`, which leaves the dimension whole",
            )
        };
        ConfigError::check((), placement.notes().iter().map(problem).collect())
    }

    /// Checks that everything in mesh and rules has an effect on a program whose arrays have all been placed, and
    /// returns warnings and notes.
    ///
    /// # Errors
    /// Nothing is split over a mesh axis that the user asked for, or `shard_mode=explicit` and a rule cannot be
    /// carried out.
    pub fn check_use(&self, placement: &Placement) -> Result<Vec<Notice>, ConfigError> {
        if self.shard_mode == ShardMode::Explicit {
            self.check_carried_out(placement)?;
        }
        let origin = &self.rules_origin;
        let (mut messages, note) = self.rules_without_effect(placement);
        messages.extend(note);
        for (axis, size) in placement.idle_mesh_axes() {
            let sizes = [&self.ici, &self.dcn].map(|of| of.sizes.iter().find(|size| size.axis == axis));
            let asked = sizes.into_iter().flatten().find(|size| size.origin.is_given() && size.size != 1);
            let reason = format!("no rule of `logical_axis_rules` ({origin}) splits anything over `{axis}`");
            let rule = format!("add a rule such as `['embed', '{axis}']`");
            match asked {
                Some(asked) => {
                    return Err(Problem::inconsistent(
                        format!("{}, but {reason}", asked.stated()),
                        format!("{rule}, or leave out `{}`", asked.key),
                    )
                    .into());
                }
                None => messages.push(Notice::Warning(format!(
                    "the {size} devices along mesh axis `{axis}` all compute the same: {reason}\n\
                     hint: {rule}, or give the devices to an axis that rules name"
                ))),
            }
        }
        Ok(messages)
    }

    /// Warnings about rules of the user's that name axes which there are not, of a program whose weights and caches have
    /// been placed.
    pub fn misspelled_rules(&self, placement: &Placement) -> Vec<Notice> {
        self.rules_without_effect(placement).0
    }

    /// Warnings about rules of the user's that name what there is not, and notes about those that nothing needs.
    fn rules_without_effect(&self, placement: &Placement) -> (Vec<Notice>, Option<Notice>) {
        let key = table::lookup("logical_axis_rules").expect("the key is in the table");
        let usual = LogicalRules::from_value(&key.default.value()).expect("the default is of the key's kind");
        if !self.rules_origin.is_given() {
            return (Vec::new(), None);
        }
        let own = self.logical_axis_rules.0.iter().filter(|rule| !usual.0.contains(rule));
        let known_axes: BTreeSet<&str> = MESH_AXES
            .iter()
            .map(|(axis, _)| *axis)
            .chain(self.mesh_axes.iter().map(String::as_str))
            .collect();
        let used = placement.logical_axes();
        let known_names: BTreeSet<&str> =
            usual.0.iter().map(|(name, _)| name).chain(&used).map(String::as_str).collect();
        let mut unknown = Vec::new();
        let mut idle = BTreeSet::new();
        for (name, axes) in own {
            let strange = axes.iter().find(|axis| !known_axes.contains(axis.as_str()));
            if let Some(axis) = strange {
                unknown.push(("mesh", axis.as_str(), did_you_mean(axis, &known_axes)));
            }
            // On one device nothing is placed.
            if placement.mesh().num_devices() == 1 || used.contains(name) {
                continue;
            }
            if known_names.contains(name.as_str()) {
                idle.insert(format!("`{name}`"));
            } else {
                unknown.push(("logical", name.as_str(), did_you_mean(name, &known_names)));
            }
        }
        let origin = &self.rules_origin;
        let warning = |(kind, name, hint): (&str, &str, String)| {
            Notice::Warning(format!(
                "`logical_axis_rules` ({origin}) names the {kind} axis `{name}`, which does not exist\nhint: {hint}"
            ))
        };
        let note = (!idle.is_empty()).then(|| {
            let names = idle.into_iter().collect::<Vec<_>>().join(", ");
            Notice::Note(format!(
                "nothing in this program has the logical axes {names} of `logical_axis_rules` ({origin})"
            ))
        });
        (unknown.into_iter().map(warning).collect(), note)
    }

    /// The group as it is in evaluation: with the mesh and rules that `custom_mesh_and_rule_for_eval` names, and the
    /// rules of `logical_axis_rules_for_eval`. Axes that only the mesh for training has split nothing then.
    pub fn for_evaluation(&self) -> Self {
        let mut group = self.clone();
        if let Some(MeshAndRules { mesh_axes, rules }) = self.preset_for_eval.clone() {
            for parallelism in [&mut group.ici, &mut group.dcn] {
                parallelism.sizes.retain(|size| mesh_axes.iter().any(|axis| axis == size.axis));
                parallelism.preset_for_eval = self.custom_mesh_and_rule_for_eval.clone();
            }
            (group.mesh_axes, group.logical_axis_rules) = (mesh_axes, rules);
            group.mesh_axes_origin = Origin::Preset {
                name: format!(
                    "{MESHES}/{}",
                    self.custom_mesh_and_rule_for_eval.as_deref().unwrap_or_default()
                ),
                line: 1,
            };
        }
        if !self.logical_axis_rules_for_eval.0.is_empty() {
            group.logical_axis_rules = self.logical_axis_rules_for_eval.clone();
        }
        group
    }

    /// Whether each axis of a training batch has a logical name.
    pub(super) fn check_batch_axes(&self, config: &Config, problems: &mut Vec<Problem>) {
        let names = &self.input_data_sharding_logical_axes;
        if names.len() != 2 {
            problems.push(Problem::inconsistent(
                format!(
                    "{}, but a batch has two axes, sequences and their tokens",
                    config.stated("input_data_sharding_logical_axes")
                ),
                "name the logical axis of each, such as `input_data_sharding_logical_axes=['activation_embed_and_logits_batch','activation_norm_length']`",
            ));
        }
    }

    /// Into how many parts the rules split a batch on this mesh.
    pub fn num_batch_parts(&self, mesh: &Mesh) -> usize {
        self.batch_axes(mesh).iter().filter_map(|axis| mesh.axis_size(axis)).product()
    }

    /// The mesh axes over which the rules split the sequences of a batch, however many there are.
    fn batch_axes(&self, mesh: &Mesh) -> Vec<String> {
        let names: Vec<Option<&str>> =
            self.input_data_sharding_logical_axes.iter().map(|name| Some(name.as_str())).collect();
        // Every product of axes divides the number of devices.
        let dims = vec![mesh.num_devices(); names.len()];
        let placement = Placement::new(mesh.clone(), self.logical_axis_rules.clone());
        let PartitionSpec(axes) = placement.sharding(&names, &dims).spec;
        axes.into_iter().next().unwrap_or_default()
    }

    /// The keys of axes that split something else than the batch, as a hint names them.
    fn beside_batch(&self, mesh: &Mesh) -> String {
        let of_batch = self.batch_axes(mesh);
        let names = |axis: &&str| {
            let rules = &self.logical_axis_rules.0;
            let logical = self.input_data_sharding_logical_axes.first();
            let splits = |of_batch: bool| {
                rules.iter().any(|(name, axes)| {
                    (Some(name) == logical) == of_batch && axes.iter().any(|other| other == axis)
                })
            };
            mesh.axis_size(axis).is_some()
                && !of_batch.iter().any(|other| other == axis)
                && splits(false)
                && !splits(true)
        };
        let keys: Vec<String> = ["tensor", "context", "sequence"]
            .into_iter()
            .filter(names)
            .map(|axis| format!("`ici_{axis}_parallelism`"))
            .collect();
        match &keys[..] {
            [] => String::new(),
            [key] => format!(", or more {key}, which does not split the batch"),
            [others @ .., last] => {
                format!(", or more {} or {last}, which do not split the batch", others.join(", "))
            }
        }
    }

    /// Checks that batches can be split over the devices.
    ///
    /// # Errors
    /// A number of sequences is no multiple of the parts it is split into.
    pub(super) fn check_batch(&self, mesh: &Mesh, sequences: &Sequences<'_>) -> Result<(), ConfigError> {
        let &Sequences { key, per_device, origin, number, is_growth } = sequences;
        let parts = self.num_batch_parts(mesh);
        if number.is_multiple_of(parts) {
            return Ok(());
        }
        let axes: Vec<String> = mesh.split_axes().map(|(name, size)| format!("{name}={size}")).collect();
        let devices = mesh.num_devices();
        let counted = counted(number, "sequence");
        let (made, split, what) = match is_growth {
            true => (format!("lets batches grow by {counted}"), "these", "growth by"),
            false => (format!("makes a batch of {counted}"), "it", "a batch of"),
        };
        // Whole numbers of sequences on each device can always be split.
        let larger = Some(number.next_multiple_of(parts))
            .filter(|larger| is_short(*larger as f64 / devices as f64))
            .unwrap_or(number.next_multiple_of(devices));
        Err(Problem::inconsistent(
            format!(
                "`{key}` is `{per_device}` ({origin}), which on {devices} devices {made}, but the mesh {} splits {split} into {parts} parts",
                axes.join(" × ")
            ),
            format!(
                "use `{key}={}` for {what} {larger}{}",
                larger as f64 / devices as f64,
                self.beside_batch(mesh)
            ),
        )
        .into())
    }

    /// Checks that tiles of a sequence's positions can be split as the sequence is.
    ///
    /// # Errors
    /// A tile is no multiple of the parts a sequence is split into.
    pub(super) fn check_tiles(&self, mesh: Mesh, objective: &ObjectiveGroup) -> Result<(), ConfigError> {
        let (tiles, length) = (objective.num_vocab_tiling, objective.max_target_length);
        let placement = Placement::new(mesh, self.logical_axis_rules.clone());
        let split = placement.sharding(&[Some(HIDDEN_POSITIONS)], &[length]);
        let size = |axis: &String| placement.mesh().axis_size(axis).unwrap_or(1);
        let parts: usize = split.spec.0.iter().flatten().map(size).product();
        if tiles == 1 || (length / tiles).is_multiple_of(parts) {
            return Ok(());
        }
        let axes: Vec<String> =
            split.spec.0.iter().flatten().map(|axis| format!("{axis}={}", size(axis))).collect();
        let fewer = (1..tiles).rev().find(|tiles| length.is_multiple_of(tiles * parts)).unwrap_or(1);
        Err(Problem::inconsistent(
            format!(
                "`num_vocab_tiling` is `{tiles}` ({}) and the mesh {} splits sequences into {parts} parts, but `max_target_length` is `{length}`, which is no multiple of {tiles} × {parts}",
                objective.tiling_origin,
                axes.join(" × ")
            ),
            format!(
                "use `num_vocab_tiling={fewer}`, or `max_target_length={}`",
                length.next_multiple_of(tiles * parts)
            ),
        )
        .into())
    }
}

impl Parallelism {
    /// The sizes with the one that is -1 filled in; `available` are the devices of a slice, or the slices.
    fn filled(&self, available: usize, num_slices: usize) -> Result<Vec<(&'static str, usize)>, ConfigError> {
        let product = self
            .sizes
            .iter()
            .filter_map(|axis| usize::try_from(axis.size).ok())
            .try_fold(1_usize, |all, size| all.checked_mul(size))
            .unwrap_or(usize::MAX);
        let set: Vec<String> = self
            .sizes
            .iter()
            .filter(|axis| axis.size > 1)
            .map(|axis| format!("`{}={}` ({})", axis.key, axis.size, axis.origin))
            .collect();
        let is_open = self.sizes.iter().any(|axis| axis.size == -1);
        let fits = if is_open {
            product > 0 && available.is_multiple_of(product) && available >= product
        } else {
            product == available
        };
        if !fits {
            let described = set.join(" × ");
            let (unit, of_slice) = match (self.network, num_slices) {
                ("dcn", _) => ("slices", ""),
                (_, 1) => ("devices", ""),
                _ => ("devices", " of a slice"),
            };
            let message = if self.network == "dcn" && num_slices == 1 {
                format!("{described} asks for several slices, but there is one")
            } else if is_open {
                format!("{described} does not divide the {available} {unit}{of_slice}")
            } else if set.is_empty() {
                let network = self.network;
                format!(
                    "the `{network}_*_parallelism` keys are all 1, but there are {available} {unit}{of_slice}"
                )
            } else {
                format!("{described} is not the number of {unit}{of_slice}, which is {available}")
            };
            let message = match &self.preset_for_eval {
                Some(preset) => {
                    format!("of the mesh axes that `custom_mesh_and_rule_for_eval={preset}` has, {message}")
                }
                None => message,
            };
            return Err(
                Problem::inconsistent(message, self.sizes_that_fit(product, available, num_slices)).into()
            );
        }
        let filled = |size: i64| usize::try_from(size).unwrap_or(available / product);
        Ok(self.sizes.iter().map(|axis| (axis.axis, filled(axis.size))).collect())
    }

    /// How to mend sizes whose product is not `available`.
    fn sizes_that_fit(&self, product: usize, available: usize, num_slices: usize) -> String {
        // Another number of devices would not fit the mesh of training.
        let is_of_training = self.preset_for_eval.is_none();
        let as_many = match (&self.absent, self.network) {
            _ if !is_of_training => String::new(),
            (Some(name), "dcn") => more_slices(name, product),
            (Some(name), _) => other_hardware(name, product),
            (None, "dcn") => on_cpu("num_cpu_slices", "slices", Some(product)),
            (None, _) => on_cpu("num_cpu_devices", "devices", product.checked_mul(num_slices)),
        };
        if self.network == "dcn" && num_slices == 1 {
            return format!(
                "leave out the `dcn_*_parallelism` keys, or split within the slice: `ici_*_parallelism`{as_many}"
            );
        }
        format!(
            "choose sizes whose product is {available}, or set one of them to -1 to take what is left{as_many}"
        )
    }
}

/// How to get `number` CPU devices or slices.
fn on_cpu(key: &str, unit: &str, number: Option<usize>) -> String {
    match number.filter(|number| *number <= MOST_CPU_DEVICES) {
        Some(number) => format!("; on a CPU, `{key}={number}` makes as many {unit}"),
        None => String::new(),
    }
}

/// How to get `number` slices of the hardware of this name. Those of GPUs, machines, are not compiled for together.
fn more_slices(name: &str, number: usize) -> String {
    match CompileTopology::named(name) {
        Ok(found) if found.chip.hardware == Hardware::Tpu && number <= MOST_ABSENT_SLICES => {
            format!("; `compile_topology_num_slices={number}` is for as many slices")
        }
        _ => String::new(),
    }
}

/// Hardware with `number` devices in a slice, of the generation of that of this name.
fn other_hardware(name: &str, number: usize) -> String {
    let other = CompileTopology::named(name).ok().and_then(|found| found.chip.name_of_slice(number));
    match other {
        Some(other) => format!("; `compile_topology={other}` has as many devices"),
        None => "; or name other hardware in `compile_topology`".to_owned(),
    }
}

/// A hint at the names that an unknown one may stand for.
fn did_you_mean(name: &str, known: &BTreeSet<&str>) -> String {
    let near = nearest_names(name, known.iter().copied());
    if near.is_empty() {
        return "`debug_sharding=true` shows the axes of every array".to_owned();
    }
    let near: Vec<String> = near.iter().map(|name| format!("`{name}`")).collect();
    format!("did you mean {}?", near.join(" or "))
}

/// A number with its noun.
fn counted(number: usize, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}
