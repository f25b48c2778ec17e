//! Attention of a decoder's tokens to the output of an encoder.

use mt_nn::{
    ParamSpec,
    attention::{
        ACTIVATION, Attention, AttentionInputs, CACHED, CONTEXT, INPUT, KeysValues, QUERY, Segments,
    },
    axes::{BATCH, KV_POSITION, POSITION},
};
use mt_shape::{Axis, DType, axis};
use mt_trace::Tensor;

use super::AttentionConfig;
use crate::{
    Kept, StateSpec,
    decoder::{
        Activation,
        part::{BatchDims, Part, PartDescription, PartInputs, PartOutputs, SpecBuilder, StateDims},
    },
};

/// Attention to the output of an encoder. Each token sees the whole source of its document.
#[derive(Clone, Debug, PartialEq)]
pub struct CrossAttentionConfig {
    /// Heads, widths and scale. The mask allows all positions, and attention is dense.
    pub attention: AttentionConfig,
}

impl CrossAttentionConfig {
    /// The multiplications for each pair of a token and a token of the source.
    pub fn pair_width(&self) -> usize {
        self.attention.query_heads.size * (self.attention.head_dim.size + self.attention.value_dim.size)
    }
}

impl Part for CrossAttentionConfig {
    type Parameters<L> = Attention<L>;

    fn specs(&self, builder: &SpecBuilder) -> Attention<ParamSpec> {
        self.attention.specs(builder)
    }

    fn forward<'t>(
        &self,
        parameters: &Attention<Tensor<'t>>,
        x: Tensor<'t>,
        inputs: &PartInputs<'_, 't>,
    ) -> PartOutputs<'t> {
        let options = &self.attention.options;
        let state = inputs.state.as_ref().map(|state| state.arrays);
        let (keys_values, segmentation, state) = match (inputs.source, state) {
            (Some(source), state) => {
                let key = parameters.key.as_ref().expect("cross-attention has keys of its own");
                let own = parameters.keys_values(source.hidden.constrain(&INPUT), key, None, options);
                let segmentation = source.segmentation.rename(POSITION, KV_POSITION);
                let kept = state.map(|_| vec![own.key, own.value, segmentation]);
                (own, segmentation, kept.unwrap_or_default())
            }
            (None, Some(&[key, value, segmentation])) => {
                let cached = KeysValues { key: key.cast(x.dtype()), value: value.cast(x.dtype()) };
                (cached, segmentation, Vec::new())
            }
            (None, _) => x.region().fail("cross-attention", "the tokens have no source"),
        };
        let given = AttentionInputs {
            angles: None,
            query_factors: None,
            segments: Segments { key: segmentation, first_query: None, positions: None, ..inputs.segments },
            cache: None,
            shared: Some(keys_values),
            biases: None,
            weight_dropout: self.attention.weight_dropout(inputs).within("cross_attention"),
            with_scores: false,
        };
        let across = Attention { key: None, value: None, ..parameters.clone() };
        PartOutputs { state, ..PartOutputs::only(across.forward(x, &given, options).output) }
    }
}

impl PartDescription for CrossAttentionConfig {
    fn state(&self, dims: &StateDims) -> Vec<StateSpec> {
        let tokens = [axis(BATCH, dims.batch), axis(KV_POSITION, dims.source)];
        let array = |name, axes: &[Axis], dtype| StateSpec {
            group: 0,
            name,
            axes: axes.to_vec(),
            logical_axes: CACHED[..axes.len()].to_vec(),
            dtype,
            kept: Kept::OfSource,
        };
        let of_heads = |width: Axis| [&tokens[..], &[self.attention.kv_heads, width]].concat();
        vec![
            array("source_key", &of_heads(self.attention.head_dim), dims.dtype),
            array("source_value", &of_heads(self.attention.value_dim), dims.dtype),
            array("source_segmentation", &tokens, DType::I32),
        ]
    }

    fn activations(&self, batch: &BatchDims) -> Vec<Activation> {
        let &BatchDims { rows, length, source_length, dtype, .. } = batch;
        let attention = &self.attention;
        let (heads, kv_heads) = (attention.query_heads.size, attention.kv_heads.size);
        let (width, value_width, group) =
            (attention.head_dim.size, attention.value_dim.size, heads / kv_heads);
        let of_keys = [("key_proj", width), ("value_proj", value_width)];
        let mut made =
            vec![Activation::new(Some("query_proj"), &[rows, length, heads, width], &QUERY, dtype)];
        made.extend(of_keys.map(|(name, width)| {
            Activation::new(Some(name), &[rows, source_length, kv_heads, width], &ACTIVATION, dtype)
        }));
        let axes = [&CONTEXT[..4], &[None]].concat();
        let pairs = Activation::new(None, &[rows, kv_heads, length, group, source_length], &axes, dtype);
        // Attention logits, and the attention weights.
        made.extend([Activation { dtype: DType::F32, ..pairs.clone() }, pairs]);
        let context = [rows, kv_heads, length, group, value_width];
        made.push(Activation::new(Some("context"), &context, &CONTEXT, dtype));
        made.push(batch.residual(Some("out_proj")));
        made
    }

    fn scope(&self) -> &'static str {
        "cross_attention"
    }
}
