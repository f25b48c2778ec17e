//! Reports on placement: mesh axes that split nothing, and tables of arrays.

use crate::{Placement, Sharding};

/// A mesh axis splits nothing, because its size divides nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "mesh axis `{axis}` has {size} devices, but splits nothing: {size} divides none of {dimensions}\nhint: choose a size that divides one of these, or give the devices to another axis"
)]
pub struct SplitsNothing {
    axis: String,
    size: usize,
    dimensions: String,
}

/// Refuses a mesh axis that splits none of these arrays, because its size divides none of their dimensions.
///
/// # Errors
/// There is such an axis.
pub fn check_axes(placement: &Placement, arrays: &[Sharding]) -> Result<(), SplitsNothing> {
    let splits =
        |axis: &str| arrays.iter().flat_map(|sharding| &sharding.spec.0).flatten().any(|used| used == axis);
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
            return Err(SplitsNothing { axis: axis.clone(), size: *size, dimensions: dimensions.join(", ") });
        }
    }
    Ok(())
}

/// A row of the table of placements.
pub struct PlacementRow {
    name: String,
    shape: String,
    logical_axes: String,
    mesh_axes: String,
    bytes: usize,
}

impl PlacementRow {
    /// An array of which each device holds `bytes`.
    pub fn new(
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

/// Rows under a title, in columns as wide as they need to be, with an empty line behind them. Nothing for no rows.
pub fn placement_table(title: &str, rows: &[PlacementRow]) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let header = PlacementRow {
        name: title.to_owned(),
        shape: "shape".to_owned(),
        logical_axes: "logical axes".to_owned(),
        mesh_axes: "mesh axes".to_owned(),
        bytes: 0,
    };
    let width = |text: fn(&PlacementRow) -> &str| {
        std::iter::once(&header).chain(rows).map(|row| text(row).chars().count()).max().unwrap_or(0)
    };
    let (name, shape) = (width(|row| &row.name), width(|row| &row.shape));
    let (logical, mesh) = (width(|row| &row.logical_axes), width(|row| &row.mesh_axes));
    let line = |row: &PlacementRow, bytes: &str| {
        let PlacementRow { name: a, shape: b, logical_axes: c, mesh_axes: d, .. } = row;
        format!("{a:<name$}  {b:<shape$}  {c:<logical$}  {d:<mesh$}  {bytes}\n")
    };
    let lines = rows.iter().map(|row| line(row, &row.bytes.to_string()));
    std::iter::once(line(&header, "bytes a device")).chain(lines).chain(["\n".to_owned()]).collect()
}
