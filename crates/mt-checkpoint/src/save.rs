//! Writing one step.

use std::{
    collections::{BTreeMap, btree_map},
    io,
    ops::Range,
    path::Path,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{SystemTime, UNIX_EPOCH},
};

use mt_shape::{DType, HostArray};
use serde_json::{Map, Value as Json};

use crate::{
    codec::{self, ShardIndex},
    disk::Disk,
    error::{CheckpointError, Result, SourceError},
    keys::KeySegment,
    manifest::{FileRecord, MANIFEST_FILE, MANIFEST_MARK, Manifest},
    metadata::{
        self, Empty, STATE_ITEM, STEP_FILE, STEP_MARK, SUCCESS_FILE, TEMPORARY_SUFFIX, TREE_FILE,
        TreeMetadata,
    },
    ocdbt::DatabaseWriter,
    plan::{self, Planned, PlannedArray, PlannedItem},
    region::{self, Region},
    values::{ValueWriter, WrittenValues},
    zarr::{ArrayLayout, StorageFormat},
};

/// An array that is fetched one shard at a time, so the host holds at most one shard per writing thread. The array
/// source is dropped when its array is written.
pub trait ArraySource: Send {
    /// The element type.
    fn dtype(&self) -> DType;
    /// The dimensions of the whole array.
    fn dims(&self) -> &[usize];
    /// The regions of the distinct shards: each cell of a regular grid once, without replicas.
    fn shards(&self) -> Vec<Region>;
    /// The contents of the shard with this index in [`Self::shards`]. Called once for each.
    ///
    /// # Errors
    /// The device failed.
    fn fetch(&mut self, shard: usize) -> Result<HostArray, SourceError>;
}

/// An array in host memory.
pub struct WholeArray {
    dtype: DType,
    dims: Vec<usize>,
    array: Option<HostArray>,
}

impl From<HostArray> for WholeArray {
    fn from(array: HostArray) -> Self {
        Self { dtype: array.dtype(), dims: array.dims().to_vec(), array: Some(array) }
    }
}

impl ArraySource for WholeArray {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn dims(&self) -> &[usize] {
        &self.dims
    }

    fn shards(&self) -> Vec<Region> {
        vec![region::whole(&self.dims)]
    }

    fn fetch(&mut self, _: usize) -> Result<HostArray, SourceError> {
        self.array.take().ok_or_else(|| "the array was fetched before".into())
    }
}

/// The value of an entry.
pub enum Value {
    Array(Box<dyn ArraySource>),
    Empty(Empty),
}

impl From<HostArray> for Value {
    fn from(array: HostArray) -> Self {
        Self::Array(Box::new(WholeArray::from(array)))
    }
}

/// A leaf of the saved tree.
pub struct Entry {
    pub key: Vec<KeySegment>,
    pub value: Value,
}

impl Entry {
    /// An entry at a key path.
    pub fn new(key: Vec<KeySegment>, value: impl Into<Value>) -> Self {
        Self { key, value: value.into() }
    }

    /// An empty node at a key path.
    pub fn empty(key: Vec<KeySegment>, empty: Empty) -> Self {
        Self { key, value: Value::Empty(empty) }
    }
}

/// A JSON file beside the state: `{step}/{item}/{file}`, such as `iter/process_0-of-1.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct JsonItem {
    pub item: String,
    pub file: String,
    pub contents: Json,
}

/// Further arrays beside the state, for this program alone. They lie in a directory inside the state's, which Orbax
/// ignores. (Beside `items`, Orbax would take the directory for an item, and refuse to restore the step unless the
/// caller names the items.)
#[derive(Default)]
pub struct ExtraItem {
    pub item: String,
    pub entries: Vec<Entry>,
}

/// Called when all files are written, before the step becomes visible; it may wait. An error discards the step. The
/// next save waits for this one, so the event that opens the gate must not depend on the next save.
pub type CommitGate = Box<dyn FnOnce() -> Result<(), SourceError> + Send>;

/// The contents of a step.
#[derive(Default)]
pub struct SaveRequest {
    /// The leaves, in listing order.
    pub entries: Vec<Entry>,
    /// Arrays beside the state.
    pub extra_items: Vec<ExtraItem>,
    /// JSON beside the state.
    pub json: Vec<JsonItem>,
    /// Metadata recorded with the step, such as `scan_layers`.
    pub custom_metadata: Map<String, Json>,
    /// Permission to commit, for example after the loss is known to be finite.
    pub commit_gate: Option<CommitGate>,
    /// Whether to fetch every shard before `save` returns, so that the device buffers can be reused at once.
    pub fetch_first: bool,
}

