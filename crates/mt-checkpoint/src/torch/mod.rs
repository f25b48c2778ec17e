//! Weights in PyTorch's format: a ZIP archive with a pickle and the storages of which tensors are views.
//!
//! ```text
//! {name}/data.pkl       a dictionary of tensors: storage, offset, dimensions, strides
//! {name}/data/{key}     the bytes of a storage
//! {name}/byteorder      `little`
//! ```

mod pickle;

use std::{
    collections::{HashMap, HashSet},
    io::{BufReader, Read},
    ops::Range,
    path::{Path, PathBuf},
};

use mt_shape::HostArray;
use zip::{CompressionMethod, ZipArchive, result::ZipError};

use crate::{
    error::{CheckpointError, Result},
    region,
    weights::{self, DOWNLOAD_HINT, TensorInfo, WeightsFile, checked_size},
};
use pickle::PickledTensor;

/// A file in which `torch.save` wrote a dictionary of tensors. Reading executes no code. Opening reads the pickle;
/// tensors are read on request, also by several threads.
#[derive(Debug)]
pub struct TorchFile {
    file: WeightsFile,
    tensors: Vec<TensorInfo>,
    /// The strides of each tensor, in elements.
    strides: Vec<Vec<usize>>,
    places: HashMap<String, usize>,
}

const SAVE_AGAIN: &str = "load it with PyTorch and save it again with `torch.save`";

impl TorchFile {
    /// Opens a file.
    ///
    /// # Errors
    /// The file is not of this format, is incomplete, or holds values other than tensors: a user error.
    pub fn open(path: &Path) -> Result<Self> {
        let file = WeightsFile::open(path)?;
        let mut archive = Archive::open(&file)?;
        let pickled = pickle::tensors(&archive.pickle()?).map_err(|reason| file.bad(reason, SAVE_AGAIN))?;
        let mut opened = Vec::new();
        let mut names = HashSet::new();
        for (name, tensor) in pickled {
            if !names.insert(name.clone()) {
                return Err(file.bad(format!("it holds two tensors `{name}`"), SAVE_AGAIN));
            }
            let storage = archive.storage(&tensor.storage)?;
            let strides = tensor.strides.clone();
            let tensor = place(&name, tensor, &storage, &file)
                .map_err(|reason| file.bad(format!("tensor `{name}` {reason}"), SAVE_AGAIN))?;
            opened.push((tensor, strides));
        }
        drop(archive);
        let (tensors, strides): (Vec<TensorInfo>, _) = opened.into_iter().unzip();
        let places = tensors.iter().enumerate().map(|(index, tensor)| (tensor.name.clone(), index)).collect();
        Ok(Self { file, tensors, strides, places })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.file.path
    }

    /// The tensors in stored order. In nested dictionaries, a tensor's name joins all keys with dots.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The tensor with this name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.places.get(name).map(|&index| &self.tensors[index])
    }

    /// Reads a tensor.
    ///
    /// # Errors
    /// There is no such tensor, its element type cannot be read, or the file can no longer be read.
    pub fn read(&self, name: &str) -> Result<HostArray> {
        let (tensor, strides) = self.find(name)?;
        self.read_view(tensor, tensor.dims.clone(), strides, 0)
    }

    /// Reads some rows (positions of the leading axis) of a tensor.
    ///
    /// # Errors
    /// As for [`Self::read`], and if the tensor has no such rows.
    pub fn read_rows(&self, name: &str, rows: Range<usize>) -> Result<HostArray> {
        let (tensor, strides) = self.find(name)?;
        let dims = tensor.dims_of_rows(&rows)?;
        self.read_view(tensor, dims, strides, rows.start)
    }

    fn find(&self, name: &str) -> Result<(&TensorInfo, &[usize])> {
        let &index = self.places.get(name).ok_or_else(|| weights::unknown_tensor(&self.file.path, name))?;
        Ok((&self.tensors[index], &self.strides[index]))
    }

    /// Reads rows of a tensor; `dims` are the dimensions of those rows.
    fn read_view(
        &self,
        tensor: &TensorInfo,
        dims: Vec<usize>,
        strides: &[usize],
        first_row: usize,
    ) -> Result<HostArray> {
        let dtype = tensor.readable()?;
        let size = dtype.byte_size();
        if dims.contains(&0) {
            return Ok(HostArray::zeros(dtype, &dims));
        }
        let skipped = first_row * strides.first().copied().unwrap_or(0) * size;
        let start = tensor.range.start + skipped as u64;
        if is_dense(&dims, strides) {
            return weights::read_dense(dtype, &dims, |bytes| self.file.read_at(bytes, start));
        }
        let mut span = vec![0; (last_element(&dims, strides) + 1) * size];
        self.file.read_at(&mut span, start)?;
        weights::read_dense(dtype, &dims, |bytes| {
            let (outer, inner) = (&dims[..dims.len() - 1], dims[dims.len() - 1]);
            let step = strides[dims.len() - 1] * size;
            for (position, row) in region::grid(outer).zip(bytes.chunks_exact_mut(inner * size)) {
                let first: usize = position.iter().zip(strides).map(|(index, stride)| index * stride).sum();
                for (index, element) in row.chunks_exact_mut(size).enumerate() {
                    element.copy_from_slice(&span[first * size + index * step..][..size]);
                }
            }
            Ok(())
        })
    }
}

