//! Weights: matrices of linear maps and lookup tables, whatever arrays represent them.
//!
//! Layers multiply by a weight and look its rows up, and never see the arrays. A further format is a file beside this
//! one with a [`WeightFormat`], and a [`WeightEncoding`] if checkpoints hold the weight in its dense form. A weight of
//! any format can have an [`Adapter`].

mod adapter;
mod dense;
mod encoding;
mod quantized;
mod rows;

use std::fmt;

use mt_shape::{Attached, Axis, DType, LogicalAxis, Path, Tree, logical};
use mt_trace::{DeviceGroup, Target, Tensor};

use adapter::Frozen;
pub use adapter::{Adapter, AdapterArray, LORA_RANK, first_magnitudes, merged_weights};
pub use dense::DENSE;
pub use encoding::{ArrayForm, EncodedArray, EncodedWeight, WeightEncoding, encoded};
pub use quantized::{Quantized, QuantizedType};
pub use rows::{ADAPTER, WITHOUT_MAGNITUDE, row_factors};

use crate::{ParamSpec, axes::BATCH, lookup::lookup_on_devices};

/// Positions in a row of a TPU's vector registers.
const LANES: usize = 128;

/// A matrix or a table, in one of the forms that weights have.
#[derive(Clone, Debug)]
pub struct Weight<L> {
    format: &'static dyn WeightFormat,
    adapter: Option<Adapter>,
    /// The arrays with their names: those of the format, then those of the adapter.
    arrays: Vec<(&'static str, L)>,
    /// The random numbers by which training drops inputs of the adapter, or the choices of rows among adapters.
    attached: Option<Attached<L>>,
}

/// A form of weights: their arrays, and products with them.
///
/// The functions of a program receive the arrays in the order of [`Self::specs`].
pub trait WeightFormat: fmt::Debug + Send + Sync {
    /// The name that tells formats apart, such as `dense`.
    fn name(&self) -> &'static str;

    /// Names and declarations of the arrays that hold a weight which would be `dense` as one array and whose first
    /// `num_inputs` axes are a linear map's input. An array with an empty name is at the weight's own path.
    fn specs(&self, dense: ParamSpec, num_inputs: usize) -> Vec<(&'static str, ParamSpec)>;

    /// The weight as one array of elements of `dtype`.
    fn dense<'t>(&self, arrays: &[Tensor<'t>], dtype: DType) -> Tensor<'t>;

    /// As [`Weight::dot`].
    fn dot<'t>(&self, arrays: &[Tensor<'t>], x: Tensor<'t>, over: &[&'static str]) -> Tensor<'t> {
        self.dense(arrays, x.dtype()).dot(x, over)
    }

    /// The array of numbers from which rows are looked up, or by which groups of rows are multiplied.
    fn table<'t>(&self, arrays: &[Tensor<'t>]) -> Tensor<'t> {
        self.dense(arrays, DType::F32)
    }

    /// The arrays of the same weight with one axis split into several.
    fn split<'t>(&self, arrays: &[Tensor<'t>], axis: &'static str, into: &[Axis]) -> Vec<Tensor<'t>> {
        let has_axis = |array: &Tensor<'t>| array.axes().iter().any(|own| own.name == axis);
        arrays.iter().map(|array| if has_axis(array) { array.split(axis, into) } else { *array }).collect()
    }

    /// The axis of this name.
    fn axis(&self, arrays: &[Tensor<'_>], name: &'static str) -> Axis {
        arrays[0].axis(name)
    }
}

impl PartialEq for dyn WeightFormat {
    fn eq(&self, other: &Self) -> bool {
        self.name() == other.name()
    }
}

impl Weight<ParamSpec> {
    /// Declares a weight that would be `dense` as one array and whose first `num_inputs` axes are a linear map's input.
    pub fn declare(format: &'static dyn WeightFormat, dense: ParamSpec, num_inputs: usize) -> Self {
        Self { format, adapter: None, arrays: format.specs(dense, num_inputs), attached: None }
    }

