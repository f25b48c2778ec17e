//! The run, its checkpoints, decoding and debugging.

use std::path::{Path, PathBuf};

use super::{
    EncoderGroup,
    choices::{Hardware, SamplingStrategy},
    data::check_templates,
    group,
};
use crate::{config::Config, error::Problem};

group! {
    /// The run: its length, its directory, its hardware.
    pub struct RunGroup {
        run_name: String,
        base_output_directory: Option<PathBuf>,
        log_config: bool,
        steps: u64,
        log_period: u64,
        max_inflight_computations: usize,
        eval_interval: Option<u64>,
        eval_steps: Option<u64>,
        eval_start_step: u64,
        target_eval_loss: f64,
        abort_on_nan_loss: bool,
        abort_on_inf_loss: bool,
        metrics_file: Option<PathBuf>,
        enable_tensorboard: bool,
        hardware: Hardware,
        num_cpu_devices: usize,
        cpu_kernels: bool,
        batch_invariant: bool,
        pjrt_plugin_path: Option<PathBuf>,
    }
}

impl RunGroup {
    fn check(&self, config: &Config, problems: &mut Vec<Problem>) {
        if self.run_name.chars().any(char::is_control) {
            problems.push(Problem::inconsistent(
                format!(
                    "{}, but the name of a directory has no line breaks or other control characters",
                    config.stated("run_name")
                ),
                "use letters, digits, `-`, `_` and `.`",
            ));
        } else if self.run_name.contains(['/', '\\']) || self.run_name == ".." || self.run_name == "." {
            problems.push(Problem::inconsistent(
                format!("{}, which does not name one directory", config.stated("run_name")),
                "put the path into `base_output_directory` and its last component into `run_name`",
            ));
        }
        self.check_invariance(config, problems);
    }

    /// Programs are batch-invariant by CPU kernels, which run on one device.
    fn check_invariance(&self, config: &Config, problems: &mut Vec<Problem>) {
        if !self.batch_invariant {
            return;
        }
        let conflicts = [
            (!self.cpu_kernels, "cpu_kernels", "only kernels keep the order of sums"),
            (self.num_cpu_devices > 1, "num_cpu_devices", "sums that devices divide depend on the division"),
            (
                matches!(self.hardware, Hardware::Gpu | Hardware::Tpu),
                "hardware",
                "only CPU kernels keep the order of sums",
            ),
        ];
        for (_, key, reason) in conflicts.into_iter().filter(|(conflicts, ..)| *conflicts) {
            problems.push(Problem::inconsistent(
                format!("{} and {}, but {reason}", config.stated("batch_invariant"), config.stated(key)),
                format!("leave out `batch_invariant` or `{key}`"),
            ));
        }
    }

    /// The evaluation loss at which the run stops, if one is set.
    pub fn target_loss(&self) -> Option<f64> {
        (self.target_eval_loss > 0.0).then_some(self.target_eval_loss)
    }

    /// The directory that contains the runs.
    pub fn output_directory(&self) -> PathBuf {
        self.base_output_directory.clone().unwrap_or_else(|| PathBuf::from("maxtext_output"))
    }

    /// The run's own directory on this machine. That of a run in an object store holds what it is about to send there.
    pub fn directory(&self) -> PathBuf {
        mt_storage::mirror_of(&self.stored_directory())
    }

    /// The run's own directory, on a disk or in an object store.
    pub fn stored_directory(&self) -> PathBuf {
        self.output_directory().join(&self.run_name)
    }

    /// The directory of the run's checkpoints, on a disk or in an object store.
    pub fn checkpoint_directory(&self) -> PathBuf {
        self.stored_directory().join("checkpoints")
    }

    /// The directory of TensorBoard events.
    pub fn tensorboard_directory(&self) -> PathBuf {
        self.directory().join("tensorboard")
    }

    /// The file of metrics in JSON lines, one object per step.
    pub fn metrics_path(&self) -> PathBuf {
        self.metrics_file.clone().unwrap_or_else(|| self.directory().join("metrics").join("metrics.jsonl"))
    }

