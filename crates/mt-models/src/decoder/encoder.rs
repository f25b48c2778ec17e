//! The encoder of an encoder–decoder model, whose output the decoder's cross-attention reads.

use mt_derive::Tree;
use mt_nn::{
    Dropout, Initializer, LayerPlace, Norm, ParamSpec, RESIDUAL, SequenceOrder,
    attention::{RelativeBuckets, Segments},
    axes::{BUCKET, EMBED},
};
use mt_shape::{Axis, Tree, axis, logical};
use mt_trace::Tensor;

use super::{
    CrossAttentionConfig, Decoder, DecoderConfig, DecoderParameters, LayerConfig, named_taps,
    part::{SourceStates, SpecBuilder},
    stack::StackInputs,
};
use crate::{Forward, LayerOutput, OfLayers, Source, SourceFlops};

/// The encoder, whose layers are the first of the model's. Its input is the embedding of the decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncoderConfig {
    pub num_layers: usize,
    /// The largest number of tokens in a source, from which estimates follow.
    pub source_length: usize,
}

/// The parameters of an encoder outside of its layers.
#[derive(Clone, Debug, Tree)]
pub struct Encoder<L> {
    /// `[bucket, q_heads]`
    pub relative_bias: Option<L>,
    pub final_norm: Option<Norm<L>>,
}

/// The output of an encoder.
pub(super) struct Encoded<'t> {
    pub states: SourceStates<'t>,
    pub taps: Vec<(String, Tensor<'t>)>,
    pub others: Vec<OfLayers<'t>>,
}

impl DecoderConfig {
    /// The number of layers that belong to the encoder, which are the first.
    pub fn num_encoder_layers(&self) -> usize {
        self.encoder.map_or(0, |encoder| encoder.num_layers)
    }

    /// The buckets of a stack, given by its layers, and the heads that learn a bias for each.
    fn relative(&self, layers: &[LayerConfig]) -> Option<(RelativeBuckets, Axis)> {
        layers
            .iter()
            .filter_map(LayerConfig::attention)
            .find_map(|attention| attention.relative.map(|buckets| (buckets, attention.query_heads)))
    }

    /// The heads that learn biases by distance in one of the stacks.
    pub(super) fn relative_heads(&self, is_encoder: bool) -> Option<Axis> {
        self.relative(self.layers_of(is_encoder)).map(|(_, heads)| heads)
    }

    fn layers_of(&self, is_encoder: bool) -> &[LayerConfig] {
        let (encoder, decoder) = self.layers.split_at(self.num_encoder_layers());
        if is_encoder { encoder } else { decoder }
    }

    /// The table of biases of one of the stacks.
    pub(super) fn relative_bias_specs(&self, builder: &SpecBuilder, is_encoder: bool) -> Option<ParamSpec> {
        let (buckets, heads) = self.relative(self.layers_of(is_encoder))?;
        let axes = [(axis(BUCKET, buckets.count), logical::POSITION), (heads, logical::Q_HEADS)];
        let deviation = (self.embed.size as f64).powf(-0.5);
        Some(builder.array(axes, Initializer::Normal { deviation }))
    }

    /// The parameters of the encoder outside of its layers.
    pub(super) fn encoder_specs(&self, builder: &SpecBuilder) -> Option<Encoder<ParamSpec>> {
        self.encoder.map(|_| Encoder {
            relative_bias: self.relative_bias_specs(builder, true),
            final_norm: self.final_norm.map(|kind| builder.residual_norm(kind)),
        })
    }

    /// The dropout of the input and the normalized output of a stack, which only the stacks of encoder–decoder models
    /// have.
    pub(super) fn dropout_at_ends<'t>(
        &self,
        forward: &Forward<'t>,
        order: SequenceOrder,
        is_encoder: bool,
    ) -> Dropout<'t> {
        let stack = if is_encoder { "encoder" } else { "decoder" };
        match forward.dropout.filter(|_| self.encoder.is_some() && self.dropout_rate > 0.0) {
            Some(key) => Dropout::On { rate: self.dropout_rate, key: key.fold_in_name(stack), order },
            None => Dropout::Off,
        }
    }

    /// The biases of the attention logits of one of the stacks, which all its layers share.
    pub(super) fn biases<'t>(
        &self,
        table: Option<Tensor<'t>>,
        segments: Segments<'t>,
        is_encoder: bool,
    ) -> Option<Tensor<'t>> {
        let (buckets, _) = self.relative(self.layers_of(is_encoder))?;
        table.map(|table| table.scope("relative_bias", |table| buckets.biases(table, segments)))
    }
}

