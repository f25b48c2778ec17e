//! Checksums of the files that hold a model's weights.

use std::{
    io::Read,
    path::{Path, PathBuf},
};

use crate::error::{CheckpointError, Result};

/// Bytes that are read at once.
const BUFFER: usize = 4 << 20;

/// Endings of the files of published models that hold weights or describe them.
const ENDINGS: [&str; 4] = [".safetensors", ".pth", ".bin", ".index.json"];
const DESCRIPTIONS: [&str; 2] = ["config.json", "params.json"];

/// A checksum of the weights in a directory, in hexadecimal digits, over names, sizes and contents of files: of a published
/// model its description and its weights, of other directories all files.
///
/// # Errors
/// A file cannot be read.
pub fn fingerprint(directory: &Path) -> Result<String> {
    crate::complete_weights(directory)?;
    let files = mt_storage::files_below(directory);
    let files = files.map_err(|source| CheckpointError::io("list", directory, source))?;
    let mut files: Vec<(PathBuf, u64)> =
        files.into_iter().map(|(file, bytes)| (directory.join(file), bytes)).collect();
    let is_published = |(path, _): &(PathBuf, u64)| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let is_here = path.parent() == Some(directory);
        is_here && (ENDINGS.iter().any(|ending| name.ends_with(ending)) || DESCRIPTIONS.contains(&&*name))
    };
    if DESCRIPTIONS.iter().any(|name| mt_storage::is_file(&directory.join(name))) {
        files.retain(is_published);
    }
    files.sort();
    let mut buffer = vec![0; BUFFER];
    let mut lines = String::new();
    for (path, bytes) in files {
        let failed = |source| CheckpointError::io("read", &path, source);
        let mut file = mt_storage::reader(&path, 0..bytes).map_err(failed)?;
        let (mut checksum, mut size) = (0, 0);
        loop {
            let read = file.read(&mut buffer).map_err(failed)?;
            if read == 0 {
                break;
            }
            checksum = crc32c::crc32c_append(checksum, &buffer[..read]);
            size += read;
        }
        let name = path.strip_prefix(directory).unwrap_or(&path).to_string_lossy();
        lines.push_str(&format!("{name} {size} {checksum:08x}\n"));
    }
    Ok(format!("{:08x}", crc32c::crc32c(lines.as_bytes())))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn changes_of_weights_and_descriptions_are_noticed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let write = |name: &str, contents: &str| fs::write(path.join(name), contents).unwrap();
        write("config.json", "{}");
        write("model.safetensors", "weights");
        let first = fingerprint(path).unwrap();
        write("README.md", "a note");
        assert_eq!(fingerprint(path).unwrap(), first);
        write("model.safetensors", "weightt");
        let other = fingerprint(path).unwrap();
        assert_ne!(other, first);
        write("model.safetensors", "weights");
        write("config.json", "{ }");
        assert_ne!(fingerprint(path).unwrap(), first);
        // All files of a checkpoint count.
        let step = tempfile::tempdir().unwrap();
        fs::create_dir(step.path().join("a")).unwrap();
        fs::write(step.path().join("a/c"), "1").unwrap();
        let first = fingerprint(step.path()).unwrap();
        fs::rename(step.path().join("a/c"), step.path().join("a/d")).unwrap();
        assert_ne!(fingerprint(step.path()).unwrap(), first);
    }
}
