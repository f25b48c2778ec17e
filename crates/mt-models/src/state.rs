//! Parameters and what is kept for them, to and from checkpoints.

use std::{ops::Range, path::PathBuf};

use half::slice::HalfFloatSliceExt;
use mt_checkpoint::{
    ArraySource, CheckpointError, Entry, ExpectedArray, KeySegment, SourceError, Value, entry_name,
};
use mt_nn::{LayerPlace, ParamSpec};
use mt_runtime::{Array, PendingHostArray, RuntimeError};
use mt_shape::{DType, HostArray, Path, Placement, Sharding};

use crate::{Affine, Model, ModelError, StoredParameter, decoder::role};

/// State cannot be saved or loaded.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(
        "the tensors of `{path}` are not those of the model{}{}{}\nhint: `maxtext checkpoint inspect` lists what is there; `config.json` or the named model says what is needed",
        listed("missing", missing),
        listed("not used", unused),
        listed("of another shape or type", others)
    )]
    OtherTensors { path: PathBuf, missing: Vec<String>, unused: Vec<String>, others: Vec<String> },
}

/// The first of a number of names, and how many more there are.
fn listed(what: &str, names: &[String]) -> String {
    const SHOWN: usize = 6;
    if names.is_empty() {
        return String::new();
    }
    let more = names.len().saturating_sub(SHOWN);
    let rest = if more > 0 { format!(", and {more} more") } else { String::new() };
    format!("\n  {what}: {}{rest}", names[..names.len().min(SHOWN)].join(", "))
}

impl StateError {
    /// Whether what the user asked for is at fault.
    pub fn is_user_error(&self) -> bool {
        match self {
            Self::Checkpoint(error) => error.is_user_error(),
            Self::Runtime(error) => error.is_user_error(),
            Self::Model(_) | Self::OtherTensors { .. } => true,
        }
    }
}

/// An array of the state, and how checkpoints hold it.
#[derive(Clone, Debug)]
pub struct StateArray {
    /// Where it is in the checkpoint's tree.
    pub key: Vec<KeySegment>,
    /// The layout of its parameter there, less the axes that the array lacks.
    pub stored: StoredParameter,
    /// What storing does to the array's numbers.
    pub affine: Affine,
    pub dtype: DType,
    pub dims: Vec<usize>,
    /// For each axis the logical name that placement rules know.
    pub logical_axes: Vec<Option<&'static str>>,
    /// A mesh axis over which the array is split besides.
    pub split_over: Option<&'static str>,
    /// The layers whose array it is.
    pub place: LayerPlace,
    /// What it is for in its layer, or in the model.
    pub role: String,
}

/// The item beside `items` that holds, unscaled, what scaling would round.
pub const EXACT_ITEM: &str = "exact";

impl StateArray {
    /// The parameters of a model, in its order.
    pub fn parameters(model: &dyn Model) -> Vec<Self> {
        let array = |(stored, (path, spec)): (StoredParameter, (Path, ParamSpec))| Self {
            key: parameter_key(&["params".into()], &stored),
            place: spec.place,
            role: role(&path, &spec),
            affine: stored.affine(),
            stored,
            dtype: spec.dtype,
            dims: spec.dims(),
            logical_axes: spec.logical_axes,
            split_over: None,
        };
        model.storage().into_iter().zip(model.parameters()).map(array).collect()
    }

    /// The place in the checkpoint's tree of the model's form that the array is of.
    pub(crate) fn holder(&self) -> &[KeySegment] {
        &self.key[..self.key.len() - self.stored.key.len()]
    }

    /// The layers along the first axis, the one whose array it is, or none.
    pub fn layers(&self) -> Vec<Option<usize>> {
        match self.place {
            LayerPlace::None => vec![None],
            LayerPlace::One(layer) => vec![Some(layer)],
            LayerPlace::Stacked { first, step } => {
                (0..self.dims[0]).map(|index| Some(first + index * step)).collect()
            }
        }
    }

