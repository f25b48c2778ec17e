//! Reading a checkpoint: what is in it, and any part of any array.

use std::{
    collections::HashMap,
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom},
    ops::Range,
    path::{Path, PathBuf},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use mt_shape::{DType, HostArray};
use serde_json::{Map, Value as Json};

use crate::{
    codec::{self, ShardIndex},
    compare::{Comparison, ExpectedArray},
    error::{CheckpointError, Result},
    keys::{KeySegment, entry_name},
    locate::{self, Location},
    manifest::{FileRecord, MANIFEST_FILE, MANIFEST_MARK, Manifest},
    metadata::{Empty, Kind, STEP_FILE, TREE_FILE, TreeMetadata},
    region::{self, Region},
    zarr::{ArrayLayout, LayoutError},
};

/// A leaf of the stored tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredEntry {
    pub key: Vec<KeySegment>,
    /// The key's segments joined by dots.
    pub name: String,
    pub value: StoredValue,
}

/// What is stored of a leaf.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoredValue {
    Array {
        dtype: DType,
        dims: Vec<usize>,
    },
    Empty(Empty),
    /// A value of a type that this crate does not read, such as `string`.
    Other(String),
}

/// One checkpoint that can be read from.
#[derive(Debug)]
pub struct Checkpoint {
    location: Location,
    manifest: Option<Manifest>,
    custom_metadata: Map<String, Json>,
    entries: Vec<StoredEntry>,
    layouts: HashMap<String, ArrayLayout>,
    stores_every_chunk: bool,
    threads: usize,
}

impl Checkpoint {
    /// Opens a complete step of a checkpoints directory.
    ///
    /// # Errors
    /// There is no such step, it is of a kind that is not supported, or a file that was looked at is damaged: the
    /// metadata is checked as a whole, of the arrays only the size of each file.
    pub fn open(checkpoints: &Path, step: u64) -> Result<Self> {
        Self::at(Location::of_step(checkpoints, step)?)
    }

    /// Opens a checkpoint by any of its directories: the run (then its newest step), its checkpoints directory
    /// (the same), a step, or a step's items.
    ///
    /// # Errors
    /// The path is no checkpoint, and as for [`Self::open`].
    pub fn open_path(path: &Path) -> Result<Self> {
        Self::at(Location::of_path(path)?)
    }

    /// The number of threads that read; by default that of the processors.
    pub fn with_threads(mut self, threads: usize) -> Self {
        self.threads = threads.max(1);
        self
    }

    /// The step, where the directory's name tells it.
    pub fn step(&self) -> Option<u64> {
        self.location.step
    }

    /// The directory that holds the arrays.
    pub fn path(&self) -> &Path {
        &self.location.items
    }

    /// The leaves of the tree in the stored order.
    pub fn entries(&self) -> &[StoredEntry] {
        &self.entries
    }

    /// The element type and the dimensions of an array.
    ///
    /// # Errors
    /// There is no such array.
    pub fn array(&self, name: &str) -> Result<(DType, &[usize])> {
        self.layout(name).map(|layout| (layout.dtype, layout.dims.as_slice()))
    }

    /// What was recorded with the step, such as `scan_layers`.
    pub fn custom_metadata(&self) -> &Map<String, Json> {
        &self.custom_metadata
    }

    /// Whether a manifest covers every byte. Orbax itself writes none.
    pub fn has_manifest(&self) -> bool {
        self.manifest.is_some()
    }

    /// Names of the files of a JSON item, sorted; empty if there is no such item.
    ///
    /// # Errors
    /// The item's directory cannot be listed.
    pub fn json_files(&self, item: &str) -> Result<Vec<String>> {
        let Some(directory) = self.location.step_directory.as_ref().map(|step| step.join(item)) else {
            return Ok(Vec::new());
        };
        let failed = |source| CheckpointError::io("list", &directory, source);
        let listing = match fs::read_dir(&directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            listing => listing.map_err(failed)?,
        };
        let mut names = Vec::new();
        for entry in listing {
            let name = entry.map_err(failed)?.file_name().to_string_lossy().into_owned();
            if name.ends_with(".json") {
                names.push(name);
            }
        }
        names.sort_unstable();
        Ok(names)
    }

    /// The contents of a JSON item's file; `None` if there is no such file.
    ///
    /// # Errors
    /// The file is damaged or cannot be read.
    pub fn read_json(&self, item: &str, file: &str) -> Result<Option<Json>> {
        let Some(step_directory) = &self.location.step_directory else { return Ok(None) };
        let path = step_directory.join(item).join(file);
        let recorded = self
            .manifest
            .as_ref()
            .is_some_and(|manifest| manifest.files.contains_key(&format!("{item}/{file}")));
        if !recorded && !path.exists() {
            return Ok(None);
        }
        self.json(&path).map(Some)
    }

