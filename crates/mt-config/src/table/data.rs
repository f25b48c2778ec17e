//! Training data and tokenizers.

use super::KeyGroup;
use crate::key::{Key, Literal};

pub(super) const GROUPS: &[KeyGroup] = &[
    KeyGroup {
        name: "DatasetGeneral",
        title: "Data",
        keys: &[
            Key::choice(
                "dataset_type",
                "tfds",
                &["synthetic", "hf", "grain", "tfds", "c4_mlperf", "olmo_grain"],
                "Where training data comes from: random tokens (`synthetic`) or local text, JSON \
                 lines and parquet files (`hf`).",
            )
            .refuse_choices(&[
                ("grain", "the data pipeline `grain`"),
                ("tfds", "the data pipeline `tfds`"),
                ("c4_mlperf", "the data pipeline `c4_mlperf`"),
                ("olmo_grain", "the data pipeline `olmo_grain`"),
            ])
            .acts_on("data"),
            Key::float(
                "per_device_batch_size",
                12.0,
                "Sequences in a batch, for each device; a fraction is possible when all devices \
                 together have a whole number.",
            )
            .at_least(0.0)
            .acts_on("data"),
            Key::float(
                "eval_per_device_batch_size",
                0.0,
                "Sequences in an evaluation batch, for each device; as in training if 0.",
            )
            .at_least(0.0)
            .acts_on("evaluation")
            .may_change(),
            Key::texts("train_data_columns", &["text"], "Columns of the training data that hold the text.")
                .acts_on("data"),
            Key::texts("eval_data_columns", &["text"], "Columns of the evaluation data that hold the text.")
                .acts_on("evaluation"),
            Key::boolean(
                "packing",
                true,
                "Put several documents into one sequence, which do not see each other.",
            )
            .acts_on("data"),
            Key::choice(
                "grain_packing_type",
                "first_fit",
                &["first_fit", "best_fit", "concat_then_split"],
                "How documents are packed: each into the first sequence with room for it, or one after another \
                 and cut where a sequence ends.",
            )
            .refuse_choices(&[("best_fit", "best-fit packing")])
            .acts_on("data"),
            Key::integer("max_segments_per_seq", -1, "Most documents in a packed sequence; no limit if -1.")
                .at_least(-1.0)
                .acts_on("data"),
            Key::integer(
                "num_epoch",
                1,
                "How often the training data is gone through before training stops; without end if -1.",
            )
            .at_least(-1.0)
            .acts_on("data"),
            Key::integer(
                "reuse_example_batch",
                0,
                "With 1, train on the first batch again and again, to measure speed.",
            )
            .at_least(0.0)
            .at_most(1.0)
            .acts_on("data"),
            Key::float("expansion_factor_real_data", -1.0, "Let only some hosts read data.")
                .refused("reading data on some hosts only")
                .acts_on("data"),
            Key::boolean("enable_rampup_batch_size", false, "Start with small batches.")
                .refused("growing batches")
                .acts_on("data"),
            Key::integer(
                "max_corpus_chars",
                10_000_000,
                "Characters of text that a SentencePiece tokenizer is trained on.",
            )
            .no_effect_here("tokenizers are trained by `maxtext tokenizer train`")
            .acts_on("tokenizer")
            .may_change(),
        ],
    },
    KeyGroup {
        name: "HfDataset",
        title: "Text, JSON lines and parquet files",
        keys: &[
            Key::text(
                "hf_path",
                "",
                "Format of the files: `text`, `json` (one object a line) or `parquet`; or `repository`, the \
                 documentation and source code of a repository, some files held out for evaluation.",
            )
            .acts_on("data"),
            Key::optional_text(
                "hf_train_files",
                "Files to train on: a path or a pattern such as `data/*.parquet`, or several with \
                 commas between.",
            )
            .acts_on("data"),
            Key::optional_text("hf_eval_files", "Files to evaluate on, written as `hf_train_files`.")
                .acts_on("evaluation"),
            Key::choice(
                "hf_text_unit",
                "file",
                &["file", "line"],
                "What one document of `hf_path=text` is: a file or a line.",
            )
            .acts_on("data")
            .own(),
            Key::optional_text("hf_name", "Configuration of a dataset of the Hugging Face hub.")
                .refused("datasets from the Hugging Face hub")
                .acts_on("data"),
            Key::optional_text("hf_data_dir", "Directory in a dataset of the Hugging Face hub.")
                .refused("datasets from the Hugging Face hub")
                .acts_on("data"),
            Key::optional_text("hf_eval_split", "Split of a dataset of the Hugging Face hub to evaluate on.")
                .refused("datasets from the Hugging Face hub")
                .acts_on("evaluation"),
            Key::optional_text("hf_access_token", "Token for private repositories of the Hugging Face hub.")
                .no_effect_here("nothing is fetched from the Hugging Face hub")
                .acts_on("data")
                .may_change()
                .secret(),
        ],
    },
    KeyGroup {
        name: "Tokenizer",
        title: "Tokenizer",
        keys: &[
            Key::integer(
                "vocab_size",
                32_000,
                "Rows of the embedding table, at least the tokenizer's number of tokens.",
            )
            .at_least(1.0)
            .acts_on("model"),
            Key::choice(
                "tokenizer_type",
                "huggingface",
                &["sentencepiece", "huggingface", "tiktoken", "byte"],
                "Kind of tokenizer: a `tokenizer.json` of Hugging Face, or `byte`, which needs no \
                 file.",
            )
            .maxtext_default(Literal::Text("sentencepiece"))
            .refuse_choices(&[
                ("sentencepiece", "SentencePiece tokenizers"),
                ("tiktoken", "tiktoken tokenizers"),
            ])
            .acts_on("tokenizer"),
            Key::optional_text(
                "tokenizer_path",
                "The `tokenizer.json` file, or the directory that holds it.",
            )
            .acts_on("tokenizer"),
            Key::integer(
                "tokenizer_vocab_size",
                0,
                "With no `tokenizer_path`, train a byte-level BPE of this many tokens on the training \
                 files at the start of the run.",
            )
            .at_least(0.0)
            .acts_on("tokenizer")
            .own(),
            Key::boolean(
                "add_bos",
                true,
                "Begin each document with the token for beginnings, if the tokenizer has one.",
            )
            .acts_on("tokenizer"),
            Key::boolean(
                "add_eos",
                true,
                "End each document with the token for ends, if the tokenizer has one.",
            )
            .acts_on("tokenizer"),
            Key::boolean("use_truncation", true, "Cut documents at the sequence length.")
            .no_effect_here("packed documents go on in the next sequence, others are always cut")
            .acts_on("data"),
            Key::boolean(
                "tokenize_train_data",
                true,
                "Tokenize the training data; otherwise it holds token numbers.",
            )
            .refused("data that is already tokenized")
            .acts_on("data"),
            Key::boolean(
                "tokenize_eval_data",
                true,
                "Tokenize the evaluation data; otherwise it holds token numbers.",
            )
            .refused("data that is already tokenized")
            .acts_on("evaluation"),
            Key::boolean("use_chat_template", false, "Format prompts by the tokenizer's chat template.")
                .refused("chat templates")
                .acts_on("tokenizer"),
            Key::integer("num_vocab_tiling", 1, "Parts in which logits and loss are computed.")
                .at_least(1.0)
                .refused("logits in parts")
                .acts_on("loss"),
        ],
    },
];
