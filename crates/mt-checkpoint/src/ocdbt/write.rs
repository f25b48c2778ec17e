//! Writing a database with one version: the nodes of the tree over values that are already in data files, and the
//! manifest.

use std::{
    hash::{BuildHasher, RandomState},
    path::Path,
};

use super::{
    DATA_DIRECTORY, MANIFEST_FILE,
    format::{
        Child, DataFile, Entries, LeafEntry, LeafValue, Manifest, Node, Options, Range, Statistics, Version,
    },
};
use crate::{
    disk::Disk,
    error::{CheckpointError, Result},
    manifest::FileRecord,
};

/// Orbax's settings.
const OPTIONS: Options = Options { max_inline_bytes: INLINE_BYTES as u64, max_node_bytes: 100_000_000 };

/// The largest size of a value that is stored in the tree.
pub(crate) const INLINE_BYTES: usize = 1024;

/// The subdirectory with the data files of a process.
pub(crate) fn process_directory(process: usize) -> String {
    format!("ocdbt.process_{process}/")
}

/// A value whose bytes are known or written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Placed {
    Inline(Vec<u8>),
    /// In a data file of a process, by the file's name.
    Written {
        process: usize,
        file: String,
        offset: u64,
        length: u64,
    },
}

/// Writes the tree and the manifest of a database.
pub(crate) struct DatabaseWriter<'w> {
    pub disk: &'w Disk,
    pub directory: &'w Path,
    /// Nanoseconds since 1970.
    pub now: u64,
}

/// A node that is encoded.
struct Subtree {
    first_key: Vec<u8>,
    node: Range,
    statistics: Statistics,
}

impl DatabaseWriter<'_> {
    /// Writes the nodes into one file and then the manifest, which makes them a database. Data files have to be on the
    /// disk. Returns the records of the files by their names.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn write(&self, values: Vec<(String, Placed)>) -> Result<Vec<(String, FileRecord)>> {
        self.write_with(values, &OPTIONS)
    }

    fn write_with(
        &self,
        mut values: Vec<(String, Placed)>,
        options: &Options,
    ) -> Result<Vec<(String, FileRecord)>> {
        values.sort_by(|left, right| left.0.cmp(&right.0));
        let nodes_file =
            DataFile { base: String::new(), file: format!("{DATA_DIRECTORY}/{}", random_name()) };
        let path = self.directory.join(&nodes_file.file);
        let failed = |source| CheckpointError::io("compress", &path, source);
        let (nodes, height, root) = tree(values, &nodes_file, options).map_err(failed)?;
        self.disk.create_directory(&self.directory.join(DATA_DIRECTORY))?;
        self.disk.write(&path, &[&nodes])?;
        let version = Version {
            generation: 1,
            height,
            statistics: root.as_ref().map(|root| root.statistics).unwrap_or_default(),
            root: root.map(|root| (nodes_file.clone(), root.node)),
            committed: self.now,
        };
        let manifest = self.directory.join(MANIFEST_FILE);
        let blob = Manifest::encode(random_bytes(), options, &version)
            .map_err(|source| CheckpointError::io("compress", &manifest, source))?;
        self.disk.write(&manifest, &[&blob])?;
        let record = |name: String, blob: &[u8]| (name, FileRecord::of(&[blob]));
        Ok(vec![record(nodes_file.file, &nodes), record(MANIFEST_FILE.to_owned(), &blob)])
    }
}

/// The encoded nodes of a tree over sorted values, one after the other, with the tree's height and root.
fn tree(
    values: Vec<(String, Placed)>,
    nodes_file: &DataFile,
    options: &Options,
) -> std::io::Result<(Vec<u8>, u8, Option<Subtree>)> {
    let mut bytes = Vec::new();
    let leaf_size = |(key, value): &(String, Placed)| match value {
        Placed::Inline(inline) => key.len() + inline.len(),
        Placed::Written { .. } => key.len(),
    };
    let leaves = groups(values, options, leaf_size).into_iter();
    let mut level = leaves.map(|group| leaf(&mut bytes, group)).collect::<std::io::Result<Vec<_>>>()?;
    let mut height = 0;
    while level.len() > 1 {
        height += 1;
        let above = groups(level, options, |subtree: &Subtree| subtree.first_key.len()).into_iter();
        level = above
            .map(|group| interior(&mut bytes, group, nodes_file, height))
            .collect::<std::io::Result<_>>()?;
    }
    Ok((bytes, height, level.pop()))
}

/// Divides entries into groups that fit into a node. Each group but the last has at least two entries.
fn groups<T>(entries: Vec<T>, options: &Options, size: impl Fn(&T) -> usize) -> Vec<Vec<T>> {
    /// A bound on the bytes of an entry besides its key and its inline value: at most nine numbers.
    const ENTRY_BYTES: usize = 90;
    let mut groups: Vec<Vec<T>> = Vec::new();
    let mut total = 0;
    for entry in entries {
        let bytes = size(&entry) + ENTRY_BYTES;
        total += bytes;
        match groups.last_mut() {
            Some(group) if group.len() < 2 || total as u64 <= options.max_node_bytes => group.push(entry),
            _ => {
                groups.push(vec![entry]);
                total = bytes;
            }
        }
    }
    groups
}

