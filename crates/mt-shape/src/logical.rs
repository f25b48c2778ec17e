//! The names of logical axes. Code declares and constrains arrays by these constants, so that a misspelling does not
//! compile; placement rules map the names to mesh axes.

use std::{
    collections::BTreeSet,
    fmt,
    sync::{Mutex, PoisonError},
};

/// The name of a logical axis: one of the constants of this module, or a name that a user made up for rules.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LogicalAxis(&'static str);

macro_rules! logical_axes {
    ($($(#[$meta:meta])* $list:ident { $($constant:ident = $name:literal,)* })*) => {
        $($(pub const $constant: LogicalAxis = LogicalAxis($name);)*)*

        $($(#[$meta])* const $list: &[LogicalAxis] = &[$($constant),*];)*
    };
}

logical_axes! {
    /// Logical axes of parameters.
    PARAMETERS {
        EMBED = "embed",
        EMBED_MOE = "embed_moe",
        EMBED_VOCAB = "embed_vocab",
        ENGRAM_DIM = "engram_dim",
        EXP = "exp",
        EXPERTS_OF_ROUTER = "experts_of_router",
        GDN_HEAD = "gdn_head",
        HEADS = "heads",
        KV = "kv",
        KV_HEAD_DIM = "kv_head_dim",
        KV_HEADS = "kv_heads",
        KV_LORA = "kv_lora",
        KV_LORA_UP_PROJ = "kv_lora_up_proj",
        LAYERS = "layers",
        LAYERS_OF_TOKEN = "layers_of_token",
        MAMBA_HEAD = "mamba_head",
        MLP = "mlp",
        MLP_MOE = "mlp_moe",
        NORM = "norm",
        POSITION = "position",
        Q_HEADS = "q_heads",
        Q_LORA = "q_lora",
        Q_LORA_UP_PROJ = "q_lora_up_proj",
        STREAMS = "mhc",
        VOCAB = "vocab",
    }
    /// Logical axes of activations.
    ACTIVATIONS {
        ACTIVATION_BATCH = "activation_batch",
        ACTIVATION_BATCH_MOE = "activation_batch_moe",
        ACTIVATION_EMBED = "activation_embed",
        ACTIVATION_EMBED_AND_LOGITS_BATCH = "activation_embed_and_logits_batch",
        ACTIVATION_EXP = "activation_exp",
        ACTIVATION_HEADS = "activation_heads",
        ACTIVATION_KV = "activation_kv",
        ACTIVATION_KV_BATCH = "activation_kv_batch",
        ACTIVATION_KV_HEAD_DIM = "activation_kv_head_dim",
        ACTIVATION_KV_HEADS = "activation_kv_heads",
        ACTIVATION_KV_LENGTH = "activation_kv_length",
        ACTIVATION_LENGTH = "activation_length",
        ACTIVATION_LENGTH_ATTN = "activation_length_attn",
        ACTIVATION_LENGTH_MOE = "activation_length_moe",
        ACTIVATION_MLP = "activation_mlp",
        ACTIVATION_MLP_MOE = "activation_mlp_moe",
        ACTIVATION_NORM_LENGTH = "activation_norm_length",
        ACTIVATION_VOCAB = "activation_vocab",
    }
    /// Logical axes of the state of generation.
    STATE {
        CACHE_HEADS = "cache_heads",
        CACHE_KV = "cache_kv",
        CACHE_SEQUENCE = "cache_sequence",
        DECODE_BATCH = "decode_batch",
    }
}

/// All constants. The default rules name each of them.
pub fn all() -> impl Iterator<Item = LogicalAxis> {
    [PARAMETERS, ACTIVATIONS, STATE].into_iter().flatten().copied()
}

impl LogicalAxis {
    /// The axis of a name that a configuration has. Names that are no constants are kept for the life of the process.
    pub fn named(name: &str) -> Self {
        static OF_USERS: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
        if let Some(known) = all().find(|axis| axis.0 == name) {
            return known;
        }
        let mut names = OF_USERS.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = names.get(name).copied().unwrap_or_else(|| {
            let kept: &'static str = Box::leak(name.into());
            names.insert(kept);
            kept
        });
        Self(kept)
    }

    /// The name.
    pub const fn name(self) -> &'static str {
        self.0
    }
}

impl fmt::Display for LogicalAxis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.0)
    }
}

impl fmt::Debug for LogicalAxis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.0, f)
    }
}
