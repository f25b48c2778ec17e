//! The names of logical axes that models use. Placement rules map them to mesh axes; a name that is neither here nor in a
//! rule is a misspelling, which would otherwise replicate an array without a word.

/// Those that the default rules leave whole on every device.
pub const UNSPLIT_LOGICAL_AXES: [&str; 2] = ["layers_of_token", "position"];

/// Axes of parameters.
const PARAMETERS: &[&str] = &[
    "embed",
    "embed_vocab",
    "heads",
    "kv",
    "kv_head_dim",
    "kv_heads",
    "layers",
    "layers_of_token",
    "mlp",
    "norm",
    "position",
    "q_heads",
    "vocab",
];

/// Axes of activations.
const ACTIVATIONS: &[&str] = &[
    "activation_batch",
    "activation_embed",
    "activation_embed_and_logits_batch",
    "activation_heads",
    "activation_kv",
    "activation_kv_batch",
    "activation_kv_head_dim",
    "activation_kv_heads",
    "activation_kv_length",
    "activation_length",
    "activation_length_attn",
    "activation_mlp",
    "activation_norm_length",
    "activation_vocab",
];

/// Axes of the state of generation.
const STATE: &[&str] = &["cache_heads", "cache_kv", "cache_sequence", "decode_batch"];

/// Whether models use this name.
pub fn is_logical_axis(name: &str) -> bool {
    [PARAMETERS, ACTIVATIONS, STATE].iter().any(|names| names.contains(&name))
}

/// All names that models use.
pub fn logical_axes() -> impl Iterator<Item = &'static str> {
    [PARAMETERS, ACTIVATIONS, STATE].into_iter().flatten().copied()
}
