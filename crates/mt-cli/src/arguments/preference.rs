//! The commands that train on preferences: `maxtext dpo` and `maxtext reward`.

use clap::{Args, Subcommand};

use super::Settings;

pub(super) const DPO: &str = "\
Trains a model on preferences between answers, or resumes the run that
`run_name` names.

This is `maxtext train post_train/dpo.yml`: MaxText's settings lie below your
files and keys, without the model that they name. Each line or row of your files
is a pair of answers, or one judged answer. `dpo.algo` and `dpo.loss_type`
select the loss.";

pub(super) const DPO_EXAMPLES: &str = "\
Examples:
  maxtext dpo load_parameters_path=maxtext_output/tuned run_name=preferred \\
      hf_train_files='pairs/*.jsonl' train_data_columns=[prompt,chosen,rejected]
  maxtext dpo hf_model_path=Qwen3-0.6B hf_train_files=pairs.parquet \\
      dpo.algo=orpo lora.enable_lora=true lora.lora_rank=16 lora.lora_alpha=32";

pub(super) const REWARD: &str = "\
Trains a reward model, or resumes the run that `run_name` names.

This is `maxtext train reward.yml`, a preset of this program. A reward model has
scores instead of logits. By default it learns from pairs of answers, of which
the chosen one has the larger reward; with `reward.reward_type=process` it learns
the labels of the steps of answers.

`maxtext reward score` scores the answers of files.";

pub(super) const REWARD_EXAMPLES: &str = "\
Examples:
  maxtext reward load_parameters_path=maxtext_output/tuned run_name=judge \\
      hf_train_files='pairs/*.jsonl' hf_eval_files=held_out.jsonl
  maxtext reward hf_model_path=Qwen3-0.6B hf_train_files=pairs.parquet \\
      lora.enable_lora=true lora.lora_rank=16 lora.lora_alpha=32
  maxtext reward score load_parameters_path=maxtext_output/judge answers.jsonl";

const SCORE: &str = "\
Writes the reward of each answer in files of JSON lines or parquet, as one JSON
object per line.

`--columns` names the columns: prompt and answer, a list of messages alone, or
prompt, chosen and rejected answer. A model that judges steps takes the columns
of prompts and of lists of steps, and writes the probability that each step is
right. With an ensemble, `deviation` is the standard deviation over its heads.";

const SCORE_EXAMPLES: &str = "\
Examples:
  maxtext reward score load_parameters_path=maxtext_output/judge answers.jsonl
  maxtext reward score load_parameters_path=maxtext_output/judge \\
      --columns prompt,chosen,rejected held_out.jsonl
  maxtext reward score hf_model_path=models/judge --columns messages chats.parquet";

/// The arguments of `maxtext reward`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, disable_help_subcommand = true)]
pub struct Reward {
    #[command(subcommand)]
    pub command: Option<RewardCommand>,
    #[command(flatten)]
    pub settings: Settings,
}

#[derive(Debug, Subcommand)]
pub enum RewardCommand {
    /// Score the answers of files
    #[command(long_about = SCORE, after_help = SCORE_EXAMPLES)]
    Score(RewardScore),
}

/// The arguments of `maxtext reward score`: files of answers, and the keys that name the model.
#[derive(Debug, Args)]
pub struct RewardScore {
    /// The columns of the records [default: prompt,completion; of steps: prompt,completions]
    #[arg(long, value_name = "NAME,…")]
    pub columns: Option<String>,
    #[command(flatten)]
    pub settings: Settings,
}
