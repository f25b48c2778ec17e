//! Parameter specifications: shape, placement and initializer, declared together.

use mt_shape::{
    Axis, DType, LogicalAxis, Path, Tree,
    kernels::{self, attributes},
    logical,
};
use mt_trace::{Key, NORMAL_BOUND, Region, ScanOptions, TRUNCATED_BOUND, Tensor, share_within};

use crate::{AdapterArray, EncodedArray, first_magnitudes};

/// A parameter's shape, logical axes, initializer and type.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamSpec {
    pub axes: Vec<Axis>,
    /// The logical name of each axis, which placement rules refer to.
    pub logical_axes: Vec<Option<LogicalAxis>>,
    pub initializer: Initializer,
    pub dtype: DType,
    pub place: LayerPlace,
    /// The number of the module around the parameter, if the model has several of its kind, such as those that predict
    /// further tokens.
    pub module: Option<usize>,
    /// The parameter's name within its layer, such as `attention.query.kernel`. It is empty for parameters outside of
    /// layers, which are identified by their paths.
    pub role: String,
    /// The number of axes that number separate matrices, such as experts. They follow the axis of stacked layers, if any.
    pub num_group_axes: usize,
    /// For matrices of linear maps within a layer: the number of input axes, which follow the axes of groups.
    pub num_input_axes: usize,
    /// Whether training can change the parameter. The others have no gradient and no optimizer state.
    pub is_trainable: bool,
    /// Set if this is an array of a weight that checkpoints hold in its dense form.
    pub encoded: Option<EncodedArray>,
    /// Set if this is an array of the adapter of the weight at the parent of its path.
    pub adapter: Option<AdapterArray>,
}

/// The layers of a stack that a parameter belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerPlace {
    /// The parameter belongs to no layer.
    None,
    One(usize),
    /// Layers from `first` in steps of `step`, stacked along the leading axis.
    Stacked {
        first: usize,
        step: usize,
    },
}

/// The distribution of a parameter's initial values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Initializer {
    Zeros,
    Ones,
    /// All elements have this value.
    Constant {
        value: f64,
    },
    /// Uniform between −`bound` and `bound`.
    Uniform {
        bound: f64,
    },
    /// Normal, with this standard deviation.
    Normal {
        deviation: f64,
    },
    /// Normal, truncated at two standard deviations and rescaled to this standard deviation.
    TruncatedNormal {
        deviation: f64,
    },
    /// The logarithm of a number that is uniform between these two.
    LogOfUniform {
        smallest: f64,
        largest: f64,
    },
    /// The number whose softplus is log-uniform between these two.
    InverseSoftplusOfLogUniform {
        smallest: f64,
        largest: f64,
    },
    /// The number of each element in row-major order, modulo this number. Elements of a row differ if it is at least as
    /// large as a row.
    Counted {
        modulus: usize,
    },
    /// The norm of each output of the weight at the parent of the parameter's path.
    NormOfWeight,
    /// The value is loaded. It is zero until then.
    Loaded,
}

/// The axis of a single random stream.
const STREAM: &str = "stream";

/// The standard deviation of a standard normal distribution truncated at two standard deviations.
const TRUNCATED_DEVIATION: f64 = 0.879_625_661_034_239_8;

impl Initializer {
    /// Variance scaling: variance `scale / fan_in`, truncated at two standard deviations.
    pub fn fan_in(scale: f64, fan_in: usize) -> Self {
        Self::TruncatedNormal { deviation: (scale / fan_in as f64).sqrt() }
    }
}

impl ParamSpec {
    /// A parameter in `f32`. Each axis comes with its logical name.
    pub fn new<const N: usize>(axes: [(Axis, LogicalAxis); N], initializer: Initializer) -> Self {
        Self {
            axes: axes.iter().map(|(axis, _)| *axis).collect(),
            logical_axes: axes.iter().map(|(_, logical)| Some(*logical)).collect(),
            initializer,
            dtype: DType::F32,
            place: LayerPlace::None,
            module: None,
            role: String::new(),
            num_group_axes: 0,
            num_input_axes: 0,
            is_trainable: true,
            encoded: None,
            adapter: None,
        }
    }

