//! One layer of a decoder.

use std::ops::Range;

use mt_derive::Tree;
use mt_nn::{
    Initializer, Linear, Norm, NormOptions, ParamSpec, RESIDUAL, RmsNorm, attention::Attention, axes::EMBED,
    engram::Engram,
};
use mt_shape::{DType, logical};
use mt_trace::Tensor;

use super::{
    DecoderConfig, FeedForward, FeedForwardConfig, LayerConfig, Mixer, NormKind,
    part::{Part, PartDescription, PartInputs, PartOutputs, PartPools, PartState, SpecBuilder, StateDims},
    residual::{LayerConnections, ResidualConnection},
};
use crate::{LayerOutput, OutputLabel, StateSpec, layer_output::statistics_of};

/// A layer's parameters. Parameters that a family lacks are absent.
#[derive(Clone, Debug, Tree)]
pub struct DecoderLayer<L> {
    pub engram_layer_norm: Option<Norm<L>>,
    pub engram: Option<Engram<L>>,
    pub pre_attention_norm: Option<Norm<L>>,
    #[tree(flatten)]
    pub mixer: Option<Mixer<L>>,
    pub post_attention_norm: Option<Norm<L>>,
    pub pre_cross_attention_norm: Option<Norm<L>>,
    pub cross_attention: Option<Attention<L>>,
    pub pre_mlp_norm: Option<Norm<L>>,
    #[tree(flatten)]
    pub feed_forward: Option<FeedForward<L>>,
    pub post_mlp_norm: Option<Norm<L>>,
    pub per_layer: Option<PerLayerInput<L>>,
    /// `[one]`
    pub scalar: Option<L>,
    pub square: Option<Linear<L>>,
    #[tree(flatten)]
    pub connections: Option<LayerConnections<L>>,
}

/// The use of per-layer embeddings in a layer (Gemma 3n, small Gemma 4 models).
#[derive(Clone, Debug, Tree)]
pub struct PerLayerInput<L> {
    /// `[embed, per_layer]`
    pub gate: Linear<L>,
    /// `[per_layer, embed]`
    pub projection: Linear<L>,
    pub norm: RmsNorm<L>,
}

/// The inputs of a layer in addition to the residual stream.
#[derive(Clone, Copy)]
pub(super) struct LayerInputs<'a, 't> {
    /// The inputs of all parts, with the state of the whole layer.
    pub parts: PartInputs<'a, 't>,
    /// The input of the mixer, if it is not the normalized residual stream.
    pub mixer_input: Option<Tensor<'t>>,
    /// The layer's per-layer embeddings of the tokens.
    pub per_layer: Option<Tensor<'t>>,
    pub residual: ResidualConnection,
}

/// The outputs of a layer.
pub(super) struct LayerOutputs<'t> {
    pub x: Tensor<'t>,
    /// The tensors that later layers can import: those of the mixer, then those of the feed-forward part.
    pub exports: Vec<Tensor<'t>>,
    /// The updates of the state: those of the memory of n-grams, of the mixer, of cross-attention, and of the feed-forward
    /// part.
    pub state: Vec<Tensor<'t>>,
    /// The other outputs, of all kinds that callers can request.
    pub others: Vec<(OutputLabel, Tensor<'t>)>,
}

impl<'t> LayerOutputs<'t> {
    /// Adds a part's results other than its output.
    fn add(&mut self, part: PartOutputs<'t>) {
        self.exports.extend(part.exports);
        self.state.extend(part.state);
        self.others.extend(part.others);
    }

    /// The requested outputs of the layer, in the order of computation.
    pub(super) fn wanted(&self, wanted: &[LayerOutput]) -> Vec<(OutputLabel, Tensor<'t>)> {
        let all = self.others.iter().copied().chain([(LayerOutput::Residual.label(), self.x)]);
        all.filter(|(label, _)| wanted.contains(&label.kind)).collect()
    }
}

/// Names of the axes that only these parameters have.
pub(crate) const PER_LAYER: &str = "per_layer";
const ONE: &str = "one";
/// The output axis of a square matrix during the product.
const SQUARE_OUTPUT: &str = "square_output";

