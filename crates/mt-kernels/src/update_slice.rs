//! Slices of arrays.

/// Copies a block into an array, in runs that are contiguous in both.
pub(crate) fn replace<T: Copy>(
    all: &mut [T],
    dims: &[usize],
    part: &[T],
    part_dims: &[usize],
    starts: &[usize],
) {
    let Some((rank, _)) = dims.iter().zip(part_dims).enumerate().rfind(|(_, (size, part))| size != part)
    else {
        return all.copy_from_slice(part);
    };
    let within: usize = dims[rank + 1..].iter().product();
    let run = part_dims[rank] * within;
    for (index, from) in part.chunks_exact(run.max(1)).enumerate() {
        let (mut rest, mut stride) = (index, dims[rank] * within);
        let mut start = starts[rank] * within;
        for dim in (0..rank).rev() {
            start += (rest % part_dims[dim] + starts[dim]) * stride;
            rest /= part_dims[dim];
            stride *= dims[dim];
        }
        all[start..start + run].copy_from_slice(from);
    }
}
