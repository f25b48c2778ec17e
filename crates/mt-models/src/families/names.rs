//! Names of tensors in Hugging Face's files.
//!
//! The leading axes of a parameter may enumerate its blocks: the layers of a stacked parameter, or the experts of a
//! layer. A block is a matrix or a vector. The files have a tensor for each block, or one tensor for several blocks.

use std::ops::Range;

use crate::decoder::DecoderConfig;

/// The name and layout of a parameter's tensor in a file.
#[derive(Clone, Copy, Debug)]
pub struct TensorName {
    /// The parameter's role, without the layer.
    pub role: &'static str,
    /// The tensor's name. `{layer}` stands for the layer's index. Other [`Placeholder`]s stand for indices along the
    /// parameter's leading axes within a layer, in order, so that each index has its own tensor.
    pub name: &'static str,
    /// The number of further axes that also lead in the tensor, such as that of experts.
    pub stacked: usize,
    /// Whether the matrices along these axes are concatenated by rows, instead of having axes of their own.
    pub merges_rows: bool,
    /// The layout of a block, which has the remaining axes, in the tensor.
    pub layout: Layout,
    /// The position of the block, if the tensor also holds blocks of other parameters.
    pub fused: Option<Fused>,
    /// The rows of the block that the tensor holds, if several tensors hold it together.
    pub portion: Option<Portion>,
    /// For a copy of a parameter of the model in each module that predicts further tokens: the models whose files have
    /// it.
    pub copied_in: Option<fn(&DecoderConfig) -> bool>,
    /// The stack whose layers have the tensor, from whose first layer `{layer}` counts; `None` for the whole model.
    pub stack: Option<LayerStack>,
    /// The models whose files have this name, if other models have another.
    pub when: Option<fn(&DecoderConfig) -> bool>,
    /// Marks a tensor that files may have, when they are read, in place of the other ones of its role, which are written.
    pub is_alternative: bool,
}

/// A stack of an encoder–decoder model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerStack {
    Encoder,
    Decoder,
}

impl LayerStack {
    /// The indices of the stack's layers among all layers of the model.
    pub fn layers(self, config: &DecoderConfig) -> Range<usize> {
        let first = config.num_encoder_layers();
        match self {
            Self::Encoder => 0..first,
            Self::Decoder => first..config.layers.len(),
        }
    }
}

/// The rows of a block in one of several tensors. The rows fall into repeating groups; a tensor has one of each
/// repetition.
#[derive(Clone, Copy, Debug)]
pub struct Portion {
    pub index: usize,
    /// The sizes of the groups in a model.
    pub groups: fn(&DecoderConfig) -> Vec<usize>,
}

/// An index within a tensor's name, other than the layer's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placeholder {
    /// `{expert}`: the index along the axis.
    Expert,
    /// `{module}`: the index of a layer after the last one, as in the numbering of modules for multi-token prediction.
    Module,
}

impl Placeholder {
    const ALL: [(&'static str, Self); 2] = [("{expert}", Self::Expert), ("{module}", Self::Module)];

    /// The placeholders of a name with their texts, in order.
    pub fn of(name: &str) -> Vec<(&'static str, Self)> {
        let mut found: Vec<_> =
            Self::ALL.iter().filter_map(|known| Some((name.find(known.0)?, *known))).collect();
        found.sort_by_key(|(place, _)| *place);
        found.into_iter().map(|(_, known)| known).collect()
    }
}

/// The layout of a parameter's block in a file's tensor. Files have matrices for parameters with an axis of heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// The same elements in the same order: a vector, or a matrix whose rows are the block's leading axes, as many as
    /// given.
    Same(usize),
    /// A transposed matrix. The block's leading axes, as many as given, are the matrix's columns.
    Transposed(usize),
    /// The filter of a depthwise convolution, `[taps, channels]`, which the file stores as `[channels, 1, taps]`.
    Depthwise,
}

/// The position of a block in a tensor that holds blocks of several parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fused {
    /// The axis of the tensor that the blocks share.
    pub along: Along,
    /// The index of this block among them.
    pub index: usize,
    pub order: FusedOrder,
}

