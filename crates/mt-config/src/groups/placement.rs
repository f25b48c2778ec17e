//! The device mesh and the placement rules.

mod rules;

use std::collections::BTreeSet;

use mt_shape::{
    DeviceAttributes, HybridAxis, LogicalAxis, LogicalRules, Mesh, PartitionSpec, Placement, Topology,
    logical,
};

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
    origin::Origin,
    resolve::MESHES,
    table,
    yaml::{self, Embedded},
};

/// Mesh axes, each with the stem of the keys that set its size: `ici_STEM_parallelism` and `dcn_STEM_parallelism`.
pub(super) const MESH_AXES: &[(&str, &str)] = &[
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

/// The sizes of the mesh axes in devices (`ici`) or slices (`dcn`); -1 takes all that remain.
#[derive(Clone, Debug, PartialEq)]
pub struct Parallelism {
    /// `ici` within a slice, `dcn` across slices.
    network: &'static str,
    /// The axes whose keys have an effect.
    sizes: Vec<AxisSize>,
    /// The preset that defines the mesh, if it is not the mesh of training.
    preset_for_eval: Option<String>,
    /// `compile_topology`, if the devices are those of absent hardware.
    absent: Option<String>,
}

/// The size of one mesh axis, with the key that sets it.
#[derive(Clone, Debug, PartialEq)]
struct AxisSize {
    axis: &'static str,
    key: &'static str,
    size: i64,
    origin: Origin,
}

impl AxisSize {
    /// The key with its value and origin, as messages name it.
    fn stated(&self) -> String {
        format!("`{}` is `{}` ({})", self.key, self.size, self.origin)
    }
}

impl Parallelism {
    pub(crate) fn read(network: &'static str, config: &Config, problems: &mut Vec<Problem>) -> Self {
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
    /// The device mesh and the placement rules.
    pub struct PlacementGroup {
        mesh_axes: Vec<String>,
        logical_axis_rules: LogicalRules,
        input_data_sharding_logical_axes: Vec<LogicalAxis>,
        sharding_tolerance: f64,
        shard_mode: ShardMode,
        optimize_mesh_for_tpu_v6e: bool,
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

/// Mesh axes and the rules that use them.
#[derive(Clone, Debug, PartialEq)]
pub struct MeshAndRules {
    mesh_axes: Vec<String>,
    rules: LogicalRules,
}

impl MeshAndRules {
    /// The preset that `custom_mesh_and_rule_for_eval` names.
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

/// The origins of the slice counts.
#[derive(Clone, Debug, PartialEq)]
pub struct SlicesOrigin {
    num_slices: Origin,
    num_cpu_slices: Origin,
}

/// The logical axis of the positions of hidden states.
const HIDDEN_POSITIONS: LogicalAxis = logical::ACTIVATION_NORM_LENGTH;

/// The device kind that the platform reports for a TPU v6e.
const TPU_V6E: &str = "TPU v6 lite";

/// The maximum of `num_cpu_devices`.
const MOST_CPU_DEVICES: usize = 4096;

/// The maximum of `compile_topology_num_slices`.
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
            // Presets may define further mesh axes.
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
                        "`mesh_axes` ({}) names `{axis}`, which does not exist: no key gives it a size",
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
                    format!("{}, but only one axis can take the remaining devices", filled.join(" and ")),
                    "give all but one of them a size: 1 for an axis that splits nothing",
                ));
            }
            for of_axis in sizes {
                let &AxisSize { axis, key, size, .. } = of_axis;
                if size == 0 {
                    problems.push(Problem::inconsistent(
                        format!("{}, which leaves no device", of_axis.stated()),
                        "use 1 for an axis that splits nothing, or -1 for one that takes the remaining devices",
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
                // `context_autoregressive` is the only mesh axis for caches.
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

    /// The devices by slice: as the devices report it, or as `num_cpu_slices` divides devices that report none.
    ///
    /// # Errors
    /// The slices have different sizes, or their number differs from `num_slices`.
    pub fn topology(
        &self,
        num_devices: usize,
        attributes: &DeviceAttributes,
    ) -> Result<Topology, ConfigError> {
        let slices = attributes.slices.as_deref();
        if let (Some(name), None, 2..) = (&self.absent, slices, self.num_cpu_slices) {
            let (slices, origin) = (self.num_cpu_slices, &self.slices_origin.num_cpu_slices);
            return Err(Problem::inconsistent(
                format!(
                    "`num_cpu_slices` is `{slices}` ({origin}), but the devices are those of `compile_topology={name}`"
                ),
                format!("leave it out; `compile_topology_num_slices={slices}` compiles for {slices} slices"),
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
                    "choose a number of slices that divides `num_cpu_devices`",
                )
            })?,
        };
        let found = topology.num_slices();
        if self.num_slices > 0 && self.num_slices != found as i64 {
            let (slices, origin) = (self.num_slices, &self.slices_origin.num_slices);
            let as_many = match self.absent {
                Some(_) => format!("`compile_topology_num_slices={slices}` compiles for {slices} slices"),
                None => {
                    format!("on a CPU, `num_cpu_slices={slices}` divides the devices into {slices} slices")
                }
            };
            return Err(Problem::inconsistent(
                format!(
                    "`num_slices` is `{slices}` ({origin}), but the devices are of {}",
                    counted(found, "slice")
                ),
                format!("leave out `num_slices`, since slices are counted; {as_many}"),
            )
            .into());
        }
        Ok(match &attributes.coordinates {
            Some(coordinates) if self.is_ring_of_v6e(&attributes.kind, &topology) => {
                topology.in_rings(coordinates)
            }
            _ => topology,
        })
    }

    /// Whether `optimize_mesh_for_tpu_v6e` is set for such devices and a single mesh axis takes all devices of a slice.
    fn is_ring_of_v6e(&self, kind: &str, topology: &Topology) -> bool {
        let slice_size = topology.slice_size();
        let takes_slice = |axis: &AxisSize| self.ici.size(axis.axis, Some(slice_size)) == Some(slice_size);
        self.optimize_mesh_for_tpu_v6e && kind == TPU_V6E && self.ici.sizes.iter().any(takes_slice)
    }

    /// The mesh of these devices. Axes of size -1 receive the remaining devices or slices.
    ///
    /// # Errors
    /// The axis sizes do not match the number of devices.
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

    /// The mesh with the placement rules.
    ///
    /// # Errors
    /// The axis sizes do not match the number of devices.
    pub fn placement(&self, devices: impl Into<Topology>) -> Result<Placement, ConfigError> {
        Ok(Placement::new(self.mesh(devices)?, self.rules()))
    }

    /// The placement on consecutive devices, of which the first has the number `first`, split over the mesh axes with
    /// these sizes. The other axes split nothing.
    ///
    /// # Errors
    /// `mesh_axes` lacks an axis that splits.
    pub(super) fn on_devices(&self, first: usize, sizes: &[(&str, usize)]) -> Result<Placement, ConfigError> {
        let lacking =
            sizes.iter().find(|(axis, size)| *size > 1 && !self.mesh_axes.iter().any(|own| own == axis));
        if let Some((axis, size)) = lacking {
            return Err(Problem::inconsistent(
                format!(
                    "the sampler splits its devices into {size} along `{axis}`, but `mesh_axes` ({}) has no `{axis}`",
                    self.mesh_axes_origin
                ),
                format!("add `{axis}` to `mesh_axes`, or split along other axes with `rollout_*_parallelism`"),
            )
            .into());
        }
        let size = |axis: &String| sizes.iter().find(|(name, _)| name == axis).map_or(1, |(_, size)| *size);
        let axes = self.mesh_axes.iter().map(|axis| (axis.clone(), size(axis)));
        let mesh =
            Mesh::new(axes).map_err(|error| Problem::inconsistent(error.to_string(), "name other axes"))?;
        Ok(Placement::new(mesh.beginning_at(first), self.rules()))
    }

    /// The group for evaluation: with the mesh and rules of `custom_mesh_and_rule_for_eval`, and with the rules of
    /// `logical_axis_rules_for_eval`. Axes that only the training mesh has split nothing in evaluation.
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

    /// Checks that each axis of a training batch has a logical name.
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
        let rules = self.rules();
        let known: BTreeSet<&str> = rules.0.iter().map(|(name, _)| name.as_str()).collect();
        for name in names.iter().filter(|name| !known.contains(name.name())) {
            problems.push(Problem::inconsistent(
                format!(
                    "{}, but no rule of `logical_axis_rules` ({}) names `{name}`",
                    config.stated("input_data_sharding_logical_axes"),
                    self.rules_origin
                ),
                did_you_mean(name.name(), &known),
            ));
        }
    }

    /// The number of shards into which the rules split a batch on this mesh.
    pub fn num_batch_shards(&self, mesh: &Mesh) -> usize {
        self.batch_axes(mesh).iter().filter_map(|axis| mesh.axis_size(axis)).product()
    }

    /// The mesh axes over which the rules split the sequences of a batch, whatever its size.
    fn batch_axes(&self, mesh: &Mesh) -> Vec<String> {
        let names: Vec<Option<LogicalAxis>> =
            self.input_data_sharding_logical_axes.iter().copied().map(Some).collect();
        // The number of devices is a multiple of every product of mesh axes, so no split fails.
        let dims = vec![mesh.num_devices(); names.len()];
        let placement = Placement::new(mesh.clone(), self.rules());
        let PartitionSpec(axes) = placement.sharding(&names, &dims).spec;
        axes.into_iter().next().unwrap_or_default()
    }

    /// The keys of axes that split other dimensions than the batch, for a hint.
    fn beside_batch(&self, mesh: &Mesh) -> String {
        let of_batch = self.batch_axes(mesh);
        let names = |axis: &&str| {
            let rules = &self.logical_axis_rules.0;
            let logical = self.input_data_sharding_logical_axes.first().map(|axis| axis.name());
            let splits = |of_batch: bool| {
                rules.iter().any(|(name, axes)| {
                    (Some(name.as_str()) == logical) == of_batch && axes.iter().any(|other| other == axis)
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

    /// Checks that the mesh can split a batch.
    ///
    /// # Errors
    /// The batch size is not a multiple of the number of shards.
    pub(super) fn check_batch(&self, mesh: &Mesh, sequences: &Sequences<'_>) -> Result<(), ConfigError> {
        let &Sequences { key, per_device, origin, number, is_growth } = sequences;
        let shards = self.num_batch_shards(mesh);
        if number.is_multiple_of(shards) {
            return Ok(());
        }
        let axes: Vec<String> = mesh.split_axes().map(|(name, size)| format!("{name}={size}")).collect();
        let devices = mesh.num_devices();
        let counted = counted(number, "sequence");
        if key == "batch_size" {
            let mesh = axes.join(" × ");
            return Err(Problem::inconsistent(
                format!("`{key}` is `{per_device}` ({origin}), which makes micro-batches of {counted}, but the mesh {mesh} splits them into {shards} shards"),
                "use a multiple: a micro-batch has `batch_size` × `rl.num_generations` answers over `rl.num_mini_batches` × `gradient_accumulation_steps`",
            ).into());
        }
        let (made, split, what) = match is_growth {
            true => (format!("lets batches grow by {counted}"), "these", "growth by"),
            false => (format!("makes a batch of {counted}"), "it", "a batch of"),
        };
        // Every mesh can split a whole number of sequences per device.
        let larger = Some(number.next_multiple_of(shards))
            .filter(|larger| is_short(*larger as f64 / devices as f64))
            .unwrap_or(number.next_multiple_of(devices));
        Err(Problem::inconsistent(
            format!(
                "`{key}` is `{per_device}` ({origin}), which on {devices} devices {made}, but the mesh {} splits {split} into {shards} shards",
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

    /// Checks that the mesh can split the positions of a vocabulary tile like those of a sequence.
    ///
    /// # Errors
    /// The size of a tile is not a multiple of the number of shards of a sequence.
    pub(super) fn check_tiles(&self, mesh: Mesh, objective: &ObjectiveGroup) -> Result<(), ConfigError> {
        let (tiles, length) = (objective.num_vocab_tiling, objective.max_target_length);
        let placement = Placement::new(mesh, self.rules());
        let split = placement.sharding(&[Some(HIDDEN_POSITIONS)], &[length]);
        let size = |axis: &String| placement.mesh().axis_size(axis).unwrap_or(1);
        let shards: usize = split.spec.0.iter().flatten().map(size).product();
        if tiles == 1 || (length / tiles).is_multiple_of(shards) {
            return Ok(());
        }
        let axes: Vec<String> =
            split.spec.0.iter().flatten().map(|axis| format!("{axis}={}", size(axis))).collect();
        let fewer = (1..tiles).rev().find(|tiles| length.is_multiple_of(tiles * shards)).unwrap_or(1);
        Err(Problem::inconsistent(
            format!(
                "`num_vocab_tiling` is `{tiles}` ({}) and the mesh {} splits sequences into {shards} shards, but `max_target_length` is `{length}`, which is no multiple of {tiles} × {shards}",
                objective.tiling_origin,
                axes.join(" × ")
            ),
            format!(
                "use `num_vocab_tiling={fewer}`, or `max_target_length={}`",
                length.next_multiple_of(tiles * shards)
            ),
        )
        .into())
    }
}

impl Parallelism {
    /// The sizes, with -1 replaced; `available` counts the devices of a slice, or the slices.
    fn filled(&self, available: usize, num_slices: usize) -> Result<Vec<(&'static str, usize)>, ConfigError> {
        let product = self.product();
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
                    format!("for the mesh axes of `custom_mesh_and_rule_for_eval={preset}`, {message}")
                }
                None => message,
            };
            return Err(
                Problem::inconsistent(message, self.sizes_that_fit(product, available, num_slices)).into()
            );
        }
        let filled = |axis| self.size(axis, Some(available)).expect("the number of devices is known");
        Ok(self.sizes.iter().map(|of_axis| (of_axis.axis, filled(of_axis.axis))).collect())
    }

    /// The product of the sizes that are set.
    fn product(&self) -> usize {
        let set = self.sizes.iter().filter_map(|axis| usize::try_from(axis.size).ok());
        set.fold(1, usize::saturating_mul)
    }

    /// The size of a mesh axis, 1 without a key. An axis of size -1 takes the rest of `available`, which is
    /// the number of devices in a slice, or of slices. None if that number is needed and unknown.
    pub(crate) fn size(&self, axis: &str, available: Option<usize>) -> Option<usize> {
        match self.sizes.iter().find(|of_axis| of_axis.axis == axis) {
            None => Some(1),
            Some(of_axis) => {
                usize::try_from(of_axis.size).ok().or_else(|| Some(available? / self.product().max(1)))
            }
        }
    }

    /// A hint for sizes whose product is not `available`.
    fn sizes_that_fit(&self, product: usize, available: usize, num_slices: usize) -> String {
        // The mesh of training fixes the number of devices, so hints about evaluation do not change it.
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
            "choose sizes whose product is {available}, or set one of them to -1, which takes the remaining devices{as_many}"
        )
    }
}

/// A hint for obtaining `number` CPU devices or slices.
fn on_cpu(key: &str, unit: &str, number: Option<usize>) -> String {
    match number.filter(|number| *number <= MOST_CPU_DEVICES) {
        Some(number) => format!("; on a CPU, `{key}={number}` provides {number} {unit}"),
        None => String::new(),
    }
}

/// A hint for obtaining `number` slices of this hardware. Only TPU programs can be compiled for several slices.
fn more_slices(name: &str, number: usize) -> String {
    match CompileTopology::named(name) {
        Ok(found) if found.chip.hardware == Hardware::Tpu && number <= MOST_ABSENT_SLICES => {
            format!("; `compile_topology_num_slices={number}` compiles for {number} slices")
        }
        _ => String::new(),
    }
}

/// A hint naming hardware of the same generation with `number` devices in a slice.
fn other_hardware(name: &str, number: usize) -> String {
    let other = CompileTopology::named(name).ok().and_then(|found| found.chip.name_of_slice(number));
    match other {
        Some(other) => format!("; `compile_topology={other}` has {number} devices"),
        None => "; or name other hardware in `compile_topology`".to_owned(),
    }
}

/// A hint listing the known names nearest to an unknown one.
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
