//! `maxtext checkpoint average`.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::atomic::Ordering,
};

use mt_checkpoint::{
    Checkpoint, CheckpointError, CopiedBytes, ElementType, StorageFormat, TensorSpec, WeightsDirectory,
    WeightsOptions, WeightsSource, WeightsWriter, average_request, checkpoints_directory, complete_steps,
    mean, mean_type,
};

use super::{
    copy::num_bytes,
    export::{CONFIG, TAKEN_ALONG, check_target},
    table::{bytes, counted},
    target::{self, CHECKPOINTS, Output, copy_run_files},
};
use crate::{
    arguments::Average,
    commands::report_loaded,
    failure::{Failure, print},
    progress::CopyProgress,
};

/// Runs `maxtext checkpoint average`.
pub fn run(arguments: &Average) -> Result<(), Failure> {
    let paths = match (arguments.last, arguments.paths.as_slice()) {
        (Some(number), [run]) => newest(run, number)?,
        (Some(_), _) => {
            return Err(Failure::user(
                "`--last` concerns one run\nhint: name one run, or leave out `--last` and name each checkpoint",
            ));
        }
        (None, paths) => paths.to_vec(),
    };
    if paths.len() < 2 {
        return Err(Failure::user(format!(
            "`{}` alone has no mean\nhint: name two or more checkpoints, or a run with `--last 3`",
            arguments.paths[0].display()
        )));
    }
    let weights = weights(&arguments.weights, paths.len())?;
    let sources = paths.iter().map(|path| WeightsSource::open(path)).collect::<Result<Vec<_>, _>>()?;
    sources.iter().for_each(|source| report_loaded(source.skipped(), &[], None));
    let (mut checkpoints, mut directories) = (Vec::new(), Vec::new());
    for (path, source) in paths.iter().zip(sources) {
        match source {
            WeightsSource::Orbax(checkpoint) => checkpoints.push(checkpoint),
            WeightsSource::Safetensors(directory) => directories.push(directory),
            _ => {
                return Err(Failure::user(format!(
                    "`{}` is neither a checkpoint of a run nor a Hugging Face directory\nhint: convert it with `checkpoint import` or `checkpoint export` first",
                    path.display()
                )));
            }
        }
    }
    match (checkpoints.is_empty(), directories.is_empty()) {
        (false, true) => of_checkpoints(&paths, &checkpoints, &weights, &arguments.output),
        (true, false) => of_directories(&directories, &weights, &arguments.output),
        _ => Err(Failure::user(
            "checkpoints of runs and Hugging Face directories have no common mean\nhint: convert all of them to one format with `checkpoint import` or `checkpoint export`",
        )),
    }
}

/// The newest checkpoints of a run.
fn newest(run: &Path, number: usize) -> Result<Vec<PathBuf>, Failure> {
    let Some(directory) = checkpoints_directory(run)? else {
        return Err(Failure::user(format!(
            "`{}` is not a run with checkpoints\nhint: `--last` takes the directory of a run",
            run.display()
        )));
    };
    let steps = complete_steps(&directory)?;
    if steps.len() < number {
        return Err(Failure::user(format!(
            "`{}` holds {}, fewer than `--last {number}`\nhint: keep more with `max_num_checkpoints_to_keep`, or average fewer",
            run.display(),
            counted(steps.len(), "checkpoint"),
        )));
    }
    Ok(steps[steps.len() - number..].iter().map(|step| directory.join(step.to_string())).collect())
}

/// The weights of checkpoints, whose sum is 1.
fn weights(given: &[f64], number: usize) -> Result<Vec<f64>, Failure> {
    if given.is_empty() {
        return Ok(vec![1.0 / number as f64; number]);
    }
    let sum: f64 = given.iter().sum();
    let are_valid = given.len() == number && given.iter().all(|weight| weight.is_finite()) && sum.is_normal();
    if !are_valid {
        return Err(Failure::user(format!(
            "`--weights` are not {number} numbers with a sum other than 0\nhint: give one for each checkpoint, such as `--weights 0.8,0.2`"
        )));
    }
    Ok(given.iter().map(|weight| weight / sum).collect())
}

