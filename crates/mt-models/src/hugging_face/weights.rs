//! Parameters from and to Hugging Face's files.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    ops::Range,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use mt_checkpoint::{TensorSpec, WeightsOptions, WeightsWriter, WrittenWeights};
use mt_ir::TensorType;
use mt_nn::ParamSpec;
use mt_runtime::{Array, Runtime, prefer_large_pages};
use mt_shape::{DType, HostArray, Placement};

use super::{
    FileTensor, TensorPart, parameter_part,
    source::TensorSource,
    tensor_bytes,
    tensors::{SIDE, write_rows},
};
use crate::{Model, StateError, families::Layout, state::converted};

/// Tensors beside those of the text model, or made from them: buffers, and the parts that see and hear.
const IGNORED_PREFIXES: &[&str] = &[
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
    "model.embed_vision.",
    "model.audio_tower.",
    "model.embed_audio.",
];
/// The tensors that tied output matrices are.
const EMBEDDING_TABLES: &[&str] = &["model.embed_tokens.weight", "transformer.wte.weight", "wte.weight"];
const IGNORED_SUFFIXES: &[&str] = &[".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"];

/// The files of a model, whose tensors are those that a model of ours needs.
pub struct Weights {
    source: TensorSource,
    tensors: Vec<FileTensor>,
    /// The names in the files, which may have other prefixes than the usual ones.
    names: HashMap<String, String>,
}

impl Weights {
    /// Opens the files of a directory, and compares their tensors with the model's parameters.
    ///
    /// # Errors
    /// Files cannot be read; tensors are missing, of another shape, or left over.
    pub fn open(model: &dyn Model, path: &Path) -> Result<Self, StateError> {
        let source = TensorSource::open(path)?;
        let tensors = model.file_tensors()?;
        let mut names = HashMap::new();
        let (mut missing, mut others) = (Vec::new(), Vec::new());
        for tensor in &tensors {
            let mut candidates = source.candidates(&tensor.name);
            let stored = candidates.iter().find_map(|name| Some((name.clone(), source.dims(name)?)));
            let Some((name, dims)) = stored else {
                missing.push(candidates.swap_remove(0));
                continue;
            };
            if dims != tensor.dims {
                others.push(format!("`{name}` is {dims:?}, not {:?}", tensor.dims));
            }
            if let Some(other) = source.other_type(&name) {
                others.push(format!("`{name}` is {other}, not a type of weights"));
            }
            names.insert(tensor.name.clone(), name);
        }
        let used: HashSet<&str> = names.values().map(String::as_str).collect();
        let mut unused: Vec<String> = source
            .names()
            .into_iter()
            .filter(|name| !used.contains(name) && !is_ignored(name) && !model.ignores_tensor(name))
            .map(str::to_owned)
            .collect();
        if let Some(head) = source.names().into_iter().find(|name| name.ends_with("lm_head.weight"))
            && !used.contains(head)
            && let Some(table) = EMBEDDING_TABLES.iter().find_map(|name| names.get(*name))
            && source.read(head)? != source.read(table)?
        {
            // Of a tied model it may be there once more, but not another matrix, which transformers would use.
            unused.push(format!("{head}, which is not the embedding table"));
        }
        if !(missing.is_empty() && unused.is_empty() && others.is_empty()) {
            return Err(StateError::OtherTensors { path: path.to_owned(), missing, unused, others });
        }
        Ok(Self { source, tensors, names })
    }

    /// Reads all parameters onto the devices, each part where it belongs, in the type `dtype` (the parameter's own if
    /// none is given). The arrays can be donated.
    ///
    /// # Errors
    /// A tensor cannot be read.
    pub fn load(
        &self,
        runtime: &Runtime,
        placement: &Placement,
        model: &dyn Model,
        dtype: Option<DType>,
    ) -> Result<Vec<Array>, StateError> {
        self.parameters(model, dtype, |spec, ty, part| {
            let sharding = placement.sharding(&spec.logical_axes, &ty.dims);
            Array::from_shards(runtime, ty, &sharding, part)
        })
    }

