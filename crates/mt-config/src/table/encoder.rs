//! Encoder–decoder models. MaxText has none, so all keys are our own.

use super::KeyGroup;
use crate::{families, key::Key};

pub(super) const GROUPS: &[KeyGroup] = &[KeyGroup {
    name: "Encoder",
    title: "Encoder–decoder models",
    prefix: None,
    keys: &[
        Key::integer(
            "base_num_encoder_layers",
            0,
            "Number of encoder layers, before `global_parameter_scale`; 0 for as many as the decoder has.",
        )
        .at_least(0.0)
        .at_most(100_000.0)
        .only_with("decoder_block", families::ENCODER.names)
        .acts_on("model")
        .own(),
        Key::integer(
            "relative_attention_num_buckets",
            32,
            "Number of buckets of distances for which each head learns a bias of its attention logits. In the \
             encoder, half of them are for later positions.",
        )
        .at_least(4.0)
        .only_with("decoder_block", families::ENCODER.names)
        .acts_on("attention")
        .own(),
        Key::integer(
            "relative_attention_max_distance",
            128,
            "Distance from which all pairs of positions are in the last bucket.",
        )
        .at_least(2.0)
        .only_with("decoder_block", families::ENCODER.names)
        .acts_on("attention")
        .own(),
        Key::integer(
            "max_source_length",
            512,
            "Largest number of tokens that the encoder reads; `max_target_length` is that of the decoder.",
        )
        .at_least(1.0)
        .only_with("decoder_block", families::ENCODER.names)
        .acts_on("data")
        .own(),
        Key::integer("decoder_start_token_id", 0, "Token that precedes the first one of the decoder.")
            .at_least(0.0)
            .only_with("decoder_block", families::ENCODER.names)
            .acts_on("data")
            .own(),
        Key::float(
            "span_corruption_noise_density",
            0.15,
            "Share of a text's tokens in the spans that span corruption removes; must be above 0 and below 1.",
        )
        .at_least(0.0)
        .at_most(1.0)
        .only_with("training_objective", &["span_corruption"])
        .acts_on("data")
        .own(),
        Key::float(
            "span_corruption_mean_span_length",
            3.0,
            "Mean number of tokens in a span that span corruption removes.",
        )
        .at_least(1.0)
        .only_with("training_objective", &["span_corruption"])
        .acts_on("data")
        .own(),
    ],
}];