/// An axis of a matrix in a file. A vector is one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Along {
    Rows,
    Columns,
}

/// The order in which blocks share an axis of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FusedOrder {
    /// The blocks in order, concatenated.
    Concatenated,
    /// Alternating groups of each block. The given number of the block's last axes on the shared axis form a group:
    /// with 0, single rows or columns alternate, and with 1, heads.
    Alternating(usize),
}

impl TensorName {
    pub(crate) const fn new(role: &'static str, name: &'static str, layout: Layout) -> Self {
        Self {
            role,
            name,
            stacked: 0,
            merges_rows: false,
            layout,
            fused: None,
            portion: None,
            copied_in: None,
            stack: None,
            when: None,
            is_alternative: false,
        }
    }

    /// A copy of a parameter of the model in each module that predicts further tokens, in models of which `is_in`
    /// holds.
    pub(crate) const fn copied_in(self, is_in: fn(&DecoderConfig) -> bool) -> Self {
        Self { copied_in: Some(is_in), ..self }
    }

    /// The same block in a tensor that several parameters share.
    pub(crate) const fn fused(self, along: Along, index: usize, order: FusedOrder) -> Self {
        Self { fused: Some(Fused { along, index, order }), ..self }
    }

    /// The tensor that holds one of the groups of the parameter's rows.
    pub(crate) const fn portion(self, index: usize, groups: fn(&DecoderConfig) -> Vec<usize>) -> Self {
        Self { portion: Some(Portion { index, groups }), ..self }
    }

    /// The tensor of the layers of a stack.
    pub(crate) const fn of(self, stack: LayerStack) -> Self {
        Self { stack: Some(stack), ..self }
    }

    /// The name in the files of models for which `holds` holds.
    pub(crate) const fn when(self, holds: fn(&DecoderConfig) -> bool) -> Self {
        Self { when: Some(holds), ..self }
    }

    /// A tensor that files may have in place of the other ones of its role.
    pub(crate) const fn alternative(self) -> Self {
        Self { is_alternative: true, ..self }
    }

    /// The layer from which `{layer}` counts, if the files of the model have this name for these layers.
    pub fn first_layer(&self, config: &DecoderConfig, layers: &[usize]) -> Option<usize> {
        let own = self.stack.map_or(0..usize::MAX, |stack| stack.layers(config));
        let is_named = self.when.is_none_or(|holds| holds(config));
        (is_named && layers.iter().all(|layer| own.contains(layer))).then_some(own.start)
    }

    /// Whether the name is that of layers' tensors.
    pub fn is_of_layer(&self) -> bool {
        self.name.contains("{layer}")
    }
}

pub(super) const fn vector(role: &'static str, name: &'static str) -> TensorName {
    TensorName::new(role, name, Layout::Same(0))
}

pub(super) const fn table(role: &'static str, name: &'static str, rows: usize) -> TensorName {
    TensorName::new(role, name, Layout::Same(rows))
}

pub(super) const fn matrix(role: &'static str, name: &'static str) -> TensorName {
    TensorName::new(role, name, Layout::Transposed(1))
}

/// The output projection of attention, from heads.
pub(super) const fn out(role: &'static str, name: &'static str) -> TensorName {
    TensorName::new(role, name, Layout::Transposed(2))
}

/// The matrices of a layer's experts, which have a tensor each.
pub(super) const fn each_expert(role: &'static str, name: &'static str) -> TensorName {
    matrix(role, name)
}

/// One tensor for all experts of a layer, not transposed.
pub(super) const fn of_experts(role: &'static str, name: &'static str, rows: usize) -> TensorName {
    TensorName { stacked: 1, ..TensorName::new(role, name, Layout::Same(rows)) }
}

/// One tensor of transposed matrices for all experts of a layer.
pub(super) const fn of_transposed_experts(role: &'static str, name: &'static str) -> TensorName {
    TensorName { stacked: 1, ..matrix(role, name) }
}