    /// As [`Self::load`], for arrays that are only read: on a CPU they are the memory that was read into.
    ///
    /// # Errors
    /// A tensor cannot be read.
    pub fn load_to_read(
        &self,
        runtime: &Runtime,
        placement: &Placement,
        model: &dyn Model,
        dtype: Option<DType>,
    ) -> Result<Vec<Array>, StateError> {
        self.parameters(model, dtype, |spec, ty, part| {
            let sharding = placement.sharding(&spec.logical_axes, &ty.dims);
            Array::from_kept_shards(runtime, ty, &sharding, part)
        })
    }

    fn parameters(
        &self,
        model: &dyn Model,
        dtype: Option<DType>,
        array: impl Fn(&ParamSpec, &TensorType, &mut ReadPart<'_>) -> Result<Array, StateError>,
    ) -> Result<Vec<Array>, StateError> {
        let mut parts: BTreeMap<(usize, Option<usize>), (&FileTensor, &TensorPart)> = BTreeMap::new();
        for tensor in &self.tensors {
            for part in &tensor.parts {
                parts.insert((part.parameter, part.layer), (tensor, part));
            }
        }
        let mut arrays = Vec::new();
        for (index, (_, spec)) in model.parameters().into_iter().enumerate() {
            let dims = spec.dims();
            let dtype = dtype.unwrap_or(spec.dtype);
            let is_stacked = parts.contains_key(&(index, Some(0)));
            let mut part = |ranges: &[Range<usize>]| -> Result<HostArray, StateError> {
                let own = if is_stacked { &dims[1..] } else { &dims[..] };
                let (layers, inner): (Vec<Option<usize>>, &[Range<usize>]) = if is_stacked {
                    (ranges[0].clone().map(Some).collect(), &ranges[1..])
                } else {
                    (vec![None], ranges)
                };
                let shard: Vec<usize> = ranges.iter().map(Range::len).collect();
                let mut made = HostArray::zeros(dtype, &shard);
                prefer_large_pages(made.bytes_mut());
                let size = made.bytes().len() / layers.len().max(1);
                let work = layers.iter().zip(made.bytes_mut().chunks_mut(size.max(1)));
                let work = work.flat_map(|(layer, bytes)| {
                    let (tensor, part) = parts[&(index, *layer)];
                    let in_rows = self.stored_rows(tensor, own, inner).is_some();
                    pieces(tensor, part, in_rows, bytes)
                });
                in_parallel(work, |buffer, piece| self.read_piece(piece, own, inner, dtype, buffer))?;
                Ok(made)
            };
            arrays.push(array(&spec, &TensorType::new(dtype, dims.clone()), &mut part)?);
        }
        Ok(arrays)
    }

    /// Reads a piece of one layer, which has the dimensions `dims` as a whole and is wanted in these ranges.
    fn read_piece(
        &self,
        piece: Piece<'_>,
        dims: &[usize],
        ranges: &[Range<usize>],
        dtype: DType,
        buffer: &mut Vec<u8>,
    ) -> Result<(), StateError> {
        let Piece { tensor, part, rows, made } = piece;
        let Some(stored) = self.stored_rows(tensor, dims, ranges) else {
            let whole = self.source.read(&self.names[&tensor.name])?;
            let values = converted(sliced(parameter_part(&whole, part, dims), ranges), dtype);
            made.copy_from_slice(values.bytes());
            return Ok(());
        };
        if stored == dtype && matches!(part.layout, Layout::Same(_)) {
            return self.read_rows(tensor, rows, made);
        }
        let columns = tensor.dims.last().copied().unwrap_or(1);
        // What is converted and transposed together is read together: it is then still in the processor's cache, and no
        // tensor is in memory in both types.
        for first in rows.clone().step_by(SIDE) {
            let some = first..rows.end.min(first + SIDE);
            let place = first - rows.start;
            if stored == dtype {
                buffer.resize(some.len() * columns * stored.byte_size(), 0);
                self.read_rows(tensor, some, buffer)?;
                write_rows(buffer, place, dtype, &tensor.dims, part, made);
            } else {
                let mut read = HostArray::zeros(stored, &[some.len(), columns]);
                self.read_rows(tensor, some, read.bytes_mut())?;
                write_rows(converted(read, dtype).bytes(), place, dtype, &tensor.dims, part, made);
            }
        }
        Ok(())
    }

    /// The type of a tensor's numbers in the files, if they are read row by row: all of them are wanted, perhaps in another
    /// type or at other places.
    fn stored_rows(&self, tensor: &FileTensor, dims: &[usize], ranges: &[Range<usize>]) -> Option<DType> {
        let is_whole = ranges.iter().zip(dims).all(|(range, dim)| range.len() == *dim);
        self.source.plain_type(&self.names[&tensor.name]).filter(|_| is_whole)
    }

    /// Reads the bytes of some rows of a tensor that is plain.
    fn read_rows(&self, tensor: &FileTensor, rows: Range<usize>, bytes: &mut [u8]) -> Result<(), StateError> {
        let name = &self.names[&tensor.name];
        match &self.source {
            TensorSource::Safetensors(directory) if rows.len() < num_rows(tensor) => {
                Ok(directory.read_rows_into(name, rows, bytes)?)
            }
            source => source.read_into(name, bytes),
        }
    }
}

/// What is read at once of matrices that are stored as they are in memory.
const COPIED_AT_ONCE: usize = 8 << 20;

/// What one thread reads at a time.
struct Piece<'a> {
    tensor: &'a FileTensor,
    part: &'a TensorPart,
    /// The rows of the tensor that are read.
    rows: Range<usize>,
    made: &'a mut [u8],
}

