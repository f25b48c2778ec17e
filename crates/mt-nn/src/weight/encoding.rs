//! Weights whose arrays are made of a dense array on the host, such as quantized ones.
//!
//! Checkpoints and published files hold such a weight in its dense form. The declaration of each array names the dense
//! form, so that one mechanism reads and writes the arrays of all formats, slice by slice.

use std::{fmt, ops::Range, sync::Arc};

use mt_shape::{Axis, DType, HostArray, Path};

use super::WeightFormat;
use crate::{Initializer, LayerPlace, ParamSpec};

/// The way between a weight's dense array and the arrays of its format. One layer is encoded at a time.
pub trait WeightEncoding: fmt::Debug + Send + Sync {
    /// The name that tells encodings apart, such as `int8`.
    fn name(&self) -> &'static str;

    /// The format whose arrays these are, which computes with them.
    fn format(&self) -> &'static dyn WeightFormat;

    /// The arrays of a weight, given its dense form in one layer; see [`EncodedWeight::num_inputs`].
    fn arrays(&self, dense: &ParamSpec, num_inputs: usize) -> Vec<ArrayForm>;

    /// The arrays made of a slice of the dense array, in `f32`. The slice is whole along the dense axes that an array
    /// lacks, and has whole blocks along all others.
    fn encode(&self, weight: &EncodedWeight, dense: &HostArray) -> Vec<HostArray>;

    /// The numbers, in `f32`, that the arrays stand for.
    fn decode(&self, weight: &EncodedWeight, arrays: &[HostArray]) -> HostArray;
}

impl PartialEq for dyn WeightEncoding {
    fn eq(&self, other: &Self) -> bool {
        self.name() == other.name()
    }
}

/// How an array lies over a weight's dense form.
#[derive(Clone, Debug, PartialEq)]
pub struct ArrayForm {
    pub name: &'static str,
    pub dtype: DType,
    /// For each axis of the array, the axis of the dense form that it runs along, and the number of dense elements
    /// along it for each of the array's.
    pub axes: Vec<(usize, usize)>,
}

/// A weight that other arrays hold than a dense one.
#[derive(Clone, Debug, PartialEq)]
pub struct EncodedWeight {
    pub encoding: &'static dyn WeightEncoding,
    /// The weight as checkpoints hold it.
    pub dense: ParamSpec,
    /// How many of the dense axes, after that of stacked layers, are the input's of a linear map.
    pub num_inputs: usize,
    pub arrays: Vec<ArrayForm>,
}

/// An array of an encoded weight.
#[derive(Clone, Debug, PartialEq)]
pub struct EncodedArray {
    pub weight: Arc<EncodedWeight>,
    /// Which of the weight's arrays.
    pub index: usize,
}

/// Declares the arrays of a weight that would be `dense` as one array. They are never trained.
///
/// # Panics
/// An axis has no whole number of blocks.
pub fn encoded(
    encoding: &'static dyn WeightEncoding,
    dense: ParamSpec,
    num_inputs: usize,
) -> Vec<(&'static str, ParamSpec)> {
    let arrays = encoding.arrays(&dense, num_inputs);
    let weight = Arc::new(EncodedWeight { encoding, dense, num_inputs, arrays });
    let declare = |(index, form): (usize, &ArrayForm)| {
        let dense = &weight.dense;
        let axis = |(along, block): &(usize, usize)| {
            let Axis { name, size } = dense.axes[*along];
            assert!(size.is_multiple_of(*block), "`{name}` has {size} elements, no multiple of {block}");
            dense.axes[*along].with_size(size / block)
        };
        let spec = ParamSpec {
            axes: form.axes.iter().map(axis).collect(),
            logical_axes: form.axes.iter().map(|(along, _)| dense.logical_axes[*along]).collect(),
            initializer: Initializer::Loaded,
            dtype: form.dtype,
            place: dense.place,
            module: dense.module,
            role: String::new(),
            num_group_axes: 0,
            num_input_axes: 0,
            is_trainable: false,
            encoded: Some(EncodedArray { weight: weight.clone(), index }),
            adapter: None,
        };
        (form.name, spec)
    };
    weight.arrays.iter().enumerate().map(declare).collect()
}

impl EncodedWeight {
    /// Whether layers are stacked along the leading axis of the dense form and of all arrays.
    pub fn is_stacked(&self) -> bool {
        matches!(self.dense.place, LayerPlace::Stacked { .. })
    }
}

impl EncodedArray {
    /// How the array lies over the dense form of a layer.
    pub fn form(&self) -> &ArrayForm {
        &self.weight.arrays[self.index]
    }

    /// The same array where the dense form is declared otherwise.
    pub(crate) fn with_dense(&self, change: impl FnOnce(&ParamSpec) -> ParamSpec) -> Self {
        let dense = change(&self.weight.dense);
        Self { weight: Arc::new(EncodedWeight { dense, ..(*self.weight).clone() }), index: self.index }
    }

    /// The slice of one layer's dense form that is encoded for the slice of the array in `ranges`, and which slice of
    /// the array that makes is wanted.
    pub fn dense_ranges(&self, ranges: &[Range<usize>]) -> (Vec<Range<usize>>, Vec<Range<usize>>) {
        let weight = &*self.weight;
        let dims = &weight.dense.dims()[usize::from(weight.is_stacked())..];
        let mut read: Vec<Range<usize>> = dims.iter().map(|dim| 0..*dim).collect();
        let mut wanted = Vec::new();
        for ((along, block), range) in self.form().axes.iter().zip(ranges) {
            let block_of = |form: &ArrayForm| {
                form.axes.iter().find(|(other, _)| other == along).map(|(_, block)| *block)
            };
            // An array that lacks the axis is made of all that lies along it.
            let blocks: Option<Vec<usize>> = weight.arrays.iter().map(block_of).collect();
            if let Some(blocks) = blocks {
                let largest = blocks.into_iter().fold(1, least_common_multiple);
                let (start, end) = (range.start * block, range.end * block);
                let end = end.next_multiple_of(largest).min(dims[*along]);
                read[*along] = start / largest * largest..end;
            }
            let first = read[*along].start / block;
            wanted.push(range.start - first..range.end - first);
        }
        (read, wanted)
    }
}

fn least_common_multiple(one: usize, other: usize) -> usize {
    let (mut divisor, mut rest) = (one, other);
    while rest > 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    one / divisor * other
}

impl ParamSpec {
    /// The parameter as checkpoints hold it: the dense form of the weight whose array it is, or the parameter itself.
    pub fn stored_form(&self, path: &Path) -> (Path, Self) {
        match &self.encoded {
            Some(array) => (path.parent(), array.weight.dense.clone()),
            None => (path.clone(), self.clone()),
        }
    }

    /// Whether the parameter stands for what checkpoints hold: all do but the further arrays of encoded weights.
    pub fn is_first_array(&self) -> bool {
        self.encoded.as_ref().is_none_or(|array| array.index == 0)
    }

    /// The number of the model's numbers that the array holds; those of an encoded weight count with its first array.
    pub fn num_weights(&self) -> usize {
        match &self.encoded {
            Some(array) if array.index == 0 => array.weight.dense.num_elements(),
            Some(_) => 0,
            None => self.num_elements(),
        }
    }
}
