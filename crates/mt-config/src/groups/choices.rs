//! Choices as types: the words that are built, and those of MaxText's that are refused by name.

use super::FromValue;
use crate::{key::Choice, table::features};

macro_rules! choice {
    (
        $(#[$meta:meta])* pub enum $name:ident { $($(#[$variant_meta:meta])* $variant:ident = $text:literal,)* }
        $(not built { $($missing:literal: $feature:expr,)* })?
    ) => {
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

        impl Choice for $name {
            const WORDS: &'static [&'static str] = &[$($text,)* $($($missing,)*)?];
            const REFUSED: &'static [(&'static str, &'static str)] = &[$($(($missing, $feature),)*)?];
        }

        impl FromValue for $name {
            fn from_value(value: &::serde_json::Value) -> Option<Self> {
                match value.as_str()? {
                    $($text => Some(Self::$variant),)*
                    _ => None,
                }
            }
        }
    };
}
pub(super) use choice;

choice! {
    /// The kind of device to run on.
    pub enum Hardware {
        /// The best whose plugin is present.
        Auto = "auto",
        Cpu = "cpu",
        Gpu = "gpu",
        Tpu = "tpu",
    }
    not built {
        "gpu_multiprocess": features::PROCESSES,
    }
}

choice! {
    /// How parts of a sequence on several devices attend to each other.
    pub enum ContextStrategy {
        /// Each device's queries to all keys and values, which are gathered.
        AllGather = "all_gather",
    }
    not built {
        "ring": features::RING_ATTENTION,
        "ulysses": features::EXCHANGE_OF_HEADS,
        "usp": features::EXCHANGE_OF_HEADS,
    }
}

choice! {
    /// How parts of a sequence are dealt to devices.
    pub enum ReorderStrategy {
        /// In pairs of chunks.
        Auto = "auto",
        /// To each device one chunk from the front and one from the back.
        DualChunkSwap = "dual_chunk_swap",
    }
    not built {
        "striped": features::STRIPED_SEQUENCES,
    }
}

choice! {
    /// What happens where a placement rule cannot be carried out.
    pub enum ShardMode {
        /// The dimension stays whole, with a note.
        Auto = "auto",
        /// The run is refused.
        Explicit = "explicit",
    }
}

choice! {
    /// The mesh axis that splits sequences.
    pub enum ContextAxis {
        Context = "context",
        Expert = "expert",
    }
}

choice! {
    /// The kind of decoder layer.
    pub enum DecoderBlock {
        /// Attention and feed-forward layer side by side, as the keys say.
        Default = "default",
        Llama2 = "llama2",
        /// The same layer as Llama 2's, with a sliding window if the keys say so.
        Mistral = "mistral",
        Gemma = "gemma",
        Gemma2 = "gemma2",
        Gemma3 = "gemma3",
        Gemma4 = "gemma4",
        Gemma4Small = "gemma4_small",
        Qwen2 = "qwen2",
        Qwen3 = "qwen3",
        Olmo3 = "olmo3",
        Gpt3 = "gpt3",
        /// A square matrix, to measure with.
        Simple = "simple",
        /// A feed-forward layer, to measure with.
        SimpleMlp = "simple_mlp",
    }
    not built {
        "mixtral": "the model family `mixtral`",
        "deepseek": "the model family `deepseek`",
        "deepseek4": "the model family `deepseek4`",
        "envy": "the model family `envy`",
        "qwen3_moe": "the model family `qwen3_moe`",
        "qwen3_custom_moe": "the model family `qwen3_custom_moe`",
        "qwen3_next": "the model family `qwen3_next`",
        "qwen3_5": "the model family `qwen3_5`",
        "gpt_oss": "the model family `gpt_oss`",
        "llama4": "the model family `llama4`",
    }
}

choice! {
    /// A factor of the gate of a feed-forward layer.
    pub enum MlpActivation {
        Silu = "silu",
        Gelu = "gelu",
        Relu = "relu",
        Sigmoid = "sigmoid",
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
    not built {
        "cudnn_flash_te": "cuDNN attention",
        "cudnn_flash_jax": "cuDNN attention",
        "paged": features::PAGED_CACHE,
        "vllm_rpa": features::PAGED_CACHE,
    }
}

choice! {
    /// The precision of matrix products of `f32`, in JAX's words.
    pub enum MatmulPrecision {
        /// The compiler's.
        Default = "default",
        /// Three products of `bf16` or better.
        High = "high",
        Highest = "highest",
        /// As `default`.
        Bfloat16 = "bfloat16",
        /// As `highest`.
        Float32 = "float32",
    }
}

choice! {
    /// How rotary frequencies are scaled.
    pub enum RopeType {
        Default = "default",
        /// In three ranges of periods.
        Llama31 = "llama3.1",
        Yarn = "yarn",
        /// By the length of the sequence, beyond the original one.
        Ntk = "ntk",
    }
}

choice! {
    /// Which earlier positions a position attends to.
    pub enum AttentionType {
        Global = "global",
        /// The last `sliding_window_size`.
        LocalSliding = "local_sliding",
        /// Those of its own chunk of `chunk_attn_window_size`.
        Chunk = "chunk",
    }
    not built {
        "mla": features::LATENT_ATTENTION,
        "full": features::OTHER_ATTENTION_TYPES,
        "compressed": features::COMPRESSED_ATTENTION,
        "block_diffusion": features::BLOCK_DIFFUSION,
    }
}

choice! {
    /// The attention of one layer of a pattern.
    pub enum LayerAttention {
        /// The last `sliding_window_size` positions.
        Local = "local",
        /// All earlier positions.
        Global = "global",
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
    not built {
        "grain": "the data pipeline `grain`",
        "tfds": features::TENSORFLOW_DATASETS,
        "c4_mlperf": features::TENSORFLOW_DATASETS,
        "olmo_grain": features::OLMO_DATA,
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
    not built {
        "best_fit": "best-fit packing",
    }
}

choice! {
    /// The kind of tokenizer.
    pub enum TokenizerType {
        /// A `tokenizer.json` file, or a Hugging Face directory.
        HuggingFace = "huggingface",
        /// A SentencePiece model.
        SentencePiece = "sentencepiece",
        /// A file of ranks.
        Tiktoken = "tiktoken",
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
        /// Adam with weight decay and running means as Pax keeps them.
        AdamPax = "adam_pax",
        /// Gradients times the learning rate.
        Sgd = "sgd",
        Muon = "muon",
        /// Second moments by rows and columns.
        Adafactor = "adafactor",
    }
}

choice! {
    /// The form of the weights that the optimizer steps, as a configuration asks for it.
    pub enum OptimizerSpaceChoice {
        /// The one that suits what the run begins with.
        Auto = "auto",
        MaxText = "maxtext",
        Published = "published",
    }
}

choice! {
    /// How the learning rate falls after the warm-up.
    pub enum LearningRateSchedule {
        Cosine = "cosine",
        /// It stays at the peak and falls at the end.
        Wsd = "wsd",
        Linear = "linear",
        /// It stays at the peak.
        Constant = "constant",
    }
}

choice! {
    /// How the learning rate of a `wsd` schedule falls.
    pub enum WsdDecayStyle {
        Linear = "linear",
        Cosine = "cosine",
    }
}
