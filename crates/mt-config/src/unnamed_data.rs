//! The dataset of a run whose keys name no data.
//!
//! MaxText's default is a TensorFlow dataset, which is not built. A run that names no data uses the table's default
//! instead and notes it. A run that names data without a `dataset_type` keeps MaxText's meaning, and is refused because
//! TensorFlow datasets are not built.

use serde_json::Value;

use crate::{config::Config, error::is, origin::Origin, table::features::TENSORFLOW_DATASETS};

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
        let entry = self.entries.get_mut("dataset_type").expect("the key is in the table");
        (entry.value, entry.origin) = (value, origin);
    }

    /// Notes about training with this configuration, in addition to [`Config::notes`].
    pub fn training_notes(&self) -> Vec<String> {
        let entry = self.entry("dataset_type");
        if entry.origin != Origin::Default || entry.value != entry.key.default.value() {
            return Vec::new();
        }
        vec![format!(
            "no key names data, so the run trains on random tokens (`dataset_type={}`): MaxText's default, \
             {TENSORFLOW_DATASETS}, {} not built yet; `dataset_type=hf` reads local files",
            entry.shown(),
            is(TENSORFLOW_DATASETS)
        )]
    }
}