    /// Compares the arrays with what a run expects.
    pub fn compare(&self, expected: &[ExpectedArray]) -> Comparison {
        let stored = self.entries.iter().filter_map(|entry| match &entry.value {
            StoredValue::Array { dtype, dims } => Some((entry.name.as_str(), *dtype, dims.as_slice())),
            _ => None,
        });
        Comparison::new(self.location.items.clone(), stored, expected)
    }

    /// Reads a whole array.
    ///
    /// # Errors
    /// As for [`Self::read`].
    pub fn read_all(&self, name: &str) -> Result<HostArray> {
        let layout = self.layout(name)?;
        self.read_region(name, layout, &region::whole(&layout.dims))
    }

    /// Reads a part of an array: only what lies in chunks that meet the ranges is touched, and checked.
    ///
    /// # Errors
    /// There is no such array, the ranges do not lie within it, or a chunk is damaged.
    pub fn read(&self, name: &str, ranges: &[Range<usize>]) -> Result<HostArray> {
        let layout = self.layout(name)?;
        let dims = &layout.dims;
        let within = ranges.len() == dims.len()
            && ranges.iter().zip(dims).all(|(range, &dim)| range.start <= range.end && range.end <= dim);
        if !within {
            let (ranges, dims) = (ranges.to_vec(), dims.clone());
            return Err(CheckpointError::OutOfBounds { name: name.to_owned(), ranges, dims });
        }
        self.read_region(name, layout, ranges)
    }

    /// Reads every byte of every file and checks it: against the manifest if there is one, by decoding if not.
    ///
    /// # Errors
    /// A file is damaged.
    pub fn verify(&self) -> Result<()> {
        match (&self.manifest, &self.location.step_directory) {
            (Some(manifest), Some(step_directory)) => {
                let files: Vec<_> = manifest.files.iter().collect();
                parallel(self.threads, &files, |(name, record)| {
                    let path = step_directory.join(name);
                    let found = record_of(&path).map_err(|source| self.failed_read(&path, source))?;
                    record.check(found).map_err(|reason| self.corrupt(&path, reason))
                })?;
            }
            _ => {
                for (name, layout) in &self.layouts {
                    for (_, cell) in region::cells_meeting(&region::whole(&layout.dims), &layout.chunk_dims) {
                        if let Some(inside) = region::overlap(&cell, &region::whole(&layout.dims)) {
                            self.read_region(name, layout, &inside)?;
                        }
                    }
                }
            }
        }
        Ok(())
    }

    fn at(location: Location) -> Result<Self> {
        if locate::is_ocdbt(&location.items) {
            return Err(CheckpointError::Ocdbt { path: location.items });
        }
        let mut checkpoint = Self {
            location,
            manifest: None,
            custom_metadata: Map::new(),
            entries: Vec::new(),
            layouts: HashMap::new(),
            stores_every_chunk: true,
            threads: std::thread::available_parallelism().map_or(1, usize::from),
        };
        checkpoint.load_step()?;
        checkpoint.load_tree()?;
        Ok(checkpoint)
    }

