//! What there is to say about where arrays are: mesh axes that split nothing, copies, and a table of everything.

use mt_config::PlacementGroup;
use mt_models::{Model, PlacementRow, check_axes, print_placements};
use mt_runtime::format_bytes;
use mt_shape::{Mesh, Placement, Sharding};

use crate::{
    TrainError,
    state::{StateEntry, StateLayout, TrainState},
};

/// The mesh axis along which devices have copies of parameters.
pub(crate) const DATA_AXIS: &str = "data";

/// Refuses a mesh axis that splits neither the batch nor any array of the state, because its size divides none.
pub(crate) fn check_state_axes(
    placement: &Placement,
    layout: &StateLayout,
    batch: &Sharding,
) -> Result<(), TrainError> {
    let mut arrays: Vec<Sharding> =
        layout.entries.iter().map(|entry| entry.array.sharding(placement)).collect();
    arrays.push(batch.clone());
    Ok(check_axes(placement, &arrays)?)
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
            "warning: each device holds {} of parameters, {:.2}% more than its part of {}, as some are not split, and \
             `sharding_tolerance` ({}) allows {}%\n\
             hint: `debug_sharding=true` shows where each parameter is",
            format_bytes(held as u64),
            100.0 * excess,
            format_bytes((whole / parts) as u64),
            group.sharding_tolerance,
            100.0 * group.sharding_tolerance
        );
    }
}

/// Prints where everything is: parameters, the optimizer's state, the batch, and what model code places between.
pub(crate) fn report(placement: &Placement, layout: &StateLayout, batch: (&[String], &[usize], &Sharding)) {
    let mut bytes_of_state = 0;
    let entries = layout.entries.iter().map(|entry| {
        let name = entry.name.strip_prefix("params.").unwrap_or(&entry.name);
        let logical = entry.array.logical_axes.iter().map(|axis| axis.map(str::to_owned));
        let spec = entry.array.sharding(placement).spec.to_string();
        bytes_of_state += bytes_on_device(placement, entry);
        PlacementRow::new(name, &entry.array.dims, logical, spec, bytes_on_device(placement, entry))
    });
    let mut parameters: Vec<PlacementRow> = entries.collect();
    let slots = parameters.split_off(layout.num_parameters);
    let (names, dims, sharding) = batch;
    let bytes = sharding.shard_dims(dims).iter().product::<usize>() * size_of::<i32>();
    let logical = names.iter().map(|name| Some(name.clone()));
    let batch = PlacementRow::new("each array", dims, logical, sharding.spec.to_string(), bytes);
    let activations = placement.values().into_iter().map(|value| {
        let name = format!("{}/{}", value.scope, value.name);
        let name = name.trim_start_matches('/');
        PlacementRow::new(name, &value.dims, value.logical_axes, value.spec, value.bytes)
    });
    print_placements("parameter", &parameters);
    print_placements("optimizer state", &slots);
    print_placements("batch", &[batch]);
    print_placements("activation", &activations.collect::<Vec<_>>());
    eprintln!("state on one device: {}", format_bytes(bytes_of_state as u64));
}

/// The bytes of an array of the state on each device.
pub(crate) fn bytes_on_device(placement: &Placement, entry: &StateEntry) -> usize {
    let parts = entry.array.sharding(placement).shard_dims(&entry.array.dims);
    parts.iter().product::<usize>() * entry.array.dtype.byte_size()
}
