//! Writing programs as text, before and after optimization.

use std::{
    fs,
    path::{Path, PathBuf},
};

use mt_ir::Program;

use crate::RuntimeError;

/// A dump in progress. `NAME.stablehlo.mlir` is written first, `NAME.optimized.hlo` follows after compilation, and
/// `NAME.xla` holds all files that XLA writes.
pub(crate) struct Dump {
    directory: PathBuf,
    xla: PathBuf,
    name: String,
}

fn file_name(program: &str) -> String {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
    program.replace(|letter| !is_plain(letter), "_")
}

/// The directory of the files that XLA writes of a program.
pub(crate) fn xla_dump(directory: &Path, program: &str) -> PathBuf {
    directory.join(format!("{}.xla", file_name(program)))
}

impl Dump {
    pub(crate) fn start(directory: &Path, program: &Program) -> Result<Self, RuntimeError> {
        let name = file_name(&program.name);
        let xla = xla_dump(directory, &program.name);
        let dump_error = |path: &Path| {
            let path = path.to_owned();
            move |source| RuntimeError::Dump { path, source }
        };
        // Files of an earlier run would be mistaken for this run's.
        if xla.exists() {
            fs::remove_dir_all(&xla).map_err(dump_error(&xla))?;
        }
        fs::create_dir_all(&xla).map_err(dump_error(&xla))?;
        let path = directory.join(format!("{name}.stablehlo.mlir"));
        fs::write(&path, &program.text).map_err(dump_error(&path))?;
        Ok(Self { directory: directory.to_owned(), xla, name })
    }

    /// The flags that make XLA write files.
    pub(crate) fn flags(&self) -> [(String, String); 2] {
        let directory = self.xla.to_string_lossy().into_owned();
        [("xla_dump_to".into(), directory), ("xla_dump_hlo_as_text".into(), "true".into())]
    }

    pub(crate) fn finish(self) -> Result<(), RuntimeError> {
        let io_error = |source| RuntimeError::io(&self.xla, source);
        let entries = fs::read_dir(&self.xla).map_err(io_error)?;
        let mut paths: Vec<PathBuf> = entries
            .map(|entry| entry.map(|entry| entry.path()))
            .collect::<Result<_, _>>()
            .map_err(io_error)?;
        paths.sort();
        let is_optimized = |path: &&PathBuf| path.to_string_lossy().ends_with("after_optimizations.txt");
        if let Some(optimized) = paths.iter().find(is_optimized) {
            let path = self.directory.join(format!("{}.optimized.hlo", self.name));
            fs::copy(optimized, &path).map_err(|source| RuntimeError::io(&path, source))?;
        }
        Ok(())
    }
}
