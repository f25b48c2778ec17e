//! `maxtext decode`.

use std::path::{Path, PathBuf};

use mt_config::{Config, DecodeConfig, Request, run_directory_of, saved_config_path};

use crate::{arguments::Settings, commands::warn, failure::Failure};

/// Runs `maxtext decode`.
pub fn run(settings: Settings) -> Result<(), Failure> {
    let (config, run_directory) = configure(settings.settings)?;
    let decode = DecodeConfig::from_config(&config)?;
    let from = run_directory.unwrap_or_default();
    Err(Failure::run(format!(
        "this build cannot continue `{}` from `{}`",
        decode.decode.prompt,
        from.display()
    )))
}

/// The configuration, on top of that of the run whose weights are loaded, and that run's directory. A checkpoint that
/// belongs to no run of ours needs its model described by keys.
fn configure(arguments: Vec<String>) -> Result<(Config, Option<PathBuf>), Failure> {
    let request = Request::from_process(arguments);
    let given = Config::resolve(&request)?;
    let load = ["load_parameters_path", "load_full_state_path"]
        .into_iter()
        .filter_map(|key| Some((key, given.entry(key).value.as_str()?)))
        .find(|(_, path)| !path.is_empty());
    let Some((key, path)) = load else {
        return Err(Failure::user(
            "nothing says which model to decode with\n\
             hint: name a run or a checkpoint: `load_parameters_path=maxtext_output/my_run`",
        ));
    };
    if !Path::new(path).exists() {
        return Err(Failure::user(format!(
            "`{key}` is `{path}` ({}), which does not exist\nhint: name the directory of a run or of a checkpoint",
            given.entry(key).origin
        )));
    }
    let run_directory = run_directory_of(Path::new(path));
    let config = match &run_directory {
        Some(directory) => Config::resolve(&request.over_saved(saved_config_path(directory)))?,
        None => given,
    };
    warn(&config);
    Ok((config, run_directory))
}