/// The parameters of a layer.
pub(super) fn layer_specs(
    builder: &SpecBuilder,
    config: &DecoderConfig,
    layer: &LayerConfig,
) -> DecoderLayer<ParamSpec> {
    let embed = config.embed;
    let norm = |kind: Option<NormKind>| kind.map(|kind| builder.residual_norm(kind));
    DecoderLayer {
        engram_layer_norm: norm(layer.engram.as_ref().map(|_| NormKind::RootMeanSquare)),
        engram: layer.engram.as_ref().map(|engram| engram.specs(builder)),
        pre_attention_norm: norm(layer.norms.pre_attention),
        mixer: layer.mixer.as_ref().map(|mixer| mixer.specs(builder)),
        post_attention_norm: norm(layer.norms.post_attention),
        pre_cross_attention_norm: norm(layer.norms.pre_attention.filter(|_| layer.cross.is_some())),
        cross_attention: layer.cross.as_ref().map(|cross| cross.specs(builder)),
        pre_mlp_norm: norm(layer.norms.pre_mlp),
        feed_forward: layer.feed_forward.as_ref().map(|feed_forward| feed_forward.specs(builder)),
        post_mlp_norm: norm(layer.norms.post_mlp),
        per_layer: config.embedding.per_layer.map(|width| PerLayerInput {
            gate: builder.linear(1, [(embed, logical::EMBED), (width, logical::MLP)]),
            projection: builder.linear(1, [(width, logical::MLP), (embed, logical::EMBED)]),
            norm: builder.rms(embed),
        }),
        scalar: layer
            .scaled
            .then(|| builder.array([(mt_shape::axis(ONE, 1), logical::NORM)], Initializer::Ones)),
        square: layer.square.then(|| {
            let output = mt_shape::axis(SQUARE_OUTPUT, embed.size);
            builder.linear(1, [(embed, logical::EMBED), (output, logical::MLP)])
        }),
        connections: config.residual.specs(builder),
    }
}

impl<'t> DecoderLayer<Tensor<'t>> {
    /// Applies the layer to the residual stream.
    ///
    /// # Shapes
    /// `[batch, position, embed] -> [batch, position, embed]`, with hyper-connections
    /// `[batch, position, residual_stream, embed] -> [batch, position, residual_stream, embed]`
    pub(super) fn forward(
        &self,
        x: Tensor<'t>,
        norm: NormOptions,
        config: &LayerConfig,
        inputs: LayerInputs<'_, 't>,
    ) -> LayerOutputs<'t> {
        let mut outputs = self.apply(x, norm, config, inputs);
        if inputs.parts.wanted.contains(&LayerOutput::Statistics) {
            outputs.others.extend(statistics_of(outputs.x));
        }
        outputs
    }

    fn apply(
        &self,
        x: Tensor<'t>,
        norm: NormOptions,
        config: &LayerConfig,
        inputs: LayerInputs<'_, 't>,
    ) -> LayerOutputs<'t> {
        let x = x.named("decoder_layer_input");
        let normalized = |layer: &Option<Norm<Tensor<'t>>>, x: Tensor<'t>| match layer {
            Some(layer) => layer.forward(x, EMBED, norm),
            None => x,
        };
        let mut outputs = LayerOutputs { x, exports: Vec::new(), state: Vec::new(), others: Vec::new() };
        if let Some(square) = &self.square {
            outputs.x = square.forward(x, &[EMBED]).rename(SQUARE_OUTPUT, EMBED).constrain(&RESIDUAL);
            return outputs;
        }
        let dropout = inputs.parts.dropout;
        let (x, num_before) = self.remember(x, norm, config, &inputs, &mut outputs);
        let connections = self.connections.as_ref();
        let residual = inputs.residual;
        let of_mixer = residual.connect(connections.map(|both| &both.mhc_attention), x, norm);
        let normed = match inputs.mixer_input {
            Some(input) => input,
            None => normalized(&self.pre_attention_norm, of_mixer.input),
        };
        let num_mixer_arrays = config.mixer.as_ref().map_or(0, |mixer| mixer.state(&StateDims::ONE).len());
        let num_mixed = num_before + num_mixer_arrays;
        let mut mixed = None;
        if let (Some(mixer), Some(described)) = (&self.mixer, &config.mixer) {
            let parts = PartInputs {
                residual: of_mixer.input,
                ..inputs.parts.with_state(|arrays| &arrays[num_before..num_mixed])
            };
            let made = x.scope(described.scope(), |_| described.forward(mixer, normed, &parts));
            let output = normalized(&self.post_attention_norm, made.output);
            outputs.others.push((LayerOutput::Projection.label(), made.output));
            outputs.others.push((LayerOutput::Mixer.label(), output));
            outputs.add(made);
            mixed = Some(dropout.apply("attention", output));
        }
        let num_cross_arrays = config.cross.as_ref().map_or(0, |cross| cross.state(&StateDims::ONE).len());
        let num_attended = num_mixed + num_cross_arrays;
        let parts = inputs.parts.with_state(|arrays| &arrays[num_attended..]);
        let hidden =
            |part: &FeedForward<Tensor<'t>>, described: &FeedForwardConfig, x: Tensor<'t>, residual| {
                x.scope(described.scope(), |x| {
                    let made = described.forward(part, x, &PartInputs { residual, ..parts });
                    let output = normalized(&self.post_mlp_norm, made.output);
                    PartOutputs { output, ..made }
                })
            };
        let feed_forward = self.feed_forward.as_ref().zip(config.feed_forward.as_ref());
        if config.parallel {
            let made = feed_forward.map(|(part, config)| hidden(part, config, normed, x));
            let output = made.as_ref().map(|made| made.output);
            outputs.others.extend(output.map(|output| (LayerOutput::FeedForward.label(), output)));
            made.into_iter().for_each(|made| outputs.add(made));
            let added = mixed.into_iter().chain(output.map(|output| dropout.apply("mlp", output)));
            outputs.x = added.fold(x, |x, part| x + part).constrain(&RESIDUAL);
        } else {
            if let Some(mixed) = mixed {
                outputs.x = of_mixer.join(mixed);
            }
            self.attend_across(norm, config, &inputs, num_mixed..num_attended, &mut outputs);
            if let Some((part, config)) = feed_forward {
                let connected = residual.connect(connections.map(|both| &both.mhc_mlp), outputs.x, norm);
                let x = connected.input;
                let made = hidden(part, config, normalized(&self.pre_mlp_norm, x), x);
                let output = made.output;
                outputs.others.push((LayerOutput::FeedForward.label(), output));
                outputs.add(made);
                outputs.x = connected.join(dropout.apply("mlp", output));
            }
        }
        self.finish(x.dtype(), norm, inputs.per_layer, &mut outputs);
        outputs
    }

    /// Adds the per-layer embeddings to the residual stream and multiplies it by the scalar, if the layer has them.
    fn finish(
        &self,
        dtype: DType,
        norm: NormOptions,
        per_layer: Option<Tensor<'t>>,
        outputs: &mut LayerOutputs<'t>,
    ) {
        if let (Some(layer), Some(vectors)) = (&self.per_layer, per_layer) {
            outputs.x = (outputs.x + layer.forward(outputs.x, vectors, norm)).constrain(&RESIDUAL);
        }
        if let Some(scalar) = self.scalar {
            outputs.x = outputs.x * scalar.cast(dtype).squeeze(ONE);
        }
    }

    /// Adds the attention to the encoder's output, if the layer has it. `arrays` are those of its state.
    fn attend_across(
        &self,
        norm: NormOptions,
        config: &LayerConfig,
        inputs: &LayerInputs<'_, 't>,
        arrays: Range<usize>,
        outputs: &mut LayerOutputs<'t>,
    ) {
        let (Some(cross), Some(described)) = (&self.cross_attention, &config.cross) else { return };
        let x = outputs.x;
        let parts = PartInputs { residual: x, ..inputs.parts.with_state(|all| &all[arrays.clone()]) };
        let normed = self.pre_cross_attention_norm.as_ref().map_or(x, |layer| layer.forward(x, EMBED, norm));
        let made = x.scope(described.scope(), |_| described.forward(cross, normed, &parts));
        let output = made.output;
        outputs.others.push((LayerOutput::CrossAttention.label(), output));
        outputs.add(made);
        outputs.x = (x + inputs.parts.dropout.apply("cross_attention", output)).constrain(&RESIDUAL);
    }

    /// Adds the memory of n-grams, if the layer has one, to the residual stream. Also returns the number of the memory's
    /// arrays of state.
    fn remember(
        &self,
        x: Tensor<'t>,
        norm: NormOptions,
        config: &LayerConfig,
        inputs: &LayerInputs<'_, 't>,
        outputs: &mut LayerOutputs<'t>,
    ) -> (Tensor<'t>, usize) {
        let (Some(engram), Some(described)) = (&self.engram, &config.engram) else { return (x, 0) };
        let count = described.state(&StateDims::ONE).len();
        let parts = inputs.parts.with_state(|arrays| &arrays[..count]);
        let normed = self.engram_layer_norm.as_ref().map_or(x, |layer| layer.forward(x, EMBED, norm));
        let made = x.scope(described.scope(), |_| described.forward(engram, normed, &parts));
        let x = inputs.residual.constrain(x + made.output);
        outputs.x = x;
        outputs.add(made);
        (x, count)
    }
}

