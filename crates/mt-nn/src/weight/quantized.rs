//! Quantized weights: whole numbers of 8 or 4 bits, or 4-bit NormalFloat numbers, with scales.
//!
//! Codes, scales and rounding are those of Qwix, the library that MaxText quantizes with: scales belong to an output and
//! to a tile of the last input axis, and are shared along the other input axes. Codes are computed in `f32`, whatever the
//! type of the weights.

use std::sync::Mutex;

use mt_shape::{Axis, DType, HostArray, axis};
use mt_trace::Tensor;

use super::{ArrayForm, EncodedWeight, WeightEncoding, WeightFormat, encoded};
use crate::ParamSpec;

/// The numbers that codes stand for, before they are multiplied by scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuantizedType {
    /// Whole numbers from −128 to 127.
    Int8,
    /// Whole numbers from −8 to 7.
    Int4,
    /// The 16 numbers of 4-bit NormalFloat (Dettmers et al., 2023, appendix E).
    Nf4,
}

impl QuantizedType {
    pub const ALL: [Self; 3] = [Self::Int8, Self::Int4, Self::Nf4];

    /// The name in configurations.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Int8 => "int8",
            Self::Int4 => "int4",
            Self::Nf4 => "nf4",
        }
    }

    /// The magnitude that the largest number of a tile is scaled to. Half a step beyond the largest whole number uses its
    /// code fully.
    const fn bound(self) -> f32 {
        match self {
            Self::Int8 => 127.5,
            Self::Int4 => 7.5,
            Self::Nf4 => 1.0,
        }
    }

    const fn is_packed(self) -> bool {
        !matches!(self, Self::Int8)
    }

    /// The code of a scaled number, as it is stored: 8 bits, or 4.
    fn code(self, scaled: f32) -> u8 {
        match self {
            Self::Int8 => scaled.round_ties_even().clamp(-128.0, 127.0) as i8 as u8,
            Self::Int4 => (scaled.round_ties_even().clamp(-8.0, 7.0) + 8.0) as u8,
            Self::Nf4 => {
                // The nearest number, and of two equally near ones the smaller.
                let mut best = 0;
                for (index, number) in NF4.iter().enumerate() {
                    if (number - scaled).abs() < (NF4[best] - scaled).abs() {
                        best = index;
                    }
                }
                best as u8
            }
        }
    }

    /// The number that a code stands for.
    fn number(self, code: u8) -> f32 {
        match self {
            Self::Int8 => f32::from(code as i8),
            Self::Int4 => f32::from(code) - 8.0,
            Self::Nf4 => NF4[usize::from(code)],
        }
    }
}

/// The numbers of 4-bit NormalFloat.
const NF4: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// The axis of two codes in a byte.
const PAIR: &str = "code_pair";
/// The axis of the numbers that share a scale.
const TILE: &str = "scale_tile";

/// A format of quantized weights.
#[derive(Debug)]
pub struct Quantized {
    codes: QuantizedType,
    /// How many numbers along the last input axis share a scale; all of them if `None`.
    tile: Option<usize>,
    name: String,
}

impl Quantized {
    /// The format of these codes and tiles. There is one value of each format, which is never freed.
    pub fn of(codes: QuantizedType, tile: Option<usize>) -> &'static Self {
        static KNOWN: Mutex<Vec<&'static Quantized>> = Mutex::new(Vec::new());
        let mut known = KNOWN.lock().expect("no thread panics while it holds the list");
        let same = known.iter().find(|format| (format.codes, format.tile) == (codes, tile));
        if let Some(format) = same.copied() {
            return format;
        }
        let name = match tile {
            Some(tile) => format!("{}_{tile}", codes.name()),
            None => codes.name().to_owned(),
        };
        let format: &'static Self = Box::leak(Box::new(Self { codes, tile, name }));
        known.push(format);
        format
    }

    /// Whether codes of an array are stored two in a byte.
    fn is_packed(values: &Tensor<'_>) -> bool {
        values.dtype() == DType::U8
    }

    /// The weight's axes, given its codes. Two codes in a byte are neighbours along the first axis.
    fn axes(values: &Tensor<'_>) -> Vec<Axis> {
        let mut axes = values.axes().to_vec();
        if Self::is_packed(values) {
            axes[0].size *= 2;
        }
        axes
    }

    /// Codes, each in an element of its own.
    fn unpacked(values: Tensor<'_>) -> Tensor<'_> {
        if !Self::is_packed(&values) {
            return values;
        }
        let own = values.axes();
        let pair = axis(PAIR, 2);
        let axes = [&[own[0], pair], &own[1..]].concat();
        let low_bit = values.region().iota(DType::U32, pair) * 4.0;
        let bits = values.cast(DType::U32).broadcast(&axes).shift_right(low_bit);
        bits.logical_and(15.0).merge(&[own[0].name, PAIR], own[0].name).cast(DType::I8)
    }

    /// The numbers before scaling, in `f32`.
    fn numbers<'t>(&self, values: Tensor<'t>) -> Tensor<'t> {
        let codes = Self::unpacked(values);
        match self.codes {
            QuantizedType::Int8 => codes.cast(DType::F32),
            QuantizedType::Int4 => codes.cast(DType::F32) - 8.0,
            QuantizedType::Nf4 => nf4_numbers(codes.cast(DType::I32), 0, NF4.len()),
        }
    }
}

