//! What there is to say about where arrays are: mesh axes that split nothing, copies, and a table of everything.

use mt_config::PlacementGroup;
use mt_models::Model;
use mt_runtime::{Array, format_bytes};
use mt_shape::{Mesh, Placement, Sharding};

use crate::{
    TrainError,
    state::{StateLayout, TrainState},
};

/// The mesh axis along which devices have copies of parameters.
pub(crate) const DATA_AXIS: &str = "data";

/// Refuses a mesh axis that splits neither the batch nor any array of the state, because its size divides none.
pub(crate) fn check_axes(
    placement: &Placement,
    layout: &StateLayout,
    batch: &Sharding,
) -> Result<(), TrainError> {
    let shardings: Vec<Sharding> =
        layout.entries.iter().map(|entry| entry.array.sharding(placement)).collect();
    let splits = |axis: &str| {
        let all = shardings.iter().chain([batch]);
        all.flat_map(|sharding| &sharding.spec.0).flatten().any(|used| used == axis)
    };
    for (axis, size) in placement.mesh().axes() {
        if *size == 1 || splits(axis) {
            continue;
        }
        let notes = placement.notes();
        let mut dimensions: Vec<String> = notes
            .iter()
            .filter(|note| note.mesh_axis == *axis)
            .map(|note| format!("`{}` ({})", note.logical_axis, note.dimension))
            .collect();
        dimensions.dedup();
        if !dimensions.is_empty() {
            return Err(TrainError::SplitsNothing {
                axis: axis.clone(),
                size: *size,
                dimensions: dimensions.join(", "),
            });
        }
    }
    Ok(())
}

/// Warns if more of the parameters than `sharding_tolerance` is on every device of axes that split parameters.
pub(crate) fn warn_of_replicas(group: &PlacementGroup, model: &dyn Model, state: &TrainState, mesh: &Mesh) {
    let specs = model.parameters();
    let names: Vec<&str> = specs.iter().flat_map(|(_, spec)| &spec.logical_axes).flatten().copied().collect();
    let rules = &group.logical_axis_rules.0;
    let splits = |axis: &String| {
        rules.iter().any(|(rule, axes)| names.contains(&rule.as_str()) && axes.contains(axis))
    };
    let parts: usize = mesh.axes().iter().filter(|(axis, _)| splits(axis)).map(|(_, size)| size).product();
    let whole: usize = state.parameters().iter().map(|array| array.ty().byte_size()).sum();
    let held: usize = state.parameters().iter().map(|array| array.bytes_on_device(0)).sum();
    let excess = held as f64 * parts as f64 / whole as f64 - 1.0;
    if parts > 1 && excess > group.sharding_tolerance {
        eprintln!(
            "warning: each device holds {} of parameters, {:.0}% more than its part of {}, as some are not split\n\
             hint: `debug_sharding=true` shows where each parameter is; `sharding_tolerance` is {}",
            format_bytes(held as u64),
            100.0 * excess,
            format_bytes((whole / parts) as u64),
            group.sharding_tolerance
        );
    }
}

/// A row of the table of placements.
struct Row {
    name: String,
    shape: String,
    logical_axes: String,
    mesh_axes: String,
    bytes: usize,
}

impl Row {
    fn new(
        name: &str,
        dims: &[usize],
        logical_axes: impl IntoIterator<Item = Option<String>>,
        mesh_axes: String,
        bytes: usize,
    ) -> Self {
        let logical: Vec<String> =
            logical_axes.into_iter().map(|axis| axis.unwrap_or_else(|| "-".to_owned())).collect();
        Self {
            name: name.to_owned(),
            shape: format!("{dims:?}"),
            logical_axes: format!("({})", logical.join(", ")),
            mesh_axes,
            bytes,
        }
    }
}

/// Prints where everything is: parameters, the optimizer's state, the batch, and what model code places between.
pub(crate) fn report(
    placement: &Placement,
    layout: &StateLayout,
    state: &[Array],
    batch: (&[String], &[usize], &Sharding),
) {
    let entries = layout.entries.iter().zip(state).map(|(entry, array)| {
        let name = entry.name.strip_prefix("params.").unwrap_or(&entry.name);
        let logical = entry.array.logical_axes.iter().map(|axis| axis.map(str::to_owned));
        let spec = entry.array.sharding(placement).spec.to_string();
        Row::new(name, &entry.array.dims, logical, spec, array.bytes_on_device(0))
    });
    let mut parameters: Vec<Row> = entries.collect();
    let slots = parameters.split_off(layout.num_parameters);
    let (names, dims, sharding) = batch;
    let bytes = sharding.shard_dims(dims).iter().product::<usize>() * size_of::<i32>();
    let logical = names.iter().map(|name| Some(name.clone()));
    let batch = Row::new("each array", dims, logical, sharding.spec.to_string(), bytes);
    let activations = placement
        .values()
        .into_iter()
        .map(|value| Row::new(&value.scope, &value.dims, value.logical_axes, value.spec, value.bytes));
    print("parameter", parameters);
    print("optimizer state", slots);
    print("batch", vec![batch]);
    print("activation", activations.collect());
    let bytes: usize = state.iter().map(|array| array.bytes_on_device(0)).sum();
    eprintln!("state on one device: {}", format_bytes(bytes as u64));
}

/// Prints rows under a title, in columns as wide as they need to be.
fn print(title: &str, rows: Vec<Row>) {
    if rows.is_empty() {
        return;
    }
    let header = Row {
        name: title.to_owned(),
        shape: "shape".to_owned(),
        logical_axes: "logical axes".to_owned(),
        mesh_axes: "mesh axes".to_owned(),
        bytes: 0,
    };
    let width = |text: fn(&Row) -> &str| {
        std::iter::once(&header).chain(&rows).map(|row| text(row).chars().count()).max().unwrap_or(0)
    };
    let (name, shape) = (width(|row| &row.name), width(|row| &row.shape));
    let (logical, mesh) = (width(|row| &row.logical_axes), width(|row| &row.mesh_axes));
    let line = |row: &Row, bytes: &str| {
        let Row { name: a, shape: b, logical_axes: c, mesh_axes: d, .. } = row;
        eprintln!("{a:<name$}  {b:<shape$}  {c:<logical$}  {d:<mesh$}  {bytes}");
    };
    line(&header, "bytes a device");
    for row in &rows {
        line(row, &row.bytes.to_string());
    }
    eprintln!();
}
