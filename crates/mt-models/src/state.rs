//! Parameters and their moments, to and from checkpoints.

use std::path::PathBuf;

use mt_checkpoint::{
    ArraySource, Checkpoint, CheckpointError, Entry, ExpectedArray, KeySegment, SourceError, Value,
    entry_name,
};
use mt_ir::TensorType;
use mt_runtime::{Array, PendingHostArray, Runtime, RuntimeError};
use mt_shape::{DType, HostArray, Placement};

use crate::{Affine, Model, ModelError, StoredParameter, moment_scale};

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

/// What is kept for each parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slot {
    /// The parameter itself.
    Parameters,
    /// The running mean of its gradients.
    FirstMoment,
    /// The running mean of their squares.
    SecondMoment,
}

/// The item beside `items` that holds, unscaled, what scaling would round.
pub const EXACT_ITEM: &str = "exact";

impl Slot {
    fn key(self, stored: &StoredParameter) -> Vec<KeySegment> {
        let prefix: Vec<KeySegment> = match self {
            Self::Parameters => vec!["params".into(), "params".into()],
            Self::FirstMoment => vec!["opt_state".into(), 0.into(), "mu".into(), "params".into()],
            Self::SecondMoment => vec!["opt_state".into(), 0.into(), "nu".into(), "params".into()],
        };
        prefix.into_iter().chain(stored.key.iter().map(|segment| segment.clone().into())).collect()
    }

    fn affine(self, stored: &StoredParameter) -> Affine {
        match self {
            Self::Parameters => stored.affine(),
            // Gradients do not see what is added.
            Self::FirstMoment => Affine { scale: moment_scale(stored.scale, 1), offset: 0.0 },
            Self::SecondMoment => Affine { scale: moment_scale(stored.scale, 2), offset: 0.0 },
        }
    }
}

/// What is to be saved of one slot.
#[derive(Default)]
pub struct SlotEntries {
    /// In MaxText's form.
    pub items: Vec<Entry>,
    /// Under the same names, unscaled, what MaxText's form rounds.
    pub exact: Vec<Entry>,
}

/// The entries of a slot's arrays, which are in the order of the model's parameters. Copies to the host are started.
///
/// # Errors
/// A copy cannot be started.
pub fn slot_entries(model: &dyn Model, slot: Slot, arrays: &[Array]) -> Result<SlotEntries, RuntimeError> {
    let mut entries = SlotEntries::default();
    for (stored, array) in model.storage().into_iter().zip(arrays) {
        let key = slot.key(&stored);
        let affine = slot.affine(&stored);
        if !stored.is_exact() {
            let source = Shards::start(array, stored.clone(), Affine::IDENTITY)?;
            entries.exact.push(Entry { key: key.clone(), value: Value::Array(Box::new(source)) });
        }
        let source = Shards::start(array, stored, affine)?;
        entries.items.push(Entry { key, value: Value::Array(Box::new(source)) });
    }
    Ok(entries)
}

/// The arrays of a slot that a checkpoint is expected to hold.
pub fn expected_arrays(model: &dyn Model, slot: Slot) -> Vec<ExpectedArray> {
    let specs = model.parameters();
    model
        .storage()
        .iter()
        .zip(specs)
        .map(|(stored, (_, spec))| ExpectedArray {
            name: entry_name(&slot.key(stored)),
            dtype: spec.dtype,
            dims: stored.stored_dims(&spec.dims()),
        })
        .collect()
}

/// Reads a slot's arrays onto the devices, each part where it belongs, in the type `dtype` (the parameter's own if
/// none is given).
///
/// # Errors
/// An array is missing, damaged, or has another shape.
pub fn load_slot(
    runtime: &Runtime,
    placement: &Placement,
    model: &dyn Model,
    slot: Slot,
    dtype: Option<DType>,
    checkpoint: &Checkpoint,
) -> Result<Vec<Array>, StateError> {
    let exact = checkpoint.item(EXACT_ITEM)?;
    let mut arrays = Vec::new();
    for ((_, spec), stored) in model.parameters().into_iter().zip(model.storage()) {
        let name = entry_name(&slot.key(&stored));
        let sharding = placement.sharding(&spec.logical_axes, &spec.dims());
        let dtype = dtype.unwrap_or(spec.dtype);
        let unscaled = exact.as_ref().filter(|item| item.array(&name).is_ok());
        let array = Array::from_shards(runtime, &TensorType::new(dtype, spec.dims()), &sharding, |ranges| {
            let ranges = stored.stored_ranges(ranges);
            let (part, affine) = match &unscaled {
                Some(item) => (item.read(&name, &ranges)?, Affine::IDENTITY),
                None => (checkpoint.read(&name, &ranges)?, slot.affine(&stored)),
            };
            Ok::<_, StateError>(converted(stored.from_stored(&part, affine), dtype))
        })?;
        arrays.push(array);
    }
    Ok(arrays)
}

/// The numbers in another type.
pub(crate) fn converted(array: HostArray, dtype: DType) -> HostArray {
    if array.dtype() == dtype {
        return array;
    }
    let numbers = array.to_f64();
    let dims = array.dims();
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
