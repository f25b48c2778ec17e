//! Which tensors of Hugging Face's files hold which parameters, and how.

use std::collections::BTreeMap;

use mt_nn::ParamSpec;
use mt_shape::{DType, HostArray};

use crate::{
    Model, ModelError,
    decoder::{Decoder, Parameter},
    families::{Layout, TensorName},
};

/// A tensor in a file, and the parameters it holds.
#[derive(Clone, Debug, PartialEq)]
pub struct FileTensor {
    pub name: String,
    pub dims: Vec<usize>,
    /// More than one if parameters are stored side by side.
    pub parts: Vec<TensorPart>,
}

/// One layer of a parameter, as a tensor holds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorPart {
    /// Which of the model's parameters.
    pub parameter: usize,
    /// Which of its layers, if it is stacked.
    pub layer: Option<usize>,
    pub layout: Layout,
}

/// All tensors of a model in Hugging Face's files, by name.
///
/// # Errors
/// The family has no published models.
pub fn file_tensors(model: &Decoder) -> Result<Vec<FileTensor>, ModelError> {
    let family = model.family().hugging_face.as_ref().ok_or(ModelError::NoHuggingFaceForm)?;
    let names: Vec<&TensorName> = family.tensors.iter().copied().flatten().collect();
    let mut tensors: BTreeMap<String, FileTensor> = BTreeMap::new();
    for (index, (path, spec)) in model.parameters().iter().enumerate() {
        let parameter = Parameter::of(model.config(), path, spec);
        let layers = parameter.layers();
        let in_layer = !layers.is_empty();
        let named =
            names.iter().find(|name| name.role == parameter.role && name.name.contains("{}") == in_layer);
        let named = named.ok_or_else(|| ModelError::NoTensorName { role: parameter.role.clone() })?;
        let dims = if is_stacked(spec) { spec.dims()[1..].to_vec() } else { spec.dims() };
        let mut add = |name: String, layer: Option<usize>| {
            let tensor = tensors.entry(name.clone()).or_insert_with(|| FileTensor {
                name,
                dims: file_dims(&dims, named.layout),
                parts: Vec::new(),
            });
            if let (Layout::Part { .. }, false) = (named.layout, tensor.parts.is_empty()) {
                // Parts stand side by side along the last axis.
                let own = file_dims(&dims, named.layout);
                let last = tensor.dims.len() - 1;
                tensor.dims[last] += own[last];
            }
            tensor.parts.push(TensorPart { parameter: index, layer, layout: named.layout });
        };
        if in_layer {
            for (position, layer) in layers.iter().enumerate() {
                let layer_of = is_stacked(spec).then_some(position);
                add(named.name.replace("{}", &layer.to_string()), layer_of);
            }
        } else {
            add(named.name.to_owned(), None);
        }
    }
    Ok(tensors.into_values().collect())
}

fn is_stacked(spec: &ParamSpec) -> bool {
    matches!(spec.place, mt_nn::LayerPlace::Stacked { .. })
}

/// The dimensions in the file of a part with these dimensions.
fn file_dims(dims: &[usize], layout: Layout) -> Vec<usize> {
    let product = |dims: &[usize]| dims.iter().product::<usize>();
    match layout {
        Layout::Transposed(inputs) => vec![product(&dims[inputs..]), product(&dims[..inputs])],
        Layout::Same(0) | Layout::Part { rows: 0, .. } => vec![product(dims)],
        Layout::Same(rows) | Layout::Part { rows, .. } => {
            vec![product(&dims[..rows]), product(&dims[rows..])]
        }
    }
}

/// A part of a parameter, made of a tensor's elements.
///
/// `dims` are the part's dimensions in memory.
pub fn parameter_part(tensor: &HostArray, part: &TensorPart, dims: &[usize]) -> HostArray {
    let mut made = HostArray::zeros(tensor.dtype(), dims);
    write_part(tensor.bytes(), tensor.dtype(), tensor.dims(), part, dims, made.bytes_mut());
    made
}

