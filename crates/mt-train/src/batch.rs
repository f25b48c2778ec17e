//! Checks batches against the objective and copies them to the devices.

use std::sync::Arc;

use mt_data::Batch;
use mt_ir::ProgramValue;
use mt_nn::{SequenceOrder, axes::POSITION};
use mt_runtime::{Array, Runtime};
use mt_shape::{DType, HostArray};

use crate::{TrainError, objective::BatchArray};

/// Checks that a batch has the declared arrays, with elements within their bounds.
///
/// # Errors
/// An array is missing, has another type or shape, or holds an element out of bounds.
pub(crate) fn check(arrays: Vec<BatchArray>, batch: &Batch) -> Result<(), TrainError> {
    for declared in arrays {
        let wrong = |problem: String| TrainError::WrongBatch { array: declared.name, problem };
        let array = array_of(batch, &declared)?;
        let dims = declared.dims();
        if (array.dtype(), array.dims()) != (declared.dtype, dims.as_slice()) {
            let given = format!("{}{:?}", array.dtype(), array.dims());
            return Err(wrong(format!("it is `{given}`, not `{}{dims:?}`", declared.dtype)));
        }
        if let (Some(bound), DType::I32) = (declared.below, declared.dtype) {
            let is_known = |number: i32| usize::try_from(number).is_ok_and(|number| number < bound);
            if let Some(number) = batch.integers(declared.name).iter().find(|number| !is_known(**number)) {
                return Err(wrong(format!("it holds {number}, but its numbers are from 0 to {}", bound - 1)));
            }
        }
    }
    Ok(())
}

/// Copies the arrays that an objective declares to the devices, with the shardings of the program's `arguments`. Along
/// positions, elements are put into the order in which sequences are stored.
pub(crate) fn to_devices(
    runtime: &Runtime,
    declared: &[BatchArray],
    arguments: &[ProgramValue],
    batch: &Batch,
    order: SequenceOrder,
) -> Result<Vec<Array>, TrainError> {
    let place = |(declared, argument): (&BatchArray, &ProgramValue)| {
        let host = array_of(batch, declared)?;
        let along = declared.axes.iter().position(|axis| axis.name == POSITION);
        let host = match (order, along) {
            (SequenceOrder::AsRead, _) | (_, None) => host.clone(),
            (_, Some(along)) => Arc::new(stored(host, along, order)),
        };
        Ok(Array::from_shared(runtime, host, &argument.sharding)?)
    };
    declared.iter().zip(arguments).map(place).collect()
}

fn array_of<'a>(batch: &'a Batch, declared: &BatchArray) -> Result<&'a Arc<HostArray>, TrainError> {
    batch.array(declared.name).ok_or_else(|| TrainError::WrongBatch {
        array: declared.name,
        problem: "the batch lacks it".to_owned(),
    })
}

/// Permutes an array along the dimension `along` from the order of the text to the order in which tokens are stored.
pub(crate) fn stored(array: &HostArray, along: usize, order: SequenceOrder) -> HostArray {
    permuted(array, along, |index, length| (order.place(index, length), index))
}

/// Permutes an array along the dimension `along` from the order in which tokens are stored to that of the text.
pub(crate) fn as_read(array: HostArray, along: usize, order: SequenceOrder) -> HostArray {
    match order {
        SequenceOrder::AsRead => array,
        SequenceOrder::Paired { .. } => {
            permuted(&array, along, |index, length| (index, order.place(index, length)))
        }
    }
}

/// Copies elements along a dimension, from one place to another for each index.
fn permuted(
    array: &HostArray,
    along: usize,
    from_and_to: impl Fn(usize, usize) -> (usize, usize),
) -> HostArray {
    let dims = array.dims();
    let (outer, length) = (dims[..along].iter().product::<usize>(), dims[along]);
    let size = dims[along + 1..].iter().product::<usize>() * array.dtype().byte_size();
    let mut copy = HostArray::zeros(array.dtype(), dims);
    let places: Vec<(usize, usize)> = (0..length).map(|index| from_and_to(index, length)).collect();
    let (from, to) = (array.bytes(), copy.bytes_mut());
    for row in 0..outer {
        for (source, target) in &places {
            let (source, target) = ((row * length + source) * size, (row * length + target) * size);
            to[target..][..size].copy_from_slice(&from[source..][..size]);
        }
    }
    copy
}
