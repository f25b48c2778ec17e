//! Arrays on devices.

use std::{
    borrow::Cow,
    collections::BTreeMap,
    fmt,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use mt_ir::{Memory, TensorType};
use mt_pjrt::{Buffer, PendingHostArray};
use mt_shape::{DType, HostArray, Sharding};

use crate::{Runtime, RuntimeError};

/// An array on the devices of a mesh. Each device holds the shard that the sharding gives it.
///
/// Arrays are results of asynchronous work. They can be used at once; errors of the program that computes them appear
/// when they are awaited or read.
pub struct Array {
    ty: TensorType,
    sharding: Sharding,
    /// The memory that holds all shards.
    memory: Memory,
    /// One for each device of the mesh.
    buffers: Vec<Buffer>,
    _live: LiveBytes,
}

/// A shard of an array, and one of the devices that hold it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    pub device: usize,
    /// The index range along each dimension.
    pub ranges: Vec<Range<usize>>,
}

impl Array {
    /// Copies an array to the devices of a mesh, sharded by `sharding`.
    ///
    /// # Errors
    /// The sharding does not fit the array or the devices, or their memory is full.
    pub fn from_host(runtime: &Runtime, host: &HostArray, sharding: &Sharding) -> Result<Self, RuntimeError> {
        let ty = TensorType::new(host.dtype(), host.dims());
        check_sharding("array", &ty, sharding)?;
        let shard_dims = sharding.shard_dims(host.dims());
        Self::from_each(runtime, ty, sharding, |place| {
            let bytes = gather(host, &runs(host, &sharding.shard_ranges(host.dims(), place)));
            let device = sharding.mesh.device(place);
            Ok(Buffer::from_bytes(runtime.client(), device, host.dtype(), &shard_dims, &bytes)?)
        })
    }

    /// An array of zeros. CPUs take its memory when it is first used, piece by piece, so that large arrays are made at
    /// once.
    ///
    /// # Errors
    /// The sharding does not fit the array or the devices, or their memory is full.
    pub fn zeros(runtime: &Runtime, ty: &TensorType, sharding: &Sharding) -> Result<Self, RuntimeError> {
        check_sharding("array", ty, sharding)?;
        let shard_dims = sharding.shard_dims(&ty.dims);
        Self::from_each(runtime, ty.clone(), sharding, |place| {
            Ok(Buffer::zeros(runtime.client(), sharding.mesh.device(place), ty.dtype, &shard_dims)?)
        })
    }

    /// As [`Self::from_host`], but without a copy if the platform can use host memory and the shards are contiguous in
    /// it, which holds for arrays that are not split, or only along the leading dimension. Donating the result does not
    /// reuse its memory.
    ///
    /// # Errors
    /// As [`Self::from_host`].
    pub fn from_shared(
        runtime: &Runtime,
        host: Arc<HostArray>,
        sharding: &Sharding,
    ) -> Result<Self, RuntimeError> {
        let ty = TensorType::new(host.dtype(), host.dims());
        check_sharding("array", &ty, sharding)?;
        let (client, shard_dims) = (runtime.client(), sharding.shard_dims(host.dims()));
        Self::from_each(runtime, ty, sharding, |place| {
            let runs = runs(&host, &sharding.shard_ranges(host.dims(), place));
            let device = sharding.mesh.device(place);
            Ok(match &runs[..] {
                [run] => Buffer::from_host_slice(client, device, host.clone(), &shard_dims, run.clone())?,
                _ => Buffer::from_bytes(client, device, host.dtype(), &shard_dims, &gather(&host, &runs))?,
            })
        })
    }

    /// Builds an array from shards that are read one at a time, so the whole array is never in host memory. Devices
    /// that hold the same shard receive copies of one.
    ///
    /// # Errors
    /// As [`Self::from_host`]; the errors of `shard`.
    pub fn from_shards<E: From<RuntimeError>>(
        runtime: &Runtime,
        ty: &TensorType,
        sharding: &Sharding,
        shard: impl FnMut(&[Range<usize>]) -> Result<HostArray, E>,
    ) -> Result<Self, E> {
        Self::assembled(runtime, ty, sharding, shard, |device, host| {
            Buffer::from_bytes(runtime.client(), device, host.dtype(), host.dims(), host.bytes())
        })
    }