    /// As [`Self::declare`], with an adapter.
    pub fn declare_adapted(
        format: &'static dyn WeightFormat,
        dense: ParamSpec,
        num_inputs: usize,
        adapter: Adapter,
    ) -> Self {
        let arrays = adapter.specs(&dense, num_inputs);
        let mut declared = Self::declare(format, dense, num_inputs);
        declared.adapter = Some(adapter);
        declared.arrays.extend(arrays);
        declared
    }
}

impl<L> Weight<L> {
    /// A weight that is one array.
    pub fn dense(array: L) -> Self {
        Self { format: &DENSE, adapter: None, arrays: vec![(dense::NAME, array)], attached: None }
    }
}

impl<L> From<L> for Weight<L> {
    fn from(dense: L) -> Self {
        Self::dense(dense)
    }
}

/// Arrays add their names to the weight's path.
impl<L> Tree for Weight<L> {
    type Leaf = L;
    type With<B> = Weight<B>;

    fn map_leaves_at<B>(&self, path: &mut Path, map: &mut dyn FnMut(&Path, &L) -> B) -> Weight<B> {
        let arrays = self.arrays.iter().map(|(name, leaf)| {
            let mapped = match *name {
                "" => map(path, leaf),
                name => path.within(name, |path| map(path, leaf)),
            };
            (*name, mapped)
        });
        Weight { format: self.format, adapter: self.adapter, arrays: arrays.collect(), attached: None }
    }

    fn attach_at(&mut self, path: &mut Path, attach: &mut dyn FnMut(&Path) -> Attached<L>) {
        if self.adapter.is_some_and(|adapter| adapter.dropout > 0.0 || adapter.choices.is_some()) {
            self.attached = Some(attach(path));
        }
    }
}

