//! The parts of a layer: a mixer, which moves information between tokens, or a feed-forward part, which works on
//! each token alone.

use std::{any::Any, fmt};

use mt_nn::{
    Dropout, Initializer, LayerNorm, Linear, Norm, NormOptions, ParamSpec, RmsNorm, RotaryAngles,
    RotaryOptions, Weight, WeightFormat, attention::Segments,
};
use mt_shape::{Axis, DType};
use mt_trace::Tensor;

use super::{Activation, NormKind};
use crate::{AttentionFlops, LayerOutput, OutputLabel, StateSpec};

/// A part of a layer, by its configuration: its parameters, its forward pass, and what follows from the parameters.
pub trait Part: PartDescription + Clone + PartialEq {
    /// Its parameters.
    type Parameters<L>;

    /// Shapes, placement and initial values of its parameters.
    fn specs(&self, builder: &SpecBuilder) -> Self::Parameters<ParamSpec>;

    /// Applies the part.
    ///
    /// # Shapes
    /// `[batch, position, embed] -> [batch, position, embed]`
    fn forward<'t>(
        &self,
        parameters: &Self::Parameters<Tensor<'t>>,
        x: Tensor<'t>,
        inputs: &PartInputs<'_, 't>,
    ) -> PartOutputs<'t>;

    /// The parameters that attention's scores are made of, if the part has attention, given the number of each
    /// parameter. `is_imported`: another layer takes this one's exports.
    fn score_weights(
        &self,
        _numbers: &Self::Parameters<usize>,
        _is_imported: bool,
    ) -> Option<PartScoreWeights> {
        None
    }

    /// Whether the part is another function than `other`, however both are computed.
    fn differs_from(&self, other: &Self) -> bool {
        self != other
    }
}

/// The declarations of a part beside its forward pass.
pub trait PartDescription: Any + fmt::Debug {
    /// The arrays that generation keeps between calls, in the order in which the forward pass takes and returns them.
    fn state(&self, _dims: &StateDims) -> Vec<StateSpec> {
        Vec::new()
    }

    /// The tensors that the forward pass makes and the backward pass can keep, in order, without those of the
    /// residual stream.
    fn activations(&self, batch: &BatchDims) -> Vec<Activation>;

    /// How many of the part's weights do not act on a given token, such as those of experts that it is not sent to.
    fn idle_weights(&self) -> usize {
        0
    }

    /// The name of the scope in which the forward pass runs, for profiles and reports.
    fn scope(&self) -> &'static str;

    /// Operations that grow with pairs of tokens.
    fn pair_operations(&self) -> Option<AttentionFlops> {
        None
    }

    /// The rotary embedding whose angles the forward pass looks up.
    fn rotary(&self) -> Option<&RotaryOptions> {
        None
    }

    /// The layer whose exports this part takes.
    fn imports(&self) -> Option<usize> {
        None
    }
}

/// The sizes that a state's shape follows from.
#[derive(Clone, Copy, Debug)]
pub struct StateDims {
    /// Sequences.
    pub batch: usize,
    /// Tokens of a sequence that can be kept.
    pub slots: usize,
    /// The width of the residual stream.
    pub embed: usize,
    /// The type of activations.
    pub dtype: DType,
}

impl StateDims {
    /// Where only the number of arrays and how they are kept matters.
    pub(super) const ONE: Self = Self { batch: 1, slots: 1, embed: 1, dtype: DType::F32 };
}

/// The sizes that an activation's shape follows from.
#[derive(Clone, Copy, Debug)]
pub struct BatchDims {
    pub rows: usize,
    pub length: usize,
    /// The width of the residual stream.
    pub embed: usize,
    /// The type of activations.
    pub dtype: DType,
}

/// The inputs of parts in addition to activations. Mixers and feed-forward parts take the same.
#[derive(Clone, Copy)]
pub struct PartInputs<'a, 't> {
    /// `i32[batch, position]`
    pub tokens: Tensor<'t>,
    pub segments: Segments<'t>,
    /// The angles of all rotary embeddings that parts declare.
    pub angles: &'a [(RotaryOptions, RotaryAngles<'t>)],
    /// The part's state, in generation.
    pub state: Option<PartState<'a, 't>>,
    /// The exports of the layer that the part imports from.
    pub imports: &'a [Tensor<'t>],
    /// The kinds of outputs that the caller requests.
    pub wanted: &'a [LayerOutput],
    pub dropout: Dropout<'t>,
}

/// A part's state before this call.
#[derive(Clone, Copy)]
pub struct PartState<'a, 't> {
    /// In the order of [`PartDescription::state`].
    pub arrays: &'a [Tensor<'t>],
    /// The number of tokens before this call, which is the slot of the first: an `i32` scalar.
    pub start: Tensor<'t>,
    /// Whether this call's tokens fill all slots: they then attend to each other as whole sequences do.
    pub is_filled: bool,
}

