//! Checks and reports of placement: mesh axes without effect, replicated parameters, and a table of all arrays.

use std::collections::BTreeSet;

use mt_config::PlacementGroup;
use mt_models::Model;
use mt_runtime::format_bytes;
use mt_shape::{
    LogicalAxis, Mesh, PlacedValue, Placement, PlacementRow, Sharding, check_axes, placement_table,
};

use crate::{
    Observer, TrainError, TrainPlan, events,
    planned::{PlannedArray, StateKind},
    state::{StateLayout, TrainState},
};

/// The mesh axis along which parameters are replicated.
pub(crate) const DATA_AXIS: &str = "data";

/// Refuses a mesh axis that splits neither the batch nor any array of the state because no dimension is divisible by
/// its size.
///
/// # Errors
/// [`TrainError::SplitsNothing`] names the axis.
pub(crate) fn check_state_axes(
    placement: &Placement,
    layout: &StateLayout,
    batch: Vec<Sharding>,
) -> Result<(), TrainError> {
    let mut arrays: Vec<Sharding> =
        layout.entries.iter().map(|entry| entry.array.sharding(placement)).collect();
    arrays.extend(batch);
    Ok(check_axes(placement, &arrays)?)
}

/// Warns if each device holds more than its share of the parameters by a fraction above `sharding_tolerance`. The share
/// follows from the mesh axes that rules assign to axes of parameters.
pub(crate) fn warn_of_replicas(
    group: &PlacementGroup,
    model: &dyn Model,
    state: &TrainState,
    mesh: &Mesh,
    observer: &Observer,
) {
    let specs = model.parameters();
    let names: Vec<&str> =
        specs.iter().flat_map(|(_, spec)| &spec.logical_axes).flatten().map(|axis| axis.name()).collect();
    let rules = &group.logical_axis_rules.0;
    let splits = |axis: &String| {
        rules.iter().any(|(rule, axes)| names.contains(&rule.as_str()) && axes.contains(axis))
    };
    let num_shards: usize =
        mesh.axes().iter().filter(|(axis, _)| splits(axis)).map(|(_, size)| size).product();
    let whole: usize = state.parameters().iter().map(|array| array.ty().byte_size()).sum();
    let held: usize = state.parameters().iter().map(|array| array.bytes_on_device(0)).sum();
    let excess = held as f64 * num_shards as f64 / whole as f64 - 1.0;
    if num_shards > 1 && excess > group.sharding_tolerance {
        let text = format!(
            "each device holds {} of parameters, {:.2}% more than its share of {}, as some are not split, and \
             `sharding_tolerance` ({}) allows {}%\n\
             hint: `debug_sharding=true` shows where each parameter is",
            format_bytes(held as u64),
            100.0 * excess,
            format_bytes((whole / num_shards) as u64),
            group.sharding_tolerance,
            100.0 * group.sharding_tolerance
        );
        events::warn(observer, text);
    }
}

/// Tables of the placement of parameters, optimizer state, the batch, and the tensors that model code constrains.
pub(crate) fn report(plan: &TrainPlan) -> String {
    let state = plan.state();
    let rows_of = |kind: StateKind| -> Vec<PlacementRow> {
        let arrays = state.iter().filter(|array| array.kind == kind);
        arrays
            .map(|array| {
                let name = array.name.strip_prefix("params.").unwrap_or(&array.name);
                let spec = array.sharding.spec.to_string();
                PlacementRow::new(name, &array.ty.dims, &array.logical_axes, spec, array.bytes_on_device())
            })
            .collect()
    };
    let batch: Vec<PlacementRow> = plan
        .batch_arrays()
        .iter()
        .map(|(array, sharding)| {
            let dims = array.dims();
            let bytes = sharding.shard_dims(&dims).iter().product::<usize>() * array.dtype.byte_size();
            let logical = plan.loss.logical_axes(array);
            PlacementRow::new(array.name, &dims, &logical, sharding.spec.to_string(), bytes)
        })
        .collect();
    let specs = plan.model.parameters();
    let of_weights: BTreeSet<LogicalAxis> =
        specs.iter().flat_map(|(_, spec)| &spec.logical_axes).flatten().copied().collect();
    let is_weight = |value: &PlacedValue| {
        let mut names = value.logical_axes.iter().flatten().peekable();
        names.peek().is_some() && names.all(|name| of_weights.contains(name))
    };
    let (weights, activations): (Vec<_>, Vec<_>) = plan.placement.values().into_iter().partition(is_weight);
    let placed = |values: Vec<PlacedValue>| -> Vec<PlacementRow> {
        let rows = values.into_iter().map(|value| {
            let name = format!("{}/{}", value.scope, value.name);
            let name = name.trim_start_matches('/');
            PlacementRow::new(name, &value.dims, &value.logical_axes, value.spec, value.bytes)
        });
        rows.collect()
    };
    let of_state: usize = state.iter().map(PlannedArray::bytes_on_device).sum();
    [
        placement_table("parameter", &rows_of(StateKind::Parameter)),
        placement_table("optimizer state", &rows_of(StateKind::Optimizer)),
        placement_table("batch", &batch),
        placement_table("weight, as it is used", &placed(weights)),
        placement_table("activation", &placed(activations)),
        format!("state on one device: {}", format_bytes(of_state as u64)),
    ]
    .concat()
}
