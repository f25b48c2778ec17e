//! Data pipelines.

use super::KeyGroup;
use crate::{
    groups::GrainFileType,
    key::{Key, Literal},
};

pub(super) const GROUPS: &[KeyGroup] = &[
    KeyGroup {
        name: "TfdsDataset",
        title: "TensorFlow datasets",
        prefix: None,
        keys: &[
            Key::text(
                "dataset_path",
                "",
                "Directory into which `tfds` wrote datasets, or the directory of one version of a dataset; by default that \
                 of `tfds`, `TFDS_DATA_DIR` or `~/tensorflow_datasets`.",
            )
                .only_with("dataset_type", &["tfds", "c4_mlperf"])
                .acts_on("data"),
            Key::text(
                "dataset_name",
                "c4/en:3.0.1",
                "Name, configuration and version of the dataset to train on; the newest version if none is named.",
            )
            .neutral(&[Literal::Text("c4/en:3.1.0")])
            .only_with("dataset_type", &["tfds", "c4_mlperf"])
            .acts_on("data"),
            Key::text(
                "eval_dataset_name",
                "c4/en:3.0.1",
                "Name, configuration and version of the dataset to evaluate on.",
            )
            .neutral(&[Literal::Text("c4/en:3.1.0")])
            .only_with("dataset_type", &["tfds", "c4_mlperf"])
            .acts_on("evaluation"),
            Key::text(
                "train_split",
                "train",
                "Split of a dataset to train on, for datasets that come with named splits, such as `train[:90%]`.",
            )
            .only_with("dataset_type", &["tfds", "c4_mlperf", "hf"])
            .acts_on("data"),
            Key::text(
                "eval_split",
                "validation",
                "Split of a dataset to evaluate on, for datasets that come with named splits.",
            )
            .only_with("dataset_type", &["tfds", "c4_mlperf"])
            .acts_on("evaluation"),
        ],
    },
    KeyGroup {
        name: "GrainDataset",
        title: "Grain",
        prefix: None,
        keys: &[
            Key::text(
                "grain_train_files",
                "",
                "Files to train on: a directory, a pattern, or several separated by commas. Patterns with weights \
                 (`a/*.array_record,0.7;b/*.array_record,0.3`) make a mixture.",
            )
            .only_with("dataset_type", &["grain"])
            .acts_on("data"),
            Key::text("grain_eval_files", "", "Files to evaluate on, written as `grain_train_files`.")
                .only_with("dataset_type", &["grain"])
                .acts_on("evaluation"),
            Key::text(
                "grain_train_mixture_config_path",
                "",
                "JSON file with the datasets of a training mixture: for each name an object with `path` and `weight`, \
                 and, not in MaxText, `epochs` or `max_examples` after which the dataset leaves the mixture.",
            )
            .only_with("dataset_type", &["grain"])
            .acts_on("data"),
            Key::of::<GrainFileType>(
                "grain_file_type",
                "arrayrecord",
                "Format of the files that `grain_train_files` and `grain_eval_files` name. Records of ArrayRecord and \
                 TFRecord files are of type `tf.train.Example`.",
            )
            .only_with("dataset_type", &["grain"])
            .acts_on("data"),
            Key::boolean(
                "grain_use_elastic_iterator",
                false,
                "Save the data position so that it can be resumed on another number of hosts.",
            )
            .no_effect_here("the data position of every run can be resumed on another number of hosts")
            .acts_on("data")
            .may_change(),
            Key::integer(
                "grain_worker_count",
                1,
                "Number of threads that read and tokenize training documents; 1 and -1 use as many as there are processors, 0 a \
                 single one. The batches do not depend on it.",
            )
            .at_least(-1.0)
            .acts_on("data")
            .may_change(),
            Key::integer(
                "grain_per_worker_buffer_size",
                1,
                "Number of training batches that are ready ahead for each of `grain_worker_count` threads, four at least in all.",
            )
            .at_least(0.0)
            .acts_on("data")
            .may_change(),
            Key::integer(
                "grain_worker_count_eval",
                1,
                "Number of threads that read and tokenize evaluation documents, as `grain_worker_count` for training.",
            )
            .at_least(-1.0)
            .acts_on("evaluation")
            .may_change(),
            Key::integer(
                "grain_per_worker_buffer_size_eval",
                1,
                "Number of evaluation batches that are ready ahead for each of `grain_worker_count_eval` threads, four at least in \
                 all.",
            )
            .at_least(0.0)
            .acts_on("evaluation")
            .may_change(),
            Key::integer(
                "grain_ram_budget_mb",
                1024,
                "Host memory in MB for training documents that are tokenized ahead. The batches do not depend on it.",
            )
            .at_least(1.0)
            .acts_on("data")
            .may_change(),
            Key::integer(
                "grain_num_threads",
                16,
                "Most of the `grain_worker_count` threads that read training documents from files at the same time; 0 and 1 for \
                 one.",
            )
            .at_least(0.0)
            .acts_on("data")
            .may_change(),
            Key::integer(
                "grain_prefetch_buffer_size",
                500,
                "Number of training documents that are read ahead, within `grain_ram_budget_mb`.",
            )
            .at_least(0.0)
            .acts_on("data")
            .may_change(),
            Key::integer(
                "grain_num_threads_eval",
                16,
                "Most of the `grain_worker_count_eval` threads that read evaluation documents from files at the same time; 0 and 1 \
                 for one.",
            )
            .at_least(0.0)
            .acts_on("evaluation")
            .may_change(),
            Key::integer(
                "grain_prefetch_buffer_size_eval",
                500,
                "Number of evaluation documents that are read ahead, within `grain_ram_budget_mb`.",
            )
            .at_least(0.0)
            .acts_on("evaluation")
            .may_change(),
            Key::integer(
                "grain_data_source_max_workers",
                16,
                "Maximum number of threads that open the datasets of a mixture.",
            )
            .no_effect_here("it tunes how Grain opens files; datasets here are opened without tuning")
            .acts_on("data")
            .may_change(),
            Key::integer(
                "grain_shuffle_buffer_size",
                100,
                "Size of the shuffle buffer for TFRecord or parquet files, in examples.",
            )
            .no_effect_here(
                "records are shuffled as a whole; parquet files, and ArrayRecord files whose records are compressed in \
                 groups, in windows of groups",
            )
            .acts_on("data")
            .may_change(),
            Key::optional_choice(
                "grain_index_storage_option",
                &["in_memory", "offloaded"],
                "Where the index of records of ArrayRecord files is kept: in memory, or in the \
                 files; the reader's own choice if none.",
            )
            .no_effect_here("the index takes 24 bytes of memory for each group of records")
            .acts_on("data")
            .may_change(),
        ],
    },
    KeyGroup {
        name: "OlmoGrainDataset",
        title: "OLMo data",
        prefix: None,
        keys: &[
            Key::text(
                "olmo_index_path",
                "",
                "JSON file that lists the token files of an OLMo dataset and the length of its \
                 sequences, which is `max_target_length`.",
            )
            .only_with("dataset_type", &["olmo_grain"])
            .acts_on("data"),
            Key::text(
                "olmo_path_remap_from",
                "",
                "Beginning of the paths in the OLMo index that `olmo_path_remap_to` replaces; \
                 none if empty.",
            )
            .only_with("dataset_type", &["olmo_grain"])
            .acts_on("data")
            .may_change(),
            Key::text(
                "olmo_path_remap_to",
                "",
                "Replacement for `olmo_path_remap_from` at the beginning of paths in the OLMo index.",
            )
            .only_with("dataset_type", &["olmo_grain"])
            .acts_on("data")
            .may_change(),
            Key::boolean(
                "olmo_apply_ngram_filter",
                true,
                "Exclude sequences of OLMo data that repeat the same few tokens from the loss.",
            )
            .only_with("dataset_type", &["olmo_grain"])
            .acts_on("data"),
        ],
    },
];
