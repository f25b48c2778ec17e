//! Names of tensors in GGUF files.

/// The tensor of the factors that divide the rotary frequencies.
pub(super) const ROPE_FACTORS: &str = "rope_freqs.weight";

/// The name of a tensor, and the expert that it belongs to if the file stores those of a layer together.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Named {
    pub name: String,
    pub expert: Option<usize>,
}

/// Names outside of layers.
const OF_MODEL: &[(&str, &str)] =
    &[("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"), ("lm_head", "output")];

/// Names within a layer that all architectures share.
const OF_LAYER: &[(&str, &str)] = &[
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("block_sparse_moe.gate", "ffn_gate_inp"),
];

/// Names of norms in layers with norms before each layer part alone.
const NORMS_BEFORE: &[(&str, &str)] = &[("post_attention_layernorm", "ffn_norm")];

/// Names of norms in layers with norms before and after each layer part.
const NORMS_AROUND: &[(&str, &str)] = &[
    ("post_attention_layernorm", "post_attention_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
];

/// Names of an expert's matrices.
const OF_EXPERT: &[(&str, &str)] = &[("w1", "ffn_gate_exps"), ("w2", "ffn_down_exps"), ("w3", "ffn_up_exps")];

/// The name of a tensor of Hugging Face's files; `None` if GGUF has none.
pub(super) fn named(tensor: &str, has_norms_around: bool) -> Option<Named> {
    let (path, suffix) = tensor.rsplit_once('.')?;
    if !matches!(suffix, "weight" | "bias") {
        return None;
    }
    if let Some(name) = of(OF_MODEL, path) {
        return Some(Named { name: format!("{name}.{suffix}"), expert: None });
    }
    let (layer, within) = path.strip_prefix("model.layers.")?.split_once('.')?;
    let layer: usize = layer.parse().ok()?;
    if let Some(rest) = within.strip_prefix("block_sparse_moe.experts.") {
        let (expert, matrix) = rest.split_once('.')?;
        let name = format!("blk.{layer}.{}.{suffix}", of(OF_EXPERT, matrix)?);
        return Some(Named { name, expert: Some(expert.parse().ok()?) });
    }
    let norms = if has_norms_around { NORMS_AROUND } else { NORMS_BEFORE };
    let name = of(norms, within).or_else(|| of(OF_LAYER, within))?;
    Some(Named { name: format!("blk.{layer}.{name}.{suffix}"), expert: None })
}

/// The name of a path in a table.
fn of(table: &[(&str, &'static str)], path: &str) -> Option<&'static str> {
    table.iter().find(|(theirs, _)| *theirs == path).map(|(_, ours)| *ours)
}

/// Whether a tensor is written in `f32` in every file: vectors, and the routers of experts.
pub(super) fn is_in_f32(name: &str, num_dims: usize) -> bool {
    num_dims < 2 || name.ends_with(".ffn_gate_inp.weight")
}

/// The order of tensors in files: those outside of layers, then layer by layer.
pub(super) fn order(name: &str) -> (Option<usize>, &str) {
    let layer = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')?.0.parse().ok());
    (layer, name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_have_names() {
        let check = |tensor: &str, around: bool, expected: Option<(&str, Option<usize>)>| {
            let found = named(tensor, around);
            let expected = expected.map(|(name, expert)| Named { name: name.to_owned(), expert });
            assert_eq!(found, expected, "{tensor}");
        };
        check("model.embed_tokens.weight", false, Some(("token_embd.weight", None)));
        check("model.layers.11.self_attn.q_proj.bias", false, Some(("blk.11.attn_q.bias", None)));
        let norm = "model.layers.0.post_attention_layernorm.weight";
        check(norm, false, Some(("blk.0.ffn_norm.weight", None)));
        check(norm, true, Some(("blk.0.post_attention_norm.weight", None)));
        check("model.layers.0.pre_feedforward_layernorm.weight", false, None);
        let expert = "model.layers.3.block_sparse_moe.experts.7.w2.weight";
        check(expert, false, Some(("blk.3.ffn_down_exps.weight", Some(7))));
        check("score.weight", false, None);
        check("model.layers.0.self_attn.sinks", false, None);
    }
}
