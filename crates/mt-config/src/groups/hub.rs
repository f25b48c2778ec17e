//! Datasets and files of the Hugging Face hub.

use super::{DataFormat, DataGroup, FromValue, group};
use crate::{config::Config, error::Problem};

group! {
    /// The choice of files of a dataset of the Hugging Face hub, and the token of requests to it.
    pub struct HubGroup {
        hf_name: Option<String>,
        hf_subset: Option<String>,
        hf_data_dir: Option<String>,
        hf_eval_split: Option<String>,
        hf_access_token: Option<String>,
    }
}

impl HubGroup {
    /// Sets the token of this process's requests to the hub, if a configuration has one.
    pub(crate) fn set_token(config: &Config) {
        let group = Self::read(config, &mut Vec::new());
        if let Some(token) = group.and_then(|group| group.hf_access_token) {
            mt_storage::hub::set_token(Some(token));
        }
    }

    fn check(&self, config: &Config, problems: &mut Vec<Problem>) {
        if config.hub_name().is_some() {
            return;
        }
        let chosen = [
            ("hf_name", &self.hf_name),
            ("hf_subset", &self.hf_subset),
            ("hf_data_dir", &self.hf_data_dir),
            ("hf_eval_split", &self.hf_eval_split),
        ];
        let is_hf = config.entry("dataset_type").value == "hf";
        for (key, _) in chosen.into_iter().filter(|(key, value)| {
            let entry = config.entry(key);
            is_hf && value.is_some() && config.matters(entry) && entry.origin.is_given()
        }) {
            problems.push(Problem::inconsistent(
                format!(
                    "{}, but {}, which are files and no dataset of the Hugging Face hub",
                    config.stated(key),
                    config.stated("hf_path")
                ),
                "leave it out, or name a dataset: `hf_path=owner/name`",
            ));
        }
    }
}

impl Config {
    /// The name of the dataset of the Hugging Face hub that a run reads: `owner/name` or `owner/name@revision`.
    pub fn hub_dataset(&self) -> Option<String> {
        let data = DataGroup::read(self, &mut Vec::new())?;
        data.is_of_hub().then(|| self.hub_name()).flatten()
    }

    /// The value of `hf_path` if it has the form of such a name.
    pub(super) fn hub_name(&self) -> Option<String> {
        let path = self.entry("hf_path").value.as_str()?;
        let is_format = DataFormat::from_value(&path.into()).is_some();
        let is_hf = self.entry("dataset_type").value == "hf";
        (is_hf && !is_format && mt_storage::hub::has_form_of_name(path)).then(|| path.to_owned())
    }
}
