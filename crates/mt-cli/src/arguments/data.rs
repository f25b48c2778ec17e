//! The commands about data: `maxtext data`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::Settings;

const DATA_SHOW: &str = "\
Prints training examples as the model sees them: after the chat template, the
tokenizer, truncation and packing.

The keys are those of `train`. On a terminal, tokens with a loss are green;
elsewhere \u{27e6} and \u{27e7} enclose them. Nothing is trained, and no device is started.";

const DATA_SHOW_EXAMPLES: &str = "\
Examples:
  maxtext data show --count 2 post_train/sft.yml hf_model_path=Qwen3-0.6B \\
      hf_train_files='chats/*.jsonl'
  maxtext data show --json dataset_type=hf hf_path=text \\
      hf_train_files='books/*.txt' tokenizer_type=byte";

const SAVE_LOGITS: &str = "\
Writes the largest logits of a teacher for each token of a run's data, in
ArrayRecord files as MaxText's `save_top_k_teacher_logits` writes them.

The keys are those of `maxtext distill`: `teacher_overrides` names the teacher,
and `steps` the number of batches. The tokenizer is saved in the directory, too.
The same command continues a directory after Ctrl-C or a crash: files that have
their name are complete. `maxtext distill offline_data_dir=DIRECTORY` trains on
it.";

const SAVE_LOGITS_EXAMPLES: &str = "\
Examples:
  maxtext data save-logits --directory logits --top-k 64 \\
      teacher_overrides.load_parameters_path=maxtext_output/large \\
      hf_path=text hf_train_files='texts/*.txt' max_target_length=512 steps=2000
  maxtext distill offline_data_dir=logits max_target_length=512 \\
      base_emb_dim=256 base_num_decoder_layers=4 steps=2000 run_name=small";

const CHECK_LOGITS: &str = "\
Reads every record of a directory of stored logits. Checksums, sizes, tokens and
the order of the logits are checked; the first damaged or foreign record is
named.";

const GENERATE: &str = "\
Writes tasks with verifiable answers for reinforcement learning: JSON lines with
`prompt` and `answer`, in the files `train.jsonl` and `evaluation.jsonl` of a
directory. Held-out tasks share their operands with no task of training.

Kinds: `addition`, `subtraction` and `multiplication` of two numbers, `comparison`
(the larger one), `chain` (sums and differences of three numbers), and `logic`
(expressions of `and`, `or` and `not`). The difficulty is the most digits of a
number, or the depth of an expression.";

const GENERATE_EXAMPLES: &str = "\
Examples:
  maxtext data generate addition --directory tasks --count 5000 --difficulty 2
  maxtext rl load_parameters_path=maxtext_output/first \\
      hf_train_files=tasks/train.jsonl hf_eval_files=tasks/evaluation.jsonl";

#[derive(Debug, Subcommand)]
pub enum DataCommand {
    /// Print training examples, and which of their tokens have a loss
    #[command(long_about = DATA_SHOW, after_help = DATA_SHOW_EXAMPLES)]
    Show(DataShow),
    /// Write the largest logits of a teacher, from which students learn without it
    #[command(long_about = SAVE_LOGITS, after_help = SAVE_LOGITS_EXAMPLES)]
    SaveLogits(DataSaveLogits),
    /// Write arithmetic and logical tasks with their answers
    #[command(long_about = GENERATE, after_help = GENERATE_EXAMPLES)]
    Generate(DataGenerate),
    /// Check every record of stored logits
    #[command(long_about = CHECK_LOGITS)]
    CheckLogits(DataCheckLogits),
}

#[derive(Debug, Args)]
pub struct DataShow {
    /// The number of examples
    #[arg(long, value_name = "EXAMPLES", default_value_t = 3)]
    pub count: usize,
    /// Write one JSON object per example: token ids, their texts, and whether they have a loss
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub settings: Settings,
}

#[derive(Debug, Args)]
pub struct DataGenerate {
    /// The kind of task
    pub kind: String,
    /// The directory for the files
    #[arg(long, value_name = "DIRECTORY")]
    pub directory: PathBuf,
    /// The number of tasks for training
    #[arg(long, value_name = "TASKS", default_value_t = 1000)]
    pub count: usize,
    /// The number of held-out tasks
    #[arg(long, value_name = "TASKS", default_value_t = 200)]
    pub held_out: usize,
    /// The most digits of a number, or the depth of a logical expression, from 1 to 9
    #[arg(long, value_name = "DIGITS", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=9))]
    pub difficulty: u32,
    /// Seed of the tasks
    #[arg(long, value_name = "SEED", default_value_t = 0)]
    pub seed: u64,
}

#[derive(Debug, Args)]
pub struct DataSaveLogits {
    /// The directory for the files
    #[arg(long, value_name = "DIRECTORY", alias = "local_tmp_dir")]
    pub directory: Option<PathBuf>,
    /// The number of logits for each token
    #[arg(long, value_name = "LOGITS", default_value_t = 128, alias = "top_k")]
    pub top_k: usize,
    /// The number of batches in each file
    #[arg(long, value_name = "BATCHES", default_value_t = 50, alias = "steps_per_file")]
    pub steps_per_file: u64,
    #[command(flatten)]
    pub settings: Settings,
}

#[derive(Debug, Args)]
pub struct DataCheckLogits {
    /// The directory with the files
    pub directory: PathBuf,
    /// The number of tokens of the vocabulary, which bounds all tokens
    #[arg(long, value_name = "TOKENS", default_value_t = i32::MAX as usize)]
    pub vocab_size: usize,
}