/// Transposed matrices of groups, whose rows follow each other in one matrix.
pub(super) const fn of_groups(role: &'static str, name: &'static str) -> TensorName {
    TensorName { merges_rows: true, ..of_transposed_experts(role, name) }
}

/// One of several concatenated blocks of a tensor that is not transposed.
const fn fused(role: &'static str, name: &'static str, rows: usize, index: usize) -> TensorName {
    table(role, name, rows).fused(Along::Columns, index, FusedOrder::Concatenated)
}

/// Whether a model does not need a tensor: a buffer, a tensor of a vision or audio tower, or the output matrix of a
/// tied head.
pub(super) fn ignores(config: &DecoderConfig, name: &str) -> bool {
    const OTHERS: &[&str] = &[
        "vision_tower.",
        "vision_model.",
        "multi_modal_projector.",
        "embed_vision.",
        "audio_tower.",
        "embed_audio.",
    ];
    let inside = name.strip_prefix("model.").unwrap_or(name);
    let is_other = OTHERS.iter().any(|name| inside.starts_with(name));
    is_other
        || name.ends_with(".rotary_emb.inv_freq")
        || (config.head.applies_table() && name.ends_with("lm_head.weight"))
}

/// Embedding, final norm and output matrix, as most models name them.
pub(super) const MODEL: &[TensorName] = &[
    table("token_embedder.embedding", "model.embed_tokens.weight", 1),
    vector("final_norm.scale", "model.norm.weight"),
    matrix("head.kernel", "lm_head.weight"),
];

/// The head of reward models, which has the same name in all families.
pub(crate) const SCORE: &[TensorName] =
    &[matrix("score.kernel", "score.weight"), vector("score.bias", "score.bias")];

/// The input of the first layer of a decoder that drafts for another model.
pub(crate) const FUSION: &[TensorName] = &[
    matrix("fusion.kernel", "fc.weight"),
    vector("fusion.bias", "fc.bias"),
    vector("fusion.embedding_norm.scale", "midlayer.input_layernorm.weight"),
    vector("fusion.hidden_norm.scale", "midlayer.hidden_norm.weight"),
];

/// Attention, with all parameters that some families have.
pub(super) const ATTENTION: &[TensorName] = &[
    matrix("attention.query.kernel", "model.layers.{layer}.self_attn.q_proj.weight"),
    vector("attention.query.bias", "model.layers.{layer}.self_attn.q_proj.bias"),
    matrix("attention.key.kernel", "model.layers.{layer}.self_attn.k_proj.weight"),
    vector("attention.key.bias", "model.layers.{layer}.self_attn.k_proj.bias"),
    matrix("attention.value.kernel", "model.layers.{layer}.self_attn.v_proj.weight"),
    vector("attention.value.bias", "model.layers.{layer}.self_attn.v_proj.bias"),
    TensorName::new(
        "attention.out.kernel",
        "model.layers.{layer}.self_attn.o_proj.weight",
        Layout::Transposed(2),
    ),
    vector("attention.out.bias", "model.layers.{layer}.self_attn.o_proj.bias"),
    vector("attention.query_norm.scale", "model.layers.{layer}.self_attn.q_norm.weight"),
    vector("attention.key_norm.scale", "model.layers.{layer}.self_attn.k_norm.weight"),
];

/// The MLP, with all parameters that some families have.
pub(super) const MLP: &[TensorName] = &[
    matrix("mlp.wi_0.kernel", "model.layers.{layer}.mlp.gate_proj.weight"),
    vector("mlp.wi_0.bias", "model.layers.{layer}.mlp.gate_proj.bias"),
    matrix("mlp.wi_1.kernel", "model.layers.{layer}.mlp.up_proj.weight"),
    vector("mlp.wi_1.bias", "model.layers.{layer}.mlp.up_proj.bias"),
    matrix("mlp.wo.kernel", "model.layers.{layer}.mlp.down_proj.weight"),
    vector("mlp.wo.bias", "model.layers.{layer}.mlp.down_proj.bias"),
];

