//! Choices that are built, as types. The table lists all of MaxText's; those missing here are refused by name.

use serde_json::Value;

use super::FromValue;

macro_rules! choice {
    ($(#[$meta:meta])* pub enum $name:ident { $($(#[$variant_meta:meta])* $variant:ident = $text:literal,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $name {
            $($(#[$variant_meta])* $variant,)*
        }

        impl $name {
            /// The choice as it is written in a configuration.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)*
                }
            }
        }

        impl FromValue for $name {
            fn from_value(value: &Value) -> Option<Self> {
                match value.as_str()? {
                    $($text => Some(Self::$variant),)*
                    _ => None,
                }
            }
        }
    };
}

choice! {
    /// The kind of device to run on.
    pub enum Hardware {
        /// The best whose plugin is present.
        Auto = "auto",
        Cpu = "cpu",
        Gpu = "gpu",
        Tpu = "tpu",
    }
}

choice! {
    /// The kind of decoder layer.
    pub enum DecoderBlock {
        Llama2 = "llama2",
        /// The same layer as Llama 2's.
        Mistral = "mistral",
    }
}

choice! {
    /// A factor of the gate of a feed-forward layer.
    pub enum MlpActivation {
        Silu = "silu",
        Gelu = "gelu",
        Relu = "relu",
        Linear = "linear",
    }
}

choice! {
    /// How attention is computed.
    pub enum AttentionKind {
        /// By size.
        Autoselected = "autoselected",
        /// With the whole matrix of attention logits.
        DotProduct = "dot_product",
        /// Block by block, in memory that is linear in the length.
        Flash = "flash",
    }
}

choice! {
    /// How rotary frequencies are scaled.
    pub enum RopeType {
        Default = "default",
    }
}

choice! {
    /// What the backward pass recomputes.
    pub enum RematPolicy {
        /// All of a layer.
        Full = "full",
        /// All but the results of matrix products with weights.
        Minimal = "minimal",
        /// Nothing.
        None = "none",
    }
}

choice! {
    /// Where training data comes from.
    pub enum DatasetType {
        /// Random tokens.
        Synthetic = "synthetic",
        /// Local text, JSON lines or parquet files.
        Hf = "hf",
    }
}

choice! {
    /// What one document of a text file is.
    pub enum HfTextUnit {
        File = "file",
        Line = "line",
    }
}

choice! {
    /// How documents are packed into sequences.
    pub enum PackingType {
        /// Each into the first sequence that has room for it.
        FirstFit = "first_fit",
        /// One after another, cut where a sequence ends.
        ConcatThenSplit = "concat_then_split",
    }
}

choice! {
    /// The kind of tokenizer.
    pub enum TokenizerType {
        /// A `tokenizer.json` file.
        HuggingFace = "huggingface",
        /// Bytes, without a file.
        Byte = "byte",
    }
}

choice! {
    /// How the next token is chosen.
    pub enum SamplingStrategy {
        /// The likeliest.
        Greedy = "greedy",
        /// Any, by its probability.
        Weighted = "weighted",
        /// From the likeliest that make up a probability mass.
        Nucleus = "nucleus",
        /// From a number of the likeliest.
        TopK = "topk",
        /// By number, then by mass.
        Composite = "composite",
    }
}

choice! {
    /// The optimizer.
    pub enum OptimizerType {
        AdamW = "adamw",
    }
}

choice! {
    /// How the learning rate falls after the warm-up.
    pub enum LearningRateSchedule {
        Cosine = "cosine",
    }
}
