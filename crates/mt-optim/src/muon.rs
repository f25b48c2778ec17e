//! Muon (Jordan et al., 2024): momentum with approximately orthogonalized matrices, with the conventions of optax.

use mt_shape::{Axis, DType, HostArray};
use mt_trace::Tensor;

use crate::{
    Adam, Parameter, Slot,
    adam::{AdamStep, decayed},
};

/// The optimizer's constants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Muon {
    /// The decay of the momentum.
    pub beta: f64,
    /// Added to the norm by which a matrix is divided.
    pub epsilon: f64,
    pub weight_decay: f64,
    /// The root mean square of updates. Without it updates grow with the square root of outputs per input.
    pub consistent_rms: Option<f64>,
    pub iterations: NewtonSchulz,
    /// Element type of the momentum.
    pub momentum_dtype: DType,
    /// For parameters that are not matrices: embeddings, heads, norms and biases.
    pub adam: Adam,
}

/// The iterations that move singular values close to 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NewtonSchulz {
    /// Five with the same coefficients, after which singular values lie around 1 (Jordan et al., 2024).
    Usual,
    /// Eight of these, and two that settle them at 1 (DeepSeek-AI, 2026: DeepSeek-V4).
    Hybrid,
}

/// Coefficients of x, x³ and x⁵ that raise small singular values fast.
const FAST: [f64; 3] = [3.4445, -4.7750, 2.0315];
/// Coefficients of x, x³ and x⁵ whose iteration converges to 1.
const SETTLING: [f64; 3] = [2.0, -1.5, 0.5];

impl NewtonSchulz {
    /// The coefficients of x, x³ and x⁵ in each iteration.
    pub fn coefficients(self) -> Vec<[f64; 3]> {
        match self {
            Self::Usual => vec![FAST; 5],
            Self::Hybrid => [[FAST; 8].as_slice(), &[SETTLING; 2]].concat(),
        }
    }

    /// The coefficients as optax keeps them: those of all iterations, or one row if they are equal.
    pub fn stored(self) -> HostArray {
        let all = self.coefficients();
        let rows = if self == Self::Usual { &all[..1] } else { &all };
        let numbers: Vec<f32> = rows.as_flattened().iter().map(|coefficient| *coefficient as f32).collect();
        let dims = if rows.len() == 1 { vec![3] } else { vec![rows.len(), 3] };
        HostArray::from_slice(DType::F32, &dims, &numbers).expect("there are three coefficients in a row")
    }
}

const INPUT: &str = "muon_input";
const OUTPUT: &str = "muon_output";
const SIDE: &str = "muon_side";

/// The axes that form a matrix: the inputs and the outputs of a linear map.
pub(crate) struct Matrix {
    inputs: Vec<Axis>,
    outputs: Vec<Axis>,
}

/// The matrix view of a parameter, one matrix per layer and group, if it is the weight of a linear map.
pub(crate) fn matrix(parameter: &Parameter) -> Option<Matrix> {
    let own = parameter.axes[parameter.own_axes()].get(parameter.num_group_axes..)?;
    let (inputs, outputs) = own.split_at_checked(parameter.num_input_axes)?;
    let is_matrix = !inputs.is_empty() && !outputs.is_empty();
    is_matrix.then(|| Matrix { inputs: inputs.to_vec(), outputs: outputs.to_vec() })
}

impl Muon {
    /// Name of the sub-optimizer for matrices.
    pub const MUON: &'static str = "muon";
    /// Name of the sub-optimizer for other parameters.
    pub const ADAM: &'static str = "adam";

    /// The running mean of gradients for matrices, and Adam's slots for other parameters.
    pub(crate) fn slots(&self, index: usize, parameter: &Parameter) -> Vec<Slot> {
        if matrix(parameter).is_none() {
            return self.adam.slots(index, parameter, Some(Self::ADAM));
        }
        let slot = Slot::like("mu", index, parameter, self.momentum_dtype, 1);
        vec![Slot { sub_optimizer: Some(Self::MUON), ..slot }]
    }

