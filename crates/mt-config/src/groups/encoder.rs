//! Encoder–decoder models.

use super::{AttentionKind, AttentionType, TrainingObjective, group};
use crate::{
    config::{Config, not_built, report},
    error::Problem,
    families,
    origin::Origin,
};

group! {
    /// The encoder of an encoder–decoder model, and the biases of both stacks by distance.
    pub struct EncoderGroup {
        base_num_encoder_layers: usize,
        relative_attention_num_buckets: usize,
        relative_attention_max_distance: usize,
        max_source_length: usize,
        decoder_start_token_id: usize,
    }
    besides {
        source_length_origin: Origin = |config, _| Some(config.entry("max_source_length").origin.clone()),
    }
}

/// Keys of features that encoder–decoder models lack, and the feature.
const UNSUPPORTED: &[(&str, &str)] = &[
    ("use_sft", "fine-tuning of encoder–decoder models on conversations"),
    ("use_dpo", "preference training of encoder–decoder models"),
    ("use_reward", "reward models with an encoder"),
    ("use_qk_clip", "QK-clip in encoder–decoder models"),
    ("moba", "chosen chunks of keys beside biases of distances"),
    ("mtp_num_layers", "multi-token prediction in encoder–decoder models"),
    ("engram_layers", "memories of n-grams in encoder–decoder models"),
    ("attention_pattern", "local layers in encoder–decoder models"),
];

impl EncoderGroup {
    /// Whether the configured family has an encoder.
    pub(crate) fn is_in(config: &Config) -> bool {
        families::ENCODER.include_that_of(config)
    }

    fn check(&self, config: &Config, problems: &mut Vec<Problem>) {
        if !Self::is_in(config) {
            return;
        }
        for (key, feature) in UNSUPPORTED {
            let entry = config.entry(key);
            if entry.key.asks(&entry.value) {
                report(problems, not_built(entry, feature));
            }
        }
        let stated = |key: &str| config.stated(key);
        let attention = config.entry("attention_type");
        if attention.value != AttentionType::Global.name() {
            problems.push(Problem::inconsistent(
                format!(
                    "{}, but {}, whose encoder sees all positions and whose decoder sees earlier ones",
                    stated("attention_type"),
                    stated("decoder_block")
                ),
                "use `attention_type=global`",
            ));
        }
        if config.entry("attention").value == AttentionKind::Flash.name() {
            problems.push(Problem::inconsistent(
                format!(
                    "{}, but {}, whose attention logits have biases that only dense attention adds",
                    stated("attention"),
                    stated("decoder_block")
                ),
                "use `attention=autoselected` or `attention=dot_product`",
            ));
        }
        let exact = self.relative_attention_num_buckets / 2;
        if self.relative_attention_max_distance <= exact {
            problems.push(Problem::inconsistent(
                format!(
                    "{}, but {}, of which {exact} are for one distance each",
                    stated("relative_attention_max_distance"),
                    stated("relative_attention_num_buckets")
                ),
                format!(
                    "use `relative_attention_max_distance={}` or more, or fewer buckets",
                    4 * self.relative_attention_num_buckets
                ),
            ));
        }
        let vocab_size = config.entry("vocab_size").value.as_u64().unwrap_or_default() as usize;
        if self.decoder_start_token_id >= vocab_size {
            problems.push(Problem::inconsistent(
                format!("{}, but {}", stated("decoder_start_token_id"), stated("vocab_size")),
                "use the number of the padding token, usually 0",
            ));
        }
    }
}

/// Checks that the objective fits the family.
pub(super) fn check_objective(
    objective: TrainingObjective,
    density: f64,
    config: &Config,
    problems: &mut Vec<Problem>,
) {
    let stated = |key: &str| config.stated(key);
    let corrupts = objective == TrainingObjective::SpanCorruption;
    if corrupts != EncoderGroup::is_in(config) {
        let hint = match corrupts {
            true => {
                "use a model with an encoder, such as `decoder_block=t5`, or `training_objective=causal_lm`"
            }
            false => "set `training_objective=span_corruption`, too",
        };
        problems.push(Problem::inconsistent(
            format!("{}, but {}", stated("training_objective"), stated("decoder_block")),
            hint,
        ));
    }
    for key in ["max_source_length", "max_target_length"] {
        if corrupts && config.entry(key).value.as_u64().is_some_and(|length| length < 3) {
            problems.push(Problem::inconsistent(
                format!(
                    "{}, but a source or target of span corruption has at least a token, a sentinel and EOS",
                    stated(key)
                ),
                "use a length of at least 3",
            ));
        }
    }
    if corrupts && (density == 0.0 || density == 1.0) {
        problems.push(Problem::inconsistent(
            format!(
                "{}, so that {} would be removed",
                stated("span_corruption_noise_density"),
                if density == 0.0 { "nothing" } else { "everything" }
            ),
            "use a share between 0 and 1, such as the default, `span_corruption_noise_density=0.15`",
        ));
    }
}
