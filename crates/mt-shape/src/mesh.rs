//! Device meshes and how an array is split over one.

use std::{fmt, ops::Range, sync::Arc};

/// A grid of devices with named axes. Device `i` sits at the row-major coordinates of `i`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Mesh {
    axes: Vec<(String, usize)>,
}

/// The mesh cannot be built.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MeshError {
    #[error("mesh axis `{0}` appears twice")]
    DuplicateAxis(String),
    #[error("mesh axis `{0}` has size 0")]
    EmptyAxis(String),
}

impl Mesh {
    /// A mesh with the given axes, the slowest-varying first.
    ///
    /// # Errors
    /// A name appears twice, or a size is 0.
    pub fn new(axes: impl IntoIterator<Item = (String, usize)>) -> Result<Self, MeshError> {
        let axes: Vec<(String, usize)> = axes.into_iter().collect();
        for (index, (name, size)) in axes.iter().enumerate() {
            if axes[..index].iter().any(|(other, _)| other == name) {
                return Err(MeshError::DuplicateAxis(name.clone()));
            }
            if *size == 0 {
                return Err(MeshError::EmptyAxis(name.clone()));
            }
        }
        Ok(Self { axes })
    }

    /// The mesh of one device, without axes.
    pub fn single() -> Self {
        Self { axes: Vec::new() }
    }

    /// Names and sizes of the axes.
    pub fn axes(&self) -> &[(String, usize)] {
        &self.axes
    }

    /// The size of an axis, if the mesh has it.
    pub fn axis_size(&self, name: &str) -> Option<usize> {
        self.axes.iter().find(|(axis, _)| axis == name).map(|(_, size)| *size)
    }

    /// The number of devices.
    pub fn num_devices(&self) -> usize {
        self.axes.iter().map(|(_, size)| size).product()
    }

    /// The position of `device` along the axis `name`; 0 if the mesh has no such axis.
    pub fn coordinate(&self, device: usize, name: &str) -> usize {
        let mut stride = 1;
        for (axis, size) in self.axes.iter().rev() {
            if axis == name {
                return device / stride % size;
            }
            stride *= size;
        }
        0
    }
}

/// The mesh axes that split each dimension of an array. A dimension without axes is not split.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct PartitionSpec(pub Vec<Vec<String>>);

impl PartitionSpec {
    /// The specification of an array of `rank` dimensions of which every device holds a whole copy.
    pub fn replicated(rank: usize) -> Self {
        Self(vec![Vec::new(); rank])
    }

    /// Whether no dimension is split.
    pub fn is_replicated(&self) -> bool {
        self.0.iter().all(Vec::is_empty)
    }

    /// The specification with one more, unsplit, leading dimension.
    pub fn with_leading(&self) -> Self {
        Self(std::iter::once(Vec::new()).chain(self.0.iter().cloned()).collect())
    }
}

impl fmt::Display for PartitionSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dims: Vec<String> =
            self.0.iter().map(|axes| if axes.is_empty() { "-".to_owned() } else { axes.join("+") }).collect();
        write!(f, "({})", dims.join(", "))
    }
}

/// A partition specification on its mesh.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Sharding {
    pub mesh: Arc<Mesh>,
    pub spec: PartitionSpec,
}

impl Sharding {
    /// Every device of `mesh` holds a whole copy.
    pub fn replicated(mesh: Arc<Mesh>, rank: usize) -> Self {
        Self { mesh, spec: PartitionSpec::replicated(rank) }
    }

    /// Into how many parts dimension `dim` is split.
    pub fn num_parts(&self, dim: usize) -> usize {
        self.spec.0[dim].iter().map(|axis| self.mesh.axis_size(axis).unwrap_or(1)).product()
    }

    /// The dimensions of the part of an array that one device holds.
    ///
    /// # Panics
    /// A dimension is not divisible by its number of parts; [`crate::Placement`] never makes such a specification.
    pub fn shard_dims(&self, dims: &[usize]) -> Vec<usize> {
        dims.iter()
            .enumerate()
            .map(|(dim, size)| {
                let parts = self.num_parts(dim);
                assert!(size % parts == 0, "dimension {dim} of size {size} is split into {parts} parts");
                size / parts
            })
            .collect()
    }

    /// The index ranges that `device` holds, one for each dimension.
    pub fn shard_ranges(&self, dims: &[usize], device: usize) -> Vec<Range<usize>> {
        self.shard_dims(dims)
            .into_iter()
            .enumerate()
            .map(|(dim, size)| {
                let index = self.spec.0[dim].iter().fold(0, |index, axis| {
                    index * self.mesh.axis_size(axis).unwrap_or(1) + self.mesh.coordinate(device, axis)
                });
                index * size..(index + 1) * size
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_cover_the_array_row_major() {
        let mesh = Mesh::new([("fsdp".to_owned(), 2), ("tensor".to_owned(), 2)]).unwrap();
        let spec = PartitionSpec(vec![vec!["tensor".into()], vec![], vec!["fsdp".into()]]);
        let sharding = Sharding { mesh: Arc::new(mesh), spec };
        assert_eq!(sharding.shard_dims(&[4, 3, 2]), [2, 3, 1]);
        assert_eq!(sharding.shard_ranges(&[4, 3, 2], 0), [0..2, 0..3, 0..1]);
        assert_eq!(sharding.shard_ranges(&[4, 3, 2], 1), [2..4, 0..3, 0..1]);
        assert_eq!(sharding.shard_ranges(&[4, 3, 2], 2), [0..2, 0..3, 1..2]);
    }

    #[test]
    fn two_axes_on_one_dimension_count_the_first_as_slower() {
        let mesh = Arc::new(Mesh::new([("a".to_owned(), 2), ("b".to_owned(), 2)]).unwrap());
        let sharding = Sharding { mesh, spec: PartitionSpec(vec![vec!["b".into(), "a".into()]]) };
        let starts: Vec<usize> = (0..4).map(|device| sharding.shard_ranges(&[4], device)[0].start).collect();
        assert_eq!(starts, [0, 2, 1, 3]);
    }

    #[test]
    fn duplicate_axes_are_refused() {
        let error = Mesh::new([("a".to_owned(), 2), ("a".to_owned(), 1)]).unwrap_err();
        assert_eq!(error, MeshError::DuplicateAxis("a".into()));
    }
}
