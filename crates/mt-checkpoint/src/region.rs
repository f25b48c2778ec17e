//! Boxes of array positions and copies between dense arrays that cover different boxes.

use std::ops::Range;

/// One range of positions per axis, in the coordinates of the whole array.
pub type Region = Vec<Range<usize>>;

/// The region of a whole array.
pub(crate) fn whole(dims: &[usize]) -> Region {
    dims.iter().map(|&dim| 0..dim).collect()
}

pub(crate) fn lengths(region: &[Range<usize>]) -> Vec<usize> {
    region.iter().map(|range| range.end.saturating_sub(range.start)).collect()
}

pub(crate) fn num_elements(region: &[Range<usize>]) -> usize {
    lengths(region).iter().product()
}

/// The intersection of two regions; `None` if it is empty.
pub(crate) fn overlap(left: &[Range<usize>], right: &[Range<usize>]) -> Option<Region> {
    let common: Region = left
        .iter()
        .zip(right)
        .map(|(left, right)| left.start.max(right.start)..left.end.min(right.end))
        .collect();
    common.iter().all(|range| range.start < range.end).then_some(common)
}

/// Every position of a grid with `counts` cells per axis, in row-major order. A grid without axes has one cell.
pub(crate) fn grid(counts: &[usize]) -> impl Iterator<Item = Vec<usize>> + use<> {
    let counts = counts.to_vec();
    let total: usize = counts.iter().product();
    (0..total).map(move |mut flat| {
        let mut position = vec![0; counts.len()];
        for (axis, &count) in counts.iter().enumerate().rev() {
            position[axis] = flat % count;
            flat /= count;
        }
        position
    })
}

/// The boxes of size `cell` of a regular grid over `bounds` that intersect `region`. Boxes at the end may extend beyond
/// the array.
pub(crate) fn cells_meeting(region: &[Range<usize>], cell: &[usize]) -> Vec<(Vec<usize>, Region)> {
    let first: Vec<usize> = region.iter().zip(cell).map(|(range, cell)| range.start / cell).collect();
    let counts: Vec<usize> = region
        .iter()
        .zip(cell)
        .zip(&first)
        .map(|((range, cell), first)| range.end.div_ceil(*cell) - first)
        .collect();
    grid(&counts)
        .map(|position| {
            let position: Vec<usize> =
                position.iter().zip(&first).map(|(offset, first)| offset + first).collect();
            let region =
                position.iter().zip(cell).map(|(index, cell)| index * cell..(index + 1) * cell).collect();
            (position, region)
        })
        .collect()
}

/// The consecutive pieces of a dense box, in the order of its elements, each with at most `most` elements where axes can
/// be divided so.
pub(crate) fn pieces(region: &[Range<usize>], most: usize) -> impl Iterator<Item = Region> + use<> {
    let counts = lengths(region);
    // Axes after `axis` are whole in each piece, those before it have one position.
    let inner_size = |axis: usize| counts[axis + 1..].iter().product::<usize>();
    let axis = (0..counts.len()).find(|axis| inner_size(*axis) <= most).unwrap_or(0);
    let rows = if counts.is_empty() { 1 } else { (most / inner_size(axis).max(1)).max(1) };
    let region = region.to_vec();
    let outer: Vec<usize> = counts.iter().take(axis).copied().collect();
    let along = counts.get(axis).copied().unwrap_or(1);
    grid(&outer).flat_map(move |position| {
        let region = region.clone();
        (0..along).step_by(rows).map(move |start| {
            let mut piece = region.clone();
            for (range, index) in piece.iter_mut().zip(&position) {
                *range = range.start + index..range.start + index + 1;
            }
            if let Some(range) = piece.get_mut(axis) {
                *range = range.start + start..range.start + along.min(start + rows);
            }
            piece
        })
    })
}

