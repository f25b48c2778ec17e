//! Writing an item's values, in any order and on several threads: each as a file, or into the data files of a database.

use std::{collections::BTreeMap, path::Path};

use crate::{
    disk::{Appender, Disk},
    error::Result,
    manifest::FileRecord,
    ocdbt::{DATA_DIRECTORY, INLINE_BYTES, Placed, process_directory, random_name},
    zarr::StorageFormat,
};

/// The number of the process that writes. Runs of several processes are not built yet.
pub(crate) const PROCESS: usize = 0;

/// The values that one thread or all threads wrote.
#[derive(Default)]
pub(crate) struct WrittenValues {
    /// The files by path relative to the item's directory.
    pub files: BTreeMap<String, FileRecord>,
    /// The values of a database by key.
    pub values: Vec<(String, Placed)>,
}

impl WrittenValues {
    pub fn append(&mut self, mut other: Self) {
        self.files.append(&mut other.files);
        self.values.append(&mut other.values);
    }
}

/// Writes values on one thread. Large values are written piece by piece, so that memory holds a piece and not the value.
pub(crate) struct ValueWriter<'w> {
    disk: &'w Disk,
    directory: &'w Path,
    format: &'w StorageFormat,
    /// The data file that is written to, with its name.
    data_file: Option<(String, Appender<'w>)>,
    written: WrittenValues,
}

impl<'w> ValueWriter<'w> {
    pub fn new(disk: &'w Disk, directory: &'w Path, format: &'w StorageFormat) -> Self {
        Self { disk, directory, format, data_file: None, written: WrittenValues::default() }
    }

    /// Writes the value of a key, given in pieces.
    pub fn put(&mut self, key: String, pieces: impl IntoIterator<Item = Result<Vec<u8>>>) -> Result<()> {
        if self.format.ocdbt { self.put_in_database(key, pieces) } else { self.put_in_file(key, pieces) }
    }

    /// Flushes the last data file.
    pub fn finish(mut self) -> Result<WrittenValues> {
        self.finish_data_file()?;
        Ok(self.written)
    }

    fn put_in_file(&mut self, key: String, pieces: impl IntoIterator<Item = Result<Vec<u8>>>) -> Result<()> {
        let path = self.directory.join(&key);
        self.disk.create_directory(path.parent().unwrap_or(self.directory))?;
        let mut file = self.disk.appender(path)?;
        for piece in pieces {
            file.append(&piece?)?;
        }
        self.written.files.insert(key, file.finish()?);
        Ok(())
    }

    fn put_in_database(
        &mut self,
        key: String,
        pieces: impl IntoIterator<Item = Result<Vec<u8>>>,
    ) -> Result<()> {
        // Holds the first pieces until it is known that the tree cannot hold the value.
        let mut small = Vec::new();
        let mut start = None;
        for piece in pieces {
            let piece = piece?;
            if start.is_none() && small.len() + piece.len() <= INLINE_BYTES {
                small.extend(piece);
                continue;
            }
            let file = self.data_file()?;
            if start.is_none() {
                start = Some(file.bytes());
                if !small.is_empty() {
                    file.append(&small)?;
                }
            }
            file.append(&piece)?;
        }
        let placed = match (start, &self.data_file) {
            (Some(offset), Some((name, file))) => {
                let length = file.bytes() - offset;
                Placed::Written { process: PROCESS, file: name.clone(), offset, length }
            }
            _ => Placed::Inline(small),
        };
        self.written.values.push((key, placed));
        let target = self.format.target_file_bytes;
        let is_full = |(_, file): &(String, Appender<'_>)| target > 0 && file.bytes() >= target;
        if self.data_file.as_ref().is_some_and(is_full) {
            self.finish_data_file()?;
        }
        Ok(())
    }

    fn data_file(&mut self) -> Result<&mut Appender<'w>> {
        if self.data_file.is_none() {
            let directory = self.directory.join(process_directory(PROCESS)).join(DATA_DIRECTORY);
            self.disk.create_directory(&directory)?;
            let name = random_name();
            let file = self.disk.appender(directory.join(&name))?;
            self.data_file = Some((name, file));
        }
        let (_, file) = self.data_file.as_mut().expect("a file was opened");
        Ok(file)
    }

    fn finish_data_file(&mut self) -> Result<()> {
        if let Some((name, file)) = self.data_file.take() {
            let path = format!("{}{DATA_DIRECTORY}/{name}", process_directory(PROCESS));
            self.written.files.insert(path, file.finish()?);
        }
        Ok(())
    }
}