/// The pieces of one layer's part: one, or several if it lies in the file in the same order and is read row by row, as a
/// large matrix may be a parameter alone.
fn pieces<'a>(
    tensor: &'a FileTensor,
    part: &'a TensorPart,
    in_rows: bool,
    made: &'a mut [u8],
) -> impl Iterator<Item = Piece<'a>> {
    let all = num_rows(tensor);
    let (rows, bytes) = if in_rows && matches!(part.layout, Layout::Same(_)) {
        let row = made.len() / all.max(1);
        let rows = (COPIED_AT_ONCE / row.max(1)).max(1);
        (rows, rows * row)
    } else {
        (all, made.len())
    };
    made.chunks_mut(bytes.max(1)).enumerate().map(move |(index, made)| {
        let first = index * rows;
        Piece { tensor, part, rows: first..all.min(first + rows), made }
    })
}

/// The rows of a tensor, of which one without two dimensions is one.
fn num_rows(tensor: &FileTensor) -> usize {
    if let [rows, _] = tensor.dims[..] { rows } else { 1 }
}

/// Reads a part of a parameter, in these ranges.
type ReadPart<'a> = dyn FnMut(&[Range<usize>]) -> Result<HostArray, StateError> + 'a;

/// Does pieces of work on all processors. Each thread has a buffer, as fresh memory costs more than what is done in it.
fn in_parallel<T: Send>(
    work: impl Iterator<Item = T> + Send,
    each: impl Fn(&mut Vec<u8>, T) -> Result<(), StateError> + Sync,
) -> Result<(), StateError> {
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get).min(8);
    let work = Mutex::new(work);
    let next = || work.lock().unwrap_or_else(PoisonError::into_inner).next();
    let one = || {
        let mut buffer = Vec::new();
        while let Some(piece) = next() {
            each(&mut buffer, piece)?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(one)).collect();
        let mut result = one();
        for other in others {
            // A panic in a thread goes on here.
            let made = other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            result = result.and(made);
        }
        result
    })
}

