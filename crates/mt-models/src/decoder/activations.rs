//! The tensors that layers make on their way, and where these are placed.

use mt_nn::{
    HIDDEN,
    attention::{ACTIVATION, AttentionKernel, CONTEXT, DENSE_LIMIT, QUERY},
};
use mt_shape::DType;

use super::{AttentionConfig, DecoderConfig, LayerConfig, Values, layer::RESIDUAL};

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

impl DecoderConfig {
    /// What the layers make of `rows` sequences of `length` tokens, regions that are alike together.
    pub(super) fn activations(&self, rows: usize, length: usize) -> Vec<RegionActivations> {
        let batch = Batch { config: self, rows, length };
        let cycles = self.num_cycles();
        let scanned = if cycles == 0 { 0 } else { self.cycle };
        let mut regions: Vec<(&[LayerConfig], usize)> = Vec::new();
        if cycles > 0 {
            regions.push((&self.layers[..scanned], cycles));
        }
        for layer in self.layers[cycles * self.cycle..].chunks(1) {
            match regions.iter_mut().find(|(known, _)| *known == layer) {
                Some((_, times)) => *times += 1,
                None => regions.push((layer, 1)),
            }
        }
        let of_region = |(layers, times)| RegionActivations {
            times,
            input: batch.residual(Some(INPUT)),
            made: batch.made_by(layers),
        };
        regions.into_iter().map(of_region).collect()
    }
}

const INPUT: &str = "decoder_layer_input";

struct Batch<'a> {
    config: &'a DecoderConfig,
    rows: usize,
    length: usize,
}

impl Batch<'_> {
    fn activation(
        &self,
        name: Option<&'static str>,
        dims: &[usize],
        logical_axes: &[Option<&'static str>],
    ) -> Activation {
        let dtype = self.config.dtype;
        Activation { name, dims: dims.to_vec(), logical_axes: logical_axes.to_vec(), dtype }
    }

    fn residual(&self, name: Option<&'static str>) -> Activation {
        self.activation(name, &[self.rows, self.length, self.config.embed.size], &RESIDUAL)
    }

    fn made_by(&self, layers: &[LayerConfig]) -> Vec<Activation> {
        let mut made = Vec::new();
        for (index, layer) in layers.iter().enumerate() {
            made.extend((index > 0).then(|| self.residual(Some(INPUT))));
            if let Some(attention) = &layer.attention {
                made.extend(layer.norms.pre_attention.map(|_| self.residual(None)));
                made.extend(self.attention(attention));
                made.push(self.residual(Some("out_proj")));
                // The sum, which the feed-forward part is given.
                made.push(self.residual(None));
            }
            if let Some(mlp) = &layer.mlp {
                let hidden = |name| self.activation(name, &[self.rows, self.length, mlp.width.size], &HIDDEN);
                let names: &[_] =
                    if mlp.activations.len() == 2 { &["mlpwi_0", "mlpwi_1"] } else { &["mlpwi"] };
                made.extend(layer.norms.pre_mlp.map(|_| self.residual(None)));
                made.extend(names.iter().map(|name| hidden(Some(*name))));
                // What the last product is given.
                made.push(hidden(None));
                made.push(self.residual(Some("mlpwo")));
            }
            made.extend(layer.square.then(|| self.residual(None)));
        }
        made
    }

    fn attention(&self, attention: &AttentionConfig) -> Vec<Activation> {
        let &Self { rows, length, .. } = self;
        let (heads, kv_heads) = (attention.query_heads.size, attention.kv_heads.size);
        let (width, group) = (attention.head_dim.size, heads / kv_heads);
        let mut made = vec![self.activation(Some("query_proj"), &[rows, length, heads, width], &QUERY)];
        if !matches!(attention.values, Values::OfLayer(_)) {
            let of_keys = ["key_proj", "value_proj"];
            let dims = [rows, length, kv_heads, width];
            made.extend(of_keys.map(|name| self.activation(Some(name), &dims, &ACTIVATION)));
        }
        let is_dense = match attention.options.kernel {
            AttentionKernel::Automatic => length < DENSE_LIMIT,
            AttentionKernel::Dense => true,
            AttentionKernel::Blockwise => false,
        };
        let of_query = &CONTEXT[..4];
        if is_dense {
            let axes = [of_query, &[None]].concat();
            let pairs = self.activation(None, &[rows, kv_heads, length, group, length], &axes);
            // Scores, and the weights that values are multiplied by.
            made.extend([Activation { dtype: DType::F32, ..pairs.clone() }, pairs]);
        } else {
            // The logarithms of the sums of weights.
            let sums = self.activation(Some("context"), &[rows, kv_heads, length, group], of_query);
            made.push(Activation { dtype: DType::F32, ..sums });
        }
        made.push(self.activation(Some("context"), &[rows, kv_heads, length, group, width], &CONTEXT));
        made
    }
}