impl<'t> PerLayerInput<Tensor<'t>> {
    /// # Shapes
    /// `[batch, position, embed], [batch, position, per_layer] -> [batch, position, embed]`
    fn forward(&self, x: Tensor<'t>, vectors: Tensor<'t>, norm: NormOptions) -> Tensor<'t> {
        let gate = self.gate.forward(x, &[EMBED]).gelu_tanh();
        self.norm.forward(self.projection.forward(gate * vectors, &[PER_LAYER]), EMBED, norm)
    }
}

impl LayerConfig {
    /// The state arrays of the layer: those of the memory of n-grams, of the mixer, of cross-attention, and of the
    /// feed-forward part.
    pub(super) fn state(&self, dims: &StateDims) -> Vec<StateSpec> {
        self.parts().flat_map(|part| part.state(dims)).collect()
    }

    pub(super) fn num_state_arrays(&self) -> usize {
        self.state(&StateDims::ONE).len()
    }
}

impl<'a, 't> PartInputs<'a, 't> {
    /// The inputs of a part with the given subset of the layer's state arrays.
    fn with_state(&self, arrays: impl Fn(&'a [Tensor<'t>]) -> &'a [Tensor<'t>]) -> Self {
        let of_part = |state: PartState<'a, 't>| {
            let pools = state.pools.map(|pools| PartPools { arrays: arrays(pools.arrays), ..pools });
            PartState { arrays: arrays(state.arrays), pools, ..state }
        };
        Self { state: self.state.map(of_part), ..*self }
    }
}