/// Encodes a leaf.
fn leaf(bytes: &mut Vec<u8>, values: Vec<(String, Placed)>) -> std::io::Result<Subtree> {
    let data_file = |process: usize, file: &str| DataFile {
        base: process_directory(process),
        file: format!("{DATA_DIRECTORY}/{file}"),
    };
    let mut files: Vec<DataFile> = values
        .iter()
        .filter_map(|(_, value)| match value {
            Placed::Written { process, file, .. } => Some(data_file(*process, file)),
            Placed::Inline(_) => None,
        })
        .collect();
    files.sort();
    files.dedup();
    let mut statistics = Statistics { num_keys: values.len() as u64, ..Statistics::default() };
    let mut entries = Vec::with_capacity(values.len());
    for (key, value) in values {
        let value = match value {
            Placed::Inline(inline) => LeafValue::Inline(inline),
            Placed::Written { process, file, offset, length } => {
                statistics.indirect_bytes += length;
                let file = files.binary_search(&data_file(process, &file)).expect("every file is listed");
                LeafValue::Indirect(Range { file, offset, length })
            }
        };
        entries.push(LeafEntry { key: key.into_bytes(), value });
    }
    let first_key = entries.first().map(|entry| entry.key.clone()).unwrap_or_default();
    append(bytes, first_key, Node { height: 0, files, entries: Entries::Leaf(entries) }, statistics)
}

/// Encodes a node above others. Their keys are whole, so no prefix is left out.
fn interior(
    bytes: &mut Vec<u8>,
    subtrees: Vec<Subtree>,
    nodes_file: &DataFile,
    height: u8,
) -> std::io::Result<Subtree> {
    let mut statistics = Statistics::default();
    subtrees.iter().for_each(|subtree| statistics += subtree.statistics);
    let child = |Subtree { first_key, node, statistics }: Subtree| Child {
        key: first_key,
        common_prefix: 0,
        node,
        statistics,
    };
    let first_key = subtrees.first().map(|subtree| subtree.first_key.clone()).unwrap_or_default();
    let entries = Entries::Interior(subtrees.into_iter().map(child).collect());
    append(bytes, first_key, Node { height, files: vec![nodes_file.clone()], entries }, statistics)
}

fn append(
    bytes: &mut Vec<u8>,
    first_key: Vec<u8>,
    node: Node,
    mut statistics: Statistics,
) -> std::io::Result<Subtree> {
    let blob = node.encode()?;
    statistics.tree_bytes += blob.len() as u64;
    let node = Range { file: 0, offset: bytes.len() as u64, length: blob.len() as u64 };
    bytes.extend(blob);
    Ok(Subtree { first_key, node, statistics })
}

/// A name for a data file that no other file has.
pub(crate) fn random_name() -> String {
    random_bytes().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Each `RandomState` has other keys, which the operating system's random numbers begin.
fn random_bytes() -> [u8; 16] {
    let mut bytes = [0; 16];
    for half in bytes.chunks_exact_mut(8) {
        half.copy_from_slice(&RandomState::new().hash_one(std::process::id()).to_le_bytes());
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::{
        super::{Database, Location},
        *,
    };
    use crate::files::StepFiles;

    #[test]
    fn trees_of_any_height_are_read_as_written() {
        let values: Vec<(String, Placed)> = (0..300_usize)
            .map(|index| {
                let key = format!("params.layers_{}/c/{}", index % 7, index);
                let placed = match index % 3 {
                    0 => Placed::Inline(vec![index as u8; index % 50]),
                    _ => Placed::Written {
                        process: index % 2,
                        file: format!("{:032x}", index % 5),
                        offset: index as u64,
                        length: 10,
                    },
                };
                (key, placed)
            })
            .collect();
        for (max_node_bytes, num_values) in
            [(1, 300), (500, 300), (5000, 300), (100_000_000, 300), (1, 0), (1, 1)]
        {
            let directory = tempfile::tempdir().unwrap();
            for process in 0..2 {
                let data = directory.path().join(process_directory(process)).join(DATA_DIRECTORY);
                std::fs::create_dir_all(&data).unwrap();
                for file in 0..5 {
                    std::fs::write(data.join(format!("{file:032x}")), [0; 320]).unwrap();
                }
            }
            let disk = Disk::default();
            let writer = DatabaseWriter { disk: &disk, directory: directory.path(), now: 1 };
            let options = Options { max_node_bytes, ..OPTIONS };
            let written: Vec<_> = values[..num_values].iter().rev().cloned().collect();
            writer.write_with(written, &options).unwrap();
            let database = Database::open(&StepFiles::open(None, None).unwrap(), directory.path()).unwrap();
            for (key, placed) in &values[..num_values] {
                match (placed, database.find(key).unwrap()) {
                    (Placed::Inline(expected), Location::Node { bytes, .. }) => assert_eq!(bytes, expected),
                    (
                        Placed::Written { process, file, offset, length },
                        Location::File { file: path, range },
                    ) => {
                        let name = format!("{}{DATA_DIRECTORY}/{file}", process_directory(*process));
                        assert_eq!(**path, *directory.path().join(name));
                        assert_eq!(*range, *offset..offset + length);
                    }
                    (placed, location) => panic!("{key}: {placed:?} is read as {location:?}"),
                }
            }
            assert!(database.find("params").is_none());
        }
    }

    #[test]
    fn names_are_not_repeated() {
        let names: std::collections::HashSet<String> = (0..1000).map(|_| random_name()).collect();
        assert_eq!(names.len(), 1000);
        assert!(names.iter().all(|name| name.len() == 32));
    }
}
