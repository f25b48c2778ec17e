//! Lengths, prompts and sampling.

use super::KeyGroup;
use crate::key::Key;

pub(super) const GROUPS: &[KeyGroup] = &[
    KeyGroup {
        name: "InferenceGeneral",
        title: "Sequence lengths and prompts",
        keys: &[
            Key::integer(
                "max_target_length",
                2048,
                "Tokens in a training sequence; when decoding, in prompt and answer together.",
            )
            .at_least(1.0)
            .acts_on("model"),
            Key::integer("max_prefill_predict_length", 64, "Most tokens of a prompt.")
                .at_least(1.0)
                .acts_on("decoding")
                .may_change(),
            Key::text("prompt", "I love to", "The text that decoding continues.")
                .acts_on("decoding")
                .may_change(),
            Key::texts("prompts", &[], "Several texts to continue at once, instead of `prompt`.")
                .acts_on("decoding")
                .may_change()
                .own(),
            Key::text("prompts_file", "", "A file with a prompt on each line, instead of `prompt`.")
                .acts_on("decoding")
                .may_change()
                .own(),
            Key::text(
                "autoregressive_decode_assert",
                "",
                "The answer that is expected; any other makes the command fail.",
            )
            .acts_on("decoding")
            .may_change(),
            Key::boolean("return_log_prob", false, "Return the log-probability of each token.")
                .refused("log-probabilities of decoded tokens")
                .acts_on("decoding")
                .may_change(),
            Key::boolean("use_chunked_prefill", false, "Process a prompt in pieces.")
                .refused("prefill in pieces")
                .acts_on("decoding")
                .may_change(),
        ],
    },
    KeyGroup {
        name: "Decoding",
        title: "Sampling",
        keys: &[
            Key::choice(
                "decode_sampling_strategy",
                "greedy",
                &["greedy", "weighted", "nucleus", "topk", "composite"],
                "How the next token is chosen: the likeliest, any by its probability, from the \
                 likeliest few by probability mass or number, or by both.",
            )
            .acts_on("sampling")
            .may_change(),
            Key::float(
                "decode_sampling_nucleus_p",
                -1.0,
                "Probability mass that `nucleus` and `composite` draw from.",
            )
            .at_least(-1.0)
            .at_most(1.0)
            .acts_on("sampling")
            .may_change(),
            Key::integer(
                "decode_sampling_top_k",
                0,
                "Number of tokens that `topk` and `composite` draw from.",
            )
            .at_least(0.0)
            .acts_on("sampling")
            .may_change(),
            Key::float(
                "decode_sampling_temperature",
                1.0,
                "Divides the logits: below 1 the likely tokens become likelier.",
            )
            .at_least(0.0)
            .acts_on("sampling")
            .may_change(),
            Key::integer("decode_seed", 0, "Seed of the draws.")
                .at_least(0.0)
                .acts_on("sampling")
                .may_change()
                .own(),
            Key::integer("decode_num_samples", 1, "Answers to each prompt.")
                .at_least(1.0)
                .acts_on("sampling")
                .may_change()
                .own(),
        ],
    },
];