    /// The record of how the run's time is spent.
    pub fn goodput_path(&self) -> PathBuf {
        self.directory().join("metrics").join("goodput.jsonl")
    }

    /// The file of the stacks of all threads.
    pub fn stacks_path(&self) -> PathBuf {
        self.directory().join("stacks.txt")
    }

    /// The file of the configuration that the run was saved with; of a run in an object store, a copy of it.
    pub fn saved_configuration(&self) -> PathBuf {
        let stored = self.stored_directory();
        let copy = mt_storage::is_remote(&stored).then(|| mt_storage::run_of(&stored)).flatten();
        saved_config_path(&copy.unwrap_or(stored))
    }

    /// The file of the resolved configuration.
    pub fn config_path(&self) -> PathBuf {
        saved_config_path(&self.directory())
    }
}

/// The directory of a run's tokenizer.
pub fn tokenizer_directory(run_directory: &Path) -> PathBuf {
    run_directory.join("tokenizer")
}

/// The file of the numbers by which a run's memories of n-grams know tokens.
pub fn token_numbers_path(run_directory: &Path) -> PathBuf {
    run_directory.join("token_numbers.json")
}

/// The file of a run's resolved configuration.
pub fn saved_config_path(run_directory: &Path) -> PathBuf {
    run_directory.join("config.yml")
}

/// The run that a path belongs to: the path itself, or the nearest ancestor with a saved configuration. A run, its
/// `checkpoints` directory, a step and an item of that step all lead to the run. For a run in an object store, it is
/// a directory of this machine with copies of its small files.
pub fn run_directory_of(path: &Path) -> Option<PathBuf> {
    if mt_storage::is_remote(path) {
        return mt_storage::run_of(path);
    }
    let absolute = std::path::absolute(path).ok()?;
    absolute.ancestors().take(4).find(|directory| saved_config_path(directory).is_file()).map(Path::to_owned)
}

group! {
    /// Saving and restoring.
    pub struct CheckpointGroup {
        enable_checkpointing: bool,
        async_checkpointing: bool,
        checkpoint_period: u64,
        max_num_checkpoints_to_keep: Option<usize>,
        checkpoint_storage_use_ocdbt: bool,
        checkpoint_storage_use_zarr3: bool,
        checkpoint_storage_target_data_file_size_bytes: u64,
        save_checkpoint_on_start: bool,
        save_checkpoint_on_completion: bool,
        load_parameters_path: Option<PathBuf>,
        hf_model_path: Option<PathBuf>,
        load_full_state_path: Option<PathBuf>,
        lora_restore_path: Option<PathBuf>,
    }
}

impl CheckpointGroup {
    fn check(&self, config: &Config, problems: &mut Vec<Problem>) {
        if self.load_parameters_path.is_some() && self.load_full_state_path.is_some() {
            problems.push(Problem::inconsistent(
                format!(
                    "{} and {}, but only one can be loaded",
                    config.stated("load_parameters_path"),
                    config.stated("load_full_state_path")
                ),
                "keep `load_parameters_path` to start anew from the weights, or `load_full_state_path` to continue",
            ));
        }
        if self.load_parameters_path.is_some() && self.hf_model_path.is_some() {
            problems.push(Problem::inconsistent(
                format!(
                    "{} and {}, but only one can be loaded",
                    config.stated("load_parameters_path"),
                    config.stated("hf_model_path")
                ),
                "keep one of the two; either can name a published model's directory",
            ));
        }
    }
}

impl CheckpointGroup {
    /// The path of the initial parameters: a run, a checkpoint, or a published model.
    pub fn parameters_path(&self) -> Option<&Path> {
        self.load_parameters_path.as_deref().or(self.hf_model_path.as_deref())
    }