/// Meta's checkpoint of a Llama model: `consolidated.00.pth` and, if the model was sharded over devices, further files
/// with slices of the same tensors. `params.json` beside them describes the model.
#[derive(Debug)]
pub struct TorchCheckpoint {
    path: PathBuf,
    files: Vec<TorchFile>,
}

impl TorchCheckpoint {
    /// Opens the files of a directory.
    ///
    /// # Errors
    /// A file is missing or, as for [`TorchFile::open`], unusable.
    pub fn open(directory: &Path) -> Result<Self> {
        let mut numbers = Self::numbers(directory)?;
        numbers.sort_unstable();
        if numbers.is_empty() {
            let reason = "it has no `consolidated.*.pth` file";
            return Err(weights::bad(directory, reason, weights::MISSING_HINT));
        }
        if let Some((missing, _)) = numbers.iter().enumerate().find(|(index, (number, _))| index != number) {
            let reason =
                format!("`consolidated.{missing:02}.pth` is missing, of {} files or more", numbers.len() + 1);
            return Err(weights::bad(directory, reason, "download the missing file"));
        }
        let files =
            numbers.iter().map(|(_, name)| TorchFile::open(&directory.join(name))).collect::<Result<_>>()?;
        Ok(Self { path: directory.to_owned(), files })
    }

    /// Whether a directory holds weights of this kind.
    pub(crate) fn is_at(directory: &Path) -> Result<bool> {
        Ok(!Self::numbers(directory)?.is_empty())
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The files by number. Each has every tensor's name, with one slice of the tensor or, for norms, all of it.
    pub fn files(&self) -> &[TorchFile] {
        &self.files
    }

    fn numbers(directory: &Path) -> Result<Vec<(usize, String)>> {
        let number = |name: &str| {
            let digits = name.strip_prefix("consolidated.")?.strip_suffix(".pth")?;
            digits.parse().ok().filter(|_| digits.bytes().all(|byte| byte.is_ascii_digit()))
        };
        let names = weights::file_names(directory)?;
        Ok(names.into_iter().filter_map(|name| Some((number(&name)?, name))).collect())
    }
}

/// The location of a tensor's elements, which must be inside its storage.
fn place(
    name: &str,
    tensor: PickledTensor,
    storage: &Range<u64>,
    file: &WeightsFile,
) -> Result<TensorInfo, String> {
    let PickledTensor { dtype, element_size, offset, dims, strides, .. } = tensor;
    let size = element_size as u64;
    let num_bytes = checked_size(&dims, element_size).ok_or("is too large")?;
    let last = dims.iter().zip(&strides).try_fold(offset, |last, (&dim, &stride)| {
        dim.saturating_sub(1).checked_mul(stride).and_then(|more| last.checked_add(more))
    });
    let elements = last.and_then(|last| if num_bytes == 0 { Some(offset) } else { last.checked_add(1) });
    let end = elements.and_then(|elements| (elements as u64).checked_mul(size));
    let first = (offset as u64).saturating_mul(size);
    let Some(end) = end.filter(|&end| first <= end && end <= storage.end - storage.start) else {
        return Err("extends beyond its storage".to_owned());
    };
    // With stride zero, one element can stand for more elements than memory holds. Weights are never stored this way.
    if num_bytes > end - first {
        return Err("repeats elements of its storage".to_owned());
    }
    let range = storage.start + first..storage.start + end;
    Ok(TensorInfo { name: name.to_owned(), dtype, dims, file: file.path.clone(), range, num_bytes })
}

/// Whether elements are contiguous in row-major order. The stride of an axis of size 1 does not matter.
fn is_dense(dims: &[usize], strides: &[usize]) -> bool {
    let mut expected = 1;
    dims.iter().zip(strides).rev().all(|(&dim, &stride)| {
        let fits = dim == 1 || stride == expected;
        expected *= dim;
        fits
    })
}

fn last_element(dims: &[usize], strides: &[usize]) -> usize {
    dims.iter().zip(strides).map(|(dim, stride)| (dim - 1) * stride).sum()
}

/// The archive while its entries are listed.
struct Archive<'a> {
    file: &'a WeightsFile,
    zip: ZipArchive<BufReader<&'a std::fs::File>>,
    /// The common prefix of all entry names.
    prefix: String,
    storages: HashMap<String, Range<u64>>,
}

