//! Parameters and what is kept for them, to and from checkpoints.

use std::path::PathBuf;

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
    /// In MaxText's form.
    pub items: Vec<Entry>,
    /// Under the same names, unscaled, what MaxText's form rounds.
    pub exact: Vec<Entry>,
}

impl StateEntries {
    /// Adds an array. Its copies to the host are started.
    ///
    /// # Errors
    /// A copy cannot be started.
    pub fn add(&mut self, described: &StateArray, array: &Array) -> Result<(), RuntimeError> {
        let StateArray { key, stored, affine, .. } = described;
        if !stored.is_exact() {
            let source = Shards::start(array, stored.clone(), Affine::IDENTITY)?;
            self.exact.push(Entry { key: key.clone(), value: Value::Array(Box::new(source)) });
        }
        let source = Shards::start(array, stored.clone(), *affine)?;
        self.items.push(Entry { key: key.clone(), value: Value::Array(Box::new(source)) });
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
    dims: Vec<usize>,
    pending: Vec<(mt_checkpoint::Region, Option<PendingHostArray>)>,
}

impl Shards {
    fn start(array: &Array, stored: StoredParameter, affine: Affine) -> Result<Self, RuntimeError> {
        let pending = array
            .shards()
            .into_iter()
            .map(|shard| {
                Ok((stored.stored_ranges(&shard.ranges), Some(array.shard_to_host_async(shard.device)?)))
            })
            .collect::<Result<_, RuntimeError>>()?;
        let dims = stored.stored_dims(array.dims());
        Ok(Self { stored, affine, dtype: array.dtype(), dims, pending })
    }
}

impl ArraySource for Shards {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn dims(&self) -> &[usize] {
        &self.dims
    }

    fn shards(&self) -> Vec<mt_checkpoint::Region> {
        self.pending.iter().map(|(region, _)| region.clone()).collect()
    }

    fn fetch(&mut self, shard: usize) -> Result<HostArray, SourceError> {
        let pending = self.pending[shard].1.take().ok_or("a shard was fetched twice")?;
        let part = pending.wait().map_err(RuntimeError::from)?;
        Ok(self.stored.to_stored(&part, self.affine))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