    /// Where the array is on a mesh.
    pub fn sharding(&self, placement: &Placement) -> Sharding {
        let sharding = placement.sharding(&self.logical_axes, &self.dims);
        self.split_over.map_or(sharding.clone(), |mesh_axis| sharding.split_further(&self.dims, mesh_axis))
    }

    /// The same array as earlier versions of this program stored it.
    #[must_use]
    pub fn as_earlier(&self) -> Self {
        let Some(earlier) = &self.stored.earlier else { return self.clone() };
        // What is added is added to parameters, not to their moments.
        let is_moment = self.affine.offset != self.stored.offset;
        Self {
            key: self.holder().iter().cloned().chain(earlier.key.iter().cloned().map(Into::into)).collect(),
            affine: if is_moment { self.affine } else { Affine { offset: earlier.offset, ..self.affine } },
            stored: (**earlier).clone(),
            ..self.clone()
        }
    }

    /// What a checkpoint that has the array holds.
    pub fn expected(&self) -> ExpectedArray {
        ExpectedArray {
            name: entry_name(&self.key),
            dtype: self.dtype,
            dims: self.stored.stored_dims(&self.dims),
        }
    }
}

/// The key of a parameter, or of what is kept for it, in a tree of the model's form that begins at `tree`.
pub fn parameter_key(tree: &[KeySegment], stored: &StoredParameter) -> Vec<KeySegment> {
    let names = stored.key.iter().map(|segment| segment.clone().into());
    tree.iter().cloned().chain(["params".into()]).chain(names).collect()
}

/// What is to be saved of the state.
#[derive(Default)]
pub struct StateEntries {
    items: Vec<StoredArray>,
    exact: Vec<StoredArray>,
}

impl StateEntries {
    /// Adds an array. Its copies to the host are started.
    ///
    /// # Errors
    /// A copy cannot be started.
    pub fn add(&mut self, described: &StateArray, array: &Array) -> Result<(), RuntimeError> {
        let StateArray { key, stored, affine, .. } = described;
        if !stored.is_exact() {
            add(&mut self.exact, key, Shards::start(array, stored.clone(), Affine::IDENTITY)?);
        }
        add(&mut self.items, key, Shards::start(array, stored.clone(), *affine)?);
        Ok(())
    }

    /// The entries of parameters in the model's order. Copies to the host are started.
    ///
    /// # Errors
    /// A copy cannot be started.
    pub fn of_parameters(model: &dyn Model, parameters: &[Array]) -> Result<Self, RuntimeError> {
        let mut entries = Self::default();
        for (described, array) in StateArray::parameters(model).iter().zip(parameters) {
            entries.add(described, array)?;
        }
        Ok(entries)
    }

    /// How many stored arrays there are: fewer than those that were added, where one holds several.
    pub fn num_stored(&self) -> usize {
        self.items.len()
    }

    /// What is saved in MaxText's form, and under the same names, unscaled, what that form rounds.
    pub fn into_entries(self) -> (Vec<Entry>, Vec<Entry>) {
        let entries = |arrays: Vec<StoredArray>| arrays.into_iter().map(StoredArray::into_entry).collect();
        (entries(self.items), entries(self.exact))
    }
}

/// Adds shards to the stored array of the same name, or as a new one.
fn add(arrays: &mut Vec<StoredArray>, key: &[KeySegment], shards: Shards) {
    let is_slice = shards.stored.slice.is_some();
    match arrays.iter_mut().find(|array| is_slice && array.key == key) {
        Some(array) => array.parameters.push(shards),
        None => arrays.push(StoredArray { key: key.to_vec(), parameters: vec![shards] }),
    }
}

/// An array of a checkpoint: a parameter, or several as its slices.
struct StoredArray {
    key: Vec<KeySegment>,
    parameters: Vec<Shards>,
}

impl StoredArray {
    fn into_entry(mut self) -> Entry {
        let grid = |shards: &Shards| -> Vec<mt_checkpoint::Region> {
            shards.pending.iter().map(|shard| shard.ranges.clone()).collect()
        };
        let first = grid(&self.parameters[0]);
        // Files are the cells of one grid, so parameters that are split in different ways are written whole.
        if self.parameters.iter().any(|shards| grid(shards) != first) {
            for shards in &mut self.parameters {
                shards.is_whole = true;
            }
        }
        let first = &self.parameters[0];
        let slices = Slices { dims: first.stored.stored_dims(&first.dims), parameters: self.parameters };
        Entry { key: self.key, value: Value::Array(Box::new(slices)) }
    }
}

