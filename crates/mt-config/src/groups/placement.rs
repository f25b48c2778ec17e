//! The device mesh and the placement rules.

use mt_shape::{LogicalRules, Mesh, Placement};

use super::{group, read};
use crate::{
    config::Config,
    error::{ConfigError, Problem},
    key::Class,
    origin::Origin,
    table,
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
        Self { network, sizes: sizes.collect() }
    }
}

group! {
    /// The mesh of devices and what is split over its axes.
    pub struct PlacementGroup {
        mesh_axes: Vec<String>,
        logical_axis_rules: LogicalRules,
        input_data_sharding_logical_axes: Vec<String>,
        sharding_tolerance: f64,
    }
    besides {
        ici: Parallelism = |config, problems| Some(Parallelism::read("ici", config, problems)),
        dcn: Parallelism = |config, problems| Some(Parallelism::read("dcn", config, problems)),
    }
}

/// Machines of several slices are not built, so there is always one.
const NUM_SLICES: usize = 1;

/// As many as `num_cpu_devices` may be.
const MOST_CPU_DEVICES: usize = 4096;

impl PlacementGroup {
    fn check(&self, config: &Config, problems: &mut Vec<Problem>) {
        for (index, axis) in self.mesh_axes.iter().enumerate() {
            if self.mesh_axes[..index].contains(axis) {
                problems.push(Problem::inconsistent(
                    format!("`mesh_axes` ({}) names `{axis}` twice", config.entry("mesh_axes").origin),
                    "name each mesh axis once",
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
                if size > 1 && !self.mesh_axes.iter().any(|name| name == axis) {
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
                if size > 1 && !ruled {
                    problems.push(Problem::inconsistent(
                        format!(
                            "{}, but no rule of `logical_axis_rules` ({}) names `{axis}`",
                            of_axis.stated(),
                            config.entry("logical_axis_rules").origin
                        ),
                        format!("add a rule such as `['embed', '{axis}']`, or leave out `{key}`"),
                    ));
                }
            }
        }
    }

    /// The mesh of `num_devices` devices, with the axes of size -1 filled in.
    ///
    /// # Errors
    /// The parallelisms and the number of devices do not fit.
    pub fn mesh(&self, num_devices: usize) -> Result<Mesh, ConfigError> {
        let ici = self.ici.filled(num_devices / NUM_SLICES)?;
        let dcn = self.dcn.filled(NUM_SLICES)?;
        let size = |axis: &str| {
            let of = |sizes: &[(&str, usize)]| {
                sizes.iter().find(|(name, _)| *name == axis).map_or(1, |(_, size)| *size)
            };
            of(&ici) * of(&dcn)
        };
        Mesh::new(self.mesh_axes.iter().map(|axis| (axis.clone(), size(axis)))).map_err(|error| {
            Problem::inconsistent(error.to_string(), "`maxtext config explain mesh_axes` lists the axes")
                .into()
        })
    }

    /// The mesh together with the rules.
    ///
    /// # Errors
    /// The parallelisms and the number of devices do not fit.
    pub fn placement(&self, num_devices: usize) -> Result<Placement, ConfigError> {
        Ok(Placement::new(self.mesh(num_devices)?, self.logical_axis_rules.clone()))
    }

    /// Into how many parts the rules split a batch on this mesh.
    pub fn num_batch_parts(&self, mesh: &Mesh) -> usize {
        let Some(logical) = self.input_data_sharding_logical_axes.first() else { return 1 };
        let rule = self.logical_axis_rules.0.iter().find(|(name, _)| name == logical);
        rule.map_or(1, |(_, axes)| axes.iter().filter_map(|axis| mesh.axis_size(axis)).product())
    }

    /// Checks that a batch can be split over the devices.
    ///
    /// # Errors
    /// The batch is no multiple of the parts it is split into.
    pub(super) fn check_batch(
        &self,
        mesh: &Mesh,
        key: &str,
        origin: &Origin,
        batch: usize,
    ) -> Result<(), ConfigError> {
        let parts = self.num_batch_parts(mesh);
        if batch.is_multiple_of(parts) {
            return Ok(());
        }
        let axes: Vec<String> = mesh
            .axes()
            .iter()
            .filter(|(_, size)| *size > 1)
            .map(|(name, size)| format!("{name}={size}"))
            .collect();
        let devices = mesh.num_devices();
        let larger = batch.next_multiple_of(parts);
        Err(Problem::inconsistent(
            format!(
                "`{key}` is `{}` ({origin}), which on {devices} devices makes a batch of {batch} sequences, but the mesh {} splits it into {parts} parts",
                batch as f64 / devices as f64,
                axes.join(" × ")
            ),
            format!("use `{key}={}` for a batch of {larger}, or more `ici_tensor_parallelism`, which does not split the batch", larger as f64 / devices as f64),
        )
        .into())
    }
}

impl Parallelism {
    /// The sizes with the one that is -1 filled in.
    fn filled(&self, available: usize) -> Result<Vec<(&'static str, usize)>, ConfigError> {
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
            let message = if self.network == "dcn" {
                format!("{described} asks for several slices, but there is one")
            } else if is_open {
                format!("{described} does not divide the {available} devices")
            } else if set.is_empty() {
                format!("the `ici_*_parallelism` keys are all 1, but there are {available} devices")
            } else {
                format!("{described} is not the number of devices, which is {available}")
            };
            return Err(Problem::inconsistent(message, self.sizes_that_fit(product, available)).into());
        }
        let filled = |size: i64| usize::try_from(size).unwrap_or(available / product);
        Ok(self.sizes.iter().map(|axis| (axis.axis, filled(axis.size))).collect())
    }

    /// How to mend sizes whose product is not `available`.
    fn sizes_that_fit(&self, product: usize, available: usize) -> String {
        if self.network == "dcn" {
            return "leave out the `dcn_*_parallelism` keys, or split within the slice: `ici_*_parallelism`"
                .to_owned();
        }
        let as_many = if product <= MOST_CPU_DEVICES {
            format!("; on a CPU, `num_cpu_devices={product}` makes as many devices")
        } else {
            String::new()
        };
        format!(
            "choose sizes whose product is {available}, or set one of them to -1 to take what is left{as_many}"
        )
    }
}
