//! The fields of `config.json`, in both directions.
//!
//! A table has a row for each field: its key, the configuration key that it sets, its conversion, its default, and its
//! value for a model that is exported. This module holds the shared rows. A family adds rows, and replaces a shared row by
//! one with the same key.

use mt_config::ModelGroup;
use serde_json::{Map, Value};

use super::{HuggingFaceConfig, Settings, rope, scores};
use crate::{ModelError, decoder::DecoderConfig};

/// A field of `config.json`, in both directions.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    /// Its key in the file; empty if it has none.
    pub key: &'static str,
    /// Further keys that the same function reads.
    pub others: &'static [&'static str],
    pub read: Read,
    /// Its value for an exported model; `None` omits it.
    pub write: fn(&Described<'_>) -> Option<Value>,
}

/// The meaning of a field.
#[derive(Clone, Copy, Debug)]
pub enum Read {
    /// The value of the configuration key `ours`, with its defaults if the field is absent or `null`.
    As { ours: &'static str, kind: Kind, absent: Otherwise, null: Otherwise },
    /// A function sets configuration keys from this field and others.
    With(fn(&HuggingFaceConfig, &mut Settings) -> Result<(), ModelError>),
    /// Only this value is supported; the feature names the others in the error.
    Only(bool, &'static str),
    /// The field is known and adds nothing.
    Nothing,
}

/// The type of a value.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    Integer,
    Number,
    Boolean,
    /// The activation function of a feed-forward layer. A gated layer has a linear function as well.
    Activation {
        names: Activations,
        gated: bool,
    },
}

/// The names of activation functions in `config.json` and in `mlp_activations`. The first match is exported.
pub type Activations = &'static [(&'static str, &'static str)];

/// The default of a value.
#[derive(Clone, Copy, Debug)]
pub enum Otherwise {
    /// The field is required.
    Missing,
    /// The configuration key keeps its own default.
    Unset,
    Null,
    Integer(i64),
    Number(f64),
    Boolean(bool),
    /// A name of an activation function in `config.json`.
    Text(&'static str),
    /// A value that follows from earlier rows.
    Of(fn(&Settings) -> Value),
}

/// A model that is exported.
pub struct Described<'a> {
    pub group: &'a ModelGroup,
    pub config: &'a DecoderConfig,
}

impl Field {
    /// A required field that sets the configuration key `ours`.
    pub const fn new(
        key: &'static str,
        ours: &'static str,
        kind: Kind,
        write: fn(&Described<'_>) -> Option<Value>,
    ) -> Self {
        let read = Read::As { ours, kind, absent: Otherwise::Missing, null: Otherwise::Missing };
        Self { key, others: &[], read, write }
    }

    /// A field, first of `keys`, that a function reads.
    pub const fn with(
        keys: &'static [&'static str],
        read: fn(&HuggingFaceConfig, &mut Settings) -> Result<(), ModelError>,
        write: fn(&Described<'_>) -> Option<Value>,
    ) -> Self {
        Self { key: first(keys), others: keys, read: Read::With(read), write }
    }

    /// A field with one supported value.
    pub const fn only(key: &'static str, value: bool, feature: &'static str) -> Self {
        Self { key, others: &[], read: Read::Only(value, feature), write: |_| None }
    }

    /// A field that reading ignores.
    pub const fn silent(key: &'static str, write: fn(&Described<'_>) -> Option<Value>) -> Self {
        Self { key, others: &[], read: Read::Nothing, write }
    }

    /// The same field with a default for an absent key and for `null`.
    pub const fn or(self, otherwise: Otherwise) -> Self {
        match self.read {
            Read::As { ours, kind, .. } => {
                Self { read: Read::As { ours, kind, absent: otherwise, null: otherwise }, ..self }
            }
            _ => self,
        }
    }

    /// The same field with another default for an absent key.
    pub const fn if_absent(self, absent: Otherwise) -> Self {
        match self.read {
            Read::As { ours, kind, null, .. } => Self { read: Read::As { ours, kind, absent, null }, ..self },
            _ => self,
        }
    }

    /// Sets configuration keys from the field of a file.
    ///
    /// # Errors
    /// The field is missing, has a value of another type, or requires an unsupported feature.
    pub(super) fn set(&self, config: &HuggingFaceConfig, settings: &mut Settings) -> Result<(), ModelError> {
        let key = self.key;
        match self.read {
            Read::With(read) => read(config, settings),
            Read::Nothing => Ok(()),
            Read::Only(value, feature) => match config.boolean(key)? {
                Some(other) if other != value => Err(config.unsupported(key, feature)),
                _ => Ok(()),
            },
            Read::As { ours, kind, absent, null } => {
                let value = match kind.value(config, key)? {
                    Some(value) => Some(value),
                    None => {
                        let otherwise = if config.is_null(key) { null } else { absent };
                        otherwise.value(kind, settings).map_err(|Missing| config.missing(key))?
                    }
                };
                if let Some(value) = value {
                    settings.set(ours, value);
                }
                Ok(())
            }
        }
    }
}

const fn first(keys: &'static [&'static str]) -> &'static str {
    match keys {
        [first, ..] => first,
        [] => "",
    }
}