/// Norms before attention and before the MLP.
pub(super) const NORMS_BEFORE: &[TensorName] = &[
    vector("pre_attention_norm.scale", "model.layers.{layer}.input_layernorm.weight"),
    vector("pre_mlp_norm.scale", "model.layers.{layer}.post_attention_layernorm.weight"),
];

/// Norms after, or before and after, each part.
pub(super) const NORMS_AROUND: &[TensorName] = &[
    vector("pre_attention_norm.scale", "model.layers.{layer}.input_layernorm.weight"),
    vector("post_attention_norm.scale", "model.layers.{layer}.post_attention_layernorm.weight"),
    vector("pre_mlp_norm.scale", "model.layers.{layer}.pre_feedforward_layernorm.weight"),
    vector("post_mlp_norm.scale", "model.layers.{layer}.post_feedforward_layernorm.weight"),
];

/// Additional parameters of Gemma 4's layers.
pub(super) const GEMMA4: &[TensorName] = &[
    vector("scalar", "model.layers.{layer}.layer_scalar"),
    matrix("per_layer.gate.kernel", "model.layers.{layer}.per_layer_input_gate.weight"),
    matrix("per_layer.projection.kernel", "model.layers.{layer}.per_layer_projection.weight"),
    vector("per_layer.norm.scale", "model.layers.{layer}.post_per_layer_input_norm.weight"),
];

/// Gemma 4's per-layer embeddings. They belong to the model, though their roles are those of a layer's part.
pub(super) const GEMMA4_MODEL: &[TensorName] = &[
    table("per_layer.embedding", "model.embed_tokens_per_layer.weight", 1),
    matrix("per_layer.projection.kernel", "model.per_layer_model_projection.weight"),
    vector("per_layer.norm.scale", "model.per_layer_projection_norm.weight"),
];

/// GPT-2's tensors, whose matrices are not transposed.
pub(super) const GPT2: &[TensorName] = &[
    table("token_embedder.embedding", "transformer.wte.weight", 1),
    table("positions.table", "transformer.wpe.weight", 1),
    vector("final_norm.scale", "transformer.ln_f.weight"),
    vector("final_norm.bias", "transformer.ln_f.bias"),
    matrix("head.kernel", "lm_head.weight"),
    vector("pre_attention_norm.scale", "transformer.h.{layer}.ln_1.weight"),
    vector("pre_attention_norm.bias", "transformer.h.{layer}.ln_1.bias"),
    fused("attention.query.kernel", "transformer.h.{layer}.attn.c_attn.weight", 1, 0),
    fused("attention.key.kernel", "transformer.h.{layer}.attn.c_attn.weight", 1, 1),
    fused("attention.value.kernel", "transformer.h.{layer}.attn.c_attn.weight", 1, 2),
    fused("attention.query.bias", "transformer.h.{layer}.attn.c_attn.bias", 0, 0),
    fused("attention.key.bias", "transformer.h.{layer}.attn.c_attn.bias", 0, 1),
    fused("attention.value.bias", "transformer.h.{layer}.attn.c_attn.bias", 0, 2),
    table("attention.out.kernel", "transformer.h.{layer}.attn.c_proj.weight", 2),
    vector("attention.out.bias", "transformer.h.{layer}.attn.c_proj.bias"),
    vector("pre_mlp_norm.scale", "transformer.h.{layer}.ln_2.weight"),
    vector("pre_mlp_norm.bias", "transformer.h.{layer}.ln_2.bias"),
    table("mlp.wi_0.kernel", "transformer.h.{layer}.mlp.c_fc.weight", 1),
    vector("mlp.wi_0.bias", "transformer.h.{layer}.mlp.c_fc.bias"),
    table("mlp.wo.kernel", "transformer.h.{layer}.mlp.c_proj.weight", 1),
    vector("mlp.wo.bias", "transformer.h.{layer}.mlp.c_proj.bias"),
];
