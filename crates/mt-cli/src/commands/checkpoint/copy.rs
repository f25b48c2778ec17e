//! `maxtext checkpoint params-only` and `reshard`.

use std::path::Path;

use mt_checkpoint::{
    Checkpoint, CopiedBytes, CopyPart, CopyShards, StorageFormat, StoredValue, WeightsSource, copy_request,
};
use mt_config::{CheckpointGroup, Config, Request};

use super::{
    table::bytes,
    target::{self, CHECKPOINTS, Output, copy_run_files, format_of},
};
use crate::{
    arguments::{ParamsOnly, Reshard},
    commands::report_loaded,
    failure::{Failure, print},
    progress::CopyProgress,
};

/// The keys that choose how a copy is stored.
const STORAGE_KEYS: [&str; 3] = [
    "checkpoint_storage_use_ocdbt",
    "checkpoint_storage_use_zarr3",
    "checkpoint_storage_target_data_file_size_bytes",
];

/// Runs `maxtext checkpoint params-only`.
pub fn params_only(arguments: &ParamsOnly) -> Result<(), Failure> {
    let copy = Copy {
        path: &arguments.path,
        output: &arguments.output,
        part: CopyPart::Parameters,
        shards: CopyShards::AsStored,
        format: StorageFormat::default(),
    };
    copy.write("params-only")
}

/// Runs `maxtext checkpoint reshard`.
pub fn reshard(arguments: Reshard) -> Result<(), Failure> {
    for setting in &arguments.settings {
        let key = setting.split_once('=').map_or(setting.as_str(), |(key, _)| key);
        if !STORAGE_KEYS.contains(&key) {
            let keys = STORAGE_KEYS.map(|key| format!("`{key}`")).join(", ");
            return Err(Failure::user(format!(
                "`{setting}` does not choose how a checkpoint is stored\nhint: the keys of `checkpoint reshard` are {keys}"
            )));
        }
    }
    let config = Config::resolve(&Request::from_process(arguments.settings))?;
    let copy = Copy {
        path: &arguments.path,
        output: &arguments.output,
        part: CopyPart::Whole,
        shards: arguments.shards.map_or(CopyShards::AsStored, |number| CopyShards::Number(number as usize)),
        format: format_of(&CheckpointGroup::from_config(&config)?),
    };
    copy.write("reshard")
}

struct Copy<'a> {
    path: &'a Path,
    output: &'a Path,
    part: CopyPart,
    shards: CopyShards,
    format: StorageFormat,
}

impl Copy<'_> {
    fn write(self, command: &str) -> Result<(), Failure> {
        target::check(self.output)?;
        let checkpoint = orbax_at(self.path, command)?;
        let copied = CopiedBytes::default();
        let request = copy_request(&checkpoint, self.part, self.shards, &copied)?;
        let total = num_bytes(&checkpoint, |name| match self.part {
            CopyPart::Whole => true,
            CopyPart::Parameters => name.starts_with("params."),
        });
        let progress = CopyProgress::start("copying", &copied, total);
        let step = checkpoint.step().unwrap_or(0);
        let output = Output { directory: self.output, format: self.format, step, request };
        let run = self.path;
        let saved = output.write(|directory| {
            if !copy_run_files(run, directory)? {
                say!(
                    "note: `{}` belongs to no run, so neither configuration nor tokenizer is copied",
                    run.display()
                );
            }
            Ok(())
        })?;
        progress.end();
        let what = match self.part {
            CopyPart::Whole => "the whole checkpoint",
            CopyPart::Parameters => "the parameters",
        };
        print(&format!(
            "wrote {what} of step {step} ({}) to `{}`",
            bytes(saved.bytes),
            self.output.join(CHECKPOINTS).join(step.to_string()).display()
        ))
    }
}

/// Opens an Orbax checkpoint. Other formats hold neither optimizer state nor shards.
pub fn orbax_at(path: &Path, command: &str) -> Result<Checkpoint, Failure> {
    match WeightsSource::open(path)? {
        WeightsSource::Orbax(checkpoint) => {
            report_loaded(checkpoint.skipped(), &[], None);
            Ok(checkpoint)
        }
        _ => Err(Failure::user(format!(
            "`{}` is not a checkpoint of a run\nhint: `checkpoint {command}` takes a run, one of its checkpoints or any Orbax checkpoint; `checkpoint import` turns other formats into one",
            path.display()
        ))),
    }
}

/// The bytes of the arrays that a command reads.
pub fn num_bytes(checkpoint: &Checkpoint, is_read: impl Fn(&str) -> bool) -> u64 {
    let entries = checkpoint.entries().iter().filter(|entry| is_read(&entry.name));
    let sizes = entries.filter_map(|entry| match &entry.value {
        StoredValue::Array { dtype, dims } => {
            Some(dims.iter().product::<usize>() as u64 * dtype.byte_size() as u64)
        }
        StoredValue::Empty(_) | StoredValue::Other(_) => None,
    });
    sizes.sum()
}
