//! The dataset of a run whose keys name no data, or only files.
//!
//! MaxText's default is a TensorFlow dataset. A run that names no data uses the table's default instead and notes it. A
//! run that names data without a `dataset_type` keeps MaxText's meaning, and is refused if the data is no TensorFlow
//! dataset.

use serde_json::Value;

use crate::{DataFormat, config::Config, groups::FromValue, origin::Origin};

/// The keys that name data of any type.
const NAMING_KEYS: &[&str] = &[
    "dataset_path",
    "dataset_name",
    "eval_dataset_name",
    "hf_path",
    "hf_name",
    "hf_data_dir",
    "hf_train_files",
    "hf_eval_files",
    "grain_train_files",
    "grain_train_mixture_config_path",
    "grain_eval_files",
    "olmo_index_path",
];

/// The keys that select a split of a dataset from the hub. Local files have none.
const HUB_KEYS: &[&str] = &["train_split", "hf_eval_split"];

/// The keys that evaluate on a preset's dataset. They yield with it, unless other files replace it.
const EVALUATION_KEYS: &[&str] = &["eval_interval", "eval_steps"];

impl Config {
    /// Replaces MaxText's default by ours if a file merely repeats it, and ours by MaxText's if keys name data without
    /// a type.
    pub(crate) fn settle_dataset(&mut self) {
        let entry = self.entry("dataset_type");
        let ours = entry.key.default.value();
        let theirs = entry.key.maxtext_default.map_or(Value::Null, |default| default.value());
        let is_repeated = entry.value == theirs && !entry.origin.is_by_hand();
        if entry.origin != Origin::Default && !is_repeated {
            return;
        }
        let asks = |name: &&str| {
            let entry = self.entry(name);
            // A named model's file describes MaxText's own training of it, on data that the user did not name.
            !matches!(entry.origin, Origin::Model { .. }) && entry.key.asks(&entry.value)
        };
        let names_data = NAMING_KEYS.iter().any(asks);
        let (value, origin) = match (names_data, is_repeated) {
            (true, true) => return,
            (true, false) => (theirs, Origin::Derived),
            (false, _) => (ours, Origin::Default),
        };
        self.replace("dataset_type", value, origin);
    }

    /// Replaces the dataset of a preset by files that are given. Their names tell the format.
    pub(crate) fn settle_files(&mut self) {
        if let Some(format) = self.format_of_files() {
            self.replace("hf_path", Value::from(format), Origin::Derived);
        }
        let path = self.entry("hf_path").value.as_str().unwrap_or_default();
        let Some(format) = DataFormat::from_value(&path.into()) else { return };
        let has_files = self.entry("hf_eval_files").value.as_str().is_some_and(|files| !files.is_empty());
        let is_evaluated = has_files || format.is_made_here();
        let evaluation = if is_evaluated { &[] } else { EVALUATION_KEYS };
        for name in HUB_KEYS.iter().chain(evaluation) {
            let entry = self.entry(name);
            if matches!(entry.origin, Origin::Preset { .. }) {
                self.replace(name, entry.key.default.value(), Origin::Default);
            }
        }
    }

    /// The format of the files that replace the dataset of a preset.
    fn format_of_files(&self) -> Option<&'static str> {
        let files = self.entry("hf_train_files");
        let is_of_preset = matches!(self.entry("hf_path").origin, Origin::Preset { .. });
        if !is_of_preset || !files.origin.is_given() {
            return None;
        }
        let names: Vec<&str> = files.value.as_str()?.split(',').map(str::trim).collect();
        let all_end = |endings: &[&str]| {
            names.iter().all(|name| endings.iter().any(|ending| name.trim_end_matches('}').ends_with(ending)))
        };
        let formats = [("json", &[".json", ".jsonl"][..]), ("parquet", &[".parquet"])];
        formats.iter().find(|(_, endings)| all_end(endings)).map(|(format, _)| *format)
    }

    /// Lets MaxText's earlier switch of reinforcement learning set the present one.
    pub(crate) fn settle_grpo(&mut self) {
        if self.entry("use_grpo").value == true && !self.entry("use_rl").origin.is_given() {
            self.replace("use_rl", true.into(), Origin::Derived);
        }
    }

    /// Sets the mask of trained parameters to that of a student.
    pub(crate) fn settle_student(&mut self) {
        let patterns = self.entry("student_params_to_update").value.clone();
        let is_set = |name: &str| self.entry(name).key.asks(&self.entry(name).value);
        let is_student = is_set("teacher_overrides") || is_set("offline_data_dir");
        let names_some = patterns.as_array().is_some_and(|patterns| !patterns.is_empty());
        if is_student && names_some && !is_set("trainable_parameters_mask") {
            self.replace("trainable_parameters_mask", patterns, Origin::Derived);
        }
    }

    pub(crate) fn replace(&mut self, name: &str, value: Value, origin: Origin) {
        let entry = self.entries.get_mut(name).expect("the key is in the table");
        (entry.value, entry.origin) = (value, origin);
    }

    /// Notes about training with this configuration, in addition to [`Config::notes`].
    pub fn training_notes(&self) -> Vec<String> {
        let entry = self.entry("dataset_type");
        let is_set = |key: &str| self.entry(key).value.as_str().is_some_and(|path| !path.is_empty());
        if is_set("offline_data_dir")
            || is_set("rollouts_path")
            || entry.origin != Origin::Default
            || entry.value != entry.key.default.value()
        {
            return Vec::new();
        }
        vec![format!(
            "no key names data, so the run trains on random tokens (`dataset_type={}`): MaxText's default, `tfds`, needs \
             `dataset_path`; `dataset_type=hf` and `dataset_type=grain` read local files",
            entry.shown()
        )]
    }
}