/// A required value is absent.
struct Missing;

impl Kind {
    fn value(self, config: &HuggingFaceConfig, key: &str) -> Result<Option<Value>, ModelError> {
        Ok(match self {
            Self::Integer => config.integer(key)?.map(Value::from),
            Self::Number => config.number(key)?.map(Value::from),
            Self::Boolean => config.boolean(key)?.map(Value::from),
            Self::Activation { .. } => match config.text(key)?.filter(|name| !name.is_empty()) {
                Some(name) => {
                    let known = self.activation(&name);
                    Some(known.ok_or_else(|| config.unsupported(key, "this activation function"))?)
                }
                None => None,
            },
        })
    }

    /// The functions of a feed-forward layer, by transformers' name.
    fn activation(self, name: &str) -> Option<Value> {
        let Self::Activation { names, gated } = self else { return None };
        let (_, ours) = names.iter().find(|(theirs, _)| *theirs == name)?;
        Some(if gated { vec![*ours, "linear"] } else { vec![*ours] }.into())
    }
}

impl Otherwise {
    fn value(self, kind: Kind, settings: &Settings) -> Result<Option<Value>, Missing> {
        Ok(match self {
            Self::Missing => return Err(Missing),
            Self::Unset => None,
            Self::Null => Some(Value::Null),
            Self::Integer(number) => Some(number.into()),
            Self::Number(number) => Some(number.into()),
            Self::Boolean(value) => Some(value.into()),
            Self::Text(name) => kind.activation(name),
            Self::Of(value) => Some(value(settings)),
        })
    }
}

