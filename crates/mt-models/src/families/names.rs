//! What tensors are called in Hugging Face's files.

/// The name of a parameter's tensor in a file, and how it is laid out there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorName {
    /// Our name of the part, without the layer.
    pub role: &'static str,
    /// Theirs; `{}` is the number of the layer.
    pub name: &'static str,
    pub layout: Layout,
}

/// How a tensor in a file holds a parameter. Files have matrices where parameters have an axis for heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// The same elements in the same order: a vector, or a matrix whose rows are the parameter's first axes, as many
    /// as this.
    Same(usize),
    /// A matrix from inputs to outputs, transposed. The parameter's first axes, as many as this, are the inputs.
    Transposed(usize),
    /// As `Same(rows)`, one of several equal parts of the file's last axis.
    Part { rows: usize, index: usize, of: usize },
}

const fn vector(role: &'static str, name: &'static str) -> TensorName {
    TensorName { role, name, layout: Layout::Same(0) }
}

const fn table(role: &'static str, name: &'static str, rows: usize) -> TensorName {
    TensorName { role, name, layout: Layout::Same(rows) }
}

const fn matrix(role: &'static str, name: &'static str) -> TensorName {
    TensorName { role, name, layout: Layout::Transposed(1) }
}

const fn part(role: &'static str, name: &'static str, rows: usize, index: usize) -> TensorName {
    TensorName { role, name, layout: Layout::Part { rows, index, of: 3 } }
}

/// Embedding, last norm and output matrix, as nearly all models call them.
pub(super) const MODEL: &[TensorName] = &[
    table("token_embedder.embedding", "model.embed_tokens.weight", 1),
    vector("final_norm.scale", "model.norm.weight"),
    matrix("head.kernel", "lm_head.weight"),
];

/// Attention and feed-forward layer, with all that some of them have.
pub(super) const LAYER: &[TensorName] = &[
    matrix("attention.query.kernel", "model.layers.{}.self_attn.q_proj.weight"),
    vector("attention.query.bias", "model.layers.{}.self_attn.q_proj.bias"),
    matrix("attention.key.kernel", "model.layers.{}.self_attn.k_proj.weight"),
    vector("attention.key.bias", "model.layers.{}.self_attn.k_proj.bias"),
    matrix("attention.value.kernel", "model.layers.{}.self_attn.v_proj.weight"),
    vector("attention.value.bias", "model.layers.{}.self_attn.v_proj.bias"),
    TensorName {
        role: "attention.out.kernel",
        name: "model.layers.{}.self_attn.o_proj.weight",
        layout: Layout::Transposed(2),
    },
    vector("attention.out.bias", "model.layers.{}.self_attn.o_proj.bias"),
    vector("attention.query_norm.scale", "model.layers.{}.self_attn.q_norm.weight"),
    vector("attention.key_norm.scale", "model.layers.{}.self_attn.k_norm.weight"),
    matrix("mlp.wi_0.kernel", "model.layers.{}.mlp.gate_proj.weight"),
    vector("mlp.wi_0.bias", "model.layers.{}.mlp.gate_proj.bias"),
    matrix("mlp.wi_1.kernel", "model.layers.{}.mlp.up_proj.weight"),
    vector("mlp.wi_1.bias", "model.layers.{}.mlp.up_proj.bias"),
    matrix("mlp.wo.kernel", "model.layers.{}.mlp.down_proj.weight"),
    vector("mlp.wo.bias", "model.layers.{}.mlp.down_proj.bias"),
];

/// Norms before attention and before the feed-forward layer.
pub(super) const NORMS_BEFORE: &[TensorName] = &[
    vector("pre_attention_norm.scale", "model.layers.{}.input_layernorm.weight"),
    vector("pre_mlp_norm.scale", "model.layers.{}.post_attention_layernorm.weight"),
];

/// Norms after, or before and after, each part.
pub(super) const NORMS_AROUND: &[TensorName] = &[
    vector("pre_attention_norm.scale", "model.layers.{}.input_layernorm.weight"),
    vector("post_attention_norm.scale", "model.layers.{}.post_attention_layernorm.weight"),
    vector("pre_mlp_norm.scale", "model.layers.{}.pre_feedforward_layernorm.weight"),
    vector("post_mlp_norm.scale", "model.layers.{}.post_feedforward_layernorm.weight"),
];

/// What Gemma 4's layers have besides.
pub(super) const GEMMA4: &[TensorName] = &[
    vector("scalar", "model.layers.{}.layer_scalar"),
    matrix("per_layer.gate.kernel", "model.layers.{}.per_layer_input_gate.weight"),
    matrix("per_layer.projection.kernel", "model.layers.{}.per_layer_projection.weight"),
    vector("per_layer.norm.scale", "model.layers.{}.post_per_layer_input_norm.weight"),
];

/// Gemma 4's tables of vectors for each layer. They are of the model, though named as a layer's part is.
pub(super) const GEMMA4_MODEL: &[TensorName] = &[
    table("per_layer.embedding", "model.embed_tokens_per_layer.weight", 1),
    matrix("per_layer.projection.kernel", "model.per_layer_model_projection.weight"),
    vector("per_layer.norm.scale", "model.per_layer_projection_norm.weight"),
];

/// GPT-2's, whose matrices are not transposed.
pub(super) const GPT2: &[TensorName] = &[
    table("token_embedder.embedding", "transformer.wte.weight", 1),
    table("positions.table", "transformer.wpe.weight", 1),
    vector("final_norm.scale", "transformer.ln_f.weight"),
    vector("final_norm.bias", "transformer.ln_f.bias"),
    matrix("head.kernel", "lm_head.weight"),
    vector("pre_attention_norm.scale", "transformer.h.{}.ln_1.weight"),
    vector("pre_attention_norm.bias", "transformer.h.{}.ln_1.bias"),
    part("attention.query.kernel", "transformer.h.{}.attn.c_attn.weight", 1, 0),
    part("attention.key.kernel", "transformer.h.{}.attn.c_attn.weight", 1, 1),
    part("attention.value.kernel", "transformer.h.{}.attn.c_attn.weight", 1, 2),
    part("attention.query.bias", "transformer.h.{}.attn.c_attn.bias", 0, 0),
    part("attention.key.bias", "transformer.h.{}.attn.c_attn.bias", 0, 1),
    part("attention.value.bias", "transformer.h.{}.attn.c_attn.bias", 0, 2),
    table("attention.out.kernel", "transformer.h.{}.attn.c_proj.weight", 2),
    vector("attention.out.bias", "transformer.h.{}.attn.c_proj.bias"),
    vector("pre_mlp_norm.scale", "transformer.h.{}.ln_2.weight"),
    vector("pre_mlp_norm.bias", "transformer.h.{}.ln_2.bias"),
    table("mlp.wi_0.kernel", "transformer.h.{}.mlp.c_fc.weight", 1),
    vector("mlp.wi_0.bias", "transformer.h.{}.mlp.c_fc.bias"),
    table("mlp.wo.kernel", "transformer.h.{}.mlp.c_proj.weight", 1),
    vector("mlp.wo.bias", "transformer.h.{}.mlp.c_proj.bias"),
];