/// Copies `common` from a dense array that covers `source_region` to one that covers `target_region`.
/// `common` must lie within both.
pub(crate) fn copy(
    source: &[u8],
    source_region: &[Range<usize>],
    target: &mut [u8],
    target_region: &[Range<usize>],
    common: &[Range<usize>],
    element_size: usize,
) {
    // Trailing axes that are whole on both sides, together with the axis before them, form one contiguous run.
    let mut split = common.len();
    let mut run = element_size;
    while split > 0 {
        split -= 1;
        run *= common[split].len();
        if common[split] != source_region[split] || common[split] != target_region[split] {
            break;
        }
    }
    let source_strides = strides(source_region, element_size);
    let target_strides = strides(target_region, element_size);
    let offset = |region: &[Range<usize>], strides: &[usize], position: &[usize]| -> usize {
        (0..common.len())
            .map(|axis| {
                let start = common[axis].start + position.get(axis).copied().unwrap_or(0);
                (start - region[axis].start) * strides[axis]
            })
            .sum()
    };
    for position in grid(&lengths(&common[..split])) {
        let from = offset(source_region, &source_strides, &position);
        let to = offset(target_region, &target_strides, &position);
        target[to..to + run].copy_from_slice(&source[from..from + run]);
    }
}

fn strides(region: &[Range<usize>], element_size: usize) -> Vec<usize> {
    let mut strides = vec![element_size; region.len()];
    for axis in (1..region.len()).rev() {
        strides[axis - 1] = strides[axis] * region[axis].len();
    }
    strides
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_grid_without_axes_has_one_cell() {
        assert_eq!(grid(&[]).collect::<Vec<_>>(), [Vec::<usize>::new()]);
        assert_eq!(cells_meeting(&[], &[]), [(vec![], vec![])]);
    }

    #[test]
    fn pieces_follow_the_order_of_elements() {
        for (dims, most) in [
            (vec![], 1),
            (vec![5], 2),
            (vec![3, 4], 1),
            (vec![3, 4], 4),
            (vec![3, 4], 9),
            (vec![2, 3, 4], 5),
            (vec![1, 1, 7], 3),
        ] {
            let region: Region = dims.iter().map(|dim| 10..10 + dim).collect();
            let mut next = 0;
            for piece in pieces(&region, most) {
                assert!(num_elements(&piece) <= most, "{dims:?} {most}: {piece:?}");
                for position in grid(&lengths(&piece)) {
                    let place = position.iter().zip(&piece).zip(&dims);
                    let flat =
                        place.fold(0, |flat, ((offset, range), dim)| flat * dim + range.start - 10 + offset);
                    assert_eq!(flat, next, "{dims:?} {most}: {piece:?}");
                    next += 1;
                }
            }
            assert_eq!(next, num_elements(&region));
        }
    }

    proptest! {
        #[test]
        fn tiles_of_any_size_rebuild_the_array(
            axes in proptest::collection::vec((1..6_usize, 1..4_usize, 0..3_usize, 0..3_usize), 0..4)
        ) {
            let dims: Vec<usize> = axes.iter().map(|axis| axis.0).collect();
            let cell: Vec<usize> = axes.iter().map(|axis| axis.1).collect();
            let wanted: Region = axes
                .iter()
                .map(|&(dim, _, start, end)| { let start = start.min(dim - 1); start..(dim - end.min(dim - 1)).max(start + 1) })
                .collect();
            let array: Vec<u8> = (0..num_elements(&whole(&dims)) as u8).collect();
            let mut expected = vec![0; num_elements(&wanted)];
            copy(&array, &whole(&dims), &mut expected, &wanted, &wanted, 1);
            let mut rebuilt = vec![255; num_elements(&wanted)];
            for (_, tile) in cells_meeting(&wanted, &cell) {
                let inside = overlap(&tile, &whole(&dims)).expect("a cell that meets the region meets the array");
                let mut bytes = vec![0; num_elements(&tile)];
                copy(&array, &whole(&dims), &mut bytes, &tile, &inside, 1);
                let common = overlap(&tile, &wanted).expect("the cell meets the region");
                copy(&bytes, &tile, &mut rebuilt, &wanted, &common, 1);
            }
            prop_assert_eq!(&rebuilt, &expected);
            for (place, value) in grid(&lengths(&wanted)).zip(&expected) {
                let flat = place.iter().zip(&wanted).zip(&dims).fold(0, |flat, ((offset, range), dim)| flat * dim + range.start + offset);
                prop_assert_eq!(*value as usize, flat);
            }
        }
    }
}