/// Totals of the written files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Written {
    pub files: usize,
    pub bytes: u64,
}

/// The inputs for writing one step.
pub(crate) struct StepWriter<'w> {
    pub disk: &'w Disk,
    pub step: u64,
    /// The temporary directory, which does not exist yet.
    pub temporary: &'w Path,
    /// The directory's name after the commit.
    pub destination: &'w Path,
    pub threads: usize,
    pub format: &'w StorageFormat,
    pub cancelled: &'w AtomicBool,
}

impl StepWriter<'_> {
    /// Writes all files into the temporary directory and flushes them; the caller commits.
    pub fn write(
        &self,
        items: Vec<PlannedItem>,
        json: &[JsonItem],
        custom_metadata: &Map<String, Json>,
    ) -> Result<Written> {
        let started = nanoseconds();
        let mut files = BTreeMap::new();
        let is_remote = mt_storage::is_remote(self.temporary);
        let temporary_items = match is_remote {
            true => self.temporary.join(STATE_ITEM),
            false => self.temporary.join(format!("{STATE_ITEM}{TEMPORARY_SUFFIX}")),
        };
        self.disk.create_directory(self.temporary)?;
        let success = success_text(self.destination);
        for PlannedItem { name, entries } in items {
            let (directory, path) = match name {
                None => (temporary_items.clone(), STATE_ITEM.to_owned()),
                Some(name) => (temporary_items.join(&name), format!("{STATE_ITEM}/{name}")),
            };
            for (name, record) in self.write_item(&directory, entries, &format!("{success}/{path}"))? {
                files.insert(format!("{path}/{name}"), record);
            }
        }
        self.disk.sync_directories(&temporary_items)?;
        if !is_remote {
            self.disk.rename(&temporary_items, &self.temporary.join(STATE_ITEM))?;
        }

        for JsonItem { item, file, contents } in json {
            let directory = self.temporary.join(item);
            self.disk.create_directory(&directory)?;
            let record = self.write_file(&directory.join(file), &[contents.to_string().as_bytes()])?;
            files.insert(format!("{item}/{file}"), record);
            if let btree_map::Entry::Vacant(vacant) = files.entry(format!("{item}/{SUCCESS_FILE}")) {
                let success = format!("{success}/{item}");
                vacant.insert(self.write_file(&directory.join(SUCCESS_FILE), &[success.as_bytes()])?);
            }
            self.disk.sync_directory(&directory)?;
        }

        let mut custom = custom_metadata.clone();
        custom.insert(MANIFEST_MARK.to_owned(), Manifest::VERSION.into());
        custom.insert(STEP_MARK.to_owned(), self.step.into());
        let metadata = metadata::step_metadata(started, nanoseconds(), &custom);
        for (name, contents) in [(STEP_FILE, metadata.to_string()), (SUCCESS_FILE, success)] {
            let record = match is_remote && name == SUCCESS_FILE {
                // In a store it completes the step, so that it is written by the commit.
                true => FileRecord::of(&[contents.as_bytes()]),
                false => self.write_file(&self.temporary.join(name), &[contents.as_bytes()])?,
            };
            files.insert(name.to_owned(), record);
        }
        let bytes = files.values().map(|record| record.bytes).sum();
        let written = Written { files: files.len(), bytes };
        let manifest = Manifest { version: Manifest::VERSION, files };
        self.write_file(&self.temporary.join(MANIFEST_FILE), &[&manifest.encode()])?;
        self.disk.sync_directory(self.temporary)?;
        Ok(written)
    }

    /// Writes a tree of arrays; its records are keyed by path relative to its directory.
    fn write_item(
        &self,
        directory: &Path,
        entries: Vec<Planned>,
        success: &str,
    ) -> Result<BTreeMap<String, FileRecord>> {
        self.disk.create_directory(directory)?;
        let tree = TreeMetadata {
            entries: entries.iter().map(|entry| (entry.key.clone(), entry.kind.clone())).collect(),
            ocdbt: self.format.ocdbt,
            zarr3: self.format.zarr3,
            stores_every_chunk: true,
        };
        let WrittenValues { mut files, values } = self.write_arrays(directory, entries)?;
        if self.format.ocdbt {
            // The tree refers to data files, so it is written after them.
            let database = DatabaseWriter { disk: self.disk, directory, now: nanoseconds() };
            files.extend(database.write(values)?);
        }
        for (name, contents) in [(TREE_FILE, tree.to_json().to_string().as_str()), (SUCCESS_FILE, success)] {
            let record = self.write_file(&directory.join(name), &[contents.as_bytes()])?;
            files.insert(name.to_owned(), record);
        }
        Ok(files)
    }

    fn write_arrays(&self, items: &Path, entries: Vec<Planned>) -> Result<WrittenValues> {
        let queue = Mutex::new(entries.into_iter());
        let failed = AtomicBool::new(false);
        let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
        let work = || -> Result<WrittenValues> {
            let mut writer = ValueWriter::new(self.disk, items, self.format);
            let mut write = || {
                while let Some(entry) = next().filter(|_| !failed.load(Ordering::Relaxed)) {
                    if let Some(array) = entry.value {
                        self.write_array(&mut writer, &entry.name, array)?;
                    }
                }
                Ok(())
            };
            write().inspect_err(|_| failed.store(true, Ordering::Relaxed))?;
            writer.finish()
        };
        std::thread::scope(|scope| {
            let helpers: Vec<_> = (1..self.threads).map(|_| scope.spawn(work)).collect();
            let own = work();
            helpers
                .into_iter()
                .map(|helper| {
                    helper.join().unwrap_or(Err(CheckpointError::WriterPanicked { step: self.step }))
                })
                .fold(own, |all, more| {
                    let mut all = all?;
                    all.append(more?);
                    Ok(all)
                })
        })
    }

    fn write_array(&self, writer: &mut ValueWriter<'_>, name: &str, mut array: PlannedArray) -> Result<()> {
        let json = array.layout.to_json().to_string();
        writer.put(format!("{name}/{}", array.layout.keys.metadata_file()), [Ok(json.into_bytes())])?;
        for index in 0..array.shards.len() {
            let host = plan::fetch(self.step, name, &mut array, index)?;
            let (layout, region) = (&array.layout, &array.shards[index]);
            for (position, cell) in region::cells_meeting(region, &layout.chunk_dims) {
                let pieces = encode_chunk(layout, &host, region, cell).map(|piece| {
                    self.check_cancelled()?;
                    piece.map_err(|source| CheckpointError::io("compress", self.temporary, source))
                });
                writer.put(format!("{name}/{}", layout.keys.file(&position)), pieces)?;
            }
        }
        Ok(())
    }

    fn write_file(&self, path: &Path, pieces: &[&[u8]]) -> Result<FileRecord> {
        self.check_cancelled()?;
        self.disk.write(path, pieces)?;
        Ok(FileRecord::of(pieces))
    }

    fn check_cancelled(&self) -> Result<()> {
        match self.cancelled.load(Ordering::Relaxed) {
            true => Err(CheckpointError::Cancelled { step: self.step }),
            false => Ok(()),
        }
    }
}