/// The numbers in another type.
pub(crate) fn converted(array: HostArray, dtype: DType) -> HostArray {
    if array.dtype() == dtype {
        return array;
    }
    let dims = array.dims();
    // What most weights are, and most models want: nothing is made in between.
    if let (DType::F32, DType::BF16) = (array.dtype(), dtype) {
        let mut made = HostArray::zeros(dtype, dims);
        let numbers = bytemuck::cast_slice::<u8, f32>(array.bytes());
        let values = bytemuck::cast_slice_mut::<u8, half::bf16>(made.bytes_mut());
        values.convert_from_f32_slice(numbers);
        return made;
    }
    let numbers = array.to_f64();
    let made = match dtype {
        DType::F64 => HostArray::from_slice(dtype, dims, &numbers),
        DType::BF16 => {
            let values: Vec<half::bf16> = numbers.iter().map(|number| to_bf16(*number)).collect();
            HostArray::from_slice(dtype, dims, &values)
        }
        DType::F16 => {
            let values: Vec<half::f16> = numbers.iter().map(|number| to_f16(*number)).collect();
            HostArray::from_slice(dtype, dims, &values)
        }
        DType::I32 => {
            let values: Vec<i32> = numbers.iter().map(|number| *number as i32).collect();
            HostArray::from_slice(dtype, dims, &values)
        }
        _ => {
            let values: Vec<f32> = numbers.iter().map(|number| *number as f32).collect();
            HostArray::from_slice(DType::F32, dims, &values)
        }
    };
    made.expect("one value for each element")
}

/// The nearest `bf16`. Of an `f64`, `half` drops the last bits before it rounds, so that numbers just beyond the middle
/// of two go the wrong way; an `f32` holds all that is converted here, or rounds it as other programs do.
pub(crate) fn to_bf16(number: f64) -> half::bf16 {
    half::bf16::from_f32(number as f32)
}

/// The nearest `f16`, as [`to_bf16`].
pub(crate) fn to_f16(number: f64) -> half::f16 {
    half::f16::from_f32(number as f32)
}

/// The distinct shards of an array on their way to the host.
struct Shards {
    stored: StoredParameter,
    affine: Affine,
    dtype: DType,
    /// In memory.
    dims: Vec<usize>,
    pending: Vec<PendingShard>,
    /// The shards are put together before they are written.
    is_whole: bool,
}

struct PendingShard {
    /// In memory.
    ranges: Vec<Range<usize>>,
    array: Option<PendingHostArray>,
}

impl Shards {
    fn start(array: &Array, stored: StoredParameter, affine: Affine) -> Result<Self, RuntimeError> {
        let pending = array
            .shards()
            .into_iter()
            .map(|shard| {
                let array = Some(array.shard_to_host_async(shard.device)?);
                Ok(PendingShard { ranges: shard.ranges, array })
            })
            .collect::<Result<_, RuntimeError>>()?;
        let dims = array.dims().to_vec();
        Ok(Self { stored, affine, dtype: array.dtype(), dims, pending, is_whole: false })
    }

    fn regions(&self) -> Vec<mt_checkpoint::Region> {
        if self.is_whole {
            let whole: Vec<Range<usize>> = self.dims.iter().map(|dim| 0..*dim).collect();
            return vec![self.stored.stored_ranges(&whole)];
        }
        self.pending.iter().map(|shard| self.stored.stored_ranges(&shard.ranges)).collect()
    }

    fn num_regions(&self) -> usize {
        if self.is_whole { 1 } else { self.pending.len() }
    }

    fn fetch(&mut self, index: usize) -> Result<HostArray, SourceError> {
        if !self.is_whole {
            return Ok(self.stored.to_stored(&self.pending[index].wait()?, self.affine));
        }
        let mut whole = HostArray::zeros(self.dtype, &self.dims);
        for shard in &mut self.pending {
            let part = shard.wait()?;
            place(&mut whole, &shard.ranges, &part);
        }
        Ok(self.stored.to_stored(&whole, self.affine))
    }
}

