//! `maxtext checkpoint verify`.

use std::path::{Path, PathBuf};

use mt_checkpoint::{Checkpoint, CheckpointError, WeightsSource, checkpoints_directory, complete_steps};
use serde_json::{Value, json};

use super::table::{bytes, counted};
use crate::{
    arguments::Verify,
    failure::{Failure, print},
};

/// The extent to which the bytes of a checkpoint can be checked.
#[derive(Clone, Copy)]
enum Coverage {
    /// Every byte has a checksum.
    EveryByte,
    /// Only the structure has checksums, and values can be decoded.
    Structure,
}

impl Coverage {
    fn text(self) -> &'static str {
        match self {
            Self::EveryByte => "every byte checked",
            Self::Structure => "all read; the format has no checksum of every byte",
        }
    }
}

/// The result for one checkpoint.
struct Verified {
    path: PathBuf,
    step: Option<u64>,
    num_bytes: u64,
    coverage: Coverage,
    damages: Vec<String>,
}

/// Runs `maxtext checkpoint verify`.
pub fn run(arguments: &Verify) -> Result<(), Failure> {
    let path = &arguments.path;
    let verified = match checkpoints_directory(path)? {
        Some(directory) => complete_steps(&directory)?
            .into_iter()
            .map(|step| verify(&directory.join(step.to_string())))
            .collect::<Result<Vec<_>, _>>()?,
        None => vec![verify(path)?],
    };
    if arguments.json {
        print(&format!("{:#}", json!(verified.iter().map(object).collect::<Vec<_>>())))?;
    } else {
        let lines: Vec<String> = verified.iter().flat_map(lines).collect();
        print(&lines.join("\n"))?;
    }
    let num_damaged = verified.iter().filter(|checkpoint| !checkpoint.damages.is_empty()).count();
    if num_damaged == 0 {
        return Ok(());
    }
    Err(Failure::run(format!(
        "{num_damaged} of {} {} damaged\nhint: a run resumes from its newest whole checkpoint; remove the damaged ones",
        counted(verified.len(), "checkpoint"),
        if num_damaged == 1 { "is" } else { "are" }
    )))
}

fn verify(path: &Path) -> Result<Verified, Failure> {
    let of_error = |error: CheckpointError| match error.is_corruption() {
        true => Ok(Verified {
            path: path.to_owned(),
            step: path.file_name().and_then(|name| name.to_str()?.parse().ok()),
            num_bytes: 0,
            coverage: Coverage::Structure,
            damages: vec![error.to_string()],
        }),
        false => Err(Failure::from(error)),
    };
    let source = match WeightsSource::open(path) {
        Ok(source) => source,
        Err(error) => return of_error(error),
    };
    if let WeightsSource::Orbax(checkpoint) = &source {
        return of_checkpoint(path, checkpoint);
    }
    let listing = source.listing()?;
    let mut damages = Vec::new();
    for tensor in listing.tensors.iter().filter(|tensor| tensor.dtype.known().is_some()) {
        match source.read(&tensor.name) {
            Ok(_) => {}
            Err(error) if error.is_corruption() => damages.push(error.to_string()),
            Err(error) => return Err(error.into()),
        }
    }
    let num_bytes = listing.totals().bytes;
    Ok(Verified { path: path.to_owned(), step: None, num_bytes, coverage: Coverage::Structure, damages })
}

fn of_checkpoint(path: &Path, checkpoint: &Checkpoint) -> Result<Verified, Failure> {
    let damages = checkpoint.find_damages()?.iter().map(ToString::to_string).collect();
    let coverage = if checkpoint.has_manifest() { Coverage::EveryByte } else { Coverage::Structure };
    let num_bytes = checkpoint.num_bytes()?;
    Ok(Verified { path: path.to_owned(), step: checkpoint.step(), num_bytes, coverage, damages })
}

fn lines(verified: &Verified) -> Vec<String> {
    let Verified { path, num_bytes, coverage, damages, .. } = verified;
    if damages.is_empty() {
        return vec![format!("`{}` is whole: {}, {}", path.display(), bytes(*num_bytes), coverage.text())];
    }
    let first = format!("`{}` is damaged:", path.display());
    std::iter::once(first).chain(damages.iter().map(|damage| format!("  {damage}"))).collect()
}

fn object(verified: &Verified) -> Value {
    json!({
        "path": verified.path.display().to_string(),
        "step": verified.step,
        "bytes": verified.num_bytes,
        "every_byte_checked": matches!(verified.coverage, Coverage::EveryByte),
        "damages": verified.damages,
    })
}