/// The contents of the file that marks a step as complete.
pub(crate) fn success_text(destination: &Path) -> String {
    format!("Checkpoint commit was successful to {}", destination.display())
}

/// The encoded boxes of a chunk and, if it has an index, the index. One box is in memory at a time.
fn encode_chunk(
    layout: &ArrayLayout,
    host: &HostArray,
    region: &[Range<usize>],
    cell: Region,
) -> impl Iterator<Item = io::Result<Vec<u8>>> {
    let inner_dims = layout.encoded_dims();
    let element_size = layout.dtype.byte_size();
    let counts: Vec<usize> =
        layout.chunk_dims.iter().zip(inner_dims).map(|(chunk, inner)| chunk / inner).collect();
    let mut index = layout.shard.as_ref().map(|_| ShardIndex { entries: Vec::new() });
    let mut positions = region::grid(&counts);
    let mut offset = 0;
    std::iter::from_fn(move || {
        let Some(position) = positions.next() else { return Some(Ok(index.take()?.encode())) };
        let inner: Region = position
            .iter()
            .zip(inner_dims)
            .zip(&cell)
            .map(|((index, dim), range)| range.start + index * dim..range.start + (index + 1) * dim)
            .collect();
        // A chunk at the end of an axis may extend beyond the array; the rest of its box is padding.
        let mut bytes = vec![0; region::num_elements(&inner) * element_size];
        if let Some(common) = region::overlap(&inner, region) {
            region::copy(host.bytes(), region, &mut bytes, &inner, &common, element_size);
        }
        let encoded = codec::encode(&layout.codecs, bytes);
        if let (Some(index), Ok(encoded)) = (&mut index, &encoded) {
            let length = encoded.len() as u64;
            index.entries.push(Some((offset, length)));
            offset += length;
        }
        Some(encoded)
    })
}

fn nanoseconds() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}