impl PendingShard {
    fn wait(&mut self) -> Result<HostArray, SourceError> {
        let pending = self.array.take().ok_or("a shard was fetched twice")?;
        Ok(pending.wait().map_err(RuntimeError::from)?)
    }
}

/// Copies a part to where it is in the whole array.
fn place(whole: &mut HostArray, ranges: &[Range<usize>], part: &HostArray) {
    let Some((last, outer)) = ranges.split_last() else {
        whole.bytes_mut().copy_from_slice(part.bytes());
        return;
    };
    let dims = whole.dims().to_vec();
    let size = part.dtype().byte_size();
    let row = last.len() * size;
    let num_rows: usize = outer.iter().map(ExactSizeIterator::len).product();
    for number in 0..num_rows {
        let (mut rest, mut start, mut stride) = (number, 0, dims[dims.len() - 1]);
        for (range, dim) in outer.iter().zip(&dims[..outer.len()]).rev() {
            start += (range.start + rest % range.len()) * stride;
            rest /= range.len();
            stride *= dim;
        }
        let target = (start + last.start) * size;
        whole.bytes_mut()[target..target + row].copy_from_slice(&part.bytes()[number * row..][..row]);
    }
}

/// The parameters in one stored array: one, or as many as it has slices.
struct Slices {
    dims: Vec<usize>,
    parameters: Vec<Shards>,
}

impl ArraySource for Slices {
    fn dtype(&self) -> DType {
        self.parameters[0].dtype
    }

    fn dims(&self) -> &[usize] {
        &self.dims
    }

    fn shards(&self) -> Vec<mt_checkpoint::Region> {
        self.parameters.iter().flat_map(Shards::regions).collect()
    }

    fn fetch(&mut self, shard: usize) -> Result<HostArray, SourceError> {
        let mut index = shard;
        for parameter in &mut self.parameters {
            let num_regions = parameter.num_regions();
            if index < num_regions {
                return parameter.fetch(index);
            }
            index -= num_regions;
        }
        Err("there is no such shard".into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_put_in_their_places() {
        let numbers = |range: Range<i32>| range.collect::<Vec<i32>>();
        let mut whole = HostArray::zeros(DType::I32, &[2, 3, 4]);
        let part = HostArray::from_slice(DType::I32, &[1, 2, 2], &numbers(1..5)).unwrap();
        place(&mut whole, &[1..2, 1..3, 2..4], &part);
        let filled: Vec<(usize, i32)> =
            whole.as_slice::<i32>().unwrap().iter().copied().enumerate().collect();
        let filled: Vec<_> = filled.into_iter().filter(|(_, number)| *number != 0).collect();
        assert_eq!(filled, [(18, 1), (19, 2), (22, 3), (23, 4)]);
        let mut scalar = HostArray::zeros(DType::I32, &[]);
        place(&mut scalar, &[], &HostArray::from_slice(DType::I32, &[], &[7]).unwrap());
        assert_eq!(scalar.to_f64(), [7.0]);
    }

    #[test]
    fn numbers_just_beyond_the_middle_are_rounded_up() {
        // The middle of 1 and the next `bf16`, and of 1 and the next `f16`, and the next `f32` after each.
        let (bf16, f16) = (1.0 + 2.0_f32.powi(-8), 1.0 + 2.0_f32.powi(-11));
        let check = |dtype: DType, numbers: [f32; 2], expected: [f64; 2]| {
            let array = HostArray::from_slice(DType::F32, &[2], &numbers).unwrap();
            assert_eq!(converted(array, dtype).to_f64(), expected, "{dtype}");
        };
        check(DType::BF16, [bf16, bf16.next_up()], [1.0, 1.0 + 2.0_f64.powi(-7)]);
        check(DType::F16, [f16, f16.next_up()], [1.0, 1.0 + 2.0_f64.powi(-10)]);
    }
}
