//! The files of the repository, as text.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// A text file.
pub struct TextFile {
    /// The path from the root of the repository, with forward slashes.
    pub path: String,
    /// The file's contents.
    pub text: String,
}

/// All text files that are tracked, or untracked and not ignored.
pub struct Repository {
    /// The root directory.
    pub root: PathBuf,
    /// The files, sorted by path.
    pub files: Vec<TextFile>,
}

impl Repository {
    /// Reads the repository that this program was built in.
    pub fn open() -> Result<Self> {
        let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
        let root = manifest.parent().context("the task runner's package is in the repository")?.to_owned();
        let listing = Command::new("git")
            .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
            .current_dir(&root)
            .output()
            .context("cannot run `git`")?;
        ensure!(
            listing.status.success(),
            "`git ls-files`: {}",
            String::from_utf8_lossy(&listing.stderr).trim()
        );
        let listing = String::from_utf8(listing.stdout).context("a path is not valid UTF-8")?;
        let mut paths: Vec<&str> = listing.split_terminator('\0').collect();
        paths.sort_unstable();
        paths.dedup();
        let mut files = Vec::new();
        for path in paths {
            // A file that is deleted but not yet committed is still listed.
            let Ok(bytes) = fs::read(root.join(path)) else { continue };
            if let Ok(text) = String::from_utf8(bytes) {
                files.push(TextFile { path: path.to_owned(), text });
            }
        }
        Ok(Self { root, files })
    }

    /// The text of one file.
    pub fn text(&self, path: &str) -> Option<&str> {
        self.files.iter().find(|file| file.path == path).map(|file| file.text.as_str())
    }

    /// The packages: each folder with the text of its manifest.
    pub fn packages(&self) -> impl Iterator<Item = (&str, &str)> {
        self.files.iter().filter_map(|file| {
            let folder = file.path.strip_suffix("/Cargo.toml")?;
            Some((folder, file.text.as_str()))
        })
    }

    /// A repository of the given files, for the tests of the checks.
    #[cfg(test)]
    pub fn of(files: &[(&str, &str)]) -> Self {
        let files = files
            .iter()
            .map(|(path, text)| TextFile { path: path.to_string(), text: text.to_string() })
            .collect();
        Self { root: PathBuf::new(), files }
    }
}
