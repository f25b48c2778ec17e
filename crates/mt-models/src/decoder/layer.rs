//! One layer of a decoder.

use mt_derive::Tree;
use mt_nn::{
    Dropout, Initializer, LayerNorm, Linear, Mlp, Norm, NormOptions, ParamSpec, RmsNorm,
    attention::{Attended, Attention, AttentionInputs, KeysValues},
    axes::EMBED,
};
use mt_shape::Axis;
use mt_trace::Tensor;

use super::{DecoderConfig, LayerConfig, NormKind, QueryKeyNorm, Values};
use crate::LayerOutput;

/// A layer's parameters. What a family's layers do not have is absent.
#[derive(Clone, Debug, Tree)]
pub struct DecoderLayer<L> {
    pub pre_attention_norm: Option<Norm<L>>,
    pub attention: Option<Attention<L>>,
    pub post_attention_norm: Option<Norm<L>>,
    pub pre_mlp_norm: Option<Norm<L>>,
    pub mlp: Option<Mlp<L>>,
    pub post_mlp_norm: Option<Norm<L>>,
    pub per_layer: Option<PerLayerInput<L>>,
    /// `[one]`
    pub scalar: Option<L>,
    pub square: Option<Linear<L>>,
}

/// What a layer does with its own vectors of the tokens (Gemma 3n, Gemma 4's small models).
#[derive(Clone, Debug, Tree)]
pub struct PerLayerInput<L> {
    /// `[embed, per_layer]`
    pub gate: Linear<L>,
    /// `[per_layer, embed]`
    pub projection: Linear<L>,
    pub norm: RmsNorm<L>,
}

/// What a layer is given besides the residual stream.
#[derive(Clone, Copy)]
pub(super) struct LayerInputs<'t> {
    pub attention: AttentionInputs<'t>,
    pub dropout: Dropout<'t>,
    /// This layer's vectors of the tokens.
    pub per_layer: Option<Tensor<'t>>,
}

/// What comes of a layer.
pub(super) struct LayerOutputs<'t> {
    pub x: Tensor<'t>,
    pub keys_values: Option<KeysValues<Tensor<'t>>>,
    /// The cache, if there was one and the layer has keys and values of its own.
    pub written: Option<KeysValues<Tensor<'t>>>,
    /// What else can be asked for.
    pub others: Vec<(LayerOutput, Tensor<'t>)>,
}

impl<'t> LayerOutputs<'t> {
    /// What is asked for of all that the layer made, in the order in which it did.
    pub(super) fn wanted(&self, wanted: &[LayerOutput]) -> Vec<(LayerOutput, Tensor<'t>)> {
        let all = self.others.iter().copied().chain([(LayerOutput::Residual, self.x)]);
        all.filter(|(output, _)| wanted.contains(output)).collect()
    }
}

pub(super) const RESIDUAL: [Option<&str>; 3] =
    [Some("activation_batch"), Some("activation_norm_length"), Some("activation_embed")];

/// Names of the axes that only these parameters have.
pub(crate) const PER_LAYER: &str = "per_layer";
const ONE: &str = "one";
/// The output axis of a square matrix, while it is multiplied.
const SQUARE_OUTPUT: &str = "square_output";

/// The parameters of a layer.
pub(super) fn layer_specs(config: &DecoderConfig, layer: &LayerConfig) -> DecoderLayer<ParamSpec> {
    let embed = config.embed;
    let norm = |kind: Option<NormKind>| kind.map(|kind| norm_specs(kind, embed, config.norm));
    DecoderLayer {
        pre_attention_norm: norm(layer.norms.pre_attention),
        attention: attention_specs(config, layer),
        post_attention_norm: norm(layer.norms.post_attention),
        pre_mlp_norm: norm(layer.norms.pre_mlp),
        mlp: mlp_specs(config, layer),
        post_mlp_norm: norm(layer.norms.post_mlp),
        per_layer: config.embedding.per_layer.map(|width| PerLayerInput {
            gate: linear(1, [(embed, "embed"), (width, "mlp")], config.init_scale),
            projection: linear(1, [(width, "mlp"), (embed, "embed")], config.init_scale),
            norm: rms_specs(embed, config.norm),
        }),
        scalar: layer.scaled.then(|| ParamSpec::new([(mt_shape::axis(ONE, 1), "norm")], Initializer::Ones)),
        square: layer.square.then(|| {
            let output = mt_shape::axis(SQUARE_OUTPUT, embed.size);
            linear(1, [(embed, "embed"), (output, "mlp")], config.init_scale)
        }),
    }
}

