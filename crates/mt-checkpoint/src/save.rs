//! Writing one step.

use std::{
    collections::{BTreeMap, HashSet, btree_map},
    path::Path,
    sync::{
        Mutex,
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
    keys::{KeySegment, entry_name},
    manifest::{FileRecord, MANIFEST_FILE, MANIFEST_MARK, Manifest},
    metadata::{
        self, Empty, Kind, STATE_ITEM, STEP_FILE, SUCCESS_FILE, TEMPORARY_SUFFIX, TREE_FILE, TreeMetadata,
    },
    region::{self, Region},
    zarr::ArrayLayout,
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

/// An entry with its path on disk.
pub(crate) struct Planned {
    key: Vec<KeySegment>,
    name: String,
    value: Option<PlannedArray>,
    kind: Kind,
}

struct PlannedArray {
    source: Box<dyn ArraySource>,
    layout: ArrayLayout,
    /// Regions of the shards with their file names.
    shards: Vec<(Region, String)>,
}

/// A tree of arrays with paths on disk.
pub(crate) struct PlannedItem {
    /// The directory inside the state's; `None` for the state itself.
    name: Option<String>,
    entries: Vec<Planned>,
}

/// Chooses the path of each entry; the state comes first.
///
/// # Errors
/// Names collide or are invalid file names, or an array's shards do not form a regular grid.
pub(crate) fn plan(entries: Vec<Entry>, extra_items: Vec<ExtraItem>) -> Result<Vec<PlannedItem>> {
    let state = plan_entries(entries)?;
    let mut taken: HashSet<String> = state.iter().map(|entry| entry.name.clone()).collect();
    taken.extend([TREE_FILE, SUCCESS_FILE].map(str::to_owned));
    let mut items = vec![PlannedItem { name: None, entries: state }];
    for ExtraItem { item, entries } in extra_items {
        if !metadata::is_plain(&item) || !taken.insert(item.clone()) {
            let reason = "the item's name is not free".to_owned();
            return Err(CheckpointError::InvalidEntry { name: item, reason });
        }
        items.push(PlannedItem { name: Some(item), entries: plan_entries(entries)? });
    }
    Ok(items)
}

fn plan_entries(entries: Vec<Entry>) -> Result<Vec<Planned>> {
    let mut names = HashSet::new();
    let mut planned = Vec::with_capacity(entries.len());
    for Entry { key, value } in entries {
        let name = entry_name(&key);
        let invalid =
            |reason: &str| CheckpointError::InvalidEntry { name: name.clone(), reason: reason.to_owned() };
        if !metadata::is_plain(&name) {
            return Err(invalid("its name cannot be the name of a directory"));
        }
        if !names.insert(name.clone()) {
            return Err(invalid("another entry has the same name"));
        }
        let (value, kind) = match value {
            Value::Empty(empty) => (None, Kind::Empty(empty)),
            Value::Array(source) => {
                let (layout, shards) = layout(source.as_ref()).map_err(invalid)?;
                (Some(PlannedArray { source, layout, shards }), Kind::Array)
            }
        };
        planned.push(Planned { key, name, value, kind });
    }
    Ok(planned)
}

fn layout(source: &dyn ArraySource) -> Result<(ArrayLayout, Vec<(Region, String)>), &'static str> {
    const NO_GRID: &str = "its shards do not form a regular grid";
    let (dims, shards) = (source.dims(), source.shards());
    if dims.contains(&0) {
        return Err("it has no elements");
    }
    let within = |region: &Region| {
        region.len() == dims.len()
            && region.iter().zip(dims).all(|(range, &dim)| range.start < range.end && range.end <= dim)
    };
    if !shards.iter().all(within) {
        return Err("a shard does not lie within the array");
    }
    let shard_dims: Vec<usize> =
        (0..dims.len()).map(|axis| shards.iter().map(|shard| shard[axis].len()).max().unwrap_or(0)).collect();
    let layout = ArrayLayout::for_shards(source.dtype(), dims, &shard_dims);
    if shard_dims.contains(&0) {
        return Err(NO_GRID);
    }
    let num_cells: usize = dims.iter().zip(&shard_dims).map(|(dim, shard)| dim.div_ceil(*shard)).product();
    let mut files = Vec::with_capacity(shards.len());
    let mut seen = HashSet::new();
    for shard in shards {
        let cell: Vec<usize> = shard.iter().zip(&shard_dims).map(|(range, dim)| range.start / dim).collect();
        let exact = (0..dims.len()).all(|axis| {
            let start = cell[axis] * shard_dims[axis];
            shard[axis] == (start..dims[axis].min(start + shard_dims[axis]))
        });
        if !exact {
            return Err(NO_GRID);
        }
        let file = layout.keys.file(&cell);
        if !seen.insert(cell) {
            return Err("two of its shards are the same");
        }
        files.push((shard, file));
    }
    if files.len() == num_cells { Ok((layout, files)) } else { Err(NO_GRID) }
}

/// Fetches all shards now.
pub(crate) fn fetch_all(step: u64, items: &mut [PlannedItem]) -> Result<()> {
    struct Fetched {
        dtype: DType,
        dims: Vec<usize>,
        shards: Vec<Option<HostArray>>,
        regions: Vec<Region>,
    }
    impl ArraySource for Fetched {
        fn dtype(&self) -> DType {
            self.dtype
        }
        fn dims(&self) -> &[usize] {
            &self.dims
        }
        fn shards(&self) -> Vec<Region> {
            self.regions.clone()
        }
        fn fetch(&mut self, shard: usize) -> Result<HostArray, SourceError> {
            self.shards[shard].take().ok_or_else(|| "the shard was fetched before".into())
        }
    }
    for entry in items.iter_mut().flat_map(|item| &mut item.entries) {
        let Some(array) = &mut entry.value else { continue };
        let mut shards = Vec::with_capacity(array.shards.len());
        for index in 0..array.shards.len() {
            shards.push(Some(fetch(step, &entry.name, array, index)?));
        }
        let (dtype, dims) = (array.layout.dtype, array.layout.dims.clone());
        let regions = array.shards.iter().map(|shard| shard.0.clone()).collect();
        array.source = Box::new(Fetched { dtype, dims, shards, regions });
    }
    Ok(())
}

fn fetch(step: u64, name: &str, array: &mut PlannedArray, index: usize) -> Result<HostArray> {
    let failed = |source| CheckpointError::Fetch { step, name: name.to_owned(), source };
    let host = array.source.fetch(index).map_err(failed)?;
    let expected = region::lengths(&array.shards[index].0);
    if host.dtype() != array.layout.dtype || host.dims() != expected {
        return Err(failed(
            format!("shard {index} is {host:?}, not `{}{expected:?}`", array.layout.dtype).into(),
        ));
    }
    Ok(host)
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
        let temporary_items = self.temporary.join(format!("{STATE_ITEM}{TEMPORARY_SUFFIX}"));
        self.disk.create_directory(self.temporary)?;
        let success = format!("Checkpoint commit was successful to {}", self.destination.display());
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
        self.disk.rename(&temporary_items, &self.temporary.join(STATE_ITEM))?;

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
        let metadata = metadata::step_metadata(started, nanoseconds(), &custom);
        for (name, contents) in [(STEP_FILE, metadata.to_string()), (SUCCESS_FILE, success)] {
            let record = self.write_file(&self.temporary.join(name), &[contents.as_bytes()])?;
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
            ocdbt: false,
            zarr3: true,
            stores_every_chunk: true,
        };
        let mut files = self.write_arrays(directory, entries)?;
        for (name, contents) in [(TREE_FILE, tree.to_json().to_string().as_str()), (SUCCESS_FILE, success)] {
            let record = self.write_file(&directory.join(name), &[contents.as_bytes()])?;
            files.insert(name.to_owned(), record);
        }
        Ok(files)
    }

    fn write_arrays(&self, items: &Path, entries: Vec<Planned>) -> Result<BTreeMap<String, FileRecord>> {
        let queue = Mutex::new(entries.into_iter());
        let files = Mutex::new(BTreeMap::new());
        let failed = AtomicBool::new(false);
        let work = || -> Result<()> {
            while !failed.load(Ordering::Relaxed) {
                let next = queue.lock().unwrap_or_else(std::sync::PoisonError::into_inner).next();
                let Some(entry) = next else { break };
                if let Some(array) = entry.value {
                    let mut records = self
                        .write_array(items, &entry.name, array)
                        .inspect_err(|_| failed.store(true, Ordering::Relaxed))?;
                    files.lock().unwrap_or_else(std::sync::PoisonError::into_inner).append(&mut records);
                }
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let helpers: Vec<_> = (1..self.threads).map(|_| scope.spawn(work)).collect();
            let own = work();
            helpers
                .into_iter()
                .map(|helper| {
                    helper.join().unwrap_or(Err(CheckpointError::WriterPanicked { step: self.step }))
                })
                .fold(own, Result::and)
        })?;
        Ok(files.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner))
    }

    fn write_array(
        &self,
        items: &Path,
        name: &str,
        mut array: PlannedArray,
    ) -> Result<BTreeMap<String, FileRecord>> {
        let directory = items.join(name);
        let mut records = BTreeMap::new();
        self.disk.create_directory(&directory)?;
        let json = array.layout.to_json().to_string();
        let record = self.write_file(&directory.join("zarr.json"), &[json.as_bytes()])?;
        records.insert(format!("{name}/zarr.json"), record);
        for index in 0..array.shards.len() {
            let host = fetch(self.step, name, &mut array, index)?;
            let (region, file) = &array.shards[index];
            let path = directory.join(file);
            let pieces = encode_shard(&array.layout, &host, region)
                .map_err(|source| CheckpointError::io("compress", &path, source))?;
            drop(host);
            self.disk.create_directory(path.parent().unwrap_or(&directory))?;
            let pieces: Vec<&[u8]> = pieces.iter().map(Vec::as_slice).collect();
            records.insert(format!("{name}/{file}"), self.write_file(&path, &pieces)?);
        }
        Ok(records)
    }

    fn write_file(&self, path: &Path, pieces: &[&[u8]]) -> Result<FileRecord> {
        if self.cancelled.load(Ordering::Relaxed) {
            return Err(CheckpointError::Cancelled { step: self.step });
        }
        self.disk.write(path, pieces)?;
        Ok(FileRecord::of(pieces))
    }
}