    /// The run that provides the initial state or parameters, if its directory is known.
    pub fn parent_run(&self) -> Option<PathBuf> {
        let path = self.parameters_path().or(self.load_full_state_path.as_deref())?;
        run_directory_of(path)
    }

    /// The tokenizer that accompanies the loaded parameters: the published model's, or that of the parent run.
    pub fn brought_tokenizer(&self) -> Option<BroughtTokenizer> {
        let published = self.parameters_path().map(|path| BroughtTokenizer::Published(path.to_owned()));
        let of_run = self.parent_run().map(|run| BroughtTokenizer::OfRun(tokenizer_directory(&run)));
        published.into_iter().chain(of_run).find(BroughtTokenizer::exists)
    }
}

/// The directory of a tokenizer that accompanies parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BroughtTokenizer {
    /// A run saved its tokenizer here.
    OfRun(PathBuf),
    /// A published model's directory, which may hold tokenizers of several kinds.
    Published(PathBuf),
}

impl BroughtTokenizer {
    /// The tokenizer that accompanies these weights: a published model's, or a run's.
    pub fn of_weights(path: &Path) -> Option<Self> {
        let of_run = run_directory_of(path).map(|run| Self::OfRun(tokenizer_directory(&run)));
        [Self::Published(path.to_owned())].into_iter().chain(of_run).find(Self::exists)
    }

    fn exists(&self) -> bool {
        let files = ["tokenizer.json", "tokenizer.model"].map(|name| self.directory().join(name));
        files.iter().any(|file| file.is_file())
    }

    /// The directory.
    pub fn directory(&self) -> &Path {
        match self {
            Self::OfRun(directory) | Self::Published(directory) => directory,
        }
    }
}

group! {
    /// Prompts and sampling.
    pub struct DecodeGroup {
        prompt: String,
        prompts: Vec<String>,
        prompts_file: Option<PathBuf>,
        max_target_length: usize,
        max_prefill_predict_length: usize,
        decode_sampling_strategy: SamplingStrategy,
        decode_sampling_nucleus_p: f64,
        decode_sampling_top_k: usize,
        decode_sampling_temperature: f64,
        decode_seed: u64,
        decode_num_samples: usize,
        return_log_prob: bool,
        autoregressive_decode_assert: Option<String>,
        use_chat_template: Option<bool>,
        chat_template: Option<String>,
        chat_template_path: Option<PathBuf>,
        system_prompt: Option<String>,
    }
}

impl DecodeGroup {
    fn check_prompts(&self, config: &Config, problems: &mut Vec<Problem>) {
        let prompts = config.entry("prompts");
        // A file that states every key states the empty list, too.
        if self.prompts.is_empty() && prompts.is_asked_for() {
            problems.push(Problem::inconsistent(
                format!("{}, which names no prompt", prompts.stated()),
                "name one, as in `prompts=['The training loop']`, or leave out `prompts` for `prompt`",
            ));
        }
        if self.prompts_file.is_some() && !self.prompts.is_empty() {
            problems.push(Problem::inconsistent(
                format!(
                    "{} and {}, but prompts come from one of the two",
                    config.stated("prompts_file"),
                    config.stated("prompts")
                ),
                "leave out `prompts_file` or `prompts`",
            ));
        }
    }