    fn load_step(&mut self) -> Result<()> {
        let Some(step_directory) = self.location.step_directory.clone() else { return Ok(()) };
        let manifest = step_directory.join(MANIFEST_FILE);
        match fs::read(&manifest) {
            Ok(contents) => {
                self.manifest =
                    Some(Manifest::decode(&contents).map_err(|reason| self.corrupt(&manifest, reason))?);
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(source) => return Err(self.failed_read(&manifest, source)),
        }
        let metadata = step_directory.join(STEP_FILE);
        // Orbax itself loads checkpoints that lack this file.
        if self.manifest.is_some() || metadata.exists() {
            if let Json::Object(custom) = self.json(&metadata)?["custom_metadata"].take() {
                self.custom_metadata = custom;
            }
            if self.custom_metadata.remove(MANIFEST_MARK).is_some() && self.manifest.is_none() {
                return Err(self.corrupt(&manifest, "it is missing"));
            }
        }
        // Sizes are cheap to check, and tell a step that was cut short before anything of it is used.
        for (name, record) in self.manifest.iter().flat_map(|manifest| &manifest.files) {
            let path = step_directory.join(name);
            let bytes = fs::metadata(&path).map_err(|source| self.failed_read(&path, source))?.len();
            let found = FileRecord { bytes, crc32c: record.crc32c };
            record.check(found).map_err(|reason| self.corrupt(&path, reason))?;
        }
        Ok(())
    }

    fn load_tree(&mut self) -> Result<()> {
        let items = self.location.items.clone();
        let path = items.join(TREE_FILE);
        let tree =
            TreeMetadata::from_json(&self.json(&path)?).map_err(|reason| self.corrupt(&path, reason))?;
        if tree.ocdbt {
            return Err(CheckpointError::Ocdbt { path: items });
        }
        self.stores_every_chunk = tree.stores_every_chunk;
        for (key, kind) in tree.entries {
            let name = entry_name(&key);
            let value = match kind {
                Kind::Empty(empty) => StoredValue::Empty(empty),
                Kind::Other(name) => StoredValue::Other(name),
                Kind::Array => {
                    let path = items.join(&name).join(if tree.zarr3 { "zarr.json" } else { ".zarray" });
                    let json = self.json(&path)?;
                    let layout = if tree.zarr3 {
                        ArrayLayout::from_zarr3(&json)
                    } else {
                        ArrayLayout::from_zarr2(&json)
                    };
                    let layout = layout.map_err(|error| match error {
                        LayoutError::Malformed(reason) => self.corrupt(&path, reason),
                        LayoutError::Unsupported(feature) => {
                            CheckpointError::Unsupported { path: path.clone(), feature }
                        }
                    })?;
                    let value = StoredValue::Array { dtype: layout.dtype, dims: layout.dims.clone() };
                    self.layouts.insert(name.clone(), layout);
                    value
                }
            };
            self.entries.push(StoredEntry { key, name, value });
        }
        Ok(())
    }

    fn layout(&self, name: &str) -> Result<&ArrayLayout> {
        self.layouts.get(name).ok_or_else(|| CheckpointError::NoSuchArray {
            checkpoint: self.location.items.clone(),
            name: name.to_owned(),
        })
    }

    fn read_region(&self, name: &str, layout: &ArrayLayout, wanted: &[Range<usize>]) -> Result<HostArray> {
        let target = HostArray::zeros(layout.dtype, &region::lengths(wanted));
        if target.num_elements() == 0 {
            return Ok(target);
        }
        let directory = self.location.items.join(name);
        let cells = region::cells_meeting(wanted, &layout.chunk_dims);
        let parts = parallel(self.threads, &cells, |(position, cell)| {
            self.parts_of_chunk(layout, directory.join(layout.keys.file(position)), cell, wanted)
        })?;
        let parts: Vec<Part> = parts.into_iter().flatten().collect();
        let target = Mutex::new(target);
        let element_size = layout.dtype.byte_size();
        let decoded_size = layout.encoded_dims().iter().product::<usize>() * element_size;
        parallel(self.threads, &parts, |part| {
            let encoded = part.read().map_err(|source| self.failed_read(&part.path, source))?;
            let bytes = codec::decode(&layout.codecs, &encoded, decoded_size)
                .map_err(|reason| self.corrupt(&part.path, reason))?;
            if let Some(common) = region::overlap(&part.region, wanted) {
                let mut target = target.lock().unwrap_or_else(PoisonError::into_inner);
                region::copy(&bytes, &part.region, target.bytes_mut(), wanted, &common, element_size);
            }
            Ok(())
        })?;
        Ok(target.into_inner().unwrap_or_else(PoisonError::into_inner))
    }

    /// The separately encoded parts of a chunk's file that meet the wanted region.
    fn parts_of_chunk(
        &self,
        layout: &ArrayLayout,
        path: PathBuf,
        cell: &Region,
        wanted: &[Range<usize>],
    ) -> Result<Vec<Part>> {
        let size = match fs::metadata(&path) {
            Ok(metadata) => metadata.len(),
            Err(error) if error.kind() == io::ErrorKind::NotFound && !self.stores_every_chunk => {
                return Ok(vec![]);
            }
            Err(source) => return Err(self.failed_read(&path, source)),
        };
        let Some(shard) = &layout.shard else {
            return Ok(vec![Part { path, bytes: 0..size, region: cell.clone() }]);
        };
        let counts: Vec<usize> =
            layout.chunk_dims.iter().zip(&shard.inner_dims).map(|(chunk, inner)| chunk / inner).collect();
        let index_size = ShardIndex::encoded_size(counts.iter().product(), shard.index_checksum) as u64;
        if size < index_size {
            return Err(
                self.corrupt(&path, format!("its {size} bytes are too few for its index of {index_size}"))
            );
        }
        let index_start = if shard.index_at_end { size - index_size } else { 0 };
        let index = read_bytes(&path, index_start..index_start + index_size)
            .map_err(|source| self.failed_read(&path, source))?;
        let index =
            ShardIndex::decode(&index, shard.index_checksum).map_err(|reason| self.corrupt(&path, reason))?;
        let mut parts = Vec::new();
        for (position, entry) in region::grid(&counts).zip(index.entries) {
            let inner: Region = position
                .iter()
                .zip(&shard.inner_dims)
                .zip(cell)
                .map(|((index, dim), range)| range.start + index * dim..range.start + (index + 1) * dim)
                .collect();
            if region::overlap(&inner, wanted).is_none() {
                continue;
            }
            match entry {
                Some((start, length)) if start.checked_add(length).is_some_and(|end| end <= size) => {
                    parts.push(Part { path: path.clone(), bytes: start..start + length, region: inner });
                }
                Some(_) => return Err(self.corrupt(&path, "its index points beyond its end")),
                None if self.stores_every_chunk => return Err(self.corrupt(&path, "a part of it is missing")),
                None => {}
            }
        }
        Ok(parts)
    }

    /// Reads a JSON file, checked against the manifest if there is one.
    fn json(&self, path: &Path) -> Result<Json> {
        let contents = fs::read(path).map_err(|source| self.failed_read(path, source))?;
        if let (Some(manifest), Some(step_directory)) = (&self.manifest, &self.location.step_directory) {
            let name = path.strip_prefix(step_directory).unwrap_or(path).to_string_lossy();
            let record = manifest.files.get(name.as_ref());
            record
                .ok_or_else(|| "the manifest does not list it".to_owned())
                .and_then(|record| record.check(FileRecord::of(&[&contents])))
                .map_err(|reason| self.corrupt(path, reason))?;
        }
        serde_json::from_slice(&contents)
            .map_err(|error| self.corrupt(path, format!("it is no JSON: {error}")))
    }

    fn corrupt(&self, path: &Path, reason: impl Into<String>) -> CheckpointError {
        CheckpointError::Corrupt { step: self.location.step, path: path.to_owned(), reason: reason.into() }
    }

    /// A file that should be there and is not, or ends too early, is damage; other failures are not the file's.
    fn failed_read(&self, path: &Path, source: io::Error) -> CheckpointError {
        match source.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => self.corrupt(path, "it is missing"),
            io::ErrorKind::UnexpectedEof => self.corrupt(path, "it is too short"),
            io::ErrorKind::IsADirectory => self.corrupt(path, "it is a directory"),
            _ => CheckpointError::io("read", path, source),
        }
    }
}