    /// As [`Self::from_shards`], but if the platform can use host memory, the shards themselves become the array.
    /// Donating the result does not reuse its memory.
    ///
    /// # Errors
    /// As [`Self::from_shards`].
    pub fn from_kept_shards<E: From<RuntimeError>>(
        runtime: &Runtime,
        ty: &TensorType,
        sharding: &Sharding,
        shard: impl FnMut(&[Range<usize>]) -> Result<HostArray, E>,
    ) -> Result<Self, E> {
        Self::assembled(runtime, ty, sharding, shard, |device, host| {
            Buffer::from_host(runtime.client(), device, host.clone())
        })
    }

    fn assembled<E: From<RuntimeError>>(
        runtime: &Runtime,
        ty: &TensorType,
        sharding: &Sharding,
        mut shard: impl FnMut(&[Range<usize>]) -> Result<HostArray, E>,
        to_device: impl Fn(usize, &Arc<HostArray>) -> Result<Buffer, mt_pjrt::Error>,
    ) -> Result<Self, E> {
        check_sharding("array", ty, sharding)?;
        let mut places: BTreeMap<Vec<(usize, usize)>, Vec<usize>> = BTreeMap::new();
        for place in 0..sharding.mesh.num_devices() {
            let ranges = sharding.shard_ranges(&ty.dims, place);
            let key = ranges.iter().map(|range| (range.start, range.end)).collect();
            places.entry(key).or_default().push(place);
        }
        let mut buffers: Vec<Option<Buffer>> = (0..sharding.mesh.num_devices()).map(|_| None).collect();
        for (key, places) in places {
            let ranges: Vec<Range<usize>> = key.into_iter().map(|(start, end)| start..end).collect();
            let host = shard(&ranges)?;
            if host.dtype() != ty.dtype || host.dims() != sharding.shard_dims(&ty.dims) {
                let reason = format!("its slice {ranges:?} was given as `{}{:?}`", host.dtype(), host.dims());
                let (ty, spec) = (ty.clone(), sharding.spec.clone());
                return Err(RuntimeError::Sharding { name: "array".into(), ty, spec, reason }.into());
            }
            let host = Arc::new(host);
            for place in places {
                let device = sharding.mesh.device(place);
                buffers[place] = Some(to_device(device, &host).map_err(RuntimeError::from)?);
            }
        }
        let mut buffers = buffers.into_iter().flatten();
        let next = |_| Ok(buffers.next().expect("each place belongs to one key"));
        Ok(Self::from_each(runtime, ty.clone(), sharding, next)?)
    }

    fn from_each(
        runtime: &Runtime,
        ty: TensorType,
        sharding: &Sharding,
        buffer: impl FnMut(usize) -> Result<Buffer, RuntimeError>,
    ) -> Result<Self, RuntimeError> {
        let buffers = (0..sharding.mesh.num_devices()).map(buffer).collect::<Result<_, _>>()?;
        Ok(Self::from_buffers(runtime, ty, sharding.clone(), Memory::Device, buffers))
    }

    /// An array of one buffer per device, which are known to fit.
    pub(crate) fn from_buffers(
        runtime: &Runtime,
        ty: TensorType,
        sharding: Sharding,
        memory: Memory,
        buffers: Vec<Buffer>,
    ) -> Self {
        let shard_size = |buffer: &Buffer| buffer.dims().iter().product::<usize>() * ty.dtype.byte_size();
        let bytes = buffers.iter().map(|buffer| shard_size(buffer) as u64).sum();
        let live = LiveBytes::new(runtime.live_counter(), bytes);
        Self { ty, sharding, memory, buffers, _live: live }
    }

