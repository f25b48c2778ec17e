//! Names of parameters in the files of reference values.

use mt_nn::{LayerPlace, ParamSpec};
use mt_shape::Path;

/// The name of a parameter's values among the reference values.
pub fn published(path: &Path, spec: &ParamSpec) -> String {
    let LayerPlace::One(layer) = spec.place else {
        return match path.to_string().as_str() {
            "token_embedder.embedding" => "model.embed_tokens.weight".to_owned(),
            "final_norm.scale" => "model.norm.weight".to_owned(),
            "score.kernel" => "score.weight".to_owned(),
            "score.bias" => "score.bias".to_owned(),
            _ => "lm_head.weight".to_owned(),
        };
    };
    let part = match spec.role.as_str() {
        "attention.query.kernel" => "self_attn.q_proj",
        "attention.key.kernel" => "self_attn.k_proj",
        "attention.value.kernel" => "self_attn.v_proj",
        "attention.out.kernel" => "self_attn.o_proj",
        "mlp.wi_0.kernel" => "mlp.gate_proj",
        "mlp.wi_1.kernel" => "mlp.up_proj",
        "mlp.wo.kernel" => "mlp.down_proj",
        "pre_attention_norm.scale" => "input_layernorm",
        "pre_mlp_norm.scale" => "post_attention_layernorm",
        other => panic!("`{other}`"),
    };
    format!("model.layers.{layer}.{part}.weight")
}
