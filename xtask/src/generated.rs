//! Generated files, and the check that they are current.

mod support;

use std::fs;

use anyhow::{Context, Result};

use crate::repository::Repository;

/// A generated file.
pub struct Generated {
    /// Path from the root of the repository.
    pub path: &'static str,
    /// The contents that the code generates.
    pub contents: fn() -> String,
}

/// All generated files.
pub const GENERATED: &[Generated] = &[
    Generated { path: "docs/configuration.md", contents: mt_config::reference_page },
    Generated { path: support::README, contents: support::readme },
];

/// Writes the files that are not current, and returns their paths.
pub fn write(repository: &Repository) -> Result<Vec<&'static str>> {
    let mut written = Vec::new();
    for generated in GENERATED {
        let contents = (generated.contents)();
        if repository.text(generated.path) != Some(contents.as_str()) {
            let path = repository.root.join(generated.path);
            if let Some(folder) = path.parent() {
                fs::create_dir_all(folder)
                    .with_context(|| format!("cannot create `{}`", folder.display()))?;
            }
            fs::write(&path, contents).with_context(|| format!("cannot write `{}`", path.display()))?;
            written.push(generated.path);
        }
    }
    Ok(written)
}
