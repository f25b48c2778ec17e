//! Device meshes, and the sharding of arrays over them.

use std::{collections::BTreeMap, fmt, ops::Range, sync::Arc};

/// The properties that a platform reports for its devices, in the order in which it numbers them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceAttributes {
    /// The kind of the devices, such as `TPU v6 lite`; empty if unknown.
    pub kind: String,
    /// The slice of each device; none if the platform reports no slices.
    pub slices: Option<Vec<i64>>,
    /// The coordinates of each device in the network of its slice; none if the platform reports none.
    pub coordinates: Option<Vec<Vec<i64>>>,
}

/// The available devices, grouped into slices. The network within a slice is much faster than the network between
/// slices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    /// The devices of each slice. All slices have the same size.
    slices: Vec<Vec<usize>>,
}

impl Topology {
    /// Devices `0..num_devices`, divided into slices of consecutive devices.
    ///
    /// # Errors
    /// `num_slices` does not divide `num_devices`.
    pub fn even(num_devices: usize, num_slices: usize) -> Result<Self, MeshError> {
        if num_slices == 0 || !num_devices.is_multiple_of(num_slices) {
            return Err(MeshError::UnevenSlices { num_devices, num_slices });
        }
        let size = num_devices / num_slices;
        Ok(Self {
            slices: (0..num_slices).map(|slice| (slice * size..(slice + 1) * size).collect()).collect(),
        })
    }

    /// The topology of devices whose slice numbers are given.
    ///
    /// # Errors
    /// Slices have different numbers of devices.
    pub fn of_slices(slice_of_device: &[i64]) -> Result<Self, MeshError> {
        let mut slices: BTreeMap<i64, Vec<usize>> = BTreeMap::new();
        for (device, slice) in slice_of_device.iter().enumerate() {
            slices.entry(*slice).or_default().push(device);
        }
        let slices: Vec<Vec<usize>> = slices.into_values().collect();
        if slices.iter().any(|slice| slice.len() != slices[0].len()) {
            return Err(MeshError::UnevenSlices {
                num_devices: slice_of_device.len(),
                num_slices: slices.len(),
            });
        }
        Ok(Self { slices })
    }

    /// The same slices, with the devices of each slice of 2×4 in the order of a ring: consecutive devices are
    /// neighbors in the network, and so are the last and the first. Other slices keep their order.
    pub fn in_rings(mut self, coordinates: &[Vec<i64>]) -> Self {
        for slice in &mut self.slices {
            if let Some(ring) = ring(slice, coordinates) {
                *slice = ring;
            }
        }
        self
    }

    /// The number of slices.
    pub fn num_slices(&self) -> usize {
        self.slices.len()
    }

    /// The number of slices to which the given devices belong.
    pub fn num_slices_of(&self, devices: &[usize]) -> usize {
        self.slices.iter().filter(|slice| slice.iter().any(|device| devices.contains(device))).count()
    }

    /// The number of devices in all slices.
    pub fn num_devices(&self) -> usize {
        self.slices.iter().map(Vec::len).sum()
    }

    /// The number of devices in one slice.
    pub fn slice_size(&self) -> usize {
        self.slices.first().map_or(0, Vec::len)
    }
}

/// The devices of a 2×4 slice, up one of the long sides and down the other. None for other slices.
fn ring(slice: &[usize], coordinates: &[Vec<i64>]) -> Option<Vec<usize>> {
    let mut devices = Vec::new();
    for device in slice {
        let [x, y, rest @ ..] = &coordinates.get(*device)?[..] else { return None };
        devices.push((*x, *y, rest, *device));
    }
    devices.sort_unstable();
    let &(left, bottom, plane, _) = devices.first()?;
    let is_grid = devices.len() == 8
        && devices.iter().zip(0..).all(|((x, y, rest, _), place)| {
            (x - left, y - bottom) == (place / 4, place % 4) && *rest == plane
        });
    let (up, down) = devices.split_at(4.min(devices.len()));
    is_grid.then(|| up.iter().chain(down.iter().rev()).map(|(.., device)| *device).collect())
}

/// A single slice of the given number of devices.
impl From<usize> for Topology {
    fn from(num_devices: usize) -> Self {
        Self { slices: vec![(0..num_devices).collect()] }
    }
}

impl From<&Topology> for Topology {
    fn from(topology: &Topology) -> Self {
        topology.clone()
    }
}

/// A mesh axis that may span slices: its number of devices within a slice, and its number of slices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HybridAxis {
    pub name: String,
    pub within_slice: usize,
    pub over_slices: usize,
}

/// A grid of devices with named axes. Grid cell `i` has the row-major coordinates of `i`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Mesh {
    axes: Vec<(String, usize)>,
    /// The device in each grid cell; empty if device `i` is in cell `i`.
    devices: Vec<usize>,
}

