//! Files that other libraries wrote, with their generator.

use std::path::{Path, PathBuf};

use mt_checkpoint::WeightsDirectory;

/// A file or directory of `tests/goldens`.
pub fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens").join(name)
}

/// Weights of `tests/goldens`.
pub fn weights(name: &str) -> WeightsDirectory {
    WeightsDirectory::open(&golden(name)).unwrap()
}
