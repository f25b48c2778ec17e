//! The activations of layers, and their placement.

use mt_nn::{RESIDUAL, attention::BIASES};
use mt_shape::{DType, LogicalAxis};

use super::{
    DecoderConfig, LayerConfig, ResidualConnection,
    part::{BatchDims, PartDescription},
    segments::SegmentForm,
};

/// A tensor that a model computes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Activation {
    /// Its name in remat policies, if it has one.
    pub name: Option<&'static str>,
    pub dims: Vec<usize>,
    /// The logical name of each axis, which placement rules refer to.
    pub logical_axes: Vec<Option<LogicalAxis>>,
    pub dtype: DType,
}

impl Activation {
    pub fn new(
        name: Option<&'static str>,
        dims: &[usize],
        logical_axes: &[Option<LogicalAxis>],
        dtype: DType,
    ) -> Self {
        Self { name, dims: dims.to_vec(), logical_axes: logical_axes.to_vec(), dtype }
    }
}

/// The activations of a recomputed region: one cycle of scanned layers, or one unrolled layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionActivations {
    /// The number of regions of this kind.
    pub times: usize,
    /// The input of the region, which is kept under any policy.
    pub input: Activation,
    /// The activations in order, without the intermediate conversions of products and norms.
    pub made: Vec<Activation>,
}

const INPUT: &str = "decoder_layer_input";

impl DecoderConfig {
    /// The activations of the layers for `rows` sequences of `length` tokens, which devices may split, with equal
    /// regions merged.
    pub(super) fn activations(
        &self,
        rows: usize,
        length: usize,
        splits_length: bool,
    ) -> Vec<RegionActivations> {
        let batch = self.batch_dims(rows, length, splits_length);
        let source_length = batch.source_length;
        let of_encoder = BatchDims { length: source_length, ..batch };
        // Layers of the encoder never equal those of the decoder, whose attention is causal.
        let is_of_encoder = |layers: &[LayerConfig]| {
            let own = &self.layers[..self.num_encoder_layers()];
            own.iter().any(|layer| layers.contains(layer))
        };
        let mut regions: Vec<(Vec<LayerConfig>, usize)> = Vec::new();
        let add_one = |regions: &mut Vec<(Vec<LayerConfig>, usize)>, layer: &LayerConfig| match regions
            .iter_mut()
            .find(|(known, _)| known.as_slice() == std::slice::from_ref(layer))
        {
            Some((_, times)) => *times += 1,
            None => regions.push((vec![layer.clone()], 1)),
        };
        for segment in self.segments() {
            match segment.form {
                SegmentForm::Scanned { repeats } => regions.push((segment.kinds, repeats)),
                SegmentForm::Single => segment.kinds.iter().for_each(|layer| add_one(&mut regions, layer)),
            }
        }
        self.predictions.iter().for_each(|layer| add_one(&mut regions, layer));
        let of_region = |(layers, times): (Vec<LayerConfig>, usize)| {
            let batch = if is_of_encoder(&layers) { &of_encoder } else { &batch };
            RegionActivations {
                times,
                input: self.residual.activation(batch, Some(INPUT)),
                made: made_by(&layers, self.residual, batch),
            }
        };
        regions.into_iter().map(of_region).collect()
    }

    /// The activations that all layers of a stack read: the output of the encoder, and the biases of each stack.
    pub(super) fn shared_activations(&self, rows: usize, length: usize) -> Vec<Activation> {
        let batch = self.batch_dims(rows, length, false);
        let of_source = BatchDims { length: batch.source_length, ..batch };
        let biases = |is_encoder: bool, length: usize| {
            let heads = self.relative_heads(is_encoder)?.size;
            Some(Activation::new(None, &[heads, length, length], &BIASES, DType::F32))
        };
        let of_encoder = self.encoder.and_then(|_| biases(true, batch.source_length));
        let output = self.encoder.map(|_| of_source.residual(None));
        of_encoder.into_iter().chain(output).chain(biases(false, length)).collect()
    }

    fn batch_dims(&self, rows: usize, length: usize, splits_length: bool) -> BatchDims {
        let source_length = self.encoder.map_or(0, |encoder| encoder.source_length);
        BatchDims { rows, length, source_length, splits_length, embed: self.embed.size, dtype: self.dtype }
    }
}

impl BatchDims {
    /// A tensor with the shape of one residual stream.
    pub fn residual(&self, name: Option<&'static str>) -> Activation {
        Activation {
            name,
            dims: vec![self.rows, self.length, self.embed],
            logical_axes: RESIDUAL.to_vec(),
            dtype: self.dtype,
        }
    }
}

fn made_by(layers: &[LayerConfig], residual: ResidualConnection, batch: &BatchDims) -> Vec<Activation> {
    let mut made = Vec::new();
    for (index, layer) in layers.iter().enumerate() {
        made.extend((index > 0).then(|| residual.activation(batch, Some(INPUT))));
        if let Some(engram) = &layer.engram {
            made.push(residual.activation(batch, None));
            made.extend(engram.activations(batch));
            made.push(residual.activation(batch, None));
        }
        if let Some(mixer) = &layer.mixer {
            made.extend(residual.activations(batch));
            made.extend(layer.norms.pre_attention.map(|_| batch.residual(None)));
            made.extend(mixer.activations(batch));
            // The residual stream, which the feed-forward part reads.
            made.push(residual.activation(batch, None));
        }
        if let Some(cross) = &layer.cross {
            made.extend(layer.norms.pre_attention.map(|_| batch.residual(None)));
            made.extend(cross.activations(batch));
            // The residual stream, which the feed-forward part reads.
            made.push(residual.activation(batch, None));
        }
        if let Some(feed_forward) = &layer.feed_forward {
            made.extend(residual.activations(batch));
            made.extend(layer.norms.pre_mlp.map(|_| batch.residual(None)));
            made.extend(feed_forward.activations(batch));
        }
        made.extend(layer.square.then(|| batch.residual(None)));
    }
    made
}
