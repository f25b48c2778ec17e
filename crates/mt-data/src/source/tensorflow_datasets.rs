//! Directories that `tfds` prepared: `dataset_info.json`, `features.json` and shards.

use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;

use super::ExampleFormat;
use crate::error::{DataError, Result};
use crate::files;

const INFO: &str = "dataset_info.json";
const FEATURES: &str = "features.json";
/// The names of shards if a split has no template.
const TEMPLATE: &str = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}";

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Info {
    name: String,
    #[serde(default)]
    file_format: String,
    #[serde(default)]
    splits: Vec<SplitInfo>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct SplitInfo {
    name: String,
    #[serde(default)]
    shard_lengths: Vec<Value>,
    #[serde(default)]
    filepath_template: String,
}

/// The shards of a split.
#[derive(Debug)]
pub(super) struct Shards {
    pub files: Vec<PathBuf>,
    pub format: ExampleFormat,
    /// The number of records of each file.
    pub lengths: Vec<u64>,
    /// The records that the split selects, over all files.
    pub ranges: Vec<Range<u64>>,
}

fn wrong(path: &Path, reason: String) -> DataError {
    DataError::TensorflowDataset { path: path.into(), reason }
}

/// The directory of a dataset `name/config:version` below `root`, or `root` itself if it is one. Without a version, the
/// newest one.
fn directory(root: &Path, name: &str) -> Result<PathBuf> {
    let copy = |path: PathBuf| mt_storage::local(&path).map_err(DataError::io("read", path));
    if mt_storage::is_file(&root.join(INFO)) {
        return copy(root.to_owned());
    }
    let (path, version) = name.split_once(':').map_or((name, None), |(path, version)| (path, Some(version)));
    let base = root.join(path);
    let parts = |name: &str| -> Option<Vec<u64>> { name.split('.').map(|part| part.parse().ok()).collect() };
    let entries = mt_storage::list(&base).map(|entries| {
        let names = entries.into_iter().map(|entry| entry.name);
        let mut versions: Vec<String> =
            names.filter(|name| mt_storage::is_file(&base.join(name).join(INFO))).collect();
        versions.sort_by_key(|name| parts(name));
        versions
    });
    let versions = entries.unwrap_or_default();
    let chosen = match version {
        Some(version) => versions.iter().find(|name| *name == version),
        None => versions.last(),
    };
    let chosen = chosen.map(|name| base.join(name)).ok_or_else(|| {
        let found = match versions.as_slice() {
            [] if mt_storage::is_directory(&base) => format!("`{}` holds no version of a dataset", base.display()),
            [] => format!("there is no directory `{}`", base.display()),
            some => format!("`{}` holds the versions {}", base.display(), files::quoted(some)),
        };
        DataError::Options(format!(
            "the dataset `{name}` is not below `{}`: {found}\nhint: set `dataset_path` to the directory into which `tfds` \
             wrote, and `dataset_name` to a name such as `c4/en:3.0.1`",
            root.display()
        ))
    })?;
    copy(chosen)
}

/// The shards of a split, where `column` is a feature that the dataset has.
pub(super) fn open(root: &Path, name: &str, split: &str, columns: &[String]) -> Result<Shards> {
    let directory = directory(root, name)?;
    let path = directory.join(INFO);
    let bytes = std::fs::read(&path).map_err(DataError::io("read", &path))?;
    let info: Info = serde_json::from_slice(&bytes).map_err(|error| wrong(&path, error.to_string()))?;
    let (format, extension) = match info.file_format.as_str() {
        "" | "tfrecord" => (ExampleFormat::TfRecord, "tfrecord"),
        "array_record" => (ExampleFormat::ArrayRecord, "array_record"),
        other => {
            return Err(wrong(
                &path,
                format!(
                    "its shards are in the format `{other}`\nhint: prepare it with `file_format='array_record'` or `'tfrecord'`"
                ),
            ));
        }
    };
    check_features(&directory, columns)?;
    let mut shards = Shards { files: Vec::new(), format, lengths: Vec::new(), ranges: Vec::new() };
    let mut first = 0;
    for term in split.split('+').map(str::trim) {
        let (of, slice) = term.split_once('[').map_or((term, None), |(of, slice)| (of, Some(slice)));
        let found = info.splits.iter().find(|known| known.name == of).ok_or_else(|| {
            let names: Vec<&str> = info.splits.iter().map(|split| split.name.as_str()).collect();
            wrong(&path, format!("it has no split `{of}`, but {}", files::quoted(&names)))
        })?;
        let length = |value: &Value| value.as_u64().or_else(|| value.as_str()?.parse().ok());
        let lengths: Option<Vec<u64>> = found.shard_lengths.iter().map(length).collect();
        let lengths = lengths
            .ok_or_else(|| wrong(&path, format!("the lengths of the shards of `{of}` are no numbers")))?;
        let total = lengths.iter().sum();
        let range = match slice {
            None => 0..total,
            Some(slice) => sliced(slice, total).ok_or_else(|| {
                DataError::Options(format!(
                    "`{term}` is no split: a slice is written as in `train[:90%]` or `train[1000:2000]`"
                ))
            })?,
        };
        let template = if found.filepath_template.is_empty() { TEMPLATE } else { &found.filepath_template };
        for index in 0..lengths.len() {
            shards.files.push(directory.join(shard_name(
                template,
                &info.name,
                of,
                extension,
                index,
                lengths.len(),
            )));
        }
        shards.ranges.push(first + range.start..first + range.end);
        shards.lengths.extend(lengths);
        first += total;
    }
    Ok(shards)
}

fn shard_name(
    template: &str,
    dataset: &str,
    split: &str,
    format: &str,
    index: usize,
    count: usize,
) -> String {
    template
        .replace("{DATASET}", dataset)
        .replace("{SPLIT}", split)
        .replace("{FILEFORMAT}", format)
        .replace("{SHARD_INDEX}", &format!("{index:05}"))
        .replace("{NUM_SHARDS}", &format!("{count:05}"))
        .replace("{SHARD_X_OF_Y}", &format!("{index:05}-of-{count:05}"))
}

/// The records of a slice, which begins behind its opening bracket. Shares are rounded to the nearest record, as `tfds` does, and halves to an even number.
fn sliced(slice: &str, total: u64) -> Option<Range<u64>> {
    let (from, to) = slice.strip_suffix(']')?.split_once(':')?;
    let bound = |text: &str, default: u64| -> Option<u64> {
        if text.is_empty() {
            return Some(default);
        }
        let number = match text.strip_suffix('%') {
            Some(share) => {
                let share: f64 = share.parse().ok().filter(|share: &f64| share.abs() <= 100.0)?;
                (share * total as f64 / 100.0).round_ties_even() as i64
            }
            None => text.parse().ok()?,
        };
        let from_end = if number < 0 { total as i64 + number } else { number };
        Some(from_end.clamp(0, total as i64) as u64)
    };
    let (from, to) = (bound(from.trim(), 0)?, bound(to.trim(), total)?);
    (from <= to).then_some(from..to)
}

/// Refuses features that the dataset does not have.
fn check_features(directory: &Path, columns: &[String]) -> Result<()> {
    let path = directory.join(FEATURES);
    // Old versions of `tfds` wrote no such file.
    if !path.is_file() {
        return Ok(());
    }
    let bytes = std::fs::read(&path).map_err(DataError::io("read", &path))?;
    let features: Value = serde_json::from_slice(&bytes).map_err(|error| wrong(&path, error.to_string()))?;
    let mut names = Vec::new();
    collect(&features, "", &mut names);
    match columns.iter().find(|column| !names.contains(column)) {
        Some(missing) if !names.is_empty() => Err(DataError::MissingColumn {
            path,
            place: String::new(),
            column: missing.clone(),
            available: files::quoted(&names),
        }),
        _ => Ok(()),
    }
}

/// The names of features, as records have them: those of a nested dictionary behind a slash.
fn collect(features: &Value, prefix: &str, names: &mut Vec<String>) {
    let dictionary = features.pointer("/featuresDict/features").and_then(Value::as_object);
    for (name, feature) in dictionary.into_iter().flatten() {
        let name = format!("{prefix}{name}");
        match feature.get("featuresDict") {
            Some(_) => collect(feature, &format!("{name}/"), names),
            None => names.push(name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_are_those_of_tfds() {
        for (slice, expected) in [
            (":]", Some(0..101)),
            (":10%]", Some(0..10)),
            ("50%:]", Some(50..101)),
            ("-5:]", Some(96..101)),
            ("10:20]", Some(10..20)),
            ("10:2000]", Some(10..101)),
            ("20:10]", None),
            ("10", None),
            ("a:b]", None),
            (":200%]", None),
        ] {
            assert_eq!(sliced(slice, 101), expected, "{slice}");
        }
        assert_eq!(
            shard_name(TEMPLATE, "c4", "train", "tfrecord", 3, 1024),
            "c4-train.tfrecord-00003-of-01024"
        );
    }
}
