//! Texts and arguments of commands on checkpoints.

use std::path::PathBuf;

use clap::Args;

pub(super) const INSPECT: &str = "\
Lists the tensors of a checkpoint: names, types, shapes and sizes, with totals.

The path names a Hugging Face directory, a safetensors or PyTorch file, a
directory with `consolidated.*.pth`, a run, one of its checkpoints, or any Orbax
checkpoint. Only headers are read.";

pub(super) const INSPECT_EXAMPLES: &str = "\
Examples:
  maxtext checkpoint inspect maxtext_output/first
  maxtext checkpoint inspect maxtext_output/first/checkpoints/199 --json
  maxtext checkpoint inspect models/llama/model-00001-of-00002.safetensors";

pub(super) const CHECKPOINT_DIFF: &str = "\
Compares two checkpoints in any formats: missing tensors, shapes, element types,
and with `--values` every number.

The output lists 20 tensors per type of difference, and those whose values
differ most; `--json` lists all. The last line is the verdict. The exit status
is 0 even if they differ.";

pub(super) const CHECKPOINT_DIFF_EXAMPLES: &str = "\
Examples:
  maxtext checkpoint diff models/llama models/tuned
  maxtext checkpoint diff --values maxtext_output/first/checkpoints/99 \\
      maxtext_output/first/checkpoints/199";

pub(super) const VERIFY: &str = "\
Reads every byte of a run's checkpoints, or of one checkpoint, and names each
damaged file.

Checkpoints of this program have a checksum of every byte. Those that Orbax or
MaxText wrote have checksums of their structure, and arrays are decoded; weights
in Hugging Face directories and PyTorch files have none, so only their structure
is checked. The exit status is 1 if anything is damaged.";

pub(super) const VERIFY_EXAMPLES: &str = "\
Examples:
  maxtext checkpoint verify maxtext_output/first
  maxtext checkpoint verify maxtext_output/first/checkpoints/199 --json";

/// The arguments of `maxtext checkpoint verify`.
#[derive(Debug, Args)]
pub struct Verify {
    /// A run (all its checkpoints), one of them, any Orbax checkpoint, a Hugging Face directory or a file of weights
    pub path: PathBuf,
    /// Write one JSON object
    #[arg(long)]
    pub json: bool,
}