/// The 4-bit NormalFloat numbers of codes in `first..end`, by comparisons, which vectorize where a lookup does not.
fn nf4_numbers<'t>(codes: Tensor<'t>, first: usize, end: usize) -> Tensor<'t> {
    if end - first == 1 {
        let number = codes.region().full(DType::F32, &[], f64::from(NF4[first]));
        return number.broadcast(&codes.axes());
    }
    let middle = first.midpoint(end);
    codes
        .greater_equal(middle as f64)
        .select(nf4_numbers(codes, middle, end), nf4_numbers(codes, first, middle))
}

impl WeightFormat for Quantized {
    fn name(&self) -> &'static str {
        // Values of this type are never freed.
        Self::of(self.codes, self.tile).name.as_str()
    }

    fn specs(&self, dense: ParamSpec, num_inputs: usize) -> Vec<(&'static str, ParamSpec)> {
        encoded(Self::of(self.codes, self.tile), dense, num_inputs)
    }

    fn dense<'t>(&self, arrays: &[Tensor<'t>], dtype: DType) -> Tensor<'t> {
        let [values, scales] = *arrays else {
            panic!("a quantized weight has 2 arrays, not {}", arrays.len())
        };
        let mut numbers = self.numbers(values);
        let of_scales = scales.axes();
        let tiled = numbers.axes().iter().find_map(|own| {
            let tiles = of_scales.iter().find(|other| other.name == own.name)?;
            (tiles.size < own.size).then(|| (*tiles, axis(TILE, own.size / tiles.size)))
        });
        if let Some((tiles, tile)) = tiled {
            numbers = numbers.split(tiles.name, &[tiles, tile]);
        }
        let scaled = numbers * scales;
        let whole = match tiled {
            Some((tiles, _)) => scaled.merge(&[tiles.name, TILE], tiles.name),
            None => scaled,
        };
        whole.cast(dtype)
    }

    fn split<'t>(&self, arrays: &[Tensor<'t>], name: &'static str, into: &[Axis]) -> Vec<Tensor<'t>> {
        let size = self.axis(arrays, name).size;
        let split = arrays.iter().map(|array| {
            let own = array.axes();
            let Some(position) = own.iter().position(|axis| axis.name == name) else { return *array };
            if own[position].size == size {
                return array.split(name, into);
            }
            // Two codes in a byte, and the numbers that share a scale, may belong to different new axes.
            let whole = match Self::is_packed(array) {
                true => Self::unpacked(*array),
                false => {
                    let tile = axis(TILE, size / own[position].size);
                    let axes = [&own[..=position], &[tile], &own[position + 1..]].concat();
                    array.broadcast(&axes).merge(&[name, TILE], name)
                }
            };
            whole.split(name, into)
        });
        split.collect()
    }

    fn axis(&self, arrays: &[Tensor<'_>], name: &'static str) -> Axis {
        let axes = Self::axes(&arrays[0]);
        axes.into_iter().find(|own| own.name == name).unwrap_or_else(|| arrays[0].axis(name))
    }
}

