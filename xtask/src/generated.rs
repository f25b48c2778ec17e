//! Files that are made from code, and checked to be as the code makes them.

mod support;

use std::fs;

use anyhow::{Context, Result};

use crate::repository::Repository;

/// A generated file.
pub struct Generated {
    /// Where it is, from the root of the repository.
    pub path: &'static str,
    /// What belongs in it.
    pub contents: fn() -> String,
}

/// All generated files.
pub const GENERATED: &[Generated] = &[
    Generated { path: "docs/configuration.md", contents: mt_config::reference_page },
    Generated { path: support::README, contents: support::readme },
];

/// Writes those that are not current, and names them.
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
