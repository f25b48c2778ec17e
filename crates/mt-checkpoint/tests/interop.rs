//! Orbax itself, from PyPI, reads what this crate writes and writes what it reads.
//!
//! The packages are installed once into a virtual environment in the system's temporary directory.

use std::{collections::BTreeMap, path::Path};

use mt_checkpoint::{
    ArraySource, Checkpoint, CheckpointManager, Empty, Entry, ExpectedArray, ExtraItem, JsonItem, KeySegment,
    ManagerOptions, Region, RunLock, SaveRequest, SourceError, StorageFormat, StoredValue, Value,
};
use mt_shape::{DType, HostArray};
use serde::{Deserialize, Serialize};
use serde_json::json;

#[path = "interop/python.rs"]
mod python;

use python::{ORBAX, python};

/// An array as both sides report it: the contents are hexadecimal, little-endian and row-major.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Described {
    dtype: String,
    dims: Vec<usize>,
    contents: String,
}

impl Described {
    fn of(array: &HostArray) -> Self {
        let contents = array.bytes().iter().map(|byte| format!("{byte:02x}")).collect();
        Self { dtype: array.dtype().name().to_owned(), dims: array.dims().to_vec(), contents }
    }
}

/// A 2×2 mesh; each of the first two axes of the array is split in halves.
struct Quartered(HostArray);

impl ArraySource for Quartered {
    fn dtype(&self) -> DType {
        self.0.dtype()
    }

    fn dims(&self) -> &[usize] {
        self.0.dims()
    }

    fn shards(&self) -> Vec<Region> {
        let &[rows, columns] = self.0.dims() else { unreachable!("the arrays of this test have two axes") };
        let halves = |dim: usize| [0..dim.div_ceil(2), dim.div_ceil(2)..dim];
        halves(rows)
            .into_iter()
            .flat_map(|rows| halves(columns).map(|columns| vec![rows.clone(), columns]))
            .collect()
    }

    fn fetch(&mut self, shard: usize) -> Result<HostArray, SourceError> {
        let region = &self.shards()[shard];
        let (rows, columns) = (&region[0], &region[1]);
        let size = self.dtype().byte_size();
        let width = self.0.dims()[1] * size;
        let bytes: Vec<u8> = rows
            .clone()
            .flat_map(|row| self.0.bytes()[row * width..][columns.start * size..columns.end * size].to_vec())
            .collect();
        Ok(HostArray::from_bytes(self.dtype(), &[rows.len(), columns.len()], &bytes)?)
    }
}

/// Counting numbers in any element type, so floating-point contents are ordinary numbers.
fn counting(dtype: DType, dims: &[usize]) -> HostArray {
    let count = dims.iter().product::<usize>();
    let bytes: Vec<u8> = (0..count)
        .flat_map(|index| match dtype {
            DType::Bool => vec![(index % 3 == 0) as u8],
            DType::F32 => (index as f32 * 0.37 - 5.0).to_le_bytes().to_vec(),
            DType::F64 => (index as f64 * 0.37 - 5.0).to_le_bytes().to_vec(),
            DType::BF16 => ((index as f32 * 0.37 - 5.0).to_bits() >> 16).to_le_bytes()[..2].to_vec(),
            // Bits of positive, finite half-precision numbers.
            DType::F16 => (0x3000 + index as u16 % 0x3000).to_le_bytes().to_vec(),
            DType::I4 => ((index as i8 * 3) << 4 >> 4).to_le_bytes().to_vec(),
            integer => (index as i64 * 3).to_le_bytes()[..integer.byte_size()].to_vec(),
        })
        .collect();
    HostArray::from_bytes(dtype, dims, &bytes).unwrap()
}

#[test]
fn orbax_restores_our_checkpoints() {
    for (ocdbt, zarr3, target_file_bytes) in [
        (true, true, 2 << 30),
        // Several chunks for each shard, and several data files.
        (true, true, 5000),
        (true, false, 2 << 30),
        (false, true, 2 << 30),
        (false, false, 2 << 30),
    ] {
        check_restoring(StorageFormat { ocdbt, zarr3, target_file_bytes });
    }
}