/// A linear map from the first `num_inputs` axes to the others.
fn linear<const N: usize>(
    num_inputs: usize,
    axes: [(Axis, &'static str); N],
    scale: f64,
) -> Linear<ParamSpec> {
    let fan_in = axes[..num_inputs].iter().map(|(axis, _)| axis.size).product();
    let kernel = ParamSpec::new(axes, Initializer::fan_in(scale, fan_in)).with_input_axes(num_inputs);
    Linear { kernel, bias: None }
}

fn with_bias<const N: usize>(
    linear: Linear<ParamSpec>,
    has_bias: bool,
    axes: [(Axis, &'static str); N],
) -> Linear<ParamSpec> {
    Linear { bias: has_bias.then(|| ParamSpec::new(axes, Initializer::Zeros)), ..linear }
}

/// A scale that leaves what it scales as it is.
fn scale_specs<const N: usize>(axes: [(Axis, &'static str); N], options: NormOptions) -> ParamSpec {
    ParamSpec::new(axes, if options.offset == 1.0 { Initializer::Zeros } else { Initializer::Ones })
}

pub(super) fn rms_specs(axis: Axis, options: NormOptions) -> RmsNorm<ParamSpec> {
    RmsNorm { scale: scale_specs([(axis, "norm")], options) }
}

pub(super) fn norm_specs(kind: NormKind, axis: Axis, options: NormOptions) -> Norm<ParamSpec> {
    match kind {
        NormKind::RootMeanSquare => Norm::Rms(rms_specs(axis, options)),
        NormKind::Layer => Norm::Layer(LayerNorm {
            scale: scale_specs([(axis, "norm")], options),
            bias: ParamSpec::new([(axis, "norm")], Initializer::Zeros),
        }),
    }
}

fn attention_specs(config: &DecoderConfig, layer: &LayerConfig) -> Option<Attention<ParamSpec>> {
    let attention = layer.attention.as_ref()?;
    let (embed, heads, kv_heads, head_dim) =
        (config.embed, attention.query_heads, attention.kv_heads, attention.head_dim);
    let own = !matches!(attention.values, Values::OfLayer(_));
    let query = linear(1, [(embed, "embed"), (heads, "q_heads"), (head_dim, "kv")], config.init_scale);
    let key_value = || {
        let kernel = linear(
            1,
            [(embed, "embed"), (kv_heads, "kv_heads"), (head_dim, "kv_head_dim")],
            config.init_scale,
        );
        with_bias(kernel, attention.input_bias, [(kv_heads, "kv_heads"), (head_dim, "kv_head_dim")])
    };
    let out = linear(2, [(heads, "heads"), (head_dim, "kv"), (embed, "embed")], config.init_scale);
    let norm = |of: (Axis, &'static str)| match attention.query_key_norm {
        QueryKeyNorm::None => None,
        QueryKeyNorm::PerHead => Some(rms_specs(head_dim, config.norm)),
        QueryKeyNorm::AllHeads => Some(RmsNorm { scale: scale_specs([of, (head_dim, "norm")], config.norm) }),
    };
    Some(Attention {
        query: with_bias(query, attention.input_bias, [(heads, "q_heads"), (head_dim, "kv")]),
        key: own.then(key_value),
        value: (attention.values == Values::Own).then(key_value),
        out: with_bias(out, attention.output_bias, [(embed, "norm")]),
        query_norm: norm((heads, "q_heads")),
        key_norm: norm((kv_heads, "kv_heads")).filter(|_| own),
        sinks: attention.sinks.then(|| ParamSpec::new([(heads, "q_heads")], Initializer::Zeros)),
    })
}

fn mlp_specs(config: &DecoderConfig, layer: &LayerConfig) -> Option<Mlp<ParamSpec>> {
    let mlp = layer.mlp.as_ref()?;
    let (embed, width) = (config.embed, mlp.width);
    let hidden = || {
        let kernel = linear(1, [(embed, "embed"), (width, "mlp")], config.init_scale);
        with_bias(kernel, mlp.bias, [(width, "mlp")])
    };
    let output = linear(1, [(width, "mlp"), (embed, "embed")], config.init_scale);
    Some(Mlp {
        wi_0: hidden(),
        wi_1: (mlp.activations.len() == 2).then(hidden),
        wo: with_bias(output, mlp.bias, [(embed, "norm")]),
    })
}

impl<'t> DecoderLayer<Tensor<'t>> {
    /// Applies the layer to the residual stream.
    ///
    /// # Shapes
    /// `[batch, position, embed] -> [batch, position, embed]`
    pub(super) fn forward(
        &self,
        x: Tensor<'t>,
        norm: NormOptions,
        config: &LayerConfig,
        inputs: LayerInputs<'t>,
    ) -> LayerOutputs<'t> {
        let x = x.named("decoder_layer_input");
        let normalized = |layer: &Option<Norm<Tensor<'t>>>, x: Tensor<'t>| match layer {
            Some(layer) => layer.forward(x, EMBED, norm),
            None => x,
        };
        let mut outputs = LayerOutputs { x, keys_values: None, written: None, others: Vec::new() };
        if let Some(square) = &self.square {
            outputs.x = square.forward(x, &[EMBED]).rename(SQUARE_OUTPUT, EMBED).constrain(&RESIDUAL);
            return outputs;
        }
        let normed = normalized(&self.pre_attention_norm, x);
        let mut attended = None;
        if let (Some(attention), Some(config)) = (&self.attention, &config.attention) {
            let Attended { output, keys_values, written, largest_scores } =
                x.scope("self_attention", |_| attention.forward(normed, &inputs.attention, &config.options));
            let output = normalized(&self.post_attention_norm, output);
            outputs.others.push((LayerOutput::Attention, output));
            outputs.others.extend(largest_scores.map(|scores| (LayerOutput::LargestScores, scores)));
            (outputs.keys_values, outputs.written) = (Some(keys_values), written);
            attended = Some(inputs.dropout.apply("attention", output));
        }
        let hidden = |mlp: &Mlp<Tensor<'t>>, activations: &[mt_nn::Activation], x: Tensor<'t>| {
            x.scope("mlp", |x| normalized(&self.post_mlp_norm, mlp.forward(x, activations, inputs.dropout)))
        };
        let mlp = self.mlp.as_ref().zip(config.mlp.as_ref());
        if config.parallel {
            let hidden = mlp.map(|(mlp, config)| hidden(mlp, &config.activations, normed));
            outputs.others.extend(hidden.map(|hidden| (LayerOutput::Mlp, hidden)));
            let added = attended.into_iter().chain(hidden.map(|hidden| inputs.dropout.apply("mlp", hidden)));
            outputs.x = added.fold(x, |x, part| x + part).constrain(&RESIDUAL);
        } else {
            if let Some(attended) = attended {
                outputs.x = (x + attended).constrain(&RESIDUAL);
            }
            if let Some((mlp, config)) = mlp {
                let x = outputs.x;
                let hidden = hidden(mlp, &config.activations, normalized(&self.pre_mlp_norm, x));
                outputs.others.push((LayerOutput::Mlp, hidden));
                outputs.x = (x + inputs.dropout.apply("mlp", hidden)).constrain(&RESIDUAL);
            }
        }
        if let (Some(layer), Some(vectors)) = (&self.per_layer, inputs.per_layer) {
            outputs.x = (outputs.x + layer.forward(outputs.x, vectors, norm)).constrain(&RESIDUAL);
        }
        if let Some(scalar) = self.scalar {
            outputs.x = outputs.x * scalar.cast(x.dtype()).squeeze(ONE);
        }
        outputs
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
