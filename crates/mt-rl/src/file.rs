//! Files of recorded rollouts, one JSON object a line, and training from them.

use std::{
    fs::File,
    io::{BufRead, BufReader, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
};

use mt_data::{Batch, BatchSource, DataError, Position};

use crate::{BatchRules, RlError, Rollout, RolloutBatch, RowShape, position::StepPosition};

/// A file of rollouts, whose lines are read on request.
pub struct RolloutFile {
    path: PathBuf,
    reader: BufReader<File>,
    /// The offset, the length and the number of each line that is not blank.
    lines: Vec<(u64, u64, u64)>,
    checksum: u32,
}

impl RolloutFile {
    /// Opens a file and finds its lines.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn open(path: &Path) -> Result<Self, RlError> {
        let file = File::open(path).map_err(RlError::io("open", path))?;
        let mut reader = BufReader::new(file);
        let (mut lines, mut line) = (Vec::new(), Vec::new());
        let (mut offset, mut number, mut checksum) = (0, 0, 0);
        loop {
            line.clear();
            let length = reader.read_until(b'\n', &mut line).map_err(RlError::io("read", path))? as u64;
            if length == 0 {
                break;
            }
            number += 1;
            checksum = crc32c::crc32c_append(checksum, &line);
            if !line.trim_ascii().is_empty() {
                lines.push((offset, length, number));
            }
            offset += length;
        }
        Ok(Self { path: path.to_owned(), reader, lines, checksum })
    }

    /// The number of rollouts.
    pub fn len(&self) -> u64 {
        self.lines.len() as u64
    }

    /// Whether the file has no rollouts.
    pub fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    /// A rollout by its number, from 0.
    ///
    /// # Errors
    /// The file cannot be read, or the line is no rollout.
    pub fn get(&mut self, index: u64) -> Result<Rollout, RlError> {
        let (offset, length, line) = self.lines[index as usize];
        let mut bytes = vec![0; length as usize];
        let read = |reader: &mut BufReader<File>, bytes: &mut [u8]| {
            reader.seek(SeekFrom::Start(offset))?;
            reader.read_exact(bytes)
        };
        read(&mut self.reader, &mut bytes).map_err(RlError::io("read", &self.path))?;
        let wrong = |reason: String| RlError::Record { path: self.path.clone(), line, reason };
        let text = str::from_utf8(&bytes).map_err(|error| wrong(format!("is not UTF-8 text: {error}")))?;
        Rollout::read(text).map_err(wrong)
    }
}

/// How recorded rollouts are trained on.
#[derive(Clone, Debug, PartialEq)]
pub struct RecordedOptions {
    /// Rows of a step.
    pub rows: usize,
    /// The steps into which a batch of rollouts is cut.
    pub mini_batches: usize,
    /// The number of times that each batch is trained on.
    pub iterations: usize,
    /// The number of passes over the file; `None` for any number.
    pub num_epoch: Option<u64>,
    pub shape: RowShape,
    pub rules: BatchRules,
}

impl RecordedOptions {
    /// The rollouts of a batch.
    fn rollouts(&self) -> u64 {
        (self.rows * self.mini_batches) as u64
    }

    /// The steps with one batch.
    fn steps(&self) -> u64 {
        (self.mini_batches * self.iterations) as u64
    }
}

/// Batches of recorded rollouts, in the order of the file. Rollouts at its end that fill no batch are left out.
pub struct RecordedRollouts {
    file: RolloutFile,
    options: RecordedOptions,
    /// The steps that have been prepared.
    step: u64,
    /// The batch that was read last, with its number among those of all passes.
    current: Option<(u64, RolloutBatch)>,
}

impl RecordedRollouts {
    /// Opens a file.
    ///
    /// # Errors
    /// The file cannot be read, or fills no batch.
    pub fn open(path: &Path, options: RecordedOptions) -> Result<Self, RlError> {
        let file = RolloutFile::open(path)?;
        let mut source = Self { file, options, step: 0, current: None };
        source.check_size()?;
        // A file of another form is refused before training begins.
        let first = source.read(0)?;
        first.rows(0..first.len(), source.options.shape)?;
        source.current = Some((0, first));
        Ok(source)
    }

    fn check_size(&self) -> Result<(), RlError> {
        let (given, needed) = (self.file.len(), self.options.rollouts());
        if given >= needed {
            return Ok(());
        }
        Err(RlError::TooFew(format!(
            "`{}` holds {given} rollouts, but a batch has {needed}\nhint: use a smaller `batch_size`, \
             `rl.num_generations` or `rl.num_mini_batches`",
            self.file.path.display()
        )))
    }

    fn fingerprint(&self) -> String {
        let RecordedOptions { mini_batches, iterations, .. } = self.options;
        let (rollouts, batch) = (self.file.len(), self.options.rollouts());
        format!(
            "{rollouts} rollouts, {:08x}, in batches of {batch} for {mini_batches} × {iterations} steps",
            self.file.checksum
        )
    }