    fn check(&self, config: &Config, problems: &mut Vec<Problem>) {
        use SamplingStrategy::{Composite, Greedy, Nucleus, TopK};
        let strategy = self.decode_sampling_strategy;
        // The prompt of an encoder takes no place beside the answer.
        let shares_places = !EncoderGroup::is_in(config);
        if shares_places && self.max_prefill_predict_length >= self.max_target_length {
            problems.push(Problem::inconsistent(
                format!(
                    "{}, but {}, which leaves nothing to generate",
                    config.stated("max_prefill_predict_length"),
                    config.stated("max_target_length")
                ),
                "make `max_target_length` larger or `max_prefill_predict_length` smaller",
            ));
        }
        let mass = self.decode_sampling_nucleus_p;
        if matches!(strategy, Nucleus | Composite) && !(mass > 0.0 && mass <= 1.0) {
            problems.push(Problem::inconsistent(
                format!(
                    "{}, but {}, which draws from a probability mass above 0 and at most 1",
                    config.stated("decode_sampling_nucleus_p"),
                    config.stated("decode_sampling_strategy")
                ),
                "set `decode_sampling_nucleus_p=0.9`, or choose `decode_sampling_strategy=weighted`",
            ));
        }
        if matches!(strategy, TopK | Composite) && self.decode_sampling_top_k == 0 {
            problems.push(Problem::inconsistent(
                format!(
                    "{}, but {}, which draws from that many tokens",
                    config.stated("decode_sampling_top_k"),
                    config.stated("decode_sampling_strategy")
                ),
                "set `decode_sampling_top_k=40`, or choose `decode_sampling_strategy=weighted`",
            ));
        }
        if strategy != Greedy && self.decode_sampling_temperature == 0.0 {
            problems.push(Problem::inconsistent(
                format!(
                    "{}, but {}, which divides by it",
                    config.stated("decode_sampling_temperature"),
                    config.stated("decode_sampling_strategy")
                ),
                "use `decode_sampling_strategy=greedy`, or a temperature above 0",
            ));
        }
        self.check_prompts(config, problems);
        check_templates(config, problems);
        if self.system_prompt.is_some() && self.use_chat_template == Some(false) {
            problems.push(Problem::inconsistent(
                format!(
                    "{}, but {}, and only a chat template has a place for it",
                    config.stated("system_prompt"),
                    config.stated("use_chat_template")
                ),
                "leave out `system_prompt`, or `use_chat_template`",
            ));
        }
    }
}

group! {
    /// The input and output files of scoring. The encoder of a model that has one reads the rows of
    /// `source_tokens_path`.
    pub struct LogitsGroup {
        tokens_path: Option<PathBuf>,
        source_tokens_path: Option<PathBuf>,
        logits_path: Option<PathBuf>,
    }
}

impl LogitsGroup {
    fn check(&self, config: &Config, problems: &mut Vec<Problem>) {
        for (key, path, example) in [
            ("tokens_path", &self.tokens_path, "tokens.json"),
            ("logits_path", &self.logits_path, "logits.npy"),
        ] {
            if path.is_none() {
                problems.push(Problem::inconsistent(
                    config.stated(key),
                    format!("name the file, such as `{key}={example}`"),
                ));
            }
        }
        if self.source_tokens_path.is_none() && EncoderGroup::is_in(config) {
            problems.push(Problem::inconsistent(
                format!(
                    "{}, but {}, whose encoder reads a source for each row of tokens",
                    config.stated("source_tokens_path"),
                    config.stated("decoder_block")
                ),
                "name the file of the sources, such as `source_tokens_path=sources.json`",
            ));
        }
    }
}

group! {
    /// Diagnostics.
    pub struct DebugGroup {
        dump_hlo: bool,
        dump_hlo_local_dir: PathBuf,
        dump_hlo_local_module_name: String,
        debug_sharding: bool,
        jax_cache_dir: Option<PathBuf>,
        compile_xla_flags: String,
    }
}

impl DebugGroup {
    fn check(&self, config: &Config, problems: &mut Vec<Problem>) {
        for flag in self.compile_xla_flags.split_whitespace() {
            if !flag.strip_prefix("--").is_some_and(|flag| flag.contains('=')) {
                problems.push(Problem::inconsistent(
                    format!(
                        "{}, where `{flag}` is not a compiler option",
                        config.stated("compile_xla_flags")
                    ),
                    "write each option as `--name=value`, with spaces between",
                ));
            }
        }
    }

    /// The compiler options as pairs of name and value.
    pub fn compiler_options(&self) -> Vec<(String, String)> {
        self.compile_xla_flags
            .split_whitespace()
            .filter_map(|flag| flag.strip_prefix("--")?.split_once('='))
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect()
    }
}