/// The reason why a mesh cannot be built.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MeshError {
    #[error("mesh axis `{0}` appears twice")]
    DuplicateAxis(String),
    #[error("mesh axis `{0}` has size 0")]
    EmptyAxis(String),
    #[error("{num_devices} devices are not {num_slices} slices of the same size")]
    UnevenSlices { num_devices: usize, num_slices: usize },
    #[error("the mesh needs {needed} devices, but there are {given}")]
    DeviceCount { needed: usize, given: usize },
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
        Ok(Self { axes, devices: Vec::new() })
    }

    /// A mesh over slices. Along each axis the devices of one slice are neighbors, and slices vary slowest.
    ///
    /// # Errors
    /// Those of [`Self::new`], or the sizes of the axes do not match the numbers of devices and slices.
    pub fn hybrid(axes: &[HybridAxis], topology: &Topology) -> Result<Self, MeshError> {
        let mesh =
            Self::new(axes.iter().map(|axis| (axis.name.clone(), axis.within_slice * axis.over_slices)))?;
        let (needed, given) = (mesh.num_devices(), topology.num_devices());
        let over_slices: usize = axes.iter().map(|axis| axis.over_slices).product();
        if needed != given || over_slices != topology.num_slices() {
            return Err(MeshError::DeviceCount { needed, given });
        }
        let device = |place: usize| {
            let (mut slice, mut within) = (0, 0);
            for axis in axes {
                let coordinate = mesh.coordinate(place, &axis.name);
                slice = slice * axis.over_slices + coordinate / axis.within_slice;
                within = within * axis.within_slice + coordinate % axis.within_slice;
            }
            topology.slices[slice][within]
        };
        let devices: Vec<usize> = (0..needed).map(device).collect();
        let is_identity = devices.iter().enumerate().all(|(place, device)| place == *device);
        Ok(Self { devices: if is_identity { Vec::new() } else { devices }, ..mesh })
    }

    /// The mesh over consecutive devices, of which the first has this number.
    #[must_use]
    pub fn beginning_at(self, first: usize) -> Self {
        let devices = self.devices().into_iter().map(|device| device + first).collect();
        Self { devices: if first == 0 { self.devices } else { devices }, ..self }
    }

    /// The mesh of one device, without axes.
    pub fn single() -> Self {
        Self { axes: Vec::new(), devices: Vec::new() }
    }

    /// The device in a grid cell.
    pub fn device(&self, place: usize) -> usize {
        self.devices.get(place).copied().unwrap_or(place)
    }

    /// The devices in the order of their grid cells.
    pub fn devices(&self) -> Vec<usize> {
        (0..self.num_devices()).map(|place| self.device(place)).collect()
    }

    /// Names and sizes of the axes.
    pub fn axes(&self) -> &[(String, usize)] {
        &self.axes
    }

    /// The axes with more than one device.
    pub fn split_axes(&self) -> impl Iterator<Item = &(String, usize)> {
        self.axes.iter().filter(|(_, size)| *size > 1)
    }

    /// The size of an axis, if the mesh has it.
    pub fn axis_size(&self, name: &str) -> Option<usize> {
        self.axes.iter().find(|(axis, _)| axis == name).map(|(_, size)| *size)
    }

    /// The number of devices.
    pub fn num_devices(&self) -> usize {
        self.axes.iter().map(|(_, size)| size).product()
    }

    /// The coordinate of a grid cell along the axis `name`; 0 if the mesh lacks the axis.
    pub fn coordinate(&self, place: usize, name: &str) -> usize {
        let mut stride = 1;
        for (axis, size) in self.axes.iter().rev() {
            if axis == name {
                return place / stride % size;
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
    /// The specification of a replicated array of rank `rank`: every device holds a whole copy.
    pub fn replicated(rank: usize) -> Self {
        Self(vec![Vec::new(); rank])
    }

    /// Whether no dimension is split.
    pub fn is_replicated(&self) -> bool {
        self.0.iter().all(Vec::is_empty)
    }

    /// The specification with an additional leading dimension, which is not split.
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

    /// Splits the first divisible dimension over one more mesh axis. Returns the sharding unchanged if the axis divides
    /// no dimension, already splits one, or does not belong to the mesh.
    pub fn split_further(mut self, dims: &[usize], mesh_axis: &str) -> Self {
        let Some(size) = self.mesh.axis_size(mesh_axis).filter(|size| *size > 1) else { return self };
        let is_used = self.spec.0.iter().flatten().any(|axis| axis == mesh_axis);
        let fitting = self.shard_dims(dims).iter().position(|dim| dim.is_multiple_of(size));
        if let Some(dim) = fitting.filter(|_| !is_used) {
            self.spec.0[dim].push(mesh_axis.to_owned());
        }
        self
    }

    /// The number of shards along dimension `dim`.
    pub fn num_shards(&self, dim: usize) -> usize {
        self.spec.0[dim].iter().map(|axis| self.mesh.axis_size(axis).unwrap_or(1)).product()
    }

    /// The dimensions of one device's shard of an array.
    ///
    /// # Panics
    /// The number of shards does not divide a dimension; [`crate::Placement`] never makes such a specification.
    pub fn shard_dims(&self, dims: &[usize]) -> Vec<usize> {
        dims.iter()
            .enumerate()
            .map(|(dim, size)| {
                let num_shards = self.num_shards(dim);
                assert!(
                    size % num_shards == 0,
                    "dimension {dim} of size {size} is split into {num_shards} shards"
                );
                size / num_shards
            })
            .collect()
    }

    /// The index range of each dimension in the shard of the device in grid cell `place`.
    pub fn shard_ranges(&self, dims: &[usize], place: usize) -> Vec<Range<usize>> {
        self.shard_dims(dims)
            .into_iter()
            .enumerate()
            .map(|(dim, size)| {
                let index = self.spec.0[dim].iter().fold(0, |index, axis| {
                    index * self.mesh.axis_size(axis).unwrap_or(1) + self.mesh.coordinate(place, axis)
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
    fn slices_vary_slower_than_devices_within_them() {
        let check = |axes: &[(usize, usize)], topology: &Topology, expected: &[usize]| {
            let axes: Vec<HybridAxis> = axes
                .iter()
                .enumerate()
                .map(|(index, (within_slice, over_slices))| HybridAxis {
                    name: format!("axis{index}"),
                    within_slice: *within_slice,
                    over_slices: *over_slices,
                })
                .collect();
            assert_eq!(Mesh::hybrid(&axes, topology).unwrap().devices(), expected);
        };
        let two = Topology::even(8, 2).unwrap();
        check(&[(1, 2), (4, 1)], &two, &[0, 1, 2, 3, 4, 5, 6, 7]);
        check(&[(4, 1), (1, 2)], &two, &[0, 4, 1, 5, 2, 6, 3, 7]);
        check(&[(2, 2), (2, 1)], &two, &[0, 1, 2, 3, 4, 5, 6, 7]);
        check(&[(2, 1), (2, 2)], &two, &[0, 1, 4, 5, 2, 3, 6, 7]);
        let mixed = Topology::of_slices(&[1, 0, 1, 0]).unwrap();
        check(&[(1, 2), (2, 1)], &mixed, &[1, 3, 0, 2]);
    }

    #[test]
    fn slices_have_one_size() {
        let uneven = |num_devices, num_slices| MeshError::UnevenSlices { num_devices, num_slices };
        assert_eq!(Topology::even(8, 3), Err(uneven(8, 3)));
        assert_eq!(Topology::of_slices(&[0, 0, 1]), Err(uneven(3, 2)));
        let axis = HybridAxis { name: "data".into(), within_slice: 2, over_slices: 2 };
        let error = Mesh::hybrid(&[axis], &8.into()).unwrap_err();
        assert_eq!(error, MeshError::DeviceCount { needed: 4, given: 8 });
    }

    #[test]
    fn shardings_are_split_further() {
        let mesh = Mesh::new([("data".to_owned(), 2), ("fsdp".to_owned(), 4)]).unwrap();
        let mesh = Arc::new(mesh);
        let check = |spec: &[&[&str]], dims: &[usize], mesh_axis: &str, expected: &str| {
            let axes = |axes: &&[&str]| axes.iter().map(|axis| (*axis).to_owned()).collect();
            let spec = PartitionSpec(spec.iter().map(axes).collect());
            let sharding = Sharding { mesh: mesh.clone(), spec };
            assert_eq!(sharding.split_further(dims, mesh_axis).spec.to_string(), expected);
        };
        check(&[&[], &["fsdp"]], &[2, 8], "data", "(data, fsdp)");
        check(&[&[], &["fsdp"]], &[3, 8], "data", "(-, fsdp+data)");
        check(&[&[], &["fsdp"]], &[3, 4], "data", "(-, fsdp)");
        check(&[&["data"], &[]], &[4, 4], "data", "(data, -)");
        check(&[&[]], &[4], "tensor", "(-)");
        check(&[], &[], "data", "()");
    }

    #[test]
    fn duplicate_axes_are_refused() {
        let error = Mesh::new([("a".to_owned(), 2), ("a".to_owned(), 1)]).unwrap_err();
        assert_eq!(error, MeshError::DuplicateAxis("a".into()));
    }
}
