//! The model of reference values, and the names of its parameters in their files.

use mt_nn::{LayerPlace, ParamSpec};
use mt_shape::Path;

/// The keys of the model.
pub const MODEL: &[&str] = &[
    "base_emb_dim=8",
    "base_num_query_heads=2",
    "base_num_kv_heads=1",
    "head_dim=4",
    "base_mlp_dim=12",
    "base_num_decoder_layers=1",
    "vocab_size=40",
    "max_target_length=13",
    "normalization_layer_epsilon=1e-5",
    "scan_layers=false",
];

/// The name of a parameter's values among the reference values.
pub fn published(path: &Path, spec: &ParamSpec) -> String {
    if let Some((segment, rest)) = path.segments().split_first()
        && segment == "value_model"
    {
        let of_model =
            rest.iter().fold(Path::default(), |mut path, segment| path.within(segment, |path| path.clone()));
        return format!("value_model.{}", published(&of_model, spec));
    }
    let LayerPlace::One(layer) = spec.place else {
        return match path.to_string().as_str() {
            "token_embedder.embedding" => "model.embed_tokens.weight".to_owned(),
            "final_norm.scale" => "model.norm.weight".to_owned(),
            "score.kernel" => "score.weight".to_owned(),
            "score.bias" => "score.bias".to_owned(),
            _ => "lm_head.weight".to_owned(),
        };
    };
    // The array of a learned map.
    if let Some((projection, array)) = spec.role.rsplit_once('.')
        && let Some(name) = projection.strip_prefix("attention.")
        && ["A", "B", "W"].contains(&array)
    {
        return format!("model.layers.{layer}.self_attn.{}_proj.{array}", &name[..1]);
    }
    let name = match spec.role.as_str() {
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
    format!("model.layers.{layer}.{name}.weight")
}