/// The rows of several tables. A later row replaces an earlier one with the same key.
pub(super) fn rows(tables: impl IntoIterator<Item = &'static [Field]>) -> Vec<&'static Field> {
    let mut rows: Vec<&'static Field> = Vec::new();
    for field in tables.into_iter().flatten() {
        let is_same = |row: &&mut &'static Field| !field.key.is_empty() && row.key == field.key;
        match rows.iter_mut().find(is_same) {
            Some(row) => *row = field,
            None => rows.push(field),
        }
    }
    rows
}

/// The fields of an exported model.
pub(super) fn written(rows: &[&'static Field], described: &Described<'_>) -> Map<String, Value> {
    rows.iter().filter_map(|field| Some((field.key.to_owned(), (field.write)(described)?))).collect()
}

/// The value of a configuration key that an earlier row has set.
fn earlier(settings: &Settings, key: &str) -> Value {
    settings.get(key).cloned().unwrap_or_default()
}

pub(crate) const ACTIVATIONS: Activations = &[
    ("silu", "silu"),
    ("swish", "silu"),
    ("gelu_pytorch_tanh", "gelu"),
    ("gelu_new", "gelu"),
    ("gelu_fast", "gelu"),
    ("relu", "relu"),
];

/// The exported name of a model's activation function.
pub(crate) fn written_activation(names: Activations, described: &Described<'_>) -> Option<Value> {
    let ours = described.group.mlp_activations.first()?.name();
    let theirs = names.iter().find(|(_, known)| *known == ours);
    Some(theirs.map_or(ours, |(theirs, _)| theirs).into())
}

pub(crate) const WIDTH: Field =
    Field::new("hidden_size", "base_emb_dim", Kind::Integer, |model| Some(model.group.emb_dim().into()));
pub(crate) const HEADS: Field =
    Field::new("num_attention_heads", "base_num_query_heads", Kind::Integer, |model| {
        Some(model.group.num_query_heads().into())
    });
pub(crate) const KV_HEADS: Field =
    Field::new("num_key_value_heads", "base_num_kv_heads", Kind::Integer, |model| {
        Some(model.group.num_kv_heads().into())
    })
    .or(Otherwise::Of(|settings| earlier(settings, "base_num_query_heads")));
pub(crate) const HEAD_DIM: Field =
    Field::new("head_dim", "head_dim", Kind::Integer, |model| Some(model.group.head_dim.into()))
        .or(Otherwise::Of(even_head_dim));
pub(crate) const VOCABULARY: Field =
    Field::new("vocab_size", "vocab_size", Kind::Integer, |model| Some(model.group.vocab_size.into()));
pub(crate) const EPSILON: Field =
    Field::new("rms_norm_eps", "normalization_layer_epsilon", Kind::Number, |model| {
        Some(model.group.normalization_layer_epsilon.into())
    })
    .or(Otherwise::Number(1e-6));
pub(crate) const ACTIVATION: Field = Field::new(
    "hidden_act",
    "mlp_activations",
    Kind::Activation { names: ACTIVATIONS, gated: true },
    |model| written_activation(ACTIVATIONS, model),
)
.or(Otherwise::Text("silu"));
pub(crate) const TIED: Field =
    Field::new("tie_word_embeddings", "logits_via_embedding", Kind::Boolean, |model| {
        Some(model.group.logits_via_embedding.into())
    })
    .or(Otherwise::Boolean(false));
pub(crate) const CONTEXT: Field =
    Field::new("max_position_embeddings", "max_position_embeddings", Kind::Integer, |model| {
        Some(super::context_length(model.group, None).into())
    })
    .or(Otherwise::Unset);
pub(crate) const ROPE: Field =
    Field::with(rope::KEYS, rope::read, |model| Some(rope::written(model.group, model.config)));

/// The fields of most families.
pub(crate) const COMMON: &[Field] = &[
    WIDTH,
    HEADS,
    KV_HEADS,
    HEAD_DIM,
    Field::new("intermediate_size", "base_mlp_dim", Kind::Integer, |model| {
        Some(model.group.mlp_dim().into())
    }),
    Field::new("num_hidden_layers", "base_num_decoder_layers", Kind::Integer, |model| {
        Some(model.config.layers.len().into())
    }),
    VOCABULARY,
    EPSILON,
    ACTIVATION,
    TIED,
    CONTEXT,
    ROPE,
];

pub(crate) const EXPERTS_PER_TOKEN: Field =
    Field::new("num_experts_per_tok", "num_experts_per_tok", Kind::Integer, |model| {
        Some(model.group.experts.num_experts_per_tok.into())
    });
/// The fields of routers that only training uses.
pub(crate) const EXPERTS_IN_TRAINING: &[Field] = &[
    Field::silent("output_router_logits", |_| None),
    Field::silent("router_aux_loss_coef", |_| None),
    Field::silent("router_jitter_noise", |_| None),
];

pub(crate) const ATTENTION_BIAS: Field =
    Field::new("attention_bias", "attention_bias", Kind::Boolean, |model| {
        Some(model.group.layers.attention_bias.into())
    })
    .or(Otherwise::Boolean(false));
pub(crate) const WINDOW: Field =
    Field::new("sliding_window", "sliding_window_size", Kind::Integer, |model| {
        Some(model.group.layers.sliding_window_size.into())
    });
/// The kinds of layers, as the function reads them.
pub(crate) const fn layer_types(
    read: fn(&HuggingFaceConfig, &mut Settings) -> Result<(), ModelError>,
) -> Field {
    Field::with(&["layer_types"], read, |model| Some(super::layer_type_names(model.config)))
}
pub(crate) const QUERY_SCALAR: Field =
    Field::new("query_pre_attn_scalar", "query_pre_attn_scalar", Kind::Number, |model| {
        let scalar = model.group.layers.query_pre_attn_scalar.unwrap_or(model.group.head_dim as f64);
        // transformers requires an integer if the value is one.
        Some(if scalar.fract() == 0.0 { (scalar as i64).into() } else { scalar.into() })
    });
pub(crate) const ATTENTION_CAP: Field =
    Field::new("attn_logit_softcapping", "attn_logits_soft_cap", Kind::Number, |model| {
        Some(model.group.layers.attn_logits_soft_cap.filter(|cap| *cap > 0.0).into())
    });
pub(crate) const LOGITS_CAP: Field =
    Field::new("final_logit_softcapping", "final_logits_soft_cap", Kind::Number, |model| {
        Some(model.group.layers.final_logits_soft_cap.filter(|cap| *cap > 0.0).into())
    })
    .or(Otherwise::Null);

fn even_head_dim(settings: &Settings) -> Value {
    let size = |key| earlier(settings, key).as_i64().unwrap_or_default();
    (size("base_emb_dim") / size("base_num_query_heads").max(1)).into()
}

/// The fields of every family. The code that reads quantized weights reads their description; exported weights are not
/// quantized.
pub(super) const OF_ALL: &[Field] =
    &[Field::silent("quantization_config", |_| None), Field::with(scores::KEYS, scores::read, |_| None)];

/// Keys of a multimodal model that also concern its text model. They count if the text model has no value of its own.
pub(super) const OF_THE_WHOLE: &[&str] = &["quantization_config", "tie_word_embeddings"];

/// Keys of a multimodal model that concern images and audio, and so do not change the logits of text.
pub(super) const OF_OTHER_MODALITIES: &[&str] = &[
    "audio_config",
    "audio_soft_tokens_per_image",
    "audio_token_id",
    "boa_token_id",
    "boa_token_index",
    "boi_token_id",
    "boi_token_index",
    "eoa_token_id",
    "eoa_token_index",
    "eoi_token_id",
    "eoi_token_index",
    "image_token_id",
    "image_token_index",
    "mm_tokens_per_image",
    "video_token_id",
    "vision_config",
    "vision_soft_tokens_per_image",
];

/// Keys that do not change a model's logits: the origin of the file, training there, tokenizer and sampler, and keys that
/// transformers writes for every model.
pub(super) const WITHOUT_MATHEMATICS: &[&str] = &[
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "attn_pdrop",
    "auto_map",
    "bos_token_id",
    "cache_implementation",
    "chunk_size_feed_forward",
    "dtype",
    "embd_pdrop",
    "eos_token_id",
    "hidden_dropout",
    "id2label",
    "initializer_range",
    "is_decoder",
    "is_encoder_decoder",
    "label2id",
    "model_type",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "pretraining_tp",
    "problem_type",
    "resid_pdrop",
    "return_dict",
    "task_specific_params",
    "tokenizer_class",
    "torch_dtype",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
];
