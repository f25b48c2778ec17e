//! What the family reads of the configuration.

use mt_config::{AttentionKind, MlpActivation, ModelGroup, RematPolicy, RopeType};
use mt_nn::{
    Activation, NormOptions, Rotary, RotaryExtent, RotaryOptions, RotaryScaling,
    attention::{AttentionKernel, AttentionOptions, MaskSpec},
};
use mt_shape::{Axis, DType, axis};
use mt_trace::SavePolicy;

use crate::ModelError;

/// The dimensions and choices of a model of this family.
#[derive(Clone, Debug, PartialEq)]
pub struct LlamaConfig {
    pub embed: Axis,
    pub query_heads: Axis,
    pub kv_heads: Axis,
    pub head_dim: Axis,
    pub mlp: Axis,
    pub layers: Axis,
    pub vocab: Axis,
    pub activations: Vec<Activation>,
    pub attention: AttentionOptions,
    pub rotary: Rotary,
    pub norm: NormOptions,
    pub dropout_rate: f64,
    pub tied_head: bool,
    /// Divides the logits of a tied head by the root of the width.
    pub normalize_tied_logits: bool,
    pub logits_in_f32: bool,
    pub init_scale: f64,
    /// The type of activations.
    pub dtype: DType,
    pub weight_dtype: DType,
    pub scan_layers: bool,
    pub param_scan_axis: usize,
    /// None keeps all activations.
    pub remat: Option<SavePolicy>,
}

/// The results of products with weights: what the `minimal` policy keeps.
const PROJECTIONS: [&str; 7] =
    ["query_proj", "key_proj", "value_proj", "out_proj", "mlpwi_0", "mlpwi_1", "mlpwo"];

impl LlamaConfig {
    /// Reads a model from the configuration.
    ///
    /// # Errors
    /// Its values do not make a model.
    pub fn from_config(group: &ModelGroup) -> Result<Self, ModelError> {
        use mt_nn::axes;
        let activations: Vec<Activation> = group
            .mlp_activations
            .iter()
            .map(|activation| match activation {
                MlpActivation::Silu => Activation::Silu,
                MlpActivation::Gelu => Activation::Gelu,
                MlpActivation::Relu => Activation::Relu,
                MlpActivation::Sigmoid => Activation::Sigmoid,
                MlpActivation::Linear => Activation::Linear,
            })
            .collect();
        if !(1..=2).contains(&activations.len()) {
            return Err(ModelError::Activations(activations.len()));
        }
        let norm = NormOptions { epsilon: group.normalization_layer_epsilon, offset: 0.0 };
        let names = |names: &[&str]| SavePolicy::Names(names.iter().map(|name| (*name).to_owned()).collect());
        Ok(Self {
            embed: axis(axes::EMBED, group.emb_dim()),
            query_heads: axis(axes::QUERY_HEADS, group.num_query_heads()),
            kv_heads: axis(axes::KV_HEADS, group.num_kv_heads()),
            head_dim: axis(axes::HEAD_DIM, group.head_dim),
            mlp: axis(axes::MLP, group.mlp_dim()),
            layers: axis(axes::LAYERS, group.num_decoder_layers()),
            vocab: axis(axes::VOCAB, group.vocab_size),
            activations,
            attention: AttentionOptions {
                scale: (group.head_dim as f64).powf(-0.5),
                kernel: match group.attention {
                    AttentionKind::Autoselected => AttentionKernel::Automatic,
                    AttentionKind::DotProduct => AttentionKernel::Dense,
                    AttentionKind::Flash => AttentionKernel::Blockwise,
                },
                float32_product: group.float32_qk_product,
                float32_scores: group.float32_logits,
                mask: MaskSpec::CAUSAL,
                soft_cap: None,
                norm,
                normalize_values: false,
            },
            rotary: match group.rope_type {
                RopeType::Default => Rotary::new(&RotaryOptions {
                    head_dim: group.head_dim,
                    min_timescale: group.rope_min_timescale as f64,
                    max_timescale: group.rope_max_timescale as f64,
                    extent: RotaryExtent::Full,
                    scaling: RotaryScaling::None,
                }),
            },
            norm,
            dropout_rate: group.effective_dropout(),
            tied_head: group.logits_via_embedding,
            normalize_tied_logits: group.normalize_embedding_logits,
            logits_in_f32: group.logits_dot_in_fp32,
            init_scale: group.dense_init_scale,
            dtype: group.dtype,
            weight_dtype: group.weight_dtype,
            scan_layers: group.scan_layers,
            param_scan_axis: group.param_scan_axis,
            remat: match group.remat_policy {
                RematPolicy::Full => Some(names(&[])),
                RematPolicy::Minimal => Some(names(&PROJECTIONS)),
                RematPolicy::None => None,
            },
        })
    }
}
