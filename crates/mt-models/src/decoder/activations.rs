//! The tensors that layers make on their way, and where these are placed.

use mt_shape::DType;

use super::{DecoderConfig, LayerConfig, layer::RESIDUAL, part::BatchDims, segments::SegmentForm};

/// A tensor that a model makes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Activation {
    /// The name by which remat policies know it, if they do.
    pub name: Option<&'static str>,
    pub dims: Vec<usize>,
    /// For each axis the logical name that placement rules know.
    pub logical_axes: Vec<Option<&'static str>>,
    pub dtype: DType,
}

/// What the layers of a region make that the backward pass computes again: of a cycle of scanned layers, or of one that
/// is not scanned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionActivations {
    /// How many regions are like this one.
    pub times: usize,
    /// What recomputation begins with, which is kept whatever policies say.
    pub input: Activation,
    /// In the order in which they are made, but for what products and norms convert on their way.
    pub made: Vec<Activation>,
}

const INPUT: &str = "decoder_layer_input";

impl DecoderConfig {
    /// What the layers make of `rows` sequences of `length` tokens, regions that are alike together.
    pub(super) fn activations(&self, rows: usize, length: usize) -> Vec<RegionActivations> {
        let batch = BatchDims { rows, length, embed: self.embed.size, dtype: self.dtype };
        let mut regions: Vec<(Vec<LayerConfig>, usize)> = Vec::new();
        for segment in self.segments() {
            match segment.form {
                SegmentForm::Scanned { repeats } => regions.push((segment.kinds, repeats)),
                SegmentForm::Single => {
                    for layer in segment.kinds.chunks(1) {
                        match regions.iter_mut().find(|(known, _)| *known == layer) {
                            Some((_, times)) => *times += 1,
                            None => regions.push((layer.to_vec(), 1)),
                        }
                    }
                }
            }
        }
        let of_region = |(layers, times): (Vec<LayerConfig>, usize)| RegionActivations {
            times,
            input: batch.residual(Some(INPUT)),
            made: made_by(&layers, &batch),
        };
        regions.into_iter().map(of_region).collect()
    }
}

impl BatchDims {
    /// A tensor like the residual stream.
    pub fn residual(&self, name: Option<&'static str>) -> Activation {
        Activation {
            name,
            dims: vec![self.rows, self.length, self.embed],
            logical_axes: RESIDUAL.to_vec(),
            dtype: self.dtype,
        }
    }
}

fn made_by(layers: &[LayerConfig], batch: &BatchDims) -> Vec<Activation> {
    let mut made = Vec::new();
    for (index, layer) in layers.iter().enumerate() {
        made.extend((index > 0).then(|| batch.residual(Some(INPUT))));
        if let Some(mixer) = &layer.mixer {
            made.extend(layer.norms.pre_attention.map(|_| batch.residual(None)));
            made.extend(mixer.activations(batch));
            // The sum, which the feed-forward part is given.
            made.push(batch.residual(None));
        }
        if let Some(feed_forward) = &layer.feed_forward {
            made.extend(layer.norms.pre_mlp.map(|_| batch.residual(None)));
            made.extend(feed_forward.activations(batch));
        }
        made.extend(layer.square.then(|| batch.residual(None)));
    }
    made
}
