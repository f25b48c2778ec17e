//! Listings and comparisons of checkpoints and weights of any kind.

mod diff;

use std::{
    collections::BTreeMap,
    fs::File,
    io::Read,
    path::{Path, PathBuf},
};

use mt_shape::HostArray;

use crate::{
    error::{CheckpointError, Result},
    gguf::{self, GgufFile},
    item::StoredValue,
    locate::SkippedStep,
    read::Checkpoint,
    safetensors::WeightsDirectory,
    torch::{TorchCheckpoint, TorchFile},
    weights::{self, ElementType, TensorInfo},
};

pub use diff::{ListedDifference, ListingDiff, ValueDifference};

/// A checkpoint or a file of weights of any kind.
#[derive(Debug)]
pub enum WeightsSource {
    /// A Hugging Face directory or a safetensors file.
    Safetensors(WeightsDirectory),
    /// A file written by `torch.save`.
    Torch(TorchFile),
    /// The `consolidated.*.pth` files of a directory.
    TorchDirectory(TorchCheckpoint),
    /// A file of llama.cpp.
    Gguf(GgufFile),
    /// An Orbax checkpoint, such as a run of this program.
    Orbax(Checkpoint),
}

/// The kind of a listed checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceKind {
    Safetensors,
    Torch,
    Gguf,
    Orbax,
}

/// One tensor of a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedTensor {
    pub name: String,
    pub dtype: ElementType,
    pub dims: Vec<usize>,
    /// Bytes of its elements before compression.
    pub bytes: u64,
    /// The file that holds it, or the directory of its chunks or of the database that holds it.
    pub place: PathBuf,
}

/// The contents of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listing {
    pub path: PathBuf,
    pub kind: SourceKind,
    /// The step, if the checkpoint records it.
    pub step: Option<u64>,
    pub tensors: Vec<ListedTensor>,
    /// Names of the items with further arrays that an Orbax checkpoint stores beside the listed state.
    pub other_items: Vec<String>,
}

/// Totals over some tensors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    pub tensors: usize,
    pub elements: u64,
    pub bytes: u64,
}

impl WeightsSource {
    /// Opens the checkpoint at a path: a Hugging Face directory, a directory with `consolidated.*.pth`, a run,
    /// checkpoints, step or items directory, or a single file of weights.
    ///
    /// # Errors
    /// The path is none of these, or the checkpoint is unusable: user errors.
    pub fn open(path: &Path) -> Result<Self> {
        let input = mt_storage::input(path).map_err(|source| CheckpointError::io("read", path, source))?;
        let path = input.as_path();
        weights::complete_weights(path)?;
        if mt_storage::is_remote(path) {
            return Checkpoint::open_path(path).map(Self::Orbax);
        }
        if path.is_file() {
            return Self::open_file(path);
        }
        if !path.is_dir() {
            return Err(weights::bad(path, "it does not exist", "check the path"));
        }
        if WeightsDirectory::is_at(path)? {
            return WeightsDirectory::open(path).map(Self::Safetensors);
        }
        if TorchCheckpoint::is_at(path)? {
            return TorchCheckpoint::open(path).map(Self::TorchDirectory);
        }
        match Checkpoint::open_path(path) {
            Ok(checkpoint) => Ok(Self::Orbax(checkpoint)),
            Err(CheckpointError::NotACheckpoint { reason, .. }) => {
                Err(CheckpointError::NoWeights { path: path.to_owned(), reason })
            }
            Err(error) => Err(error),
        }
    }

    /// Damaged steps that are newer than the opened one, if a run was opened.
    pub fn skipped(&self) -> &[SkippedStep] {
        match self {
            Self::Orbax(checkpoint) => checkpoint.skipped(),
            Self::Safetensors(_) | Self::Torch(_) | Self::TorchDirectory(_) | Self::Gguf(_) => &[],
        }
    }

    /// The list of tensors.
    ///
    /// # Errors
    /// A checkpoint's directory cannot be listed.
    pub fn listing(&self) -> Result<Listing> {
        let listing = |path: &Path, kind, tensors| Listing {
            path: path.to_owned(),
            kind,
            step: None,
            tensors,
            other_items: Vec::new(),
        };
        Ok(match self {
            Self::Safetensors(weights) => {
                let tensors = weights.tensors().iter().map(|tensor| listed(tensor, None)).collect();
                listing(weights.path(), SourceKind::Safetensors, tensors)
            }
            Self::Torch(file) => {
                let tensors = file.tensors().iter().map(|tensor| listed(tensor, None)).collect();
                listing(file.path(), SourceKind::Torch, tensors)
            }
            Self::Gguf(file) => {
                let tensors = file.tensors().iter().map(|tensor| listed(tensor, None)).collect();
                listing(file.path(), SourceKind::Gguf, tensors)
            }
            Self::TorchDirectory(checkpoint) => {
                let tensors = checkpoint.files().iter().flat_map(|file| {
                    let prefix = (checkpoint.files().len() > 1).then(|| file_prefix(file));
                    file.tensors().iter().map(move |tensor| listed(tensor, prefix.as_deref()))
                });
                listing(checkpoint.path(), SourceKind::Torch, tensors.collect())
            }
            Self::Orbax(checkpoint) => {
                let tensors = checkpoint.entries().iter().filter_map(|entry| {
                    let (dtype, dims) = match &entry.value {
                        StoredValue::Array { dtype, dims } => (ElementType::Known(*dtype), dims.clone()),
                        StoredValue::Other(kind) => (ElementType::Other(kind.clone()), Vec::new()),
                        StoredValue::Empty(_) => return None,
                    };
                    let size = dtype.known().map_or(0, |dtype| dtype.byte_size() as u64);
                    let bytes = dims.iter().fold(size, |bytes, &dim| bytes.saturating_mul(dim as u64));
                    let place = checkpoint.place(&entry.name);
                    Some(ListedTensor { name: entry.name.clone(), dtype, dims, bytes, place })
                });
                Listing {
                    path: checkpoint.path().to_owned(),
                    kind: SourceKind::Orbax,
                    step: checkpoint.step(),
                    tensors: tensors.collect(),
                    other_items: checkpoint.item_names()?,
                }
            }
        })
    }

