//! Datasets of the Hugging Face hub that keys name: `hf_path=owner/name`.

use mt_config::{Config, HubGroup, Request};
use mt_data::HubSelection;
use mt_storage::hub::{self, Repository, RepositoryKind};

use crate::{commands::resolve, failure::Failure};

/// The branch of the hub with every dataset as Parquet files.
const CONVERTED: &str = "refs/convert/parquet";

/// The configuration with files in place of a dataset of the hub, if keys name one. The files are named at the commit
/// that the dataset has now, so that the configuration of a run records what it is trained on.
pub fn with_files_of_hub(request: Request, config: Config) -> Result<(Request, Config), Failure> {
    let Some(named) = config.hub_dataset() else { return Ok((request, config)) };
    let group = HubGroup::from_config(&config)?;
    let of_keys = |value: &Option<String>| value.clone().filter(|value| !value.is_empty());
    let text = |key: &str| config.entry(key).value.as_str().unwrap_or_default().to_owned();
    let patterns = |key: &str| -> Vec<String> {
        text(key)
            .split(',')
            .map(|pattern| pattern.trim().to_owned())
            .filter(|pattern| !pattern.is_empty())
            .collect()
    };
    let failed = |error: std::io::Error| {
        let message = format!("cannot read the dataset `{named}` (`hf_path`): {error}");
        if mt_storage::is_user_error(&error) { Failure::user(message) } else { Failure::run(message) }
    };
    let (name, revision) = named.split_once('@').unwrap_or((named.as_str(), "main"));
    let repository = |revision: &str| Repository {
        kind: RepositoryKind::Dataset,
        name: name.to_owned(),
        revision: revision.to_owned(),
    };
    let mut listed = hub::list(&repository(revision)).map_err(failed)?;
    if revision == "main" && !HubSelection::has_data(&listed.files) {
        listed = hub::list(&repository(CONVERTED)).map_err(failed)?;
    }
    let selection = |patterns: Vec<String>| HubSelection {
        name: name.to_owned(),
        configuration: of_keys(&group.hf_name).or_else(|| of_keys(&group.hf_subset)),
        directory: of_keys(&group.hf_data_dir),
        patterns,
    };
    let urls = |files: Vec<String>| -> String {
        let urls =
            files.iter().map(|file| format!("hf://datasets/{name}@{}/{}", listed.commit, escaped(file)));
        urls.collect::<Vec<_>>().join(",")
    };
    let train = selection(patterns("hf_train_files")).files(&listed.files, &text("train_split"))?;
    let mut arguments =
        vec![format!("hf_path={}", train.format), format!("hf_train_files={}", urls(train.files))];
    let eval_patterns = patterns("hf_eval_files");
    let evaluation = match of_keys(&group.hf_eval_split) {
        None if eval_patterns.is_empty() => None,
        split => Some(selection(eval_patterns).files(&listed.files, &split.unwrap_or_default())?),
    };
    if let Some(evaluation) = evaluation {
        if evaluation.format != train.format {
            return Err(Failure::user(format!(
                "the files of `{name}` to train on are {}, but those to evaluate on are {}\nhint: name files of one \
                 format with `hf_train_files` and `hf_eval_files`",
                train.format, evaluation.format
            )));
        }
        arguments.push(format!("hf_eval_files={}", urls(evaluation.files)));
    }
    // The files are those of the split and of the configuration.
    arguments.extend(["train_split=train", "hf_eval_split=", "hf_name=", "hf_data_dir="].map(str::to_owned));
    if !text("hf_subset").is_empty() {
        arguments.push("hf_subset=".to_owned());
    }
    let mut request = request;
    request.arguments.extend(arguments);
    let config = resolve(&request)?;
    Ok((request, config))
}

/// A file's name with the characters escaped that patterns give a meaning.
fn escaped(file: &str) -> String {
    let special = |c: char| matches!(c, '*' | '?' | '[' | ']');
    file.chars().map(|c| if special(c) { format!("[{c}]") } else { c.to_string() }).collect()
}
