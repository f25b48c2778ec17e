//! Lengths, prompts and sampling.

use super::{KeyGroup, features};
use crate::{groups::SamplingStrategy, key::Key};

pub(super) const GROUPS: &[KeyGroup] = &[
    KeyGroup {
        name: "InferenceGeneral",
        title: "Sequence lengths and prompts",
        prefix: None,
        keys: &[
            Key::integer(
                "max_target_length",
                2048,
                "Tokens in a training sequence; when decoding, in prompt and answer together.",
            )
            .at_least(1.0)
            .at_most(16_777_216.0)
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
            Key::text(
                "tokens_path",
                "",
                "A JSON file of lists of tokens, one list a row, whose logits `maxtext logits` computes.",
            )
            .acts_on("decoding")
            .run_level()
            .own(),
            Key::text("logits_path", "", "The file in NumPy's format that `maxtext logits` writes.")
                .acts_on("decoding")
                .run_level()
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
                .refused(features::LOG_PROBABILITIES_OF_DECODED_TOKENS)
                .acts_on("decoding")
                .may_change(),
            Key::boolean("use_chunked_prefill", false, "Process a prompt in pieces.")
                .refused(features::CHUNKED_PREFILL)
                .acts_on("decoding")
                .may_change(),
            Key::boolean(
                "load_from_prefill_dir",
                false,
                "Read the cache of the prompt from `prefill_cache_dir` instead of computing it.",
            )
            .refused(features::SAVED_PREFILL_CACHES)
            .acts_on("decoding")
            .may_change(),
            Key::text(
                "prefill_cache_dir",
                "",
                "Directory that holds the saved cache of a prompt; empty for none.",
            )
            .refused(features::SAVED_PREFILL_CACHES)
            .acts_on("decoding")
            .may_change(),
            Key::text(
                "model_call_mode",
                "",
                "Says that the model is called for `inference` rather than for training, which \
                 is the empty text.",
            )
            .no_effect_here("each command knows by itself whether it trains or generates")
            .acts_on("model")
            .may_change(),
            Key::integer(
                "prefill_chunk_size",
                256,
                "Number of tokens in a piece of a prompt when `use_chunked_prefill` is set.",
            )
            .at_least(1.0)
            .refused(features::CHUNKED_PREFILL)
            .only_with("use_chunked_prefill", &[])
            .acts_on("decoding")
            .may_change(),
            Key::boolean(
                "enable_model_warmup",
                false,
                "Compile all programs and run them once before the first request is answered.",
            )
            .refused(features::SERVING)
            .acts_on("server")
            .may_change(),
            Key::boolean(
                "enable_llm_inference_pool",
                false,
                "Join a pool of servers behind an inference gateway.",
            )
            .no_effect_here(
                "it opens an interface for Google's inference gateway, which this program does \
                 not speak",
            )
            .acts_on("server")
            .may_change(),
            Key::boolean("multi_sampling", false, "Draw several answers from one pass over the prompt.")
                .refused(features::SEVERAL_ANSWERS_FROM_ONE_PREFILL)
                .acts_on("decoding")
                .may_change(),
        ],
    },
    KeyGroup {
        name: "Decoding",
        title: "Sampling",
        prefix: None,
        keys: &[
            Key::of::<SamplingStrategy>(
                "decode_sampling_strategy",
                "greedy",
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
            .only_with("decode_sampling_strategy", &["nucleus", "composite"])
            .at_least(-1.0)
            .at_most(1.0)
            .acts_on("sampling")
            .may_change(),
            Key::integer(
                "decode_sampling_top_k",
                0,
                "Number of tokens that `topk` and `composite` draw from.",
            )
            .only_with("decode_sampling_strategy", &["topk", "composite"])
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
    KeyGroup {
        name: "InferenceLayout",
        title: "Layouts of the cache",
        prefix: None,
        keys: &[
            Key::boolean(
                "stack_prefill_result_cache",
                false,
                "Stack the caches of all layers into one array after a prompt is processed.",
            )
            .no_effect_here("it arranges JetStream's cache of a prompt, which does not exist here")
            .acts_on("decoding")
            .may_change(),
            Key::text(
                "prefill_cache_axis_order",
                "1,2,0,3",
                "Order of the axes in which the cache of a prompt is stored.",
            )
            .no_effect_here("XLA chooses the layout of the cache itself")
            .acts_on("decoding")
            .may_change(),
            Key::text(
                "ar_cache_axis_order",
                "1,2,0,3",
                "Order of the axes in which the cache of generated tokens is stored.",
            )
            .no_effect_here("XLA chooses the layout of the cache itself")
            .acts_on("decoding")
            .may_change(),
            Key::text(
                "compute_axis_order",
                "0,1,2,3",
                "Order of the axes in which attention is computed while decoding.",
            )
            .no_effect_here("XLA chooses the layout of attention's operands itself")
            .acts_on("attention")
            .may_change(),
            Key::boolean(
                "reshape_q",
                false,
                "Reshape queries for the product with a cache of other axis order.",
            )
            .no_effect_here("XLA chooses the layout of attention's operands itself")
            .acts_on("attention")
            .may_change(),
        ],
    },
    KeyGroup {
        name: "InferenceServer",
        title: "Serving",
        prefix: None,
        keys: &[
            Key::text(
                "inference_server",
                "MaxtextInterleavedServer",
                "Whether a server processes prompts and generates on the same devices or on \
                 separate slices.",
            )
            .refused(features::SERVING_ON_SEPARATE_SLICES)
            .acts_on("server")
            .may_change(),
            Key::text(
                "prefill_slice",
                "v5e-16",
                "Kind of slice that processes prompts when they have a slice of their own.",
            )
            .refused(features::SERVING_ON_SEPARATE_SLICES)
            .acts_on("server")
            .may_change(),
            Key::text(
                "generate_slice",
                "v5e-16",
                "Kind of slice that generates answers when prompts have a slice of their own.",
            )
            .refused(features::SERVING_ON_SEPARATE_SLICES)
            .acts_on("server")
            .may_change(),
        ],
    },
    KeyGroup {
        name: "InferenceBenchmark",
        title: "Benchmarks of inference",
        prefix: None,
        keys: &[
            Key::text(
                "inference_microbenchmark_prefill_lengths",
                "64,128,256,512,1024",
                "Lengths of the prompts that are timed, in tokens, with commas between.",
            )
            .refused(features::BENCHMARKS_OF_INFERENCE)
            .acts_on("decoding")
            .may_change(),
            Key::text(
                "inference_microbenchmark_stages",
                "prefill,generate",
                "Stages of inference that are timed, `prefill` and `generate`, with commas \
                 between.",
            )
            .refused(features::BENCHMARKS_OF_INFERENCE)
            .acts_on("decoding")
            .may_change(),
            Key::integer(
                "inference_microbenchmark_loop_iters",
                10,
                "Number of times each stage is run and timed.",
            )
            .at_least(1.0)
            .refused(features::BENCHMARKS_OF_INFERENCE)
            .acts_on("decoding")
            .may_change(),
            Key::text(
                "inference_microbenchmark_log_file_path",
                "",
                "File that receives the results of a benchmark as JSON; empty for none.",
            )
            .refused(features::BENCHMARKS_OF_INFERENCE)
            .acts_on("decoding")
            .run_level(),
            Key::integers(
                "inference_microbenchmark_num_samples",
                &[1, 2, 3, 4, 5],
                "Numbers of answers to a prompt for which drawing several of them is timed.",
            )
            .refused(features::BENCHMARKS_OF_INFERENCE)
            .acts_on("decoding")
            .may_change(),
            Key::text(
                "inference_metadata_file",
                "",
                "JSON file with facts about the machine and the model that are added to the \
                 results of a benchmark.",
            )
            .refused(features::BENCHMARKS_OF_INFERENCE)
            .acts_on("decoding")
            .run_level(),
            Key::boolean(
                "inference_benchmark_test",
                false,
                "Run on one process and one slice, as tests of inference do.",
            )
            .no_effect_here("it only keeps JAX's distributed system from starting, which is not used here")
            .acts_on("runtime")
            .may_change(),
        ],
    },
    KeyGroup {
        name: "PrefixCaching",
        title: "Prefix cache",
        prefix: None,
        keys: &[
            Key::boolean(
                "enable_prefix_caching",
                false,
                "Keep the caches of prompts, so that a prompt with the same beginning reuses \
                 them.",
            )
            .refused(features::PREFIX_CACHING)
            .acts_on("server")
            .may_change(),
            Key::integer(
                "prefix_caching_hbm_byte",
                10000000000,
                "Device memory for kept caches of prompts, in bytes.",
            )
            .at_least(0.0)
            .refused(features::PREFIX_CACHING)
            .only_with("enable_prefix_caching", &[])
            .acts_on("server")
            .may_change(),
            Key::integer(
                "prefix_caching_dram_byte",
                100000000000,
                "Host memory for kept caches of prompts, in bytes.",
            )
            .at_least(0.0)
            .refused(features::PREFIX_CACHING)
            .only_with("enable_prefix_caching", &[])
            .acts_on("server")
            .may_change(),
        ],
    },
];
