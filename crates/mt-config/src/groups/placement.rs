//! The device mesh and the placement rules.

use mt_shape::{LogicalRules, Mesh, Placement};

use super::group;
use crate::error::{ConfigError, Problem};

group! {
    /// The mesh of devices and what is split over its axes.
    pub struct PlacementGroup {
        mesh_axes: Vec<String>,
        logical_axis_rules: LogicalRules,
        input_data_sharding_logical_axes: Vec<String>,
        sharding_tolerance: f64,
        ici_data_parallelism: i64,
        ici_fsdp_parallelism: i64,
        ici_fsdp_transpose_parallelism: i64,
        ici_tensor_parallelism: i64,
        ici_tensor_sequence_parallelism: i64,
        ici_autoregressive_parallelism: i64,
        dcn_data_parallelism: i64,
        dcn_fsdp_parallelism: i64,
        dcn_fsdp_transpose_parallelism: i64,
        dcn_tensor_parallelism: i64,
        dcn_tensor_sequence_parallelism: i64,
        dcn_autoregressive_parallelism: i64,
    }
}

/// Machines of several slices are not built, so there is always one.
const NUM_SLICES: usize = 1;

impl PlacementGroup {
    fn check(&self, problems: &mut Vec<Problem>) {
        for (index, axis) in self.mesh_axes.iter().enumerate() {
            if self.mesh_axes[..index].contains(axis) {
                problems.push(Problem::inconsistent(
                    format!("`mesh_axes` has `{axis}` twice"),
                    "name each mesh axis once",
                ));
            }
        }
        for (network, sizes) in [("ici", self.ici()), ("dcn", self.dcn())] {
            let filled: Vec<String> = sizes
                .iter()
                .filter(|(_, size)| *size == -1)
                .map(|(axis, _)| format!("{network}_{axis}_parallelism"))
                .collect();
            if filled.len() > 1 {
                problems.push(Problem::inconsistent(
                    format!("{} are both -1, but only one axis can take what is left", quoted(&filled)),
                    "give all but one of them a size",
                ));
            }
            for (axis, size) in sizes {
                let key = format!("{network}_{axis}_parallelism");
                if size == 0 {
                    problems.push(Problem::inconsistent(
                        format!("`{key}` is `0`"),
                        "use 1 for an axis that splits nothing, or -1 for one that takes the devices that are left",
                    ));
                }
                if size > 1 && !self.mesh_axes.iter().any(|name| name == axis) {
                    problems.push(Problem::inconsistent(
                        format!("`{key}` is `{size}`, but `mesh_axes` has no `{axis}`"),
                        format!("add `{axis}` to `mesh_axes`, or leave out `{key}`"),
                    ));
                }
                let ruled =
                    self.logical_axis_rules.0.iter().any(|(_, axes)| axes.iter().any(|name| name == axis));
                if size > 1 && !ruled {
                    problems.push(Problem::inconsistent(
                        format!("`{key}` is `{size}`, but no rule of `logical_axis_rules` names `{axis}`"),
                        format!("add a rule such as `['embed', '{axis}']`, or leave out `{key}`"),
                    ));
                }
            }
        }
    }

    fn ici(&self) -> [(&'static str, i64); 6] {
        [
            ("data", self.ici_data_parallelism),
            ("fsdp", self.ici_fsdp_parallelism),
            ("fsdp_transpose", self.ici_fsdp_transpose_parallelism),
            ("tensor", self.ici_tensor_parallelism),
            ("tensor_sequence", self.ici_tensor_sequence_parallelism),
            ("autoregressive", self.ici_autoregressive_parallelism),
        ]
    }

    fn dcn(&self) -> [(&'static str, i64); 6] {
        [
            ("data", self.dcn_data_parallelism),
            ("fsdp", self.dcn_fsdp_parallelism),
            ("fsdp_transpose", self.dcn_fsdp_transpose_parallelism),
            ("tensor", self.dcn_tensor_parallelism),
            ("tensor_sequence", self.dcn_tensor_sequence_parallelism),
            ("autoregressive", self.dcn_autoregressive_parallelism),
        ]
    }

    /// The mesh of `num_devices` devices, with the axes of size -1 filled in.
    ///
    /// # Errors
    /// The parallelisms and the number of devices do not fit.
    pub fn mesh(&self, num_devices: usize) -> Result<Mesh, ConfigError> {
        let ici = filled("ici", &self.ici(), num_devices / NUM_SLICES, "devices")?;
        let dcn = filled("dcn", &self.dcn(), NUM_SLICES, "slices")?;
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
    pub fn check_batch(&self, mesh: &Mesh, key: &str, batch: usize) -> Result<(), ConfigError> {
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
            format!("a batch of {batch} sequences (`{key}` on {devices} devices) cannot be split into {parts} parts, as the mesh {} does", axes.join(" × ")),
            format!("use `{key}={}` for a batch of {larger}, or more `ici_tensor_parallelism`, which does not split the batch", larger as f64 / devices as f64),
        )
        .into())
    }
}

/// The sizes with the one that is -1 filled in.
fn filled<'a>(
    network: &str,
    sizes: &[(&'a str, i64)],
    available: usize,
    of_what: &str,
) -> Result<Vec<(&'a str, usize)>, ConfigError> {
    let product: usize = sizes.iter().filter_map(|(_, size)| usize::try_from(*size).ok()).product();
    let set: Vec<String> = sizes
        .iter()
        .filter(|(_, size)| *size > 1)
        .map(|(axis, size)| format!("`{network}_{axis}_parallelism={size}`"))
        .collect();
    let open = sizes.iter().find(|(_, size)| *size == -1);
    let fits = match open {
        Some(_) => product > 0 && available.is_multiple_of(product) && available >= product,
        None => product == available,
    };
    if !fits {
        let described = match set.as_slice() {
            [] => format!("the `{network}_*_parallelism` keys, all 1,"),
            set => set.join(" × "),
        };
        let verb = if open.is_some() { "does not divide" } else { "is not the number of" };
        let message = match open {
            Some(_) => format!("{described} {verb} the {available} {of_what}"),
            None => format!("{described} {verb} {of_what}, which is {available}"),
        };
        let devices = if network == "ici" {
            format!("; on a CPU, `num_cpu_devices={product}` makes as many devices")
        } else {
            String::new()
        };
        return Err(Problem::inconsistent(
            message,
            format!("choose sizes whose product is {available}, or set one of them to -1 to take what is left{devices}"),
        )
        .into());
    }
    Ok(sizes
        .iter()
        .map(|(axis, size)| (*axis, usize::try_from(*size).unwrap_or(available / product)))
        .collect())
}

fn quoted(names: &[String]) -> String {
    let quoted: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
    quoted.join(" and ")
}