fn is_ignored(name: &str) -> bool {
    IGNORED_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
        || IGNORED_SUFFIXES.iter().any(|suffix| name.ends_with(suffix))
}

/// The part of an array that lies in these ranges.
fn sliced(array: HostArray, ranges: &[Range<usize>]) -> HostArray {
    let dims = array.dims().to_vec();
    if ranges.iter().zip(&dims).all(|(range, dim)| range.len() == *dim) {
        return array;
    }
    let shape: Vec<usize> = ranges.iter().map(Range::len).collect();
    let mut made = HostArray::zeros(array.dtype(), &shape);
    // Rows of the last axis are contiguous on both sides.
    let size = array.dtype().byte_size();
    let Some((last, outer)) = ranges.split_last() else { return array };
    let row = last.len() * size;
    let mut index: Vec<usize> = outer.iter().map(|range| range.start).collect();
    let count: usize = outer.iter().map(Range::len).product();
    for place in 0..count {
        let flat = index.iter().zip(&dims).fold(0, |flat, (i, dim)| flat * dim + i);
        let from = (flat * dims[dims.len() - 1] + last.start) * size;
        made.bytes_mut()[place * row..(place + 1) * row].copy_from_slice(&array.bytes()[from..from + row]);
        for (position, range) in index.iter_mut().zip(outer).rev() {
            *position += 1;
            if *position < range.end {
                break;
            }
            *position = range.start;
        }
    }
    made
}

/// Writes parameters as Hugging Face's files, in the type `dtype`.
///
/// # Errors
/// The family has no such form, a copy fails, or the files cannot be written.
pub fn write_weights(
    model: &dyn Model,
    arrays: &[Array],
    dtype: DType,
    directory: &Path,
    options: WeightsOptions,
) -> Result<WrittenWeights, StateError> {
    let tensors = model.file_tensors()?;
    let announced = tensors.iter().map(|tensor| TensorSpec {
        name: tensor.name.clone(),
        dtype,
        dims: tensor.dims.clone(),
    });
    let mut writer = WeightsWriter::create(directory, announced.collect(), options)?;
    // One parameter is on the host at a time; what several parameters make together waits until all have been there.
    let mut waiting: HashMap<&str, Vec<(usize, HostArray)>> = HashMap::new();
    for (index, array) in arrays.iter().enumerate() {
        let whole = converted(array.to_host()?, dtype);
        for tensor in &tensors {
            for (position, part) in
                tensor.parts.iter().enumerate().filter(|(_, part)| part.parameter == index)
            {
                let values = match part.layer {
                    Some(layer) => layer_of(&whole, layer),
                    None => whole.clone(),
                };
                let there = waiting.entry(&tensor.name).or_default();
                there.push((position, values));
                if there.len() == tensor.parts.len() {
                    let mut parts = waiting.remove(tensor.name.as_str()).unwrap_or_default();
                    parts.sort_by_key(|(position, _)| *position);
                    let parts: Vec<HostArray> = parts.into_iter().map(|(_, values)| values).collect();
                    writer.write(&tensor.name, &tensor_bytes(tensor, dtype, &parts))?;
                }
            }
        }
    }
    Ok(writer.finish()?)
}

fn layer_of(stacked: &HostArray, layer: usize) -> HostArray {
    let dims = &stacked.dims()[1..];
    let mut made = HostArray::zeros(stacked.dtype(), dims);
    let size = made.bytes().len();
    made.bytes_mut().copy_from_slice(&stacked.bytes()[layer * size..(layer + 1) * size]);
    made
}

/// Whether a path is a published model's directory: one of Hugging Face's, with a `config.json`, or one in Llama's first
/// format; and no run of ours.
pub fn is_hugging_face(path: &Path) -> bool {
    mt_config::is_published_model(path)
}

/// The file of a directory that says how its model is sampled.
pub fn generation_config(directory: &Path) -> PathBuf {
    directory.join("generation_config.json")
}
