//! Training data and tokenizers.

use std::path::PathBuf;

use super::{
    choices::{DatasetType, HfTextUnit, PackingType, TokenizerType},
    group,
};
use crate::error::{ConfigError, Problem};

group! {
    /// The batches a run trains and evaluates on.
    pub struct DataGroup {
        dataset_type: DatasetType,
        hf_path: Option<String>,
        hf_train_files: Option<String>,
        hf_eval_files: Option<String>,
        hf_text_unit: HfTextUnit,
        train_data_columns: Vec<String>,
        eval_data_columns: Vec<String>,
        packing: bool,
        grain_packing_type: PackingType,
        max_segments_per_seq: Option<usize>,
        enable_data_shuffling: bool,
        data_shuffle_seed: u64,
        num_epoch: Option<u64>,
        reuse_example_batch: u64,
        per_device_batch_size: f64,
        eval_per_device_batch_size: f64,
        max_target_length: usize,
        vocab_size: usize,
    }
}

/// The formats of local files.
const FORMATS: [&str; 4] = ["text", "json", "parquet", REPOSITORY];

/// What `hf_path` calls the files of a repository.
const REPOSITORY: &str = "repository";

impl DataGroup {
    fn check(&self, problems: &mut Vec<Problem>) {
        if self.per_device_batch_size == 0.0 {
            problems.push(Problem::inconsistent(
                "`per_device_batch_size` is `0`",
                "use at least one sequence, or a fraction of one",
            ));
        }
        if self.num_epoch == Some(0) {
            problems.push(Problem::inconsistent(
                "`num_epoch` is `0`, which reads nothing",
                "use 1 or more, or -1 for data without end",
            ));
        }
        if self.dataset_type != DatasetType::Hf {
            return;
        }
        match self.hf_path.as_deref() {
            None => problems.push(Problem::inconsistent(
                "`dataset_type` is `hf`, but `hf_path` is empty",
                "say what the files are: `hf_path=text`, `hf_path=json` or `hf_path=parquet`",
            )),
            Some(path) if !FORMATS.contains(&path) => problems.push(Problem::inconsistent(
                format!("`hf_path` is `{path}`, but datasets from the Hugging Face hub are not built yet"),
                "download its files and use `hf_path=parquet hf_train_files='data/*.parquet'`, or `text` or `json`",
            )),
            Some(_) => {}
        }
        if self.hf_train_files.is_none() && !self.is_repository() {
            problems.push(Problem::inconsistent(
                "`dataset_type` is `hf`, but `hf_train_files` is empty",
                "name the files to train on, such as `hf_train_files='data/*.txt'`",
            ));
        }
        for (key, columns) in
            [("train_data_columns", &self.train_data_columns), ("eval_data_columns", &self.eval_data_columns)]
        {
            if columns.len() != 1 {
                problems.push(Problem::inconsistent(
                    format!("`{key}` names {} columns, but documents are read from one", columns.len()),
                    format!("name the column that holds the text, such as `{key}=text`"),
                ));
            }
        }
    }

    /// Whether the data is the documentation and source code of a repository.
    pub fn is_repository(&self) -> bool {
        self.hf_path.as_deref() == Some(REPOSITORY)
    }

    /// The patterns of the files to train on.
    pub fn train_patterns(&self) -> Vec<String> {
        patterns(self.hf_train_files.as_deref())
    }

    /// The patterns of the files to evaluate on.
    pub fn eval_patterns(&self) -> Vec<String> {
        patterns(self.hf_eval_files.as_deref())
    }

    /// Whether there is anything to evaluate on.
    pub fn has_evaluation_data(&self) -> bool {
        self.dataset_type == DatasetType::Synthetic || self.hf_eval_files.is_some() || self.is_repository()
    }

    /// Sequences in a training batch, on all devices together.
    ///
    /// # Errors
    /// The devices together have no whole number of sequences.
    pub fn global_batch(&self, num_devices: usize) -> Result<usize, ConfigError> {
        whole_batch("per_device_batch_size", self.per_device_batch_size, num_devices)
    }

    /// Sequences in an evaluation batch, on all devices together.
    ///
    /// # Errors
    /// The devices together have no whole number of sequences.
    pub fn eval_global_batch(&self, num_devices: usize) -> Result<usize, ConfigError> {
        if self.eval_per_device_batch_size == 0.0 {
            return self.global_batch(num_devices);
        }
        whole_batch("eval_per_device_batch_size", self.eval_per_device_batch_size, num_devices)
    }
}

/// Splits patterns at commas, those within braces left alone.
fn patterns(text: Option<&str>) -> Vec<String> {
    let mut depth = 0_i32;
    let separator = |character: char| {
        match character {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        character == ',' && depth == 0
    };
    let parts = text.unwrap_or_default().split(separator);
    parts.map(str::trim).filter(|part| !part.is_empty()).map(str::to_owned).collect()
}

fn whole_batch(key: &str, per_device: f64, num_devices: usize) -> Result<usize, ConfigError> {
    let batch = per_device * num_devices as f64;
    let rounded = batch.round();
    // A third of a sequence on each of three devices is one sequence, whatever the last digit says.
    if rounded >= 1.0 && (batch - rounded).abs() < 1e-6 {
        return Ok(rounded as usize);
    }
    let nearest = rounded.max(1.0);
    Err(Problem::inconsistent(
        format!("`{key}` is `{per_device}`, which on {num_devices} devices makes {batch} sequences"),
        format!("use `{key}={}` for a batch of {nearest}", nearest / num_devices as f64),
    )
    .into())
}

group! {
    /// The tokenizer of the run.
    pub struct TokenizerGroup {
        tokenizer_type: TokenizerType,
        tokenizer_path: Option<PathBuf>,
        tokenizer_vocab_size: usize,
        add_bos: bool,
        add_eos: bool,
        vocab_size: usize,
    }
}

impl TokenizerGroup {
    fn check(&self, problems: &mut Vec<Problem>) {
        if self.tokenizer_vocab_size > self.vocab_size {
            problems.push(Problem::inconsistent(
                format!(
                    "`tokenizer_vocab_size` is `{}`, more than `vocab_size`, `{}`",
                    self.tokenizer_vocab_size, self.vocab_size
                ),
                format!("use `vocab_size={}`, or a smaller tokenizer", self.tokenizer_vocab_size),
            ));
        }
        if let (Some(path), 1..) = (&self.tokenizer_path, self.tokenizer_vocab_size) {
            problems.push(Problem::inconsistent(
                format!(
                    "`tokenizer_path` is `{}`, but `tokenizer_vocab_size={}` asks to train a tokenizer",
                    path.display(),
                    self.tokenizer_vocab_size
                ),
                "leave out one of the two",
            ));
        }
    }

    /// Checks that there is a tokenizer for data that is text.
    ///
    /// # Errors
    /// No tokenizer is named.
    pub fn require(&self) -> Result<(), ConfigError> {
        let named = self.tokenizer_type == TokenizerType::Byte
            || self.tokenizer_path.is_some()
            || self.tokenizer_vocab_size > 0;
        if named {
            return Ok(());
        }
        Err(Problem::inconsistent(
            "the data is text, but `tokenizer_path` is empty",
            "name a `tokenizer.json`, or use `tokenizer_type=byte`, or train one: `tokenizer_vocab_size=4096` or `maxtext tokenizer train`",
        )
        .into())
    }
}