fn check_restoring(format: StorageFormat) {
    let directory = tempfile::tempdir().unwrap();
    let lock = RunLock::acquire(directory.path()).unwrap();
    let checkpoints = directory.path().join("checkpoints");
    let mut entries = Vec::new();
    let mut expected = BTreeMap::new();
    let mut add = |key: Vec<KeySegment>, array: HostArray, sharded: bool| {
        expected.insert(mt_checkpoint::entry_name(&key), Described::of(&array));
        let value = if sharded { Value::Array(Box::new(Quartered(array))) } else { array.into() };
        entries.push(Entry::new(key, value));
    };
    let weight =
        |last: &str| -> Vec<KeySegment> { ["params", "params", "decoder", last].map(Into::into).to_vec() };
    add(weight("kernel"), counting(DType::F32, &[64, 32]), true);
    add(weight("half"), counting(DType::BF16, &[16, 6]), true);
    add(weight("uneven"), counting(DType::F32, &[7, 5]), true);
    // Larger than one inner chunk.
    add(weight("large"), counting(DType::F32, &[4096, 768]), false);
    for dtype in DType::ALL {
        add(weight(dtype.name()), counting(dtype, &[3, 2, 5]), false);
    }
    for (index, name) in ["mu", "nu"].into_iter().enumerate() {
        let key = vec!["opt_state".into(), 0.into(), name.into(), "params".into(), "scale".into()];
        add(key, counting(DType::F32, &[4 + index]), false);
    }
    add(vec!["opt_state".into(), 0.into(), "count".into()], counting(DType::I32, &[]), false);
    add(vec!["step".into()], HostArray::from_slice(DType::I32, &[], &[1234_i32]).unwrap(), false);
    let empties = [(1, Empty::None), (2, Empty::Dict), (3, Empty::List), (4, Empty::Tuple)];
    entries.extend(empties.map(|(index, empty)| Entry::empty(vec!["opt_state".into(), index.into()], empty)));

    // Named like an array of the state, with other contents: Orbax must not confuse the two.
    let extra_items = || {
        let entries = vec![Entry::new(weight("kernel"), counting(DType::I32, &[64, 32]))];
        vec![ExtraItem { item: "exact".to_owned(), entries }]
    };

    let options = ManagerOptions { max_to_keep: Some(2), format, ..ManagerOptions::default() };
    let mut manager = CheckpointManager::open(&checkpoints, &lock, options).unwrap();
    let request = SaveRequest {
        entries,
        extra_items: extra_items(),
        json: vec![JsonItem {
            item: "iter".to_owned(),
            file: "process_0-of-1.json".to_owned(),
            contents: json!({"next_index": 5}),
        }],
        custom_metadata: json!({"scan_layers": true}).as_object().unwrap().clone(),
        ..SaveRequest::default()
    };
    manager.save(1234, request).unwrap();
    manager.wait_until_finished().unwrap();
    manager.save(1235, SaveRequest::default()).unwrap();
    manager.wait_until_finished().unwrap();
    manager.set_aside(1235).unwrap();
    // Orbax restores a whole step without further arguments if it knows the kind of each directory in it.
    let entries = vec![Entry::new(weight("kernel"), counting(DType::F32, &[64, 32]))];
    manager.save(7, SaveRequest { entries, extra_items: extra_items(), ..SaveRequest::default() }).unwrap();
    manager.wait_until_finished().unwrap();

    let description = directory.path().join("expected.json");
    std::fs::write(&description, serde_json::to_string(&expected).unwrap()).unwrap();
    let kinds = [if format.ocdbt { "ocdbt" } else { "plain" }, if format.zarr3 { "zarr3" } else { "zarr2" }];
    let arguments = [checkpoints.as_path(), &description, Path::new(kinds[0]), Path::new(kinds[1])];
    let output = python(&ORBAX, "restore_with_orbax.py", &arguments);
    assert!(output.contains(&format!("{} arrays agree", expected.len())), "{output}");
    println!("{output}");
}