    /// The same parameter as the weight of a linear map that contracts its first `num_input_axes` axes.
    pub fn with_input_axes(self, num_input_axes: usize) -> Self {
        Self { num_input_axes, ..self }
    }

    /// The same parameter as a matrix for each element of its first `num_group_axes` axes, which contracts the next
    /// `num_input_axes` axes.
    pub fn with_groups(self, num_group_axes: usize, num_input_axes: usize) -> Self {
        Self { num_group_axes, num_input_axes, ..self }
    }

    /// The same parameter with the role `role` in the layers from `first` in steps of `step`, stacked along a leading
    /// axis.
    pub fn stacked(&self, role: &Path, layers: Axis, first: usize, step: usize) -> Self {
        let axes = std::iter::once(layers).chain(self.axes.iter().copied()).collect();
        let logical_axes =
            std::iter::once(Some(logical::LAYERS)).chain(self.logical_axes.iter().copied()).collect();
        let place = LayerPlace::Stacked { first, step };
        let stacked = |dense: &Self| dense.stacked(&role.parent(), layers, first, step);
        let encoded = self.encoded.as_ref().map(|array| array.with_dense(stacked));
        Self { axes, logical_axes, place, role: role.to_string(), encoded, ..self.clone() }
    }

    /// The same parameter with the role `role` in one layer of an unrolled stack.
    pub fn of_layer(&self, role: &Path, layer: usize) -> Self {
        let of_layer = |dense: &Self| dense.of_layer(&role.parent(), layer);
        let encoded = self.encoded.as_ref().map(|array| array.with_dense(of_layer));
        Self { place: LayerPlace::One(layer), role: role.to_string(), encoded, ..self.clone() }
    }

    /// The same parameter in the module with the number `module`.
    pub fn of_module(&self, module: usize) -> Self {
        let encoded = self.encoded.as_ref().map(|array| array.with_dense(|dense| dense.of_module(module)));
        Self { module: Some(module), encoded, ..self.clone() }
    }

    /// The same parameter with another type.
    pub fn with_dtype(self, dtype: DType) -> Self {
        Self { dtype, ..self }
    }

    /// The number of axes of stacked layers: 1 or 0.
    pub fn num_layer_axes(&self) -> usize {
        usize::from(matches!(self.place, LayerPlace::Stacked { .. }))
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

/// Draws the initial values of parameters.
///
/// Each parameter has its own random stream. Streams of layers' parameters are keyed by role and layer, so that scanned
/// and unrolled stacks have the same initial values; the others are keyed by path.
pub fn initialize<'t>(region: Region<'t>, key: Key<'t>, parameters: &[(Path, ParamSpec)]) -> Vec<Tensor<'t>> {
    let mut drawn: Vec<Tensor<'t>> =
        parameters.iter().map(|(path, spec)| initialize_one(region, key, path, spec)).collect();
    for (index, norms) in first_magnitudes(parameters, |index| drawn[index]) {
        drawn[index] = norms;
    }
    drawn
}

fn initialize_one<'t>(region: Region<'t>, key: Key<'t>, path: &Path, spec: &ParamSpec) -> Tensor<'t> {
    let name = match spec.place {
        LayerPlace::None => path.to_string(),
        LayerPlace::One(_) | LayerPlace::Stacked { .. } => format!("layers.{}", spec.role),
    };
    let key = key.fold_in_name(&name);
    let number = |number: usize| region.integer(DType::U64, number as i64);
    // The index of each layer's stream, and the axes of one layer.
    let one = |layer: usize| number(layer).unsqueeze(STREAM);
    let (streams, axes) = match spec.place {
        LayerPlace::Stacked { first, step } => {
            (region.iota(DType::U64, spec.axes[0]) * number(step) + number(first), &spec.axes[1..])
        }
        LayerPlace::One(layer) => (one(layer), &spec.axes[..]),
        LayerPlace::None => (one(0), &spec.axes[..]),
    };
    let normal =
        |bound, scale| draw_normal(region, key, streams, axes, Normal { bound, scale, dtype: spec.dtype });
    let drawn = match spec.initializer {
        Initializer::Zeros | Initializer::Loaded | Initializer::NormOfWeight => {
            return region.full(spec.dtype, &spec.axes, 0.0);
        }
        Initializer::Ones => return region.full(spec.dtype, &spec.axes, 1.0),
        Initializer::Constant { value } => return region.full(spec.dtype, &spec.axes, value),
        Initializer::Counted { modulus } => {
            let counted = counted(region, axes, modulus).cast(spec.dtype);
            return counted.broadcast(&spec.axes);
        }
        Initializer::Uniform { bound } => {
            draw_each(region, key, streams, |key| ((key.uniform(axes) * 2.0 - 1.0) * bound).cast(spec.dtype))
        }
        Initializer::Normal { deviation } => normal(NORMAL_BOUND, deviation),
        Initializer::TruncatedNormal { deviation } => {
            normal(TRUNCATED_BOUND, deviation / TRUNCATED_DEVIATION)
        }
        Initializer::LogOfUniform { smallest, largest } => draw_each(region, key, streams, |key| {
            // Half a step of distance avoids 0.
            let uniform = key.uniform(axes) + 0.5 / f64::from(1 << 24);
            (uniform * (largest - smallest) + smallest).log().cast(spec.dtype)
        }),
        Initializer::InverseSoftplusOfLogUniform { smallest, largest } => {
            draw_each(region, key, streams, |key| {
                let (low, high) = (smallest.ln(), largest.ln());
                let drawn = (key.uniform(axes) * (high - low) + low).exp();
                // The logarithm of `exp(x) − 1`.
                (drawn + ((drawn * -1.0).exp() * -1.0 + 1.0).log()).cast(spec.dtype)
            })
        }
    };
    if matches!(spec.place, LayerPlace::Stacked { .. }) { drawn } else { drawn.squeeze(STREAM) }
}

/// The number of each element, modulo `modulus`: `i32[axes]`.
fn counted<'t>(region: Region<'t>, axes: &[Axis], modulus: usize) -> Tensor<'t> {
    let zero = region.full(DType::I32, axes, 0.0);
    axes.iter()
        .fold(zero, |number, axis| number * axis.size as f64 + region.iota(DType::I32, *axis))
        .remainder(modulus as f64)
}