    /// Reads batch `number` of all passes.
    fn read(&mut self, number: u64) -> Result<RolloutBatch, RlError> {
        let size = self.options.rollouts();
        let first = number % (self.file.len() / size) * size;
        let rollouts =
            (first..first + size).map(|index| self.file.get(index)).collect::<Result<Vec<_>, _>>()?;
        if first + size < self.file.len() {
            let next = self.file.get(first + size)?;
            if next.continues(&rollouts[rollouts.len() - 1]) {
                let line = self.file.lines[(first + size) as usize].2;
                let reason = format!(
                    "a batch of {size} rollouts ends within the answers to one prompt\nhint: set `batch_size` and \
                     `rl.num_generations` to the numbers of prompts and of answers to each"
                );
                return Err(RlError::Record { path: self.file.path.clone(), line, reason });
            }
        }
        RolloutBatch::new(rollouts, &self.options.rules)
    }
}

impl BatchSource for RecordedRollouts {
    fn next_batch(&mut self) -> Result<Option<Batch>, DataError> {
        let steps = self.options.steps();
        let (number, within) = (self.step / steps, self.step % steps);
        let of_epoch = self.file.len() / self.options.rollouts();
        if self.options.num_epoch.is_some_and(|epochs| number >= epochs.saturating_mul(of_epoch)) {
            return Ok(None);
        }
        if self.current.as_ref().is_none_or(|(known, _)| *known != number) {
            self.current = Some((number, self.read(number)?));
        }
        let (_, batch) = self.current.as_ref().expect("it has just been read");
        let first = within as usize % self.options.mini_batches * self.options.rows;
        let rows = batch.rows(first..first + self.options.rows, self.options.shape)?;
        self.step += 1;
        Ok(Some(rows))
    }

    fn set_batch_rows(&mut self, rows: usize) -> Result<(), DataError> {
        if rows != self.options.rows {
            self.options.rows = rows;
            self.current = None;
            self.check_size()?;
        }
        Ok(())
    }

    fn position(&self) -> Position {
        StepPosition::stored(self.step, self.fingerprint())
    }

    fn seek(&mut self, position: &Position) -> Result<(), DataError> {
        self.step = StepPosition::step(position, self.fingerprint(), "the recorded rollouts")?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use mt_data::arrays::INPUTS;

    use super::*;
    use crate::{AdvantageRule, advantages::Scale, arrays::ADVANTAGES};

    fn options() -> RecordedOptions {
        RecordedOptions {
            rows: 2,
            mini_batches: 2,
            iterations: 2,
            num_epoch: Some(2),
            shape: RowShape { length: 3, pad: 0, vocab_size: 100 },
            rules: BatchRules {
                advantage: AdvantageRule::Group { scale: Scale::None, epsilon: 0.0 },
                penalty: None,
                uses_recorded: false,
                masks_degenerate: false,
                masks_truncated: false,
                with_old: false,
                with_sampler: false,
                with_values: false,
            },
        }
    }

    /// A file of rollouts with these prompts, each with two answers. Blank lines do not count.
    fn file(prompts: u32) -> tempfile::NamedTempFile {
        let line = |prompt: u32, reward: u32| {
            format!("{{\"prompt\":[{prompt}],\"completion\":[9],\"reward\":{reward}}}\n\n")
        };
        let lines: String =
            (1..=prompts).flat_map(|prompt| [line(prompt, 0), line(prompt, prompt)]).collect();
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), lines).unwrap();
        file
    }

    fn steps(source: &mut RecordedRollouts) -> Vec<(i32, f32)> {
        std::iter::from_fn(|| source.next_batch().unwrap())
            .map(|batch| {
                let advantages = batch.array(ADVANTAGES).unwrap().as_slice::<f32>().unwrap();
                (batch.integers(INPUTS)[0], advantages[0])
            })
            .collect()
    }

    #[test]
    fn batches_are_trained_on_several_times() {
        let file = file(5);
        let open = || RecordedRollouts::open(file.path(), options()).unwrap();
        let first: Vec<i32> = steps(&mut open()).iter().map(|(prompt, _)| *prompt).collect();
        // Two passes over two batches of two prompts; the fifth prompt fills none.
        let pass = [1, 2, 1, 2, 3, 4, 3, 4];
        assert_eq!(first, [pass, pass].concat());
        assert_eq!(steps(&mut open())[5], (4, -2.0));
        let mut source = open();
        for _ in 0..3 {
            source.next_batch().unwrap();
        }
        let mut resumed = open();
        resumed.seek(&source.position()).unwrap();
        assert_eq!(steps(&mut resumed), steps(&mut source));
    }

    #[test]
    fn files_that_do_not_fit_are_refused() {
        let file = file(3);
        let message = |options: RecordedOptions| {
            RecordedRollouts::open(file.path(), options).err().unwrap().to_string()
        };
        let few = message(RecordedOptions { rows: 8, ..options() });
        assert!(few.contains("holds 6 rollouts, but a batch has 16"), "{few}");
        let cut = message(RecordedOptions { rows: 3, mini_batches: 1, ..options() });
        assert!(cut.contains("line 7: a batch of 3 rollouts ends within"), "{cut}");
        let other = RecordedOptions { iterations: 1, ..options() };
        let position = RecordedRollouts::open(file.path(), other).unwrap().position();
        let error = RecordedRollouts::open(file.path(), options()).unwrap().seek(&position).unwrap_err();
        assert!(error.to_string().contains("the recorded rollouts is"), "{error}");
        let absent = RecordedRollouts::open(Path::new("/absent.jsonl"), options()).err().unwrap();
        assert!(absent.is_user_error() && absent.to_string().contains("cannot open `/absent.jsonl`"));
    }
}
