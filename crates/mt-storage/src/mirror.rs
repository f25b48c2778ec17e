//! The small files of a run whose directory is in a store: configuration, tokenizer, metrics. Objects cannot be appended
//! to, so that the run writes them into a directory of this machine, and what changed is sent now and then.

use std::{
    collections::HashMap,
    fs, io,
    path::{Path, PathBuf},
    time::SystemTime,
};

use crate::{cache, location::Location, read, write};

/// Directories of a run that are not mirrored, because they are written to the store itself.
const OWN: &[&str] = &["checkpoints"];

/// The directory of this machine with the small files of a remote run. The path itself if it is local.
pub fn mirror_of(run: &Path) -> PathBuf {
    let Ok(location) = Location::of(run) else { return run.to_owned() };
    let cache = cache::program_cache().unwrap_or_else(|_| std::env::temp_dir().join("maxtext"));
    cache.join("runs").join(location.scheme.name()).join(&location.bucket).join(location.key.as_ref())
}

/// A run's directory in a store with its mirror.
#[derive(Debug)]
pub struct Mirror {
    remote: PathBuf,
    local: PathBuf,
    /// The sizes and times of the files that were sent.
    sent: HashMap<PathBuf, (u64, SystemTime)>,
}

impl Mirror {
    /// Makes the mirror hold what the store holds, and nothing else.
    ///
    /// # Errors
    /// The store cannot be read, or the mirror cannot be written.
    pub fn pull(remote: &Path) -> io::Result<Self> {
        let local = mirror_of(remote);
        match fs::remove_dir_all(&local) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => fs::create_dir_all(&local)?,
        }
        let mut mirror = Self { remote: remote.to_owned(), local, sent: HashMap::new() };
        for entry in read::list(remote)? {
            let path = remote.join(&entry.name);
            if OWN.contains(&entry.name.as_str()) || is_passing(&entry.name) {
                continue;
            }
            let files = match entry.is_directory {
                true => read::files_below(&path)?
                    .into_iter()
                    .map(|(file, _)| Path::new(&entry.name).join(file))
                    .collect(),
                false => vec![PathBuf::from(&entry.name)],
            };
            for file in files {
                let target = mirror.local.join(&file);
                if let Some(parent) = target.parent() {
                    fs::create_dir_all(parent)?;
                }
                write::copy(&remote.join(&file), &target)?;
                mirror.sent.insert(file, state(&target)?);
            }
        }
        Ok(mirror)
    }

    /// The mirror's directory.
    pub fn local(&self) -> &Path {
        &self.local
    }

    /// Sends the files that have changed, and removes those that are gone.
    ///
    /// # Errors
    /// A file cannot be read or sent.
    pub fn push(&mut self) -> io::Result<()> {
        let mut files = Vec::new();
        for entry in read::list(&self.local)? {
            if OWN.contains(&entry.name.as_str()) || is_passing(&entry.name) {
                continue;
            }
            match entry.is_directory {
                true => {
                    let below = read::files_below(&self.local.join(&entry.name))?;
                    files.extend(below.into_iter().map(|(file, _)| Path::new(&entry.name).join(file)));
                }
                false => files.push(PathBuf::from(&entry.name)),
            }
        }
        files.retain(|file| !is_passing(&file.to_string_lossy()));
        for file in &files {
            let path = self.local.join(file);
            // A file may be replaced or vanish at any moment, and is then sent the next time.
            let Ok(now) = state(&path) else { continue };
            if self.sent.get(file) != Some(&now) {
                write::put(&self.remote.join(file), fs::read(&path)?, write::Condition::Any)?;
                self.sent.insert(file.clone(), now);
            }
        }
        let gone: Vec<PathBuf> = self.sent.keys().filter(|file| !files.contains(file)).cloned().collect();
        for file in gone {
            write::remove(&self.remote.join(&file))?;
            self.sent.remove(&file);
        }
        Ok(())
    }
}

fn state(path: &Path) -> io::Result<(u64, SystemTime)> {
    let found = fs::metadata(path)?;
    Ok((found.len(), found.modified()?))
}

/// Whether a file exists only while another one is written, or belongs to a process.
fn is_passing(name: &str) -> bool {
    name.ends_with(".partial") || name.ends_with(".lock")
}
