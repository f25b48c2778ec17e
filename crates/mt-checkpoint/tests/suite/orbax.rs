//! Checkpoints that Orbax wrote, which `tests/goldens/orbax/generate.py` makes.

use std::{collections::BTreeMap, fs, path::Path};

use mt_checkpoint::{Checkpoint, Result, StoredValue};
use serde::Deserialize;

use crate::{
    goldens::golden,
    support::{files, scratch},
};

const LAYOUTS: [&str; 4] = ["zarr3_ocdbt", "zarr2_ocdbt", "save_pytree", "zarr3_four_smaller"];

#[derive(Deserialize)]
struct Described {
    dtype: String,
    dims: Vec<usize>,
    contents: String,
}

fn expected() -> BTreeMap<String, Described> {
    serde_json::from_slice(&fs::read(golden("orbax/trees/expected.json")).unwrap()).unwrap()
}

#[test]
fn databases_of_orbax_are_read() {
    let expected = expected();
    assert_eq!(expected.len(), 6);
    for layout in LAYOUTS {
        let checkpoint = Checkpoint::open_path(&golden(&format!("orbax/trees/{layout}"))).unwrap();
        assert!(!checkpoint.has_manifest());
        for (name, array) in &expected {
            let found = checkpoint.read_all(name).unwrap();
            assert_eq!((found.dtype().name(), found.dims()), (array.dtype.as_str(), array.dims.as_slice()));
            let contents: String = found.bytes().iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(contents, array.contents, "{name} of {layout}");
        }
        checkpoint.verify().unwrap();
        // Arrays of types that host arrays lack are known, and do not keep the others from being read.
        let unknown = checkpoint.entries().iter().filter_map(|entry| match &entry.value {
            StoredValue::Other(kind) => Some((entry.name.as_str(), kind.as_str())),
            _ => None,
        });
        let unknown: BTreeMap<_, _> = unknown.collect();
        if layout == "zarr3_four_smaller" {
            assert!(unknown.is_empty());
            continue;
        }
        let complex = if layout == "zarr2_ocdbt" { "<c8" } else { "complex64" };
        assert_eq!(unknown["unknown.complex64"], complex);
        assert_eq!(unknown.len(), 3, "{unknown:?}");
    }
}

fn copy(from: &Path, to: &Path) {
    for file in files(from) {
        let target = to.join(file.strip_prefix(from).unwrap());
        fs::create_dir_all(target.parent().unwrap()).unwrap();
        fs::copy(&file, target).unwrap();
    }
}

/// The format has checksums of manifests, nodes and shard indexes. Truncations of any file that is read are found by sizes.
#[test]
fn damage_of_databases_is_named() {
    for layout in LAYOUTS {
        let directory = scratch();
        let path = directory.path().join(layout);
        copy(&golden(&format!("orbax/trees/{layout}")), &path);
        let items = if layout == "save_pytree" { path.join("state") } else { path.clone() };
        let read = || -> Result<()> { Checkpoint::open_path(&path)?.verify() };
        read().unwrap();
        let nodes = files(&items.join("d"));
        assert!(!nodes.is_empty());
        for file in nodes.into_iter().chain([items.join("manifest.ocdbt")]) {
            let contents = fs::read(&file).unwrap();
            let check = |damaged: &[u8], what: &str, position: usize| {
                fs::write(&file, damaged).unwrap();
                let error = read().expect_err(&format!("{}: {what} {position}", file.display()));
                assert!(error.is_corruption(), "{error}");
                assert!(error.to_string().contains(&*file.to_string_lossy()), "{what} {position}: {error}");
            };
            for position in 0..contents.len() {
                let mut damaged = contents.clone();
                damaged[position] ^= 1 << (position % 8);
                check(&damaged, "changed at", position);
                check(&contents[..position], "truncated to", position);
            }
            fs::remove_file(&file).unwrap();
            let error = read().unwrap_err();
            assert!(error.is_corruption(), "{error}");
            fs::write(&file, &contents).unwrap();
        }
        // Values of a process: those that are not read any more may be cut off.
        let mut num_found = 0;
        for file in files(&items).into_iter().filter(|file| file.to_string_lossy().contains("ocdbt.process_"))
        {
            let contents = fs::read(&file).unwrap();
            for length in [0, contents.len() / 2] {
                fs::write(&file, &contents[..length]).unwrap();
                if let Err(error) = read() {
                    assert!(error.is_corruption(), "{error}");
                    assert!(error.to_string().contains(&*file.to_string_lossy()), "{error}");
                    num_found += 1;
                }
            }
            fs::write(&file, &contents).unwrap();
        }
        assert!(num_found > 0, "{layout}");
        read().unwrap();
    }
}
