//! What a parameter is: shape, placement and initial value, declared together.

use mt_shape::{Axis, DType, Path, Tree};
use mt_trace::{
    KernelOperands, Key, NORMAL_BOUND, Region, ScanOptions, TRUNCATED_BOUND, Tensor, share_within,
};

/// A parameter's shape, logical axes, initial value and type.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamSpec {
    pub axes: Vec<Axis>,
    /// For each axis the logical name that placement rules know.
    pub logical_axes: Vec<Option<&'static str>>,
    pub initializer: Initializer,
    pub dtype: DType,
    pub place: LayerPlace,
    /// What the parameter is for: its name within its layer, such as `attention.query.kernel`. Parameters of a model
    /// are known by their paths, and this is empty.
    pub role: String,
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

/// The axis of a single stream of random numbers.
const STREAM: &str = "stream";

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
            role: String::new(),
            num_input_axes: 0,
        }
    }

    /// The same parameter as the kernel of a linear map whose input has its first axes.
    pub fn with_input_axes(self, num_input_axes: usize) -> Self {
        Self { num_input_axes, ..self }
    }

    /// The same parameter with this role in several layers, those from `first` on in steps of `step`, stacked along a
    /// leading axis.
    pub fn stacked(&self, role: &Path, layers: Axis, first: usize, step: usize) -> Self {
        let axes = std::iter::once(layers).chain(self.axes.iter().copied()).collect();
        let logical_axes = std::iter::once(Some("layers")).chain(self.logical_axes.iter().copied()).collect();
        let place = LayerPlace::Stacked { first, step };
        Self { axes, logical_axes, place, role: role.to_string(), ..self.clone() }
    }

    /// The same parameter, with this role in one layer of an unrolled stack.
    pub fn of_layer(&self, role: &Path, layer: usize) -> Self {
        Self { place: LayerPlace::One(layer), role: role.to_string(), ..self.clone() }
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
/// Each parameter has its own stream of random numbers. Layers' parameters are keyed by role and layer, so that scanned
/// and unrolled stacks start from the same values; those of the model by path.
pub fn initialize<'t>(region: Region<'t>, key: Key<'t>, parameters: &[(Path, ParamSpec)]) -> Vec<Tensor<'t>> {
    parameters.iter().map(|(path, spec)| initialize_one(region, key, path, spec)).collect()
}

fn initialize_one<'t>(region: Region<'t>, key: Key<'t>, path: &Path, spec: &ParamSpec) -> Tensor<'t> {
    let name = match spec.place {
        LayerPlace::None => path.to_string(),
        LayerPlace::One(_) | LayerPlace::Stacked { .. } => format!("layers.{}", spec.role),
    };
    let key = key.fold_in_name(&name);
    let number = |number: usize| region.integer(DType::U64, number as i64);
    // The numbers of the layers that are drawn, and how these are stacked.
    let one = |layer: usize| number(layer).unsqueeze(STREAM);
    let (streams, axes) = match spec.place {
        LayerPlace::Stacked { first, step } => {
            (region.iota(DType::U64, spec.axes[0]) * number(step) + number(first), &spec.axes[1..])
        }
        LayerPlace::One(layer) => (one(layer), &spec.axes[..]),
        LayerPlace::None => (one(0), &spec.axes[..]),
    };
    let (bound, scale) = match spec.initializer {
        Initializer::Zeros => return region.full(spec.dtype, &spec.axes, 0.0),
        Initializer::Ones => return region.full(spec.dtype, &spec.axes, 1.0),
        Initializer::Normal { deviation } => (NORMAL_BOUND, deviation),
        Initializer::TruncatedNormal { deviation } => (TRUNCATED_BOUND, deviation / TRUNCATED_DEVIATION),
    };
    let drawn = draw(region, key, streams, axes, Normal { bound, scale, dtype: spec.dtype });
    if matches!(spec.place, LayerPlace::Stacked { .. }) { drawn } else { drawn.squeeze(STREAM) }
}

/// A normal distribution, which is cut at `bound` deviations before it is scaled.
#[derive(Clone, Copy)]
struct Normal {
    bound: f64,
    scale: f64,
    dtype: DType,
}

/// The most elements that the kernel draws with one key.
const MOST_DRAWN: usize = 1 << 32;

/// Draws numbers of `axes` for each of `streams`, from keys of their own: `[streams] -> [streams, …]`.
fn draw<'t>(
    region: Region<'t>,
    key: Key<'t>,
    streams: Tensor<'t>,
    axes: &[Axis],
    normal: Normal,
) -> Tensor<'t> {
    let elements: usize = axes.iter().map(|axis| axis.size).product();
    if normal.dtype != DType::F32 || elements > MOST_DRAWN {
        return draw_each(region, key, streams, axes, normal);
    }
    let bits = |number: f64| i64::from((number as f32).to_bits());
    let attributes = vec![("bound", bits(normal.bound)), ("edge", bits(share_within(normal.bound)))];
    // The first operand says which type the kernel computes with.
    let operands = [region.full(DType::F32, &[], normal.scale), key.value(), streams];
    let taken = KernelOperands::Dense { num_updated: 0 };
    region.kernel("maxtext.normal", attributes, taken, &operands, |region, operands| {
        vec![draw_each(region, Key::new(operands[1]), operands[2], axes, normal)]
    })[0]
}

/// As [`draw`], by the compiler.
fn draw_each<'t>(
    region: Region<'t>,
    key: Key<'t>,
    streams: Tensor<'t>,
    axes: &[Axis],
    Normal { bound, scale, dtype }: Normal,
) -> Tensor<'t> {
    let stream_axis = streams.axes()[0];
    if stream_axis.size == 1 {
        let key = key.fold_in(streams.squeeze(stream_axis.name));
        return (key.normal_within(axes, bound) * scale).cast(dtype).unsqueeze(stream_axis.name);
    }
    let index = LayerIndex { index: streams };
    let ([], [drawn]) = region.scan(ScanOptions::over(stream_axis), [], &index, |_, [], stream| {
        let drawn = key.fold_in(stream.index).normal_within(axes, bound) * scale;
        ([], [drawn.cast(dtype)])
    });
    drawn
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