fn of_checkpoints(
    paths: &[PathBuf],
    checkpoints: &[Checkpoint],
    weights: &[f64],
    output: &Path,
) -> Result<(), Failure> {
    target::check(output)?;
    let copied = CopiedBytes::default();
    let request = average_request(checkpoints, weights, &copied)?;
    let total = num_bytes(&checkpoints[0], |name| name.starts_with("params."));
    let progress = CopyProgress::start("averaging", &copied, total);
    let step = checkpoints.iter().filter_map(Checkpoint::step).max().unwrap_or(0);
    let written = Output { directory: output, format: StorageFormat::default(), step, request };
    let saved = written.write(|directory| copy_run_files(&paths[0], directory).map(|_| ()))?;
    progress.end();
    print(&format!(
        "wrote the mean of {} ({}) to `{}`",
        counted(checkpoints.len(), "checkpoint"),
        bytes(saved.bytes),
        output.join(CHECKPOINTS).join(step.to_string()).display()
    ))
}

fn of_directories(directories: &[WeightsDirectory], weights: &[f64], output: &Path) -> Result<(), Failure> {
    check_target(output)?;
    let first = &directories[0];
    let mut specs = Vec::new();
    for tensor in first.tensors() {
        let dtype = match &tensor.dtype {
            ElementType::Known(dtype) if mean_type(*dtype) => *dtype,
            other => {
                let (file, name) = (tensor.file.to_path_buf(), tensor.name.clone());
                return Err(CheckpointError::UnreadableTensor { file, name, dtype: other.to_string() }.into());
            }
        };
        specs.push(TensorSpec { name: tensor.name.clone(), dtype, dims: tensor.dims.clone() });
    }
    for other in &directories[1..] {
        check_same(first, other)?;
    }
    let (copied, total) = (CopiedBytes::default(), first.num_bytes());
    let progress = CopyProgress::start("averaging", &copied, total);
    // The weights are written last: a directory without weights is not mistaken for a complete model.
    fs::create_dir_all(output)
        .map_err(|source| CheckpointError::Unwritable { path: output.to_owned(), source })?;
    for name in TAKEN_ALONG.iter().chain([&CONFIG]) {
        let from = first.path().join(name);
        if first.path().is_dir() && from.is_file() {
            fs::copy(&from, output.join(name))
                .map_err(|error| Failure::run(format!("cannot copy `{}`: {error}", from.display())))?;
        }
    }
    let names: Vec<String> = specs.iter().map(|spec| spec.name.clone()).collect();
    let mut writer = WeightsWriter::create(output, specs, WeightsOptions::default())?;
    for name in names {
        let arrays =
            directories.iter().map(|directory| directory.read(&name)).collect::<Result<Vec<_>, _>>()?;
        let mean = mean(&arrays, weights);
        copied.fetch_add(mean.bytes().len() as u64, Ordering::Relaxed);
        writer.write(&name, &mean)?;
    }
    let written = writer.finish()?;
    progress.end();
    print(&format!(
        "wrote the mean of {} ({}) to `{}`",
        counted(directories.len(), "model"),
        bytes(written.num_bytes),
        output.display()
    ))
}

/// Refuses directories whose tensors have other names or shapes.
fn check_same(first: &WeightsDirectory, other: &WeightsDirectory) -> Result<(), Failure> {
    let lacks = |one: &WeightsDirectory, other: &WeightsDirectory| {
        let odd = one.tensors().iter().find(|tensor| {
            let same = other.tensor(&tensor.name);
            same.is_none_or(|same| same.dims != tensor.dims || !same.dtype.known().is_some_and(mean_type))
        });
        odd.map(|tensor| tensor.name.clone())
    };
    match lacks(first, other).or_else(|| lacks(other, first)) {
        None => Ok(()),
        Some(name) => Err(CheckpointError::OtherParameters {
            first: first.path().to_owned(),
            other: other.path().to_owned(),
            reason: format!("`{name}` is not in both with the same shape"),
        }
        .into()),
    }
}
