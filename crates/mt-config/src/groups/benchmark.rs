//! Keys of benchmarks of inference.

use std::path::PathBuf;

use super::group;
use crate::{config::Config, error::Problem};

group! {
    /// The measurements of a benchmark of inference, and the file of its results.
    pub struct InferenceBenchmarkGroup {
        inference_microbenchmark_prefill_lengths: String,
        inference_microbenchmark_stages: String,
        inference_microbenchmark_loop_iters: usize,
        inference_microbenchmark_log_file_path: Option<PathBuf>,
        inference_microbenchmark_num_samples: Vec<usize>,
        inference_metadata_file: Option<PathBuf>,
    }
    besides {
        has_own_lengths: bool = |config, _| {
            Some(config.entry("inference_microbenchmark_prefill_lengths").is_asked_for())
        },
    }
}

/// A stage of inference that is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InferenceStage {
    /// Reading prompts.
    Prefill,
    /// Generating tokens.
    Generate,
}

impl InferenceBenchmarkGroup {
    /// The lengths of prompts.
    pub fn prefill_lengths(&self) -> Vec<usize> {
        let words = self.inference_microbenchmark_prefill_lengths.split(',');
        words.filter_map(|word| word.trim().parse().ok()).collect()
    }

    /// The stages in order.
    pub fn stages(&self) -> Vec<InferenceStage> {
        self.inference_microbenchmark_stages.split(',').filter_map(stage).collect()
    }

    fn check(&self, config: &Config, problems: &mut Vec<Problem>) {
        let mut wrong = |key: &str, hint: &str| {
            problems.push(Problem::inconsistent(config.stated(key), hint));
        };
        let lengths = &self.inference_microbenchmark_prefill_lengths;
        let is_length = |word: &str| word.trim().parse::<usize>().is_ok_and(|length| length > 0);
        if !lengths.split(',').all(is_length) {
            wrong(
                "inference_microbenchmark_prefill_lengths",
                "write lengths in tokens of at least 1, separated by commas, such as `64,128`",
            );
        }
        if self.inference_microbenchmark_stages.split(',').any(|word| stage(word).is_none()) {
            wrong("inference_microbenchmark_stages", "write `prefill`, `generate` or `prefill,generate`");
        }
        if self.inference_microbenchmark_num_samples.contains(&0) {
            wrong("inference_microbenchmark_num_samples", "write numbers of at least 1, such as `[1,4]`");
        }
    }
}

fn stage(word: &str) -> Option<InferenceStage> {
    match word.trim() {
        "prefill" => Some(InferenceStage::Prefill),
        "generate" => Some(InferenceStage::Generate),
        _ => None,
    }
}
