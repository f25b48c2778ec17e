//! The commands that let a model write training data: `maxtext data generate`.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};

use super::Settings;
use crate::failure::Failure;

const ANSWERS: &str = "\
Answers each prompt several times, judges the answers by reward functions, and
keeps the best ones (rejection sampling): JSON lines with `prompt`, `completion`
and `reward`, which `maxtext sft` reads.

The keys name the model, how it samples, and the reward functions with their
settings, as in `maxtext rl`; without `reward_functions`, mathematical equality
with the expected answer counts. The same command continues after an
interruption.";

const ANSWERS_EXAMPLES: &str = "\
Examples:
  maxtext data generate answers --prompts tasks/train.jsonl --output right.jsonl \\
      --samples 16 load_parameters_path=maxtext_output/first
  maxtext sft hf_train_files=right.jsonl train_data_columns=[prompt,completion] \\
      load_parameters_path=maxtext_output/first";

const INSTRUCTIONS: &str = "\
Lets a model continue lists of instructions, keeps those that differ from all
known ones, and answers them (Self-Instruct): JSON lines with `prompt` and
`completion`, which `maxtext sft` reads.

Each request shows eight instructions, of which up to two are new ones. An
instruction is refused if it is too short or long, is not about text, or has a
ROUGE-L of 0.7 or more with a known one. The same command continues after an
interruption.";

const INSTRUCTIONS_EXAMPLES: &str = "\
Examples:
  maxtext data generate instructions --prompts seeds.jsonl --count 1000 \\
      --output instructions.jsonl hf_model_path=Qwen3-0.6B max_target_length=1024";

const REVISIONS: &str = "\
Lets a model answer each prompt, criticize its answer by a principle, and revise
it (constitutional AI): JSON lines with `prompt`, the last revision as `chosen`
and the first answer as `rejected`, with the critiques. `maxtext sft` reads them
with `train_data_columns=[prompt,chosen]`, and `maxtext dpo` as preferences.

The file of principles has one on each line: a text, or a JSON object with the
requests `critique` and `revision`. The principle of each round is drawn at
random. The model needs a chat template. The same command continues after an
interruption.";

const REVISIONS_EXAMPLES: &str = "\
Examples:
  maxtext data generate revisions --prompts questions.jsonl --output revised.jsonl \\
      --principles constitution.txt --rounds 2 hf_model_path=Qwen3-0.6B \\
      max_target_length=2048";

const PREFERENCES: &str = "\
Lets a model answer each prompt twice, and choose the answer that follows a
principle better (RLAIF): JSON lines with `prompt`, `chosen` and `rejected`, which
`maxtext reward` and `maxtext dpo` read.

The answers are compared in both orders, and left out if the verdicts contradict
each other. The file of principles is that of `revisions`; objects may have the
question `choice`. The model needs a chat template. The same command continues
after an interruption.";

const PREFERENCES_EXAMPLES: &str = "\
Examples:
  maxtext data generate preferences --prompts questions.jsonl --output pairs.jsonl \\
      --principles constitution.txt hf_model_path=Qwen3-0.6B max_target_length=2048
  maxtext reward hf_model_path=Qwen3-0.6B hf_train_files=pairs.jsonl";

#[derive(Debug, Subcommand)]
pub enum GenerateCommand {
    /// Keep the best of several answers to each prompt (rejection sampling)
    #[command(long_about = ANSWERS, after_help = ANSWERS_EXAMPLES)]
    Answers(GenerateAnswers),
    /// Write new instructions with answers after given examples (Self-Instruct)
    #[command(long_about = INSTRUCTIONS, after_help = INSTRUCTIONS_EXAMPLES)]
    Instructions(GenerateInstructions),
    /// Criticize and revise answers by written principles (constitutional AI)
    #[command(long_about = REVISIONS, after_help = REVISIONS_EXAMPLES)]
    Revisions(GenerateRevisions),
    /// Choose between two answers by written principles (RLAIF)
    #[command(long_about = PREFERENCES, after_help = PREFERENCES_EXAMPLES)]
    Preferences(GeneratePreferences),
}

/// The prompts, the output, and the keys that name the model.
#[derive(Debug, Args)]
pub struct Generated {
    /// JSON lines or parquet files of prompts, separated by commas
    #[arg(long, value_name = "FILE")]
    pub prompts: Option<String>,
    /// The columns of prompts, texts or messages, and of expected answers [default: prompt,answer]
    #[arg(long, value_name = "NAME,…")]
    pub columns: Option<String>,
    /// The file to write
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// The most tokens of an answer [default: as many as `max_target_length` allows]
    #[arg(long, value_name = "TOKENS")]
    pub max_tokens: Option<usize>,
    #[command(flatten)]
    pub settings: Settings,
}

impl Generated {
    /// The columns of prompts and of expected answers.
    pub fn columns(&self) -> (String, Option<String>) {
        let given = self.columns.as_deref().unwrap_or("prompt,answer");
        let mut names = given.trim_matches(['[', ']']).split(',').map(|name| name.trim().to_owned());
        (names.next().unwrap_or_default(), names.next())
    }

    /// The file to write.
    ///
    /// # Errors
    /// None is named.
    pub fn output(&self) -> Result<&Path, Failure> {
        self.output
            .as_deref()
            .ok_or_else(|| Failure::user("no file for the data is named\nhint: write `--output data.jsonl`"))
    }
}

#[derive(Debug, Args)]
pub struct GenerateAnswers {
    /// The answers to each prompt [default: 8]
    #[arg(long, value_name = "ANSWERS")]
    pub samples: Option<usize>,
    /// The most answers to each prompt that are kept [default: 1]
    #[arg(long, value_name = "ANSWERS")]
    pub keep: Option<usize>,
    /// The least reward of answers that are kept [default: 1]
    #[arg(long, value_name = "REWARD", allow_negative_numbers = true)]
    pub keep_above: Option<f64>,
    #[command(flatten)]
    pub generated: Generated,
}

#[derive(Debug, Args)]
pub struct GenerateInstructions {
    /// The new instructions [default: 100]
    #[arg(long, value_name = "INSTRUCTIONS")]
    pub count: Option<u64>,
    /// The examples in each request [default: 8]
    #[arg(long, value_name = "EXAMPLES")]
    pub examples: Option<usize>,
    /// The ROUGE-L with a known instruction from which on a new one is refused [default: 0.7]
    #[arg(long, value_name = "SHARE")]
    pub similarity: Option<f64>,
    /// Seed of the examples [default: 0]
    #[arg(long, value_name = "SEED")]
    pub seed: Option<u64>,
    #[command(flatten)]
    pub generated: Generated,
}

#[derive(Debug, Args)]
pub struct GenerateRevisions {
    /// The file of principles
    #[arg(long, value_name = "FILE")]
    pub principles: Option<String>,
    /// The critiques and revisions of each answer [default: 1]
    #[arg(long, value_name = "ROUNDS")]
    pub rounds: Option<u64>,
    /// Seed of the choice of principles [default: 0]
    #[arg(long, value_name = "SEED")]
    pub seed: Option<u64>,
    #[command(flatten)]
    pub generated: Generated,
}

#[derive(Debug, Args)]
pub struct GeneratePreferences {
    /// The file of principles
    #[arg(long, value_name = "FILE")]
    pub principles: Option<String>,
    /// Seed of the choice of principles [default: 0]
    #[arg(long, value_name = "SEED")]
    pub seed: Option<u64>,
    #[command(flatten)]
    pub generated: Generated,
}