/// The results of a part.
pub struct PartOutputs<'t> {
    /// `[batch, position, embed]`
    pub output: Tensor<'t>,
    /// In the order of [`PartDescription::state`]: the values of this call's slots where slots are kept, or the whole
    /// array. Empty without a state.
    pub state: Vec<Tensor<'t>>,
    /// Tensors that later layers can import.
    pub exports: Vec<Tensor<'t>>,
    /// The requested outputs of the part, and its auxiliary losses.
    pub others: Vec<(OutputLabel, Tensor<'t>)>,
}

impl<'t> PartOutputs<'t> {
    /// An output and nothing else.
    pub fn only(output: Tensor<'t>) -> Self {
        Self { output, state: Vec::new(), exports: Vec::new(), others: Vec::new() }
    }
}

impl<'t> PartInputs<'_, 't> {
    /// The angles of a rotary embedding.
    pub fn angles(&self, rotary: &RotaryOptions) -> RotaryAngles<'t> {
        let known = self.angles.iter().find(|(other, _)| other == rotary);
        known.expect("the angles of every part's embedding are made").1
    }
}

/// The numbers of the parameters that attention's scores are made of, as [`crate::ScoreWeights`] has them.
pub struct PartScoreWeights {
    pub queries: Vec<usize>,
    pub keys: Vec<usize>,
    pub are_normalized: bool,
}

/// Declares parameters in the way that a decoder's configuration says.
#[derive(Clone, Copy, Debug)]
pub struct SpecBuilder {
    pub embed: Axis,
    pub norm: NormOptions,
    pub init_scale: f64,
    /// The type of the parameters.
    pub dtype: DType,
    pub weights: WeightFormat,
}

impl SpecBuilder {
    /// One array.
    pub fn array<const N: usize>(
        &self,
        axes: [(Axis, &'static str); N],
        initializer: Initializer,
    ) -> ParamSpec {
        ParamSpec::new(axes, initializer).with_dtype(self.dtype)
    }

    /// A matrix from the first `num_inputs` axes to the others, in the form of the model's weights.
    pub fn matrix<const N: usize>(
        &self,
        num_inputs: usize,
        axes: [(Axis, &'static str); N],
    ) -> Weight<ParamSpec> {
        let fan_in = axes[..num_inputs].iter().map(|(axis, _)| axis.size).product();
        let dense = self.array(axes, Initializer::fan_in(self.init_scale, fan_in));
        self.weights.specs(dense)
    }

    /// A table of vectors, which are drawn with this deviation.
    pub fn table<const N: usize>(
        &self,
        axes: [(Axis, &'static str); N],
        deviation: f64,
    ) -> Weight<ParamSpec> {
        Weight::Dense(self.array(axes, Initializer::Normal { deviation }))
    }

    /// A linear map within a layer, from the first `num_inputs` axes to the others.
    pub fn linear<const N: usize>(
        &self,
        num_inputs: usize,
        axes: [(Axis, &'static str); N],
    ) -> Linear<ParamSpec> {
        let fan_in = axes[..num_inputs].iter().map(|(axis, _)| axis.size).product();
        let dense = self.array(axes, Initializer::fan_in(self.init_scale, fan_in));
        Linear::new(self.weights.specs(dense.with_input_axes(num_inputs)))
    }

    /// The map with a bias over these axes, if it has one.
    pub fn with_bias<const N: usize>(
        &self,
        linear: Linear<ParamSpec>,
        has_bias: bool,
        axes: [(Axis, &'static str); N],
    ) -> Linear<ParamSpec> {
        linear.with_bias(has_bias.then(|| self.array(axes, Initializer::Zeros)))
    }

    /// A scale that leaves what it scales as it is.
    pub fn scale<const N: usize>(&self, axes: [(Axis, &'static str); N]) -> ParamSpec {
        self.array(axes, if self.norm.offset == 1.0 { Initializer::Zeros } else { Initializer::Ones })
    }

    /// A root-mean-square norm over one axis.
    pub fn rms(&self, axis: Axis) -> RmsNorm<ParamSpec> {
        RmsNorm { scale: self.scale([(axis, "norm")]) }
    }

    /// A norm of the residual stream.
    pub fn residual_norm(&self, kind: NormKind) -> Norm<ParamSpec> {
        match kind {
            NormKind::RootMeanSquare => Norm::Rms(self.rms(self.embed)),
            NormKind::Layer => Norm::Layer(LayerNorm {
                scale: self.scale([(self.embed, "norm")]),
                bias: self.array([(self.embed, "norm")], Initializer::Zeros),
            }),
        }
    }
}