/// A range of a file that holds one encoded box of an array.
struct Part {
    path: PathBuf,
    bytes: Range<u64>,
    region: Region,
}

impl Part {
    fn read(&self) -> io::Result<Vec<u8>> {
        read_bytes(&self.path, self.bytes.clone())
    }
}

fn read_bytes(path: &Path, range: Range<u64>) -> io::Result<Vec<u8>> {
    let length = usize::try_from(range.end - range.start).map_err(io::Error::other)?;
    let mut file = File::open(path)?;
    file.seek(SeekFrom::Start(range.start))?;
    let mut bytes = vec![0; length];
    file.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn record_of(path: &Path) -> io::Result<FileRecord> {
    let mut file = File::open(path)?;
    let mut buffer = vec![0; 1 << 20];
    let mut record = FileRecord { bytes: 0, crc32c: 0 };
    loop {
        let count = match file.read(&mut buffer) {
            Ok(0) => return Ok(record),
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        record.bytes += count as u64;
        record.crc32c = crc32c::crc32c_append(record.crc32c, &buffer[..count]);
    }
}

/// Applies `work` to every input on several threads; results are in the order of the inputs. The first failure in
/// that order is returned.
fn parallel<T: Sync, R: Send>(
    threads: usize,
    inputs: &[T],
    work: impl Fn(&T) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    let threads = threads.min(inputs.len());
    if threads <= 1 {
        return inputs.iter().map(work).collect();
    }
    let next = AtomicUsize::new(0);
    let run = || {
        let mut results = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(input) = inputs.get(index) else { return results };
            let result = work(input);
            if result.is_err() {
                // Nothing further is needed: later inputs would only be read in vain.
                next.store(inputs.len(), Ordering::Relaxed);
            }
            results.push((index, result));
        }
    };
    let mut results = std::thread::scope(|scope| {
        let helpers: Vec<_> = (1..threads).map(|_| scope.spawn(run)).collect();
        let mut results = run();
        for helper in helpers {
            match helper.join() {
                Ok(more) => results.extend(more),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        results
    });
    results.sort_unstable_by_key(|(index, _)| *index);
    results.into_iter().map(|(_, result)| result).collect()
}