impl<'t> Weight<Tensor<'t>> {
    fn tensors(&self) -> Vec<Tensor<'t>> {
        self.arrays.iter().map(|(_, array)| *array).collect()
    }

    /// The arrays of the format, and those of the adapter.
    fn by_format(&self) -> (Vec<Tensor<'t>>, Vec<Tensor<'t>>) {
        let mut arrays = self.tensors();
        let num_adapted = self.adapter.map_or(0, |adapter| 2 + usize::from(adapter.has_magnitude));
        let adapted = arrays.split_off(arrays.len() - num_adapted);
        (arrays, adapted)
    }

    /// The array from which rows are looked up, or by which groups of rows are multiplied.
    #[track_caller]
    fn table(&self) -> Tensor<'t> {
        let (arrays, adapted) = self.by_format();
        match self.adapter {
            Some(Adapter { choices: Some(_), .. }) => {
                arrays[0].region().fail("table", "the weight is one array, but its adapters differ by row")
            }
            Some(adapter) => adapter.merged(&adapted, self.format.dense(&arrays, DType::F32)),
            None => self.format.table(&arrays),
        }
    }

    /// Multiplies by the weight in the activation's type and sums over the axes `over`.
    ///
    /// # Shapes
    /// `[…, over], [over, output axes] -> […, output axes]`
    #[track_caller]
    pub fn dot(&self, x: Tensor<'t>, over: &[&'static str]) -> Tensor<'t> {
        let (arrays, adapted) = self.by_format();
        match self.adapter {
            Some(adapter) => {
                let frozen = Frozen { format: self.format, arrays: &arrays };
                match (adapter.choices, self.attached) {
                    (None, Some(Attached::Noise(noise))) => {
                        adapter.dot(&adapted, x, over, frozen, Some(noise))
                    }
                    (None, _) => adapter.dot(&adapted, x, over, frozen, None),
                    (Some(_), Some(Attached::Rows(choices))) => rows::dot(frozen, &adapted, x, over, choices),
                    // No row of the batch has an adapter.
                    (Some(_), _) => self.format.dot(&arrays, x, over),
                }
            }
            None => self.format.dot(&arrays, x, over),
        }
    }

    /// The weight as one array, for products of groups of rows.
    #[track_caller]
    pub(crate) fn whole(&self) -> Tensor<'t> {
        self.table()
    }

    /// Looks up rows along the leading axis `along`, whose logical name is `logical_axis`, in the type of the format's
    /// table.
    ///
    /// # Shapes
    /// `[along, …], i32[batch, position] -> [batch, position, …]`
    #[track_caller]
    pub fn lookup(&self, along: &'static str, logical_axis: LogicalAxis, indices: Tensor<'t>) -> Tensor<'t> {
        let table = self.table();
        let others = || table.axes().iter().skip(1).map(|_| None).collect::<Vec<_>>();
        // Devices that split the vectors gather them first. Otherwise the partitioner would look up slices of vectors
        // for the tokens of all devices and exchange activations.
        let whole_rows = table.constrain(&[vec![Some(logical_axis)], others()].concat());
        // The vectors of a batch are unsplit, and so are the gradients that are added to rows.
        let batch = vec![Some(logical::ACTIVATION_BATCH), Some(logical::ACTIVATION_NORM_LENGTH)];
        // Rows are gathered in the table's own type, so that the gradient's sums over equal tokens are in that type,
        // too.
        whole_rows.take(along, indices).constrain(&[batch, others()].concat())
    }

    /// As [`Self::lookup`] for a table of two axes, in the type `dtype`, but devices exchange vectors instead of gathering
    /// the table: each looks up its columns for the tokens of all. `None` where that is not cheaper, or not possible.
    #[track_caller]
    pub fn lookup_by_exchange(
        &self,
        table_axes: &[Option<LogicalAxis>],
        indices: Tensor<'t>,
        dtype: DType,
    ) -> Option<Tensor<'t>> {
        if indices.region().target() != Target::Tpu || !indices.has_axis(BATCH) {
            return None;
        }
        let table = self.table();
        let [rows, columns] = table.axes()[..] else { return None };
        let of_columns = table.shards(table_axes).along(columns.name).map(DeviceGroup::size)?;
        let batch = [Some(logical::ACTIVATION_BATCH), Some(logical::ACTIVATION_NORM_LENGTH)];
        let of_tokens = indices.shards(&batch);
        let on_device = |axis: &Axis| axis.size / of_tokens.along(axis.name).map_or(1, DeviceGroup::size);
        let tokens: usize = indices.axes().iter().map(on_device).product();
        // Columns that do not fill a register take as long as those that do, and a table with fewer rows than there are
        // tokens is smaller than their vectors.
        if columns.size / of_columns < LANES || tokens > rows.size {
            return None;
        }
        let found = lookup_on_devices(table, table_axes, indices, &batch, dtype);
        Some(found.constrain(&[batch.as_slice(), &[None]].concat()))
    }

    /// As [`Self::lookup`], in the type `dtype`, but as a product with one-hot vectors. A table that is split along
    /// `along` stays on its devices, and its gradient is also a product, not a scatter-add over rows.
    ///
    /// # Shapes
    /// `[along, …], i32[batch, position] -> [batch, position, …]`
    #[track_caller]
    pub fn lookup_by_product(&self, along: &'static str, indices: Tensor<'t>, dtype: DType) -> Tensor<'t> {
        let axes = [&*indices.axes(), &[self.axis(along)]].concat();
        let numbers = indices.region().iota(DType::I32, self.axis(along)).broadcast(&axes);
        let rows = self.dot(numbers.equals(indices).cast(dtype), &[along]);
        let batch = [Some(logical::ACTIVATION_BATCH), Some(logical::ACTIVATION_NORM_LENGTH)];
        let others = rows.axes().iter().skip(batch.len()).map(|_| None).collect::<Vec<_>>();
        rows.constrain(&[batch.to_vec(), others].concat())
    }

    /// The same weight with one axis split into several.
    #[track_caller]
    pub fn split(&self, axis: &'static str, into: &[Axis]) -> Self {
        let (arrays, adapted) = self.by_format();
        let mut split = self.format.split(&arrays, axis, into);
        split.extend(DENSE.split(&adapted, axis, into));
        let names = self.arrays.iter().map(|(name, _)| *name);
        let arrays = names.zip(split).collect();
        Self { format: self.format, adapter: self.adapter, arrays, attached: self.attached }
    }

    /// The axis of this name.
    #[track_caller]
    pub fn axis(&self, name: &'static str) -> Axis {
        self.format.axis(&self.by_format().0, name)
    }
}