    /// The array in another memory of its devices.
    ///
    /// # Errors
    /// A device has no such memory, or the memory is full.
    pub fn moved_to(self, runtime: &Runtime, memory: Memory) -> Result<Self, RuntimeError> {
        if memory == self.memory {
            return Ok(self);
        }
        let copy = |(place, buffer): (usize, &Buffer)| {
            buffer.copy_to_memory(self.sharding.mesh.device(place), memory.kind())
        };
        let buffers = self.buffers.iter().enumerate().map(copy).collect::<Result<_, _>>()?;
        Ok(Self::from_buffers(runtime, self.ty, self.sharding, memory, buffers))
    }

    /// A copy on the devices of another mesh. A place of its mesh gets the shard of the same place of this array, or, if the
    /// array is replicated, the whole of it.
    pub(crate) fn copied_to(&self, runtime: &Runtime, sharding: &Sharding) -> Result<Self, RuntimeError> {
        let copy = |place: usize| {
            let buffer = &self.buffers[place % self.buffers.len()];
            Ok(buffer.copy_to_memory(sharding.mesh.device(place), Memory::Device.kind())?)
        };
        Self::from_each(runtime, self.ty.clone(), sharding, copy)
    }

    /// The type of the whole array.
    pub fn ty(&self) -> &TensorType {
        &self.ty
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.ty.dtype
    }

    /// The dimensions of the whole array.
    pub fn dims(&self) -> &[usize] {
        &self.ty.dims
    }

    /// The memory that holds the array.
    pub fn memory(&self) -> Memory {
        self.memory
    }

    /// The array's sharding.
    pub fn sharding(&self) -> &Sharding {
        &self.sharding
    }

    /// Whether each device already holds the shard that `sharding` gives it.
    pub(crate) fn is_placed_as(&self, sharding: &Sharding) -> bool {
        let (own, dims) = (&self.sharding, &self.ty.dims);
        let places = 0..sharding.mesh.num_devices();
        own == sharding
            || own.mesh.devices() == sharding.mesh.devices()
                && places
                    .into_iter()
                    .all(|place| own.shard_ranges(dims, place) == sharding.shard_ranges(dims, place))
    }

    /// The array with another sharding, resharded through host memory; `None` if it has that sharding already.
    ///
    /// # Errors
    /// As [`Self::from_host`].
    pub fn moved(&self, runtime: &Runtime, sharding: &Sharding) -> Result<Option<Self>, RuntimeError> {
        if self.is_placed_as(sharding) {
            return Ok(None);
        }
        Self::from_host(runtime, &self.to_host()?, sharding).map(Some)
    }

    pub(crate) fn buffers(&self) -> &[Buffer] {
        &self.buffers
    }

    pub(crate) fn into_buffers(self) -> Vec<Buffer> {
        self.buffers
    }

    /// The bytes that the array takes in the memory of one device; 0 if the device is outside of the mesh or the array
    /// is in host memory.
    pub fn bytes_on_device(&self, device: usize) -> usize {
        if self.memory != Memory::Device {
            return 0;
        }
        let of_shape = |buffer: &Buffer| buffer.dims().iter().product::<usize>() * self.ty.dtype.byte_size();
        self.buffers.get(device).map_or(0, |buffer| buffer.size_on_device().unwrap_or(of_shape(buffer)))
    }

    /// Waits until the array exists.
    ///
    /// # Errors
    /// The program that computes the array failed.
    pub fn wait(&self) -> Result<(), RuntimeError> {
        self.buffers.iter().try_for_each(|buffer| Ok(buffer.wait()?))
    }

    /// The distinct shards of the array, each with the first device that holds it.
    pub fn shards(&self) -> Vec<Shard> {
        let mut shards: Vec<Shard> = Vec::new();
        for device in 0..self.buffers.len() {
            let ranges = self.sharding.shard_ranges(&self.ty.dims, device);
            if !shards.iter().any(|shard| shard.ranges == ranges) {
                shards.push(Shard { device, ranges });
            }
        }
        shards
    }