    /// Reads a tensor by its name in the listing.
    ///
    /// # Errors
    /// The tensor does not exist, its element type cannot be read, or its file is damaged.
    pub fn read(&self, name: &str) -> Result<HostArray> {
        match self {
            Self::Safetensors(weights) => weights.read(name),
            Self::Torch(file) => file.read(name),
            Self::Gguf(file) => file.read(name),
            Self::TorchDirectory(checkpoint) => match checkpoint.files() {
                [file] => file.read(name),
                files => {
                    let found = files.iter().find_map(|file| {
                        let name = name.strip_prefix(&file_prefix(file))?;
                        file.tensor(name).map(|_| file.read(name))
                    });
                    found.unwrap_or_else(|| Err(weights::unknown_tensor(checkpoint.path(), name)))
                }
            },
            Self::Orbax(checkpoint) => checkpoint.read_all(name),
        }
    }

    fn open_file(path: &Path) -> Result<Self> {
        let extension = path.extension().and_then(|extension| extension.to_str());
        match extension {
            Some("safetensors") => return WeightsDirectory::open(path).map(Self::Safetensors),
            Some("pth" | "pt" | "bin") => return TorchFile::open(path).map(Self::Torch),
            Some("gguf") => return GgufFile::open(path).map(Self::Gguf),
            _ => {}
        }
        // Downloads may be stored under a digest instead of a name.
        let mut start = Vec::new();
        File::open(path)
            .and_then(|file| file.take(16).read_to_end(&mut start))
            .map_err(|source| CheckpointError::io("read", path, source))?;
        if start.starts_with(b"PK") {
            return TorchFile::open(path).map(Self::Torch);
        }
        if start.starts_with(gguf::MAGIC) {
            return GgufFile::open(path).map(Self::Gguf);
        }
        if start.get(8..10) == Some(b"{\"") {
            return WeightsDirectory::open(path).map(Self::Safetensors);
        }
        let reason = "the file is neither of safetensors nor of PyTorch nor of llama.cpp (GGUF)".to_owned();
        Err(CheckpointError::NoWeights { path: path.to_owned(), reason })
    }
}

impl Listing {
    /// The totals over all tensors.
    pub fn totals(&self) -> Totals {
        self.tensors.iter().fold(Totals::default(), Totals::with)
    }

    /// The totals for each element type, in descending order of bytes.
    pub fn by_dtype(&self) -> Vec<(ElementType, Totals)> {
        self.grouped(|tensor| tensor.dtype.clone())
    }

    /// The totals for each top-level entry of the tree, such as `model` and `lm_head`, in descending order of bytes.
    pub fn by_entry(&self) -> Vec<(String, Totals)> {
        self.grouped(|tensor| {
            let end = tensor.name.find('/').or_else(|| tensor.name.find('.')).unwrap_or(tensor.name.len());
            tensor.name[..end].to_owned()
        })
    }

    fn grouped<K: Ord>(&self, key: impl Fn(&ListedTensor) -> K) -> Vec<(K, Totals)> {
        let mut groups = BTreeMap::<K, Totals>::new();
        for tensor in &self.tensors {
            let group = groups.entry(key(tensor)).or_default();
            *group = group.with(tensor);
        }
        let mut groups: Vec<_> = groups.into_iter().collect();
        groups.sort_by_key(|(_, totals)| std::cmp::Reverse(totals.bytes));
        groups
    }
}

impl ListedTensor {
    /// The number of elements; one for a leaf that is not an array.
    pub fn num_elements(&self) -> u64 {
        self.dims.iter().fold(1, |elements, &dim| elements.saturating_mul(dim as u64))
    }
}

impl Totals {
    fn with(self, tensor: &ListedTensor) -> Self {
        Self {
            tensors: self.tensors + 1,
            elements: self.elements.saturating_add(tensor.num_elements()),
            bytes: self.bytes.saturating_add(tensor.bytes),
        }
    }
}

fn listed(tensor: &TensorInfo, prefix: Option<&str>) -> ListedTensor {
    ListedTensor {
        name: format!("{}{}", prefix.unwrap_or_default(), tensor.name),
        dtype: tensor.dtype.clone(),
        dims: tensor.dims.clone(),
        bytes: tensor.num_bytes,
        place: tensor.file.to_path_buf(),
    }
}

/// A prefix that distinguishes tensors of the same name in several files, such as `consolidated.00/`.
fn file_prefix(file: &TorchFile) -> String {
    let stem = file.path().file_stem().unwrap_or_default();
    format!("{}/", stem.to_string_lossy())
}