/// The inner chunks of a shard followed by its index.
fn encode_shard(layout: &ArrayLayout, host: &HostArray, region: &Region) -> std::io::Result<Vec<Vec<u8>>> {
    let inner_dims = layout.encoded_dims();
    let element_size = layout.dtype.byte_size();
    // A shard at the end of an axis may be smaller than the others; the rest of its box is padding.
    let full: Region =
        region.iter().zip(&layout.chunk_dims).map(|(range, dim)| range.start..range.start + dim).collect();
    let counts: Vec<usize> =
        layout.chunk_dims.iter().zip(inner_dims).map(|(chunk, inner)| chunk / inner).collect();
    let mut pieces = Vec::new();
    let mut entries = Vec::new();
    let mut offset = 0;
    for position in region::grid(&counts) {
        let inner: Region = position
            .iter()
            .zip(inner_dims)
            .zip(&full)
            .map(|((index, dim), range)| range.start + index * dim..range.start + (index + 1) * dim)
            .collect();
        let mut bytes = vec![0; region::num_elements(&inner) * element_size];
        if let Some(common) = region::overlap(&inner, region) {
            region::copy(host.bytes(), region, &mut bytes, &inner, &common, element_size);
        }
        let encoded = codec::encode(&layout.codecs, bytes)?;
        let length = encoded.len() as u64;
        entries.push(Some((offset, length)));
        offset += length;
        pieces.push(encoded);
    }
    pieces.push(ShardIndex { entries }.encode());
    Ok(pieces)
}

fn nanoseconds() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}