impl<'a> Archive<'a> {
    fn open(file: &'a WeightsFile) -> Result<Self> {
        let mut start = [0; 2];
        if file.length >= 2 {
            file.read_at(&mut start, 0)?;
        }
        if start[0] == 0x80 {
            return Err(file.bad("PyTorch saved it in its format from before version 1.6", SAVE_AGAIN));
        }
        if &start != b"PK" {
            return Err(file.bad("it is not a PyTorch file: it is not a ZIP archive", DOWNLOAD_HINT));
        }
        let zip = ZipArchive::new(BufReader::new(file.handle())).map_err(|error| damaged(file, error))?;
        let prefix = zip.file_names().find_map(|name| name.strip_suffix("data.pkl")).map(str::to_owned);
        let Some(prefix) = prefix else {
            return Err(file.bad("it is not a PyTorch file: it has no `data.pkl`", SAVE_AGAIN));
        };
        let mut archive = Self { file, zip, prefix, storages: HashMap::new() };
        if let Some(order) = archive.small("byteorder")?
            && order != b"little"
        {
            return Err(file.bad("its numbers start with the most significant byte", SAVE_AGAIN));
        }
        Ok(archive)
    }

    fn pickle(&mut self) -> Result<Vec<u8>> {
        let missing = || self.file.bad("it has no `data.pkl`", SAVE_AGAIN);
        self.small("data.pkl")?.ok_or_else(missing)
    }

    /// The bytes of the file that form a storage.
    fn storage(&mut self, key: &str) -> Result<Range<u64>> {
        if let Some(range) = self.storages.get(key) {
            return Ok(range.clone());
        }
        let name = format!("{}data/{key}", self.prefix);
        let index = self.zip.index_for_name(&name);
        let missing = || self.file.bad(format!("its storage `{name}` is missing"), DOWNLOAD_HINT);
        let entry =
            self.zip.by_index_raw(index.ok_or_else(missing)?).map_err(|error| damaged(self.file, error))?;
        if entry.compression() != CompressionMethod::Stored || entry.encrypted() {
            return Err(self
                .file
                .bad(format!("its storage `{name}` is compressed or encrypted"), SAVE_AGAIN));
        }
        let start = entry.data_start();
        let end = start.checked_add(entry.size()).filter(|&end| end <= self.file.length);
        let cut_short =
            || self.file.bad(format!("it is cut short: storage `{name}` ends beyond it"), DOWNLOAD_HINT);
        let range = start..end.ok_or_else(cut_short)?;
        self.storages.insert(key.to_owned(), range.clone());
        Ok(range)
    }

    /// The contents of an entry that is not a storage.
    fn small(&mut self, name: &str) -> Result<Option<Vec<u8>>> {
        let entry = match self.zip.by_name(&format!("{}{name}", self.prefix)) {
            Err(ZipError::FileNotFound) => return Ok(None),
            entry => entry.map_err(|error| damaged(self.file, error))?,
        };
        let mut contents = Vec::new();
        let limit = self.file.length;
        entry.take(limit).read_to_end(&mut contents).map_err(|error| damaged(self.file, error.into()))?;
        Ok(Some(contents))
    }
}

fn damaged(file: &WeightsFile, error: ZipError) -> CheckpointError {
    file.bad(format!("its archive is damaged: {error}"), DOWNLOAD_HINT)
}

#[cfg(test)]
mod tests {
    use mt_shape::DType;

    use super::*;

    #[test]
    fn tensors_lie_within_their_storage() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        std::fs::write(&path, [7; 200]).unwrap();
        let file = WeightsFile::open(&path).unwrap();
        let check = |offset: usize, dims: &[usize], strides: &[usize], expected: Result<Range<u64>, &str>| {
            let tensor = PickledTensor {
                storage: "0".to_owned(),
                dtype: DType::F16.into(),
                element_size: 2,
                offset,
                dims: dims.to_vec(),
                strides: strides.to_vec(),
            };
            // A storage of 24 elements.
            let found = place("a", tensor, &(100..148), &file).map(|tensor| tensor.range);
            assert_eq!(found, expected.map_err(str::to_owned), "{offset} {dims:?} {strides:?}");
        };
        let (beyond, large) = ("extends beyond its storage", "is too large");
        check(0, &[4, 6], &[6, 1], Ok(100..148));
        check(0, &[6, 4], &[1, 6], Ok(100..148));
        check(3, &[2, 2], &[10, 2], Ok(106..132));
        check(23, &[], &[], Ok(146..148));
        check(24, &[3, 0], &[1, 1], Ok(148..148));
        check(24, &[], &[], Err(beyond));
        check(25, &[0], &[1], Err(beyond));
        check(1, &[4, 6], &[6, 1], Err(beyond));
        check(0, &[3], &[12], Err(beyond));
        check(0, &[2], &[usize::MAX], Err(beyond));
        check(usize::MAX, &[1], &[1], Err(beyond));
        check(usize::MAX / 2, &[0], &[1], Err(beyond));
        check(0, &[3, usize::MAX], &[1, 1], Err(large));
        check(0, &[9, 3], &[0, 1], Err("repeats elements of its storage"));
    }
}
