//! Differences of two checkpoints.

use std::collections::HashMap;

use mt_shape::HostArray;

use super::{ListedTensor, WeightsSource};
use crate::error::Result;

/// The differences of two checkpoints. Lists are in the order of the left one; tensors that only the right one has are
/// in its order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ListingDiff {
    pub only_left: Vec<ListedTensor>,
    pub only_right: Vec<ListedTensor>,
    /// Tensors with the same name but other dimensions.
    pub shapes: Vec<ListedDifference>,
    /// Tensors with the same name and dimensions but another element type.
    pub dtypes: Vec<ListedDifference>,
    /// Tensors with the same name, dimensions and element type.
    pub num_same: usize,
    /// Differences among tensors with the same name and dimensions; empty unless values were compared. Leaves that are
    /// not arrays, and arrays with unreadable element types, are left out.
    pub values: Vec<ValueDifference>,
}

/// A tensor that both checkpoints have, with a difference.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedDifference {
    pub left: ListedTensor,
    pub right: ListedTensor,
}

/// The numeric difference of a tensor, measured in `f64`.
#[derive(Clone, Debug, PartialEq)]
pub struct ValueDifference {
    pub name: String,
    pub num_elements: u64,
    /// Unequal elements. NaNs are equal to each other.
    pub num_different: u64,
    /// The largest |left − right|; infinite if exactly one side is NaN or infinite.
    pub max_absolute: f64,
    /// The largest |left − right| / max(|left|, |right|).
    pub max_relative: f64,
    /// The position, in row-major order, of the largest absolute difference.
    pub position: Option<u64>,
}

impl ListingDiff {
    /// Compares two checkpoints and, with `values`, every element of the tensors that both hold in the same shape. One
    /// tensor of each is in memory at a time.
    ///
    /// # Errors
    /// A checkpoint cannot be read.
    pub fn of(left: &WeightsSource, right: &WeightsSource, values: bool) -> Result<Self> {
        let (of_left, of_right) = (left.listing()?.tensors, right.listing()?.tensors);
        let mut rest: HashMap<&str, &ListedTensor> =
            of_right.iter().map(|tensor| (tensor.name.as_str(), tensor)).collect();
        let mut diff = Self::default();
        for one in of_left {
            let Some(other) = rest.remove(one.name.as_str()) else {
                diff.only_left.push(one);
                continue;
            };
            if one.dims != other.dims {
                diff.shapes.push(ListedDifference { left: one, right: other.clone() });
                continue;
            }
            let readable = one.dtype.known().is_some() && other.dtype.known().is_some();
            if values && readable {
                let name = &one.name;
                diff.values.push(ValueDifference::of(name, &left.read(name)?, &right.read(name)?));
            }
            if one.dtype == other.dtype {
                diff.num_same += 1;
            } else {
                diff.dtypes.push(ListedDifference { left: one, right: other.clone() });
            }
        }
        diff.only_right =
            of_right.iter().filter(|tensor| rest.contains_key(tensor.name.as_str())).cloned().collect();
        Ok(diff)
    }

    /// Whether names, dimensions and element types agree, and the values if they were compared.
    pub fn is_empty(&self) -> bool {
        self.only_left.is_empty()
            && self.only_right.is_empty()
            && self.shapes.is_empty()
            && self.dtypes.is_empty()
            && self.values.iter().all(ValueDifference::is_equal)
    }

    /// The number of tensors with compared and equal values.
    pub fn num_equal(&self) -> usize {
        self.values.iter().filter(|difference| difference.is_equal()).count()
    }
}

/// Elements converted at a time. A whole embedding as `f64` would take several times its memory.
const BLOCK: usize = 1 << 16;

impl ValueDifference {
    /// Whether every element is equal.
    pub fn is_equal(&self) -> bool {
        self.num_different == 0
    }

    fn of(name: &str, left: &HostArray, right: &HostArray) -> Self {
        let mut difference = Self {
            name: name.to_owned(),
            num_elements: left.num_elements() as u64,
            num_different: 0,
            max_absolute: 0.0,
            max_relative: 0.0,
            position: None,
        };
        if left == right {
            return difference;
        }
        let (left_blocks, right_blocks) = (blocks(left), blocks(right));
        for (block, (left, right)) in left_blocks.zip(right_blocks).enumerate() {
            for (index, (left, right)) in left.into_iter().zip(right).enumerate() {
                if left != right && !(left.is_nan() && right.is_nan()) {
                    difference.add((block * BLOCK + index) as u64, left, right);
                }
            }
        }
        if left.dtype() == right.dtype() && left.dtype().is_integer() {
            // Different large integers may be the same number in floating point.
            let size = left.dtype().byte_size();
            let pairs = left.bytes().chunks_exact(size).zip(right.bytes().chunks_exact(size));
            difference.num_different = pairs.filter(|(left, right)| left != right).count() as u64;
        }
        difference
    }

    fn add(&mut self, position: u64, left: f64, right: f64) {
        self.num_different += 1;
        let finite = left.is_finite() && right.is_finite();
        let absolute = if finite { (left - right).abs() } else { f64::INFINITY };
        let relative = if finite { absolute / left.abs().max(right.abs()) } else { f64::INFINITY };
        if absolute > self.max_absolute {
            self.max_absolute = absolute;
            self.position = Some(position);
        }
        self.max_relative = self.max_relative.max(relative);
    }
}

/// The elements of an array in blocks.
fn blocks(array: &HostArray) -> impl Iterator<Item = Vec<f64>> {
    let (dtype, size) = (array.dtype(), array.dtype().byte_size());
    array.bytes().chunks(BLOCK * size).map(move |bytes| {
        let block = HostArray::from_bytes(dtype, &[bytes.len() / size], bytes);
        block.expect("the block has whole elements").to_f64()
    })
}