/// A normal distribution that is truncated at `bound` standard deviations and then scaled.
#[derive(Clone, Copy)]
struct Normal {
    bound: f64,
    scale: f64,
    dtype: DType,
}

/// Draws an array of `axes` from a normal distribution for each stream, each with its own key:
/// `[streams] -> [streams, …]`.
fn draw_normal<'t>(
    region: Region<'t>,
    key: Key<'t>,
    streams: Tensor<'t>,
    axes: &[Axis],
    normal: Normal,
) -> Tensor<'t> {
    let bits = |number: f64| i64::from((number as f32).to_bits());
    let drawn =
        vec![(attributes::BOUND, bits(normal.bound)), (attributes::EDGE, bits(share_within(normal.bound)))];
    // The first operand sets the type in which the kernel computes.
    let operands = [region.full(normal.dtype, &[], normal.scale), key.value(), streams];
    region.kernel(&kernels::NORMAL, drawn, &operands, |region, operands| {
        let Normal { bound, scale, dtype } = normal;
        let key = Key::new(operands[1]);
        vec![draw_each(region, key, operands[2], |key| (key.normal_within(axes, bound) * scale).cast(dtype))]
    })[0]
}

/// Draws an array for each stream, each with its own key: `[streams] -> [streams, …]`.
fn draw_each<'t>(
    region: Region<'t>,
    key: Key<'t>,
    streams: Tensor<'t>,
    draw: impl for<'b> Fn(Key<'b>) -> Tensor<'b>,
) -> Tensor<'t> {
    let stream_axis = streams.axes()[0];
    if stream_axis.size == 1 {
        return draw(key.fold_in(streams.squeeze(stream_axis.name))).unsqueeze(stream_axis.name);
    }
    let index = LayerIndex { index: streams };
    let ([], [drawn]) = region.scan(ScanOptions::over(stream_axis), [], &index, |_, [], stream| {
        ([], [draw(key.fold_in(stream.index))])
    });
    drawn
}

/// The index of each layer, for a scan over layers.
#[derive(mt_derive::Tree)]
pub struct LayerIndex<L> {
    pub index: L,
}

/// Constrains parameters to the placement of their specifications. In the body of a scan this keeps slices of stacked
/// weights and their gradients sharded; otherwise the partitioner may replicate them.
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