    /// The shard that `device` holds.
    ///
    /// # Errors
    /// The device is outside of the mesh, or the program that computes the array failed.
    pub fn shard_to_host(&self, device: usize) -> Result<HostArray, RuntimeError> {
        Ok(self.shard_to_host_async(device)?.wait()?)
    }

    /// Starts copying the shard that `device` holds to host memory. The array may be dropped or donated meanwhile.
    ///
    /// # Errors
    /// The device is outside of the mesh, or the copy cannot be started.
    pub fn shard_to_host_async(&self, device: usize) -> Result<PendingHostArray, RuntimeError> {
        let buffer = self.buffers.get(device).ok_or_else(|| {
            mt_pjrt::Error::Argument(format!(
                "the array is on {} devices, not on {device}",
                self.buffers.len()
            ))
        })?;
        Ok(buffer.to_host_async()?)
    }

    /// Starts copying the array to host memory, each distinct shard once. The array may be dropped or donated
    /// meanwhile.
    ///
    /// # Errors
    /// The copy cannot be started. The result's `wait` returns errors of the program that computes the array.
    pub fn to_host_async(&self) -> Result<PendingArray, RuntimeError> {
        let start = |shard: Shard| Ok((self.buffers[shard.device].to_host_async()?, shard.ranges));
        let shards = self.shards().into_iter().map(start).collect::<Result<_, RuntimeError>>()?;
        Ok(PendingArray { ty: self.ty.clone(), shards })
    }

    /// The whole array.
    ///
    /// # Errors
    /// The program that computes the array failed.
    pub fn to_host(&self) -> Result<HostArray, RuntimeError> {
        self.to_host_async()?.wait()
    }
}

impl fmt::Debug for Array {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Array({}, {})", self.ty, self.sharding.spec)
    }
}

/// An array that is being copied to host memory.
#[must_use = "dropping it waits for the copy and discards it"]
pub struct PendingArray {
    ty: TensorType,
    shards: Vec<(PendingHostArray, Vec<Range<usize>>)>,
}

impl PendingArray {
    /// Waits for the array.
    ///
    /// # Errors
    /// The program that computes the array failed.
    pub fn wait(self) -> Result<HostArray, RuntimeError> {
        let mut shards = self.shards;
        if shards.len() == 1 {
            let (shard, _) = shards.remove(0);
            return Ok(shard.wait()?);
        }
        let mut whole = HostArray::zeros(self.ty.dtype, &self.ty.dims);
        let element_size = self.ty.dtype.byte_size();
        for (shard, ranges) in shards {
            let shard = shard.wait()?;
            let (from, into) = (shard.bytes(), whole.bytes_mut());
            for_each_run(&self.ty.dims, &ranges, element_size, |in_whole, in_slice| {
                into[in_whole].copy_from_slice(&from[in_slice]);
            });
        }
        Ok(whole)
    }
}

/// Counts an array's bytes while it exists.
struct LiveBytes {
    counter: Arc<AtomicU64>,
    bytes: u64,
}

impl LiveBytes {
    fn new(counter: &Arc<AtomicU64>, bytes: u64) -> Self {
        counter.fetch_add(bytes, Ordering::Relaxed);
        Self { counter: counter.clone(), bytes }
    }
}

