//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

const EXAMPLES: &str = "\
Examples:
  maxtext train                           the quick start: a small model
  maxtext train run.yml steps=1000        a configuration file, one key changed
  maxtext decode load_parameters_path=maxtext_output/first prompt='Once upon'
  maxtext config explain learning_rate    what a key does

Keys are MaxText's. They are set in a YAML file, as `key=value`, or as `M_KEY`
in the environment.";

const TRAIN: &str = "\
Trains a model, or continues the run that `run_name` names.

Without keys, or with keys that are only about the run (`run_name`, `steps`,
`base_output_directory`, logging, hardware), this trains the quick start: a
language model of about 10 million parameters on the documentation and source
code of the repository in the current directory.

The directory `base_output_directory`/`run_name` receives checkpoints, metrics
as JSON lines and TensorBoard events, a loss curve, the tokenizer and the
resolved configuration. The same command again continues after an interruption;
Ctrl-C stops with a checkpoint.";

const TRAIN_EXAMPLES: &str = "\
Examples:
  maxtext train
  maxtext train run_name=first steps=500
  maxtext train run_name=books dataset_type=hf hf_path=text \\
      hf_train_files='books/*.txt' tokenizer_type=byte base_emb_dim=256 \\
      base_num_decoder_layers=4 max_target_length=512 steps=1000
  maxtext train books.yml run_name=tuned learning_rate=1e-5 \\
      load_parameters_path=maxtext_output/books
  maxtext train books.yml run_name=split num_cpu_devices=8 \\
      ici_fsdp_parallelism=4 ici_tensor_parallelism=2

See also:
  maxtext config show          every key and its value
  maxtext config explain KEY   what a key does
  maxtext config check …       look for mistakes without training";

const DECODE: &str = "\
Continues prompts with a trained model, as the tokens come.

Model and tokenizer are those of the run that `load_parameters_path` names: its
directory, or one of its checkpoints.";

const DECODE_EXAMPLES: &str = "\
Examples:
  maxtext decode load_parameters_path=maxtext_output/first prompt='The answer'
  maxtext decode load_parameters_path=maxtext_output/first \\
      prompts=\"['One','Two']\" max_target_length=128
  maxtext decode load_parameters_path=maxtext_output/first prompt=Hello \\
      decode_sampling_strategy=nucleus decode_sampling_nucleus_p=0.9 \\
      decode_sampling_temperature=0.8 decode_seed=7";

const TOKENIZER_TRAIN: &str = "\
Trains a byte-level BPE tokenizer on text, and writes it as a `tokenizer.json`
that Hugging Face's library reads too.

The text is what training would read: `hf_path`, `hf_train_files`,
`hf_text_unit` and `train_data_columns`.";

const TOKENIZER_EXAMPLES: &str = "\
Examples:
  maxtext tokenizer train --vocab-size 8192 --output my_tokenizer \\
      hf_path=text hf_train_files='books/*.txt'
  maxtext train books.yml tokenizer_path=my_tokenizer vocab_size=8192";

/// Train, sample and inspect language models.
#[derive(Debug, Parser)]
#[command(name = "maxtext", version, after_help = EXAMPLES, disable_help_subcommand = true)]
pub struct Arguments {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Train a model, or continue a run
    #[command(long_about = TRAIN, after_help = TRAIN_EXAMPLES)]
    Train(Settings),
    /// Continue prompts with a trained model
    #[command(long_about = DECODE, after_help = DECODE_EXAMPLES)]
    Decode(Decode),
    /// Show, explain and check configurations
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Train tokenizers
    #[command(subcommand)]
    Tokenizer(TokenizerCommand),
    /// List and install the plugins that run programs on CPUs, GPUs and TPUs
    #[command(subcommand)]
    Plugin(PluginCommand),
}

/// A configuration file and keys.
#[derive(Debug, Args)]
pub struct Settings {
    /// A YAML file, and keys that override it: `steps=100 learning_rate=1e-3`
    #[arg(value_name = "CONFIG.yml | KEY=VALUE", allow_hyphen_values = true)]
    pub settings: Vec<String>,
}

/// What to decode, and how to write it.
#[derive(Debug, Args)]
pub struct Decode {
    /// Write one JSON object a line: prompt, text, tokens, and why it ended
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub settings: Settings,
}

#[derive(Debug, Subcommand)]
pub enum ConfigCommand {
    /// Show the value of every key
    Show(Show),
    /// Explain a key: its type, default, bounds, and what it does
    Explain {
        /// The key
        key: String,
    },
    /// Look for mistakes in what `maxtext train` would be given, without training
    Check(Settings),
}

#[derive(Debug, Args)]
pub struct Show {
    /// Show where each value comes from
    #[arg(long)]
    pub origins: bool,
    /// Show only what differs from the defaults
    #[arg(long)]
    pub changed: bool,
    /// Write one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub settings: Settings,
}

#[derive(Debug, Subcommand)]
pub enum TokenizerCommand {
    /// Train a byte-level BPE tokenizer
    #[command(long_about = TOKENIZER_TRAIN, after_help = TOKENIZER_EXAMPLES)]
    Train(TokenizerTrain),
}

#[derive(Debug, Args)]
pub struct TokenizerTrain {
    /// Number of tokens, the 256 bytes and 3 special tokens included
    #[arg(long, value_name = "TOKENS", default_value_t = 8192)]
    pub vocab_size: usize,
    /// Directory that receives `tokenizer.json`
    #[arg(long, value_name = "DIRECTORY")]
    pub output: PathBuf,
    #[command(flatten)]
    pub settings: Settings,
}

#[derive(Debug, Subcommand)]
pub enum PluginCommand {
    /// List the plugins on this machine
    List {
        /// Write one JSON array
        #[arg(long)]
        json: bool,
    },
    /// Install a plugin into the user's cache directory
    Install {
        /// The kind of hardware
        #[arg(value_parser = ["cpu", "gpu", "tpu"])]
        platform: String,
    },
}