impl WeightEncoding for Quantized {
    fn name(&self) -> &'static str {
        WeightFormat::name(self)
    }

    fn format(&self) -> &'static dyn WeightFormat {
        Self::of(self.codes, self.tile)
    }

    fn arrays(&self, dense: &ParamSpec, num_inputs: usize) -> Vec<ArrayForm> {
        let packs = self.codes.is_packed() && dense.axes[0].size.is_multiple_of(2);
        let values = (0..dense.axes.len()).map(|along| (along, if packs && along == 0 { 2 } else { 1 }));
        // Scales lack the input axes, except for the tiles of the last one.
        let tiled = self.tile.map(|tile| (num_inputs - 1, tile));
        let outputs = (num_inputs..dense.axes.len()).map(|along| (along, 1));
        let dtype = if packs { DType::U8 } else { DType::I8 };
        vec![
            ArrayForm { name: "codes", dtype, axes: values.collect() },
            ArrayForm { name: "scales", dtype: DType::F32, axes: tiled.into_iter().chain(outputs).collect() },
        ]
    }

    fn encode(&self, weight: &EncodedWeight, dense: &HostArray) -> Vec<HostArray> {
        let numbers = dense.as_slice::<f32>().expect("dense forms are read in `f32`");
        let Lines { length, tile, outputs } = self.lines(weight, dense.dims());
        let tiles = length / tile;
        let mut scales = vec![0.0_f32; tiles * outputs];
        for (line, values) in numbers.chunks_exact(outputs).enumerate() {
            let first = line % length / tile * outputs;
            let of_line = scales[first..first + outputs].iter_mut();
            of_line.zip(values).for_each(|(scale, value)| *scale = scale.max(value.abs()));
        }
        let smallest = f32::MIN_POSITIVE.sqrt();
        for scale in &mut scales {
            let divided = *scale / self.codes.bound();
            // Tiles of zeros have no scale of their own.
            *scale = if divided < smallest { 1.0 } else { divided };
        }
        let mut codes = Vec::with_capacity(numbers.len());
        for (line, values) in numbers.chunks_exact(outputs).enumerate() {
            let first = line % length / tile * outputs;
            let of_line = &scales[first..first + outputs];
            codes.extend(values.iter().zip(of_line).map(|(value, scale)| self.codes.code(value / scale)));
        }
        let (mut dims, form) = (dense.dims().to_vec(), &weight.arrays[0]);
        if form.dtype == DType::U8 {
            dims[0] /= 2;
            let inner = codes.len() / 2 / dims[0].max(1);
            let pairs = codes.chunks_exact(2 * inner.max(1));
            codes = pairs
                .flat_map(|pair| {
                    let (low, high) = pair.split_at(inner);
                    low.iter().zip(high).map(|(low, high)| low | high << 4)
                })
                .collect();
        }
        let scale_dims: Vec<usize> = self
            .tile
            .map(|_| tiles)
            .into_iter()
            .chain(dense.dims()[weight.num_inputs..].iter().copied())
            .collect();
        let array = |dtype, dims: &[usize], values: &[u8]| match dtype {
            DType::U8 => HostArray::from_slice(dtype, dims, values),
            _ => {
                HostArray::from_slice(dtype, dims, &values.iter().map(|code| *code as i8).collect::<Vec<_>>())
            }
        };
        let expected = "there are as many elements as the dimensions hold";
        vec![
            array(form.dtype, &dims, &codes).expect(expected),
            HostArray::from_slice(DType::F32, &scale_dims, &scales).expect(expected),
        ]
    }

    fn decode(&self, weight: &EncodedWeight, arrays: &[HostArray]) -> HostArray {
        let (mut dims, mut codes) = (arrays[0].dims().to_vec(), arrays[0].bytes().to_vec());
        if weight.arrays[0].dtype == DType::U8 {
            let inner = codes.len() / dims[0].max(1);
            let of_pair = |bytes: &[u8]| {
                let low = bytes.iter().map(|byte| byte & 15);
                low.chain(bytes.iter().map(|byte| byte >> 4)).collect::<Vec<u8>>()
            };
            codes = codes.chunks_exact(inner.max(1)).flat_map(of_pair).collect();
            dims[0] *= 2;
        }
        let scales = arrays[1].as_slice::<f32>().expect("scales are `f32`");
        let Lines { length, tile, outputs } = self.lines(weight, &dims);
        let decoded = codes.chunks_exact(outputs).enumerate().flat_map(|(line, codes)| {
            let first = line % length / tile * outputs;
            let of_line = &scales[first..first + outputs];
            codes.iter().zip(of_line).map(|(code, scale)| self.codes.number(*code) * scale)
        });
        let numbers: Vec<f32> = decoded.collect();
        HostArray::from_slice(DType::F32, &dims, &numbers).expect("each code stands for a number")
    }
}

/// A weight as lines of outputs, one for each input.
struct Lines {
    /// The size of the last input axis.
    length: usize,
    /// How many lines along it share scales.
    tile: usize,
    /// The number of outputs.
    outputs: usize,
}

impl Quantized {
    fn lines(&self, weight: &EncodedWeight, dims: &[usize]) -> Lines {
        let (inputs, outputs) = dims.split_at(weight.num_inputs);
        let length = inputs.last().copied().unwrap_or(1).max(1);
        let tile = self.tile.unwrap_or(length);
        Lines { length, tile, outputs: outputs.iter().product::<usize>().max(1) }
    }
}