impl Drop for LiveBytes {
    fn drop(&mut self) {
        self.counter.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Checks that a sharding splits every dimension evenly, over axes that its mesh has.
pub(crate) fn check_sharding(name: &str, ty: &TensorType, sharding: &Sharding) -> Result<(), RuntimeError> {
    let fail = |reason: String| {
        Err(RuntimeError::Sharding { name: name.into(), ty: ty.clone(), spec: sharding.spec.clone(), reason })
    };
    if sharding.spec.0.len() != ty.rank() {
        return fail(format!("it has {} dimensions, the specification {}", ty.rank(), sharding.spec.0.len()));
    }
    let mut used: Vec<&String> = Vec::new();
    for (dim, axes) in sharding.spec.0.iter().enumerate() {
        for axis in axes {
            if sharding.mesh.axis_size(axis).is_none() {
                return fail(format!("the mesh has no axis `{axis}`"));
            }
            if used.contains(&axis) {
                return fail(format!("mesh axis `{axis}` is used twice"));
            }
            used.push(axis);
        }
        let (size, num_shards) = (ty.dims[dim], sharding.num_shards(dim));
        if size % num_shards != 0 {
            return fail(format!(
                "dimension {dim} of size {size} cannot be split into {num_shards} equal shards"
            ));
        }
    }
    Ok(())
}

/// The contiguous byte ranges of a shard.
fn runs(host: &HostArray, ranges: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut runs = Vec::new();
    for_each_run(host.dims(), ranges, host.dtype().byte_size(), |in_whole, _| runs.push(in_whole));
    runs
}

/// The bytes of a shard, copied only if they are not contiguous.
fn gather<'a>(host: &'a HostArray, runs: &[Range<usize>]) -> Cow<'a, [u8]> {
    let bytes = host.bytes();
    match runs {
        [run] => Cow::Borrowed(&bytes[run.clone()]),
        _ => Cow::Owned(runs.iter().flat_map(|run| &bytes[run.clone()]).copied().collect()),
    }
}

/// Calls `copy` with each run of bytes that is contiguous in an array and in its shard: its range in the array, and its
/// range in the shard.
fn for_each_run(
    dims: &[usize],
    ranges: &[Range<usize>],
    element_size: usize,
    mut copy: impl FnMut(Range<usize>, Range<usize>),
) {
    if ranges.iter().any(Range::is_empty) {
        return;
    }
    // Dimensions after the last split one belong to each run whole.
    let split = (0..dims.len()).rev().find(|dim| ranges[*dim].len() != dims[*dim]);
    let split = split.unwrap_or(0);
    let inner: usize = dims.get(split + 1..).unwrap_or_default().iter().product::<usize>() * element_size;
    let run = ranges.get(split).map_or(1, Range::len) * inner;
    let mut index: Vec<usize> = ranges.iter().take(split).map(|range| range.start).collect();
    let mut in_slice = 0;
    loop {
        let row = index.iter().zip(dims).fold(0, |row, (index, size)| row * size + index);
        let start = match ranges.get(split) {
            Some(range) => (row * dims[split] + range.start) * inner,
            None => 0,
        };
        copy(start..start + run, in_slice..in_slice + run);
        in_slice += run;
        // The next index of the outer dimensions, the last varying fastest.
        let mut dim = index.len();
        loop {
            if dim == 0 {
                return;
            }
            dim -= 1;
            index[dim] += 1;
            if index[dim] < ranges[dim].end {
                break;
            }
            index[dim] = ranges[dim].start;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_cover_a_slice_in_order() {
        let check = |dims: &[usize], ranges: &[Range<usize>], expected: &[(usize, usize)]| {
            let mut runs = Vec::new();
            let mut next = 0;
            for_each_run(dims, ranges, 2, |in_whole, in_slice| {
                assert_eq!(in_slice, next..next + in_whole.len());
                next = in_slice.end;
                runs.push((in_whole.start, in_whole.end));
            });
            assert_eq!(runs, expected, "{dims:?} {ranges:?}");
        };
        const ONE_RANGE: [Range<usize>; 1] = [Range { start: 1, end: 3 }];
        check(&[], &[], &[(0, 2)]);
        check(&[5], &ONE_RANGE, &[(2, 6)]);
        check(&[2, 3], &[0..2, 0..3], &[(0, 12)]);
        check(&[2, 3], &[1..2, 0..3], &[(6, 12)]);
        check(&[2, 3], &[0..2, 1..2], &[(2, 4), (8, 10)]);
        check(&[2, 2, 2], &[0..1, 1..2, 0..2], &[(4, 8)]);
        check(&[2, 2, 2], &[0..2, 1..2, 0..2], &[(4, 8), (12, 16)]);
        check(&[2, 0], &[0..1, 0..0], &[]);
    }
}
