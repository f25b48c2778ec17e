//! The rollouts that a run records as it samples them.

use std::{
    collections::BTreeSet,
    fs::{File, OpenOptions},
    io::{BufRead, BufReader, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

use serde::Deserialize;

use crate::{RlError, Rollout};

/// A file to which the rollouts of each batch are appended.
pub struct RolloutLog {
    path: PathBuf,
    file: File,
    /// The steps whose rollouts the file had when it was opened.
    before: BTreeSet<u64>,
}

/// The begin of a line, from which its step is known.
#[derive(Deserialize)]
struct StepOfLine {
    step: u64,
}

impl RolloutLog {
    /// Opens the file of a run, without rollouts from step `next` on: those of an earlier process that was interrupted.
    ///
    /// # Errors
    /// The file cannot be read or written.
    pub fn open(path: &Path, next: u64) -> Result<Self, RlError> {
        if let Some(directory) = path.parent() {
            std::fs::create_dir_all(directory).map_err(RlError::io("create", directory))?;
        }
        let mut options = OpenOptions::new();
        let opened = options.read(true).write(true).create(true).truncate(false).open(path);
        let mut file = opened.map_err(RlError::io("open", path))?;
        let (kept, before) = kept_bytes(&file, next).map_err(RlError::io("read", path))?;
        file.set_len(kept)
            .and_then(|()| file.seek(SeekFrom::End(0)).map(|_| ()))
            .map_err(RlError::io("write", path))?;
        Ok(Self { path: path.to_owned(), file, before })
    }

    /// Whether the file had rollouts of a step when it was opened.
    pub fn has(&self, step: u64) -> bool {
        self.before.contains(&step)
    }

    /// Appends rollouts. They are durable when this function returns.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn append(&mut self, rollouts: &[Rollout]) -> Result<(), RlError> {
        let lines: String = rollouts.iter().map(|rollout| rollout.line() + "\n").collect();
        let written = self.file.write_all(lines.as_bytes()).and_then(|()| self.file.sync_data());
        written.map_err(RlError::io("write", &self.path))
    }

    /// The rollouts of a step.
    ///
    /// # Errors
    /// The file cannot be read, or a line is no rollout.
    pub fn of_step(&self, step: u64) -> Result<Vec<Rollout>, RlError> {
        let file = File::open(&self.path).map_err(RlError::io("open", &self.path))?;
        let mut found = Vec::new();
        for (index, line) in BufReader::new(file).lines().enumerate() {
            let line = line.map_err(RlError::io("read", &self.path))?;
            if serde_json::from_str::<StepOfLine>(&line).is_ok_and(|of_line| of_line.step == step) {
                let wrong =
                    |reason| RlError::Record { path: self.path.clone(), line: index as u64 + 1, reason };
                found.push(Rollout::read(&line).map_err(wrong)?);
            }
        }
        Ok(found)
    }
}

/// The bytes of the whole lines before the first one of step `next` or a later one, and their steps.
fn kept_bytes(file: &File, next: u64) -> std::io::Result<(u64, BTreeSet<u64>)> {
    let mut reader = BufReader::new(file);
    reader.seek(SeekFrom::Start(0))?;
    let (mut kept, mut line, mut steps) = (0, Vec::new(), BTreeSet::new());
    loop {
        line.clear();
        let length = reader.read_until(b'\n', &mut line)?;
        let step = serde_json::from_slice::<StepOfLine>(&line).ok().map(|of_line| of_line.step);
        let Some(step) = step.filter(|step| *step < next && line.ends_with(b"\n")) else {
            return Ok((kept, steps));
        };
        steps.insert(step);
        kept += length as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_and_unfinished_lines_are_dropped() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("rollouts/rollouts.jsonl");
        let rollout = |step, token| Rollout {
            step: Some(step),
            prompt: vec![1],
            completion: vec![token],
            ..Rollout::default()
        };
        let mut log = RolloutLog::open(&path, 0).unwrap();
        for step in 0..3 {
            log.append(&[rollout(step, 10 + step as u32), rollout(step, 20)]).unwrap();
        }
        let whole = std::fs::read(&path).unwrap();
        // A killed process leaves a line without its end.
        std::fs::write(&path, [&whole[..], b"{\"step\":1,"].concat()).unwrap();
        let log = RolloutLog::open(&path, 3).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), whole);
        assert_eq!(log.of_step(1).unwrap(), [rollout(1, 11), rollout(1, 20)]);
        let mut log = RolloutLog::open(&path, 2).unwrap();
        assert_eq!(log.of_step(2).unwrap(), []);
        log.append(&[rollout(2, 9)]).unwrap();
        assert_eq!(log.of_step(2).unwrap(), [rollout(2, 9)]);
        assert_eq!(log.of_step(0).unwrap().len(), 2);
    }
}
