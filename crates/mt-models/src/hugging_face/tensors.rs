//! Which tensors of Hugging Face's files hold which parameters, and how.

use std::collections::BTreeMap;

use mt_nn::ParamSpec;
use mt_shape::{DType, HostArray};

use crate::{
    ForwardPass, ModelError,
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
    let segments = model.config().segments();
    for (index, (path, spec)) in model.parameters().iter().enumerate() {
        let parameter = Parameter::of(&segments, path, spec);
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
    write_rows(tensor.bytes(), 0, tensor.dtype(), tensor.dims(), part, made.bytes_mut());
    made
}

/// Writes what some rows of a tensor, which has the dimensions `file_dims` as a whole, are in a part of a parameter.
/// A tensor of one dimension is one row.
pub fn write_rows(
    rows: &[u8],
    first: usize,
    dtype: DType,
    file_dims: &[usize],
    part: &TensorPart,
    made: &mut [u8],
) {
    let size = dtype.byte_size();
    let columns = file_dims.last().copied().unwrap_or(1);
    match part.layout {
        Layout::Same(_) => made[first * columns * size..][..rows.len()].copy_from_slice(rows),
        Layout::Transposed(_) => {
            transpose_bytes(rows, &mut made[first * size..], size, columns, file_dims[0]);
        }
        Layout::Part { index, of, .. } => {
            let width = columns / of * size;
            let made = made[first * width..].chunks_exact_mut(width.max(1));
            for (from, to) in rows.chunks_exact((columns * size).max(1)).zip(made) {
                to.copy_from_slice(&from[index * width..][..width]);
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
                transpose_bytes(array.bytes(), made.bytes_mut(), size, rows, columns);
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

/// Writes rows of `columns` elements of `size` bytes as the columns of a matrix, whose rows begin `stride` elements
/// apart.
fn transpose_bytes(from: &[u8], to: &mut [u8], size: usize, columns: usize, stride: usize) {
    match size {
        1 => transpose::<1>(from, to, columns, stride, turn),
        // Almost all published weights have two bytes.
        2 => transpose::<2>(from, to, columns, stride, turn_pairs),
        4 => transpose::<4>(from, to, columns, stride, turn),
        _ => transpose::<8>(from, to, columns, stride, turn),
    }
}

/// The side of the squares that are transposed at once. Of elements of two bytes one fills the smallest cache, and its
/// lines are long enough to be written as fast as memory takes them.
pub const SIDE: usize = 128;
/// Elements of `SIZE` bytes, turned: the element in row 2 of column 3 is `square[3][2]`.
type Square<const SIZE: usize> = [[[u8; SIZE]; SIDE]; SIDE];

/// Square by square: lines are read and written whole, and turned in between in memory that stays in the cache, as rows
/// of matrices whose width is a power of two would push each other out of it.
fn transpose<const SIZE: usize>(
    from: &[u8],
    to: &mut [u8],
    columns: usize,
    stride: usize,
    turn_whole: fn(&[[u8; SIZE]], usize, &mut Square<SIZE>),
) {
    let (from, to) = (from.as_chunks::<SIZE>().0, to.as_chunks_mut::<SIZE>().0);
    let rows = from.len().checked_div(columns).unwrap_or(0);
    let mut square = [[[0; SIZE]; SIDE]; SIDE];
    for first_row in (0..rows).step_by(SIDE) {
        let height = SIDE.min(rows - first_row);
        for first_column in (0..columns).step_by(SIDE) {
            let width = SIDE.min(columns - first_column);
            let from = &from[first_row * columns + first_column..];
            let to = &mut to[first_column * stride + first_row..];
            if height == SIDE && width == SIDE {
                turn_whole(from, columns, &mut square);
                for (column, line) in square.iter().enumerate() {
                    to[column * stride..][..SIDE].copy_from_slice(line);
                }
                continue;
            }
            for (row, line) in from.chunks(columns).take(height).enumerate() {
                for (column, value) in line[..width].iter().enumerate() {
                    square[column][row] = *value;
                }
            }
            for (column, line) in square[..width].iter().enumerate() {
                to[column * stride..][..height].copy_from_slice(&line[..height]);
            }
        }
    }
}

/// Turns the square at the beginning of rows of `columns` elements.
fn turn<const SIZE: usize>(from: &[[u8; SIZE]], columns: usize, square: &mut Square<SIZE>) {
    for row in 0..SIDE {
        for (column, value) in from[row * columns..][..SIDE].iter().enumerate() {
            square[column][row] = *value;
        }
    }
}

/// As [`turn`], for elements of two bytes: four rows of four of them are turned in words of eight bytes.
fn turn_pairs(from: &[[u8; 2]], columns: usize, square: &mut Square<2>) {
    const EVEN: u64 = 0x0000_ffff_0000_ffff;
    const LOW: u64 = 0x0000_0000_ffff_ffff;
    let word =
        |line: &[[u8; 2]], group: usize| u64::from_le_bytes(bytemuck::cast(line.as_chunks::<4>().0[group]));
    for row in (0..SIDE).step_by(4) {
        let line = |next: usize| &from[(row + next) * columns..][..SIDE];
        let lines = [line(0), line(1), line(2), line(3)];
        for group in 0..SIDE / 4 {
            let (a, b) = (word(lines[0], group), word(lines[1], group));
            let (c, d) = (word(lines[2], group), word(lines[3], group));
            let (first_ac, second_ac) = (a & LOW | c << 32, a >> 32 | c & !LOW);
            let (first_bd, second_bd) = (b & LOW | d << 32, b >> 32 | d & !LOW);
            let turned = [
                first_ac & EVEN | (first_bd & EVEN) << 16,
                first_ac >> 16 & EVEN | first_bd & !EVEN,
                second_ac & EVEN | (second_bd & EVEN) << 16,
                second_ac >> 16 & EVEN | second_bd & !EVEN,
            ];
            for (column, word) in square[group * 4..].iter_mut().zip(turned) {
                column.as_chunks_mut::<4>().0[row / 4] = bytemuck::cast(word.to_le_bytes());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Transposes a matrix, some rows at a time.
    fn check(size: usize, rows: usize, columns: usize, at_once: usize) {
        let element = |index: usize| (0..size).map(move |byte| (index >> (8 * byte)) as u8 ^ byte as u8);
        let from: Vec<u8> = (0..rows * columns).flat_map(element).collect();
        let expected: Vec<u8> = (0..columns)
            .flat_map(|column| (0..rows).flat_map(move |row| element(row * columns + column)))
            .collect();
        let mut to = vec![0; from.len()];
        for (index, some) in from.chunks(at_once * columns * size).enumerate() {
            transpose_bytes(some, &mut to[index * at_once * size..], size, columns, rows);
        }
        assert_eq!(to, expected, "{rows} rows of {columns} elements of {size} bytes, {at_once} at once");
    }

    #[test]
    fn matrices_are_transposed_whole_and_in_parts() {
        for size in [1, 2, 4, 8] {
            for (rows, columns) in [(1, 1), (3, 5), (128, 128), (64, 200), (130, 257), (256, 384)] {
                for at_once in [128, 100, rows] {
                    check(size, rows, columns, at_once);
                }
            }
        }
    }
}