/// Writes a part of a parameter, which has the dimensions `dims` in memory, made of the elements of a tensor, which has
/// the dimensions `file_dims`.
pub fn write_part(
    tensor: &[u8],
    dtype: DType,
    file_dims: &[usize],
    part: &TensorPart,
    dims: &[usize],
    made: &mut [u8],
) {
    let product = |dims: &[usize]| dims.iter().product::<usize>();
    let size = dtype.byte_size();
    match part.layout {
        Layout::Same(_) => made.copy_from_slice(tensor),
        Layout::Transposed(inputs) => {
            let (rows, columns) = (product(&dims[inputs..]), product(&dims[..inputs]));
            transpose_bytes(tensor, made, size, rows, columns);
        }
        Layout::Part { index, of, .. } => {
            let columns = file_dims.last().copied().unwrap_or(1);
            let (rows, width) = (product(file_dims) / columns.max(1), columns / of);
            for row in 0..rows {
                let from = (row * columns + index * width) * size;
                made[row * width * size..(row + 1) * width * size]
                    .copy_from_slice(&tensor[from..from + width * size]);
            }
        }
    }
}

/// A tensor's elements, made of its parts, in their order.
pub fn tensor_bytes(tensor: &FileTensor, dtype: DType, parts: &[HostArray]) -> HostArray {
    let mut made = HostArray::zeros(dtype, &tensor.dims);
    let size = dtype.byte_size();
    for (part, array) in tensor.parts.iter().zip(parts) {
        match part.layout {
            Layout::Same(_) => made.bytes_mut().copy_from_slice(array.bytes()),
            Layout::Transposed(_) => {
                let (rows, columns) = (tensor.dims[0], tensor.dims[1]);
                transpose_bytes(array.bytes(), made.bytes_mut(), size, columns, rows);
            }
            Layout::Part { index, of, .. } => {
                let columns = tensor.dims.last().copied().unwrap_or(1);
                let (rows, width) = (made.num_elements() / columns.max(1), columns / of);
                for row in 0..rows {
                    let to = (row * columns + index * width) * size;
                    made.bytes_mut()[to..to + width * size]
                        .copy_from_slice(&array.bytes()[row * width * size..(row + 1) * width * size]);
                }
            }
        }
    }
    made
}

/// Writes the matrix of `rows` rows and `columns` columns of elements of `size` bytes transposed.
fn transpose_bytes(from: &[u8], to: &mut [u8], size: usize, rows: usize, columns: usize) {
    fn sized<const SIZE: usize>(from: &[u8], to: &mut [u8], rows: usize, columns: usize)
    where
        [u8; SIZE]: Default,
    {
        transpose(from.as_chunks::<SIZE>().0, to.as_chunks_mut::<SIZE>().0, rows, columns);
    }
    match size {
        1 => sized::<1>(from, to, rows, columns),
        2 => sized::<2>(from, to, rows, columns),
        4 => sized::<4>(from, to, rows, columns),
        _ => sized::<8>(from, to, rows, columns),
    }
}

/// Tile by tile: lines are read and written whole, and turned in between in a tile that stays in the cache, as rows of
/// matrices whose width is a power of two would push each other out of it.
fn transpose<T: Copy + Default>(from: &[T], to: &mut [T], rows: usize, columns: usize) {
    const SIDE: usize = 32;
    let mut tile = [[T::default(); SIDE]; SIDE];
    for first_row in (0..rows).step_by(SIDE) {
        let height = SIDE.min(rows - first_row);
        for first_column in (0..columns).step_by(SIDE) {
            let width = SIDE.min(columns - first_column);
            for row in 0..height {
                let line = &from[(first_row + row) * columns + first_column..][..width];
                for (column, value) in line.iter().enumerate() {
                    tile[column][row] = *value;
                }
            }
            for (column, line) in tile[..width].iter().enumerate() {
                to[(first_column + column) * rows + first_row..][..height].copy_from_slice(&line[..height]);
            }
        }
    }
}
