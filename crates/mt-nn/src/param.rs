//! What a parameter is: shape, placement and initial value, declared together.

use mt_shape::{Axis, DType, Path, Tree};
use mt_trace::{Key, Region, ScanOptions, Tensor};

/// A parameter's shape, logical axes, initial value and type.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamSpec {
    pub axes: Vec<Axis>,
    /// For each axis the logical name that placement rules know.
    pub logical_axes: Vec<Option<&'static str>>,
    pub initializer: Initializer,
    pub dtype: DType,
    pub place: LayerPlace,
    /// If this is the kernel of a linear map within a layer, how many of its axes, after that of stacked layers, are
    /// those of the map's input.
    pub num_input_axes: usize,
}

/// Which layers of a stack a parameter is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerPlace {
    /// It is of no stack.
    None,
    One(usize),
    /// Those from `first` on in steps of `step`, along the leading axis.
    Stacked {
        first: usize,
        step: usize,
    },
}

/// How a parameter's first value is drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Initializer {
    Zeros,
    Ones,
    /// Normal, with this standard deviation.
    Normal {
        deviation: f64,
    },
    /// Normal, cut at two deviations before it is scaled to this standard deviation.
    TruncatedNormal {
        deviation: f64,
    },
}

/// The standard deviation of a standard normal distribution that is cut at two deviations.
const TRUNCATED_DEVIATION: f64 = 0.879_625_661_034_239_8;

impl Initializer {
    /// Variance scaling: variance `scale / fan_in`, cut at two deviations.
    pub fn fan_in(scale: f64, fan_in: usize) -> Self {
        Self::TruncatedNormal { deviation: (scale / fan_in as f64).sqrt() }
    }
}

impl ParamSpec {
    /// A parameter in `f32`; each axis comes with its logical name.
    pub fn new<const N: usize>(axes: [(Axis, &'static str); N], initializer: Initializer) -> Self {
        Self {
            axes: axes.iter().map(|(axis, _)| *axis).collect(),
            logical_axes: axes.iter().map(|(_, logical)| Some(*logical)).collect(),
            initializer,
            dtype: DType::F32,
            place: LayerPlace::None,
            num_input_axes: 0,
        }
    }

    /// The same parameter as the kernel of a linear map whose input has its first axes.
    pub fn with_input_axes(self, num_input_axes: usize) -> Self {
        Self { num_input_axes, ..self }
    }

    /// The same parameter of several layers, those from `first` on in steps of `step`, stacked along a leading axis.
    pub fn stacked(&self, layers: Axis, first: usize, step: usize) -> Self {
        let axes = std::iter::once(layers).chain(self.axes.iter().copied()).collect();
        let logical_axes = std::iter::once(Some("layers")).chain(self.logical_axes.iter().copied()).collect();
        Self { axes, logical_axes, place: LayerPlace::Stacked { first, step }, ..self.clone() }
    }

    /// The same parameter, of one layer of an unrolled stack.
    pub fn of_layer(&self, layer: usize) -> Self {
        Self { place: LayerPlace::One(layer), ..self.clone() }
    }

    /// The same parameter in another type.
    pub fn with_dtype(self, dtype: DType) -> Self {
        Self { dtype, ..self }
    }

    /// The dimensions.
    pub fn dims(&self) -> Vec<usize> {
        self.axes.iter().map(|axis| axis.size).collect()
    }

    /// The number of elements.
    pub fn num_elements(&self) -> usize {
        self.axes.iter().map(|axis| axis.size).product()
    }
}

/// Draws the first values of parameters.
///
/// Each parameter has its own stream of random numbers, keyed by its path without layer numbers and the lists that they
/// count, and by its layer, so that scanned and unrolled stacks start from the same values.
pub fn initialize<'t>(region: Region<'t>, key: Key<'t>, parameters: &[(Path, ParamSpec)]) -> Vec<Tensor<'t>> {
    parameters.iter().map(|(path, spec)| initialize_one(region, key, path, spec)).collect()
}

fn initialize_one<'t>(region: Region<'t>, key: Key<'t>, path: &Path, spec: &ParamSpec) -> Tensor<'t> {
    let segments = path.segments();
    let is_number =
        |index: usize| segments.get(index).is_some_and(|segment| segment.parse::<usize>().is_ok());
    let in_stack = spec.place != LayerPlace::None;
    let name: Vec<&str> = (0..segments.len())
        .filter(|index| !in_stack || !(is_number(*index) || is_number(index + 1)))
        .map(|index| segments[index].as_str())
        .collect();
    let key = key.fold_in_name(&name.join("."));
    let (initializer, dtype) = (spec.initializer, spec.dtype);
    let number = |number: usize| region.integer(DType::U64, number as i64);
    let (first, step) = match spec.place {
        LayerPlace::Stacked { first, step } => (first, step),
        LayerPlace::One(layer) => {
            return draw(region, initializer, key.fold_in(number(layer)), &spec.axes).cast(dtype);
        }
        LayerPlace::None => return draw(region, initializer, key.fold_in(number(0)), &spec.axes).cast(dtype),
    };
    let layers = spec.axes[0];
    let index = LayerIndex { index: region.iota(DType::U64, layers) * number(step) + number(first) };
    let axes = spec.axes[1..].to_vec();
    let ([], [stacked]) = region.scan(ScanOptions::over(layers), [], &index, |region, [], layer| {
        ([], [draw(*region, initializer, key.fold_in(layer.index), &axes).cast(dtype)])
    });
    stacked
}

fn draw<'t>(region: Region<'t>, initializer: Initializer, key: Key<'t>, axes: &[Axis]) -> Tensor<'t> {
    match initializer {
        Initializer::Zeros => region.full(DType::F32, axes, 0.0),
        Initializer::Ones => region.full(DType::F32, axes, 1.0),
        Initializer::Normal { deviation } => key.normal(axes) * deviation,
        Initializer::TruncatedNormal { deviation } => {
            key.truncated_normal(axes) * (deviation / TRUNCATED_DEVIATION)
        }
    }
}

/// The number of each layer, for a scan over layers.
#[derive(mt_derive::Tree)]
pub struct LayerIndex<L> {
    pub index: L,
}

/// Places parameters where their specifications say. Inside a scanned body this keeps slices of stacked weights, and
/// the gradients of those slices, split; without it the partitioner may replicate them.
pub fn constrain_to_specs<'t, M>(parameters: &M, specs: &[ParamSpec]) -> M::With<Tensor<'t>>
where
    M: Tree<Leaf = Tensor<'t>>,
{
    let mut specs = specs.iter();
    parameters.map_leaves(|_, leaf| {
        let spec = specs.next().expect("one specification for each parameter");
        leaf.constrain(&spec.logical_axes)
    })
}