impl Decoder {
    /// The work for a source, if the model has an encoder.
    pub(super) fn source_flops(&self) -> Option<SourceFlops> {
        let EncoderConfig { num_layers, source_length } = self.config.encoder?;
        let is_of_source = |spec: &ParamSpec| {
            let layer = match spec.place {
                LayerPlace::None => return false,
                LayerPlace::One(layer) | LayerPlace::Stacked { first: layer, .. } => layer,
            };
            let reads_source = ["cross_attention.key.", "cross_attention.value."];
            layer < num_layers || reads_source.iter().any(|part| spec.role.starts_with(part))
        };
        let weights: Vec<ParamSpec> =
            self.specs.leaves().into_iter().map(|(_, spec)| spec).filter(is_of_source).collect();
        let sum = |specs: &mut dyn Iterator<Item = &ParamSpec>| -> usize {
            specs.map(ParamSpec::num_weights).sum()
        };
        let weights_per_token = sum(&mut weights.iter());
        let (encoder, decoder) = self.config.layers.split_at(num_layers);
        let pairs = encoder.iter().flat_map(LayerConfig::parts).flat_map(|part| part.pair_operations());
        let cross = decoder.iter().filter_map(|layer| layer.cross.as_ref());
        Some(SourceFlops {
            length: source_length,
            weights_per_token,
            frozen_per_token: match self.config.adapters {
                Some(_) => sum(&mut weights.iter().filter(|spec| spec.adapter.is_none())),
                None => 0,
            },
            pair_width: pairs.map(|attention| attention.width).sum(),
            cross_width: cross.map(CrossAttentionConfig::pair_width).sum(),
        })
    }
}

impl<'t> DecoderParameters<Tensor<'t>> {
    /// Applies the encoder to a source.
    ///
    /// # Shapes
    /// `i32[batch, position] -> [batch, position, embed]`
    pub(super) fn encoded(
        &self,
        source: Source<'t>,
        config: &DecoderConfig,
        forward: &Forward<'t>,
        wanted: &[LayerOutput],
    ) -> Encoded<'t> {
        let encoder = self.encoder.as_ref().expect("only models with an encoder read a source");
        let segments = Segments::within(source.segmentation, source.order);
        let ends = config.dropout_at_ends(forward, source.order, true);
        let x = config.embedded(self.table(), source.tokens).constrain(&RESIDUAL);
        let x = ends.apply("embedding", x);
        let inputs = StackInputs {
            tokens: source.tokens,
            numbers: None,
            positions: source.segmentation,
            angles: Vec::new(),
            segments,
            biases: config.biases(encoder.relative_bias, segments, true),
            source: None,
            dropout: forward.dropout.filter(|_| config.drops()),
            state: None,
            adapters: None,
            mixer_input: None,
            per_layer: None,
            wanted: wanted.to_vec(),
            layers_in: forward.layers_in,
            pieces: None,
        };
        let num_layers = config.num_encoder_layers();
        let outputs = x.scope("encoder", |x| self.layers.forward(x, config, &inputs, 0..num_layers));
        let hidden = match &encoder.final_norm {
            Some(norm) => norm.forward(outputs.x, EMBED, config.norm),
            None => outputs.x,
        };
        let hidden = ends.apply("final_norm", hidden);
        let mut taps = Vec::new();
        if forward.taps {
            taps.push(("encoder.embedding".to_owned(), x));
            taps.extend(named_taps(&outputs.others, "encoder.", 0));
            taps.push(("encoder.final_norm".to_owned(), hidden));
        }
        let states = SourceStates { hidden, segmentation: source.segmentation };
        Encoded { states, taps, others: outputs.others }
    }
}
