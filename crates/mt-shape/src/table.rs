//! Reports on placement: mesh axes that split nothing, and tables of arrays.

use crate::{LogicalAxis, Placement, Sharding};

/// The error for a mesh axis that splits nothing because its size divides no dimension.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "mesh axis `{axis}` has {size} devices, but splits nothing: {size} divides none of {dimensions}\nhint: choose a size that divides one of these, or give the devices to another axis"
)]
pub struct SplitsNothing {
    axis: String,
    size: usize,
    dimensions: String,
}

/// Refuses a mesh axis that splits none of these arrays because its size divides none of their dimensions.
///
/// # Errors
/// [`SplitsNothing`] describes the first such axis.
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

/// A row of a placement table.
pub struct PlacementRow {
    name: String,
    shape: String,
    logical_axes: String,
    mesh_axes: String,
    bytes: usize,
}

impl PlacementRow {
    /// The row of an array of which each device holds `bytes`.
    pub fn new(
        name: &str,
        dims: &[usize],
        logical_axes: &[Option<LogicalAxis>],
        mesh_axes: String,
        bytes: usize,
    ) -> Self {
        let logical: Vec<&str> =
            logical_axes.iter().map(|axis| axis.map_or("-", LogicalAxis::name)).collect();
        Self {
            name: name.to_owned(),
            shape: format!("{dims:?}"),
            logical_axes: format!("({})", logical.join(", ")),
            mesh_axes,
            bytes,
        }
    }
}

/// A table of the rows under a title, in columns of minimum width, followed by an empty line. Empty without rows.
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