#[test]
fn we_read_checkpoints_that_orbax_wrote() {
    let directory = tempfile::tempdir().unwrap();
    let output = python(&ORBAX, "write_with_orbax.py", &[directory.path()]);
    println!("{output}");
    let contents = std::fs::read(directory.path().join("expected.json")).unwrap();
    let expected: BTreeMap<String, Described> = serde_json::from_slice(&contents).unwrap();
    assert!(expected.len() >= 20, "{}", expected.len());
    for kind in ["zarr3", "zarr2", "replicated", "ocdbt", "ocdbt_zarr2"] {
        let checkpoint = Checkpoint::open_path(&directory.path().join(kind)).unwrap();
        assert_eq!(checkpoint.step(), Some(40));
        assert!(!checkpoint.has_manifest());
        assert_eq!(checkpoint.custom_metadata()["scan_layers"], false);
        checkpoint.verify().unwrap();
        let mut arrays = Vec::new();
        for entry in checkpoint.entries() {
            match &entry.value {
                StoredValue::Array { dtype, dims } => {
                    let array = checkpoint.read_all(&entry.name).unwrap();
                    assert_eq!(Described::of(&array), expected[&entry.name], "{} of {kind}", entry.name);
                    arrays.push(ExpectedArray {
                        name: entry.name.clone(),
                        dtype: *dtype,
                        dims: dims.clone(),
                    });
                }
                StoredValue::Empty(empty) => {
                    let kinds = BTreeMap::from([
                        ("opt_state.1", Empty::None),
                        ("opt_state.2", Empty::Dict),
                        ("opt_state.3", Empty::List),
                        ("opt_state.4", Empty::Tuple),
                    ]);
                    assert_eq!(kinds[entry.name.as_str()], *empty);
                }
                StoredValue::Other(kind) => {
                    assert_eq!((entry.name.as_str(), kind.as_str()), ("note", "string"))
                }
            }
        }
        assert_eq!(arrays.len(), expected.len());
        assert_eq!(checkpoint.entries().len(), expected.len() + 5);
        checkpoint.compare(&arrays).check_exactly().unwrap();
        let slice = checkpoint.read("params.params.sharded", &[15..40, 3..20]).unwrap();
        assert_eq!(slice.dims(), [25, 17]);
        assert_eq!(slice.to_f64()[0], f64::from(15 * 32 + 3));
    }
}

/// Trees of odd shapes, in every layout, by one process and by four.
#[test]
fn we_read_every_layout_of_orbax() {
    const NUM_TREES: usize = 30;
    let directory = tempfile::tempdir().unwrap();
    let number = NUM_TREES.to_string();
    println!("{}", python(&ORBAX, "trees.py", &[directory.path(), Path::new(&number)]));
    let mut num_read = 0;
    for tree in 0..NUM_TREES {
        let directory = directory.path().join(tree.to_string());
        let contents = std::fs::read(directory.join("expected.json")).unwrap();
        let expected: BTreeMap<String, Described> = serde_json::from_slice(&contents).unwrap();
        let types: std::collections::BTreeSet<&str> =
            expected.values().map(|array| array.dtype.as_str()).collect();
        assert_eq!(types.len(), DType::ALL.len(), "{types:?}");
        let mut num_layouts = 0;
        for entry in std::fs::read_dir(&directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_file() {
                continue;
            }
            num_layouts += 1;
            let checkpoint = Checkpoint::open_path(&path).unwrap();
            checkpoint.verify().unwrap();
            for (name, array) in &expected {
                let found = checkpoint.read_all(name).unwrap();
                assert_eq!(Described::of(&found), *array, "{name} of {}", path.display());
                // A slice from the middle of each axis.
                let ranges: Vec<_> = array.dims.iter().map(|dim| dim / 3..dim - dim / 4).collect();
                let slice = checkpoint.read(name, &ranges).unwrap();
                let (whole, part) = (found.to_f64(), slice.to_f64());
                for (index, value) in part.iter().enumerate() {
                    let (mut rest, mut flat, mut stride) = (index, 0, 1);
                    for axis in (0..ranges.len()).rev() {
                        flat += (ranges[axis].start + rest % ranges[axis].len()) * stride;
                        rest /= ranges[axis].len();
                        stride *= array.dims[axis];
                    }
                    assert_eq!(value.to_bits(), whole[flat].to_bits(), "{name} of {}", path.display());
                }
                num_read += 1;
            }
        }
        assert_eq!(num_layouts, 9);
    }
    println!("{num_read} arrays agree");
}