    /// Scalars of the step that follows `count` steps.
    #[track_caller]
    pub(crate) fn step<'t>(&self, count: Tensor<'t>) -> MuonStep<'t> {
        let number = count.cast(DType::F32) + 1.0;
        let weight = |power: Tensor<'t>| {
            let base = count.region().full(DType::F32, &[], self.beta);
            -(base.power(power)) + 1.0
        };
        MuonStep {
            constants: *self,
            momentum: weight(number + 1.0),
            gradient: weight(number),
            adam: self.adam.step(count),
        }
    }
}

/// Scalars that all parameters share in one step.
pub(crate) struct MuonStep<'t> {
    constants: Muon,
    /// Divisor of the momentum.
    momentum: Tensor<'t>,
    /// Divisor of the gradient.
    gradient: Tensor<'t>,
    pub adam: AdamStep<'t>,
}

impl<'t> MuonStep<'t> {
    /// The amount to subtract from the parameter before the learning rate applies, and the new slots.
    #[track_caller]
    pub fn update(
        &self,
        parameter: &Parameter,
        value: Tensor<'t>,
        gradient: Tensor<'t>,
        kept: &[Tensor<'t>],
    ) -> (Tensor<'t>, Vec<Tensor<'t>>) {
        let Some(matrix) = matrix(parameter) else {
            return self.adam.update(parameter, value, gradient, kept);
        };
        let Muon { beta, epsilon, weight_decay, consistent_rms, iterations, .. } = self.constants;
        let momentum = kept[0] * beta + gradient * (1.0 - beta);
        let ahead = momentum / self.momentum * beta + gradient / self.gradient * (1.0 - beta);
        // With respect to the stepped form, the matrix and its norm are divided by the form's scale.
        let update = orthogonalized(ahead, &matrix, epsilon * parameter.form.scale, iterations);
        let size = |axes: &[Axis]| axes.iter().map(|axis| axis.size).product::<usize>() as f64;
        let (inputs, outputs) = (size(&matrix.inputs), size(&matrix.outputs));
        let scale = match consistent_rms {
            Some(rms) => rms * inputs.max(outputs).sqrt(),
            None => (outputs / inputs).max(1.0).sqrt(),
        };
        (decayed(update * scale, parameter, value, weight_decay), vec![momentum])
    }
}

/// Moves the singular values of each matrix close to 1 by the Newton–Schulz iteration.
#[track_caller]
fn orthogonalized<'t>(
    tensor: Tensor<'t>,
    matrix: &Matrix,
    epsilon: f64,
    iterations: NewtonSchulz,
) -> Tensor<'t> {
    let names = |axes: &[Axis]| -> Vec<&'static str> { axes.iter().map(|axis| axis.name).collect() };
    let flat = tensor.merge(&names(&matrix.inputs), INPUT).merge(&names(&matrix.outputs), OUTPUT);
    // The product over the longer side is the smaller matrix.
    let (short, long) =
        if flat.axis(INPUT).size > flat.axis(OUTPUT).size { (OUTPUT, INPUT) } else { (INPUT, OUTPUT) };
    let order: Vec<&'static str> = flat.axes().iter().map(|axis| axis.name).collect();
    let norm = flat.square().sum(&[INPUT, OUTPUT]).sqrt();
    let mut x = flat / (norm + epsilon);
    for [linear, cubic, quintic] in iterations.coefficients() {
        // Two axes of the short side's size: its own and `SIDE`.
        let square = x.contract(x.rename(short, SIDE), &[long]);
        let fourth = square.rename(SIDE, long).contract(square.rename(short, long), &[long]);
        let polynomial = square * cubic + fourth * quintic;
        x = x * linear + polynomial.contract(x.rename(short, SIDE), &[SIDE]).order(&order);
    }
    x.split(OUTPUT, &matrix.outputs).split(INPUT, &matrix.inputs)
}
