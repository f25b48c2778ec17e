//! Safetensors files: those of the library that defines the format, ours, and damaged ones.

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use mt_checkpoint::{
    CheckpointError, DiskEffect, DiskHook, ElementType, TensorSpec, WeightsDirectory, WeightsOptions,
    WeightsWriter,
};
use mt_shape::{DType, HostArray};
use proptest::prelude::*;
use safetensors::SafeTensors;
use serde_json::{Value as Json, json};

use crate::{
    goldens::{golden, weights},
    support::{array, names, scratch},
};

/// The element types that torch has for all numbers, and this program reads.
const DTYPES: [DType; 13] = [
    DType::Bool,
    DType::I8,
    DType::I16,
    DType::I32,
    DType::I64,
    DType::U8,
    DType::U16,
    DType::U32,
    DType::U64,
    DType::F16,
    DType::BF16,
    DType::F32,
    DType::F64,
];

fn spec(name: &str, dtype: DType, dims: &[usize]) -> TensorSpec {
    TensorSpec { name: name.to_owned(), dtype, dims: dims.to_vec() }
}

/// Writes tensors whose contents depend on their index.
fn write(
    directory: &Path,
    specs: &[TensorSpec],
    options: WeightsOptions,
) -> mt_checkpoint::Result<Vec<String>> {
    let mut writer = WeightsWriter::create(directory, specs.to_vec(), options)?;
    for (index, spec) in specs.iter().enumerate().rev() {
        writer.write(&spec.name, &contents(spec, index))?;
    }
    let written = writer.finish()?;
    assert_eq!(written.num_bytes, specs.iter().map(|spec| spec.num_bytes().unwrap()).sum::<u64>());
    let name = |path: &std::path::PathBuf| path.strip_prefix(directory).unwrap().to_str().unwrap().to_owned();
    Ok(written.files.iter().map(name).collect())
}

fn contents(spec: &TensorSpec, index: usize) -> HostArray {
    array(spec.dtype, &spec.dims, index as u64)
}

fn check_written(directory: &Path, specs: &[TensorSpec]) {
    let weights = WeightsDirectory::open(directory).unwrap();
    assert_eq!(weights.tensors().len(), specs.len());
    for (index, spec) in specs.iter().enumerate() {
        assert_eq!(weights.read(&spec.name).unwrap(), contents(spec, index), "{}", spec.name);
    }
}

#[test]
fn files_of_the_library_are_read_and_written_to_the_byte() {
    for name in ["mixed", "views", "module", "nested"] {
        let path = golden(&format!("{name}.safetensors"));
        let file = fs::read(&path).unwrap();
        let theirs = SafeTensors::deserialize(&file).unwrap();
        let ours = WeightsDirectory::open(&path).unwrap();
        assert_eq!(ours.tensors().len(), theirs.len());
        let mut specs = Vec::new();
        for tensor in ours.tensors() {
            let view = theirs.tensor(&tensor.name).unwrap();
            assert_eq!(tensor.dims, view.shape());
            assert_eq!(ours.read(&tensor.name).unwrap().bytes(), view.data(), "{}", tensor.name);
            let range = tensor.range.start as usize..tensor.range.end as usize;
            assert_eq!(&file[range], view.data());
            specs.push(spec(&tensor.name, tensor.dtype.known().unwrap(), &tensor.dims));
        }
        assert_eq!(ours.num_bytes(), specs.iter().map(|spec| spec.num_bytes().unwrap()).sum::<u64>());
        specs.reverse();
        let directory = scratch();
        let mut writer = WeightsWriter::create(directory.path(), specs, WeightsOptions::default()).unwrap();
        for name in ours.names() {
            writer.write(name, &ours.read(name).unwrap()).unwrap();
        }
        let written = writer.finish().unwrap();
        assert_eq!(written.files, [directory.path().join("model.safetensors")]);
        // The generator gave no metadata to the files other than PyTorch's.
        if name == "mixed" {
            assert_eq!(fs::read(&written.files[0]).unwrap(), file);
        }
        let written = WeightsDirectory::open(directory.path()).unwrap();
        for name in ours.names() {
            assert_eq!(written.read(name).unwrap(), ours.read(name).unwrap());
        }
    }
}

#[test]
fn every_element_type_and_name_is_there() {
    let weights = weights("mixed.safetensors");
    for dtype in DTYPES {
        let tensor = weights.tensor(&format!("of.torch.{dtype}")).unwrap();
        assert_eq!((&tensor.dtype, tensor.num_elements()), (&ElementType::Known(dtype), 15));
    }
    let check = |name: &str, dims: &[usize]| {
        assert_eq!(weights.read(name).unwrap().dims(), dims, "{name}");
        assert_eq!(weights.tensor(name).unwrap().dims, dims, "{name}");
    };
    check("scalar", &[]);
    check("no elements", &[0, 7]);
    check("no rows, 3d", &[4, 0, 2]);
    check("", &[1]);
    check("quote\" back\\slash", &[2, 2]);
    check("line\nfeed\ttab", &[3]);
    check("grüße/漢字/🦀", &[2, 3, 2]);
    assert!(weights.tensor("other").is_none());
    let error = weights.read("other").unwrap_err();
    assert!(matches!(error, CheckpointError::NoSuchArray { .. }), "{error}");
}

#[test]
fn rows_are_read_alone() {
    let weights = weights("mixed.safetensors");
    for name in ["of.torch.float32", "of.torch.bfloat16", "grüße/漢字/🦀", "", "no rows, 3d", "no elements"]
    {
        let whole = weights.read(name).unwrap();
        let num_rows = whole.dims()[0];
        for start in 0..=num_rows {
            for end in start..=num_rows {
                let rows = weights.read_rows(name, start..end).unwrap();
                assert_eq!(rows.dims(), [&[end - start], &whole.dims()[1..]].concat());
                let row = whole.bytes().len().checked_div(num_rows).unwrap_or(0);
                assert_eq!(rows.bytes(), &whole.bytes()[start * row..end * row]);
                let mut bytes = vec![0; rows.bytes().len()];
                let elements = whole.num_elements().checked_div(num_rows).unwrap_or(0);
                weights.read_elements_into(name, start * elements..end * elements, &mut bytes).unwrap();
                assert_eq!(bytes, rows.bytes());
            }
        }
        let beyond = weights.read_rows(name, 0..num_rows + 1).unwrap_err();
        assert!(matches!(beyond, CheckpointError::OutOfBounds { .. }), "{beyond}");
        let mut bytes = vec![0; whole.bytes().len()];
        weights.read_into(name, &mut bytes).unwrap();
        assert_eq!(bytes, whole.bytes());
        bytes.push(0);
        for error in [
            weights.read_into(name, &mut bytes).unwrap_err(),
            weights.read_elements_into(name, 0..whole.num_elements(), &mut bytes).unwrap_err(),
        ] {
            assert!(matches!(error, CheckpointError::WrongSize { .. }), "{error}");
        }
        let beyond = weights.read_elements_into(name, 0..whole.num_elements() + 1, &mut bytes).unwrap_err();
        assert!(matches!(beyond, CheckpointError::OutOfBounds { .. }), "{beyond}");
    }
    assert!(weights.read_rows("scalar", 0..1).is_err());
}

#[test]
fn element_types_that_the_format_lacks_are_refused() {
    let directory = scratch();
    let specs = vec![spec("weight", DType::I4, &[2])];
    let error = WeightsWriter::create(directory.path(), specs, WeightsOptions::default()).err().unwrap();
    assert!(error.to_string().contains("the format has no elements of type `int4`"), "{error}");
}

#[test]
fn numbers_of_8_bits_are_read() {
    let weights = weights("float8.safetensors");
    let tensor = weights.tensor("weight").unwrap();
    assert_eq!((tensor.num_bytes, tensor.dims.as_slice()), (12, [3, 4].as_slice()));
    let read = weights.read("weight").unwrap();
    assert_eq!((read.dtype(), read.to_f64()), (DType::F8E4M3FN, vec![1.0; 12]));
    assert_eq!(weights.read("scale").unwrap().dtype(), DType::BF16);
}

#[test]
fn element_types_that_cannot_be_read_are_listed() {
    let directory = scratch();
    let header =
        json!({"weight": {"dtype": "F8_E8M0", "shape": [3, 4], "data_offsets": [0, 12]}}).to_string();
    let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &[0x38; 12]].concat();
    fs::write(directory.path().join("model.safetensors"), bytes).unwrap();
    let weights = WeightsDirectory::open(directory.path()).unwrap();
    let tensor = weights.tensor("weight").unwrap();
    assert_eq!(tensor.dtype, ElementType::Other("F8_E8M0".to_owned()));
    assert_eq!((tensor.num_bytes, tensor.dims.as_slice()), (12, [3, 4].as_slice()));
    for error in [weights.read("weight").unwrap_err(), weights.read_rows("weight", 0..1).unwrap_err()] {
        assert!(error.is_user_error());
        let message = error.to_string();
        assert!(message.contains("tensor `weight` of `") && message.contains("`F8_E8M0`"), "{message}");
    }
    assert_eq!(self::weights("no_metadata.safetensors").read("weight").unwrap().dims(), [2, 3]);
}

#[test]
fn shards_are_those_of_transformers() {
    let theirs = weights("sharded");
    assert_eq!(theirs.files().count(), 4);
    let order: Vec<String> =
        serde_json::from_slice(&fs::read(golden("sharded/order.json")).unwrap()).unwrap();
    let specs = order.iter().map(|name| {
        let tensor = theirs.tensor(name).unwrap();
        spec(name, tensor.dtype.known().unwrap(), &tensor.dims)
    });
    let directory = scratch();
    let options = WeightsOptions { shard_bytes: 200, ..WeightsOptions::default() };
    let mut writer = WeightsWriter::create(directory.path(), specs.collect(), options).unwrap();
    for name in &order {
        writer.write(name, &theirs.read(name).unwrap()).unwrap();
    }
    let files = writer.finish().unwrap().files;
    assert_eq!(files.len(), 5);
    for file in files {
        let expected = fs::read(golden("sharded").join(file.file_name().unwrap())).unwrap();
        let written = fs::read(&file).unwrap();
        if file.extension().unwrap() == "json" {
            let json = |text: &[u8]| serde_json::from_slice::<Json>(text).unwrap();
            assert_eq!(json(&written), json(&expected));
        } else {
            assert_eq!(written, expected, "{}", file.display());
        }
    }
    let alone = weights("sharded/model-00003-of-00004.safetensors");
    assert!(alone.tensors().len() < theirs.tensors().len());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn what_is_written_is_read_again(
        tensors in proptest::collection::vec(
            ("[a-z.\"\\\\ é\n]{0,8}", 0..13_usize, proptest::collection::vec(0..4_usize, 0..4)), 0..8),
        shard_bytes in 1..200_u64,
    ) {
        let unique: BTreeMap<_, _> = tensors.into_iter().map(|(name, dtype, dims)| (name, (dtype, dims))).collect();
        let specs: Vec<_> = unique.iter().rev().map(|(name, (dtype, dims))| spec(name, DTYPES[*dtype], dims)).collect();
        let directory = scratch();
        let options = WeightsOptions { shard_bytes, ..WeightsOptions::default() };
        let files = write(directory.path(), &specs, options).unwrap();
        check_written(directory.path(), &specs);
        let mut num_tensors = 0;
        for file in files.iter().filter(|file| file.ends_with(".safetensors")) {
            let bytes = fs::read(directory.path().join(file)).unwrap();
            let theirs = SafeTensors::deserialize(&bytes).unwrap();
            num_tensors += theirs.len();
            let tensors: Vec<_> = theirs.iter().collect();
            let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
            prop_assert_eq!(safetensors::serialize(tensors, Some(metadata)).unwrap(), bytes);
        }
        prop_assert_eq!(num_tensors, specs.len());
    }
}

/// A file with a header and some bytes of tensors.
fn file_with(header: &str, num_bytes: usize) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &vec![1; num_bytes]].concat()
}

fn check_refused(path: &Path, expected: &[&str]) {
    let error = WeightsDirectory::open(path).expect_err(&expected.concat());
    let message = error.to_string();
    assert!(error.is_user_error() && matches!(error, CheckpointError::BadWeights { .. }), "{message}");
    for fragment in expected {
        assert!(message.contains(fragment), "`{fragment}`: {message}");
    }
}

#[test]
fn damaged_files_are_refused() {
    let directory = scratch();
    let path = directory.path().join("bad.safetensors");
    let check = |contents: &[u8], expected: &[&str]| {
        fs::write(&path, contents).unwrap();
        check_refused(&path, &[expected, &["bad.safetensors"]].concat());
    };
    check(b"", &["it is empty", "hint: download it again"]);
    check(b"1234", &["cut short: it has 4 bytes"]);
    check(
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n",
        &["Git LFS", "git lfs pull"],
    );
    check(b"<!DOCTYPE html><html></html>", &["a web page"]);
    check(b"\n  <html>not found</html>", &["a web page"]);
    check(b"PK\x03\x04 something else altogether", &["not a safetensors file: its header would take"]);
    check(&file_with("{}", 0)[..9], &["its header takes 2 bytes, the file has 9"]);
    check(&file_with("[1, 2]", 0), &["its header lists no tensors", "object"]);
    check(&file_with(r#"{"a": {"dtype": "F32"}}"#, 0), &["tensor `a`: missing field `shape`"]);
    check(
        &file_with(r#"{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}"#, 4),
        &["tensor `a`"],
    );
    let two = |first: &str, second: &str| {
        format!(
            r#"{{"a": {{"dtype": "F16", "shape": [2], "data_offsets": {first}}}, "b": {{"dtype": "F8_E8M0", "shape": [4], "data_offsets": {second}}}}}"#
        )
    };
    fs::write(&path, file_with(&two("[0, 4]", "[4, 8]"), 8)).unwrap();
    assert_eq!(WeightsDirectory::open(&path).unwrap().names().collect::<Vec<_>>(), ["a", "b"]);
    check(&file_with(&two("[0, 4]", "[4, 8]"), 7), &["cut short: tensor `b` ends at byte", "the file has"]);
    check(&file_with(&two("[0, 4]", "[4, 8]"), 9), &["1 bytes after its last tensor"]);
    check(&file_with(&two("[0, 4]", "[3, 7]"), 7), &["tensors `a` and `b` overlap"]);
    check(&file_with(&two("[4, 8]", "[0, 3]"), 8), &["1 bytes before tensor `a`"]);
    check(&file_with(&two("[0, 3]", "[3, 7]"), 7), &["tensor `a`, F16[2], has 3 bytes: it takes 4"]);
    check(&file_with(&two("[4, 0]", "[4, 8]"), 8), &["tensor `a` lies at bytes 4..0"]);
    check(&file_with(&two("[0, 4]", "[4, 18446744073709551615]"), 8), &["tensor `b` lies at"]);
    let huge = r#"{"a": {"dtype": "F32", "shape": [9223372036854775807, 9], "data_offsets": [0, 4]}}"#;
    check(&file_with(huge, 4), &["tensor `a`", "2^63 or more"]);
    let twice = two("[0, 4]", "[4, 8]").replace("\"b\"", "\"a\"");
    check(&file_with(&twice, 8), &["tensor `a` appears twice"]);
    fs::remove_file(&path).unwrap();
    check_refused(&path, &["it is missing"]);
}

#[test]
fn every_truncated_file_is_refused() {
    let contents = fs::read(golden("mixed.safetensors")).unwrap();
    let directory = scratch();
    let path = directory.path().join("model.safetensors");
    for length in (0..contents.len()).step_by(7) {
        fs::write(&path, &contents[..length]).unwrap();
        check_refused(directory.path(), &["model.safetensors", "hint: download it again"]);
    }
}

#[test]
fn directories_that_contradict_themselves_are_refused() {
    let copy = || {
        let directory = scratch();
        for entry in fs::read_dir(golden("sharded")).unwrap() {
            let path = entry.unwrap().path();
            fs::copy(&path, directory.path().join(path.file_name().unwrap())).unwrap();
        }
        directory
    };
    let index = "model.safetensors.index.json";
    let edit = |change: &dyn Fn(&mut Json)| {
        let directory = copy();
        let path = directory.path().join(index);
        let mut json = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        change(&mut json);
        fs::write(path, json.to_string()).unwrap();
        directory
    };
    let (first, second) = ("model-00001-of-00004.safetensors", "model-00002-of-00004.safetensors");
    let norm = "model.layers.0.input_layernorm.weight";

    let directory = copy();
    fs::remove_file(directory.path().join(second)).unwrap();
    check_refused(
        directory.path(),
        &[index, &format!("names `{second}` for 3 tensors"), "the file does not exist"],
    );
    fs::remove_file(directory.path().join(index)).unwrap();
    check_refused(directory.path(), &["it has 3 of the 4 shards of `model`: number 2 is missing"]);

    let directory = copy();
    fs::remove_file(directory.path().join(index)).unwrap();
    assert_eq!(WeightsDirectory::open(directory.path()).unwrap().tensors().len(), 8);
    fs::copy(golden("sharded").join(first), directory.path().join("other.safetensors")).unwrap();
    check_refused(
        directory.path(),
        &["other.safetensors", "tensor `model.embed_tokens.weight` is also in", first],
    );

    let directory = edit(&|json| drop(json["weight_map"].as_object_mut().unwrap().remove(norm)));
    check_refused(directory.path(), &[index, &format!("does not list tensor `{norm}`"), second]);
    let directory = edit(&|json| json["weight_map"]["extra"] = json!(first));
    check_refused(
        directory.path(),
        &[index, &format!("names `{first}` for tensor `extra`"), "does not hold it"],
    );
    let directory = edit(&|json| json["weight_map"][norm] = json!(first));
    check_refused(directory.path(), &[&format!("names `{first}` for tensor `{norm}`"), "but", second]);
    let directory = edit(&|json| json["weight_map"][norm] = json!("../outside.safetensors"));
    check_refused(directory.path(), &["`../outside.safetensors`, which is not a file of its directory"]);
    let directory = edit(&|json| *json = json!({"metadata": {}}));
    check_refused(directory.path(), &[index, "missing field `weight_map`"]);

    let directory = scratch();
    check_refused(directory.path(), &["no `*.safetensors` file"]);
    fs::write(directory.path().join(index), "version https://git-lfs.github.com/spec/v1\n").unwrap();
    check_refused(directory.path(), &[index, "Git LFS"]);
}

#[test]
fn weights_are_replaced_only_when_asked() {
    let directory = scratch();
    let (large, small) =
        ([spec("a", DType::F32, &[8]), spec("b", DType::F32, &[8])], [spec("c", DType::I8, &[3])]);
    let options = |replace| WeightsOptions { shard_bytes: 32, replace, ..WeightsOptions::default() };
    fs::write(directory.path().join("config.json"), "{}").unwrap();
    let files = write(directory.path(), &large, options(false)).unwrap();
    let index = "model.safetensors.index.json";
    assert_eq!(files, ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", index]);
    let error = write(directory.path(), &small, options(false)).unwrap_err();
    assert!(error.is_user_error() && error.to_string().contains("already holds weights"), "{error}");
    check_written(directory.path(), &large);
    write(directory.path(), &small, options(true)).unwrap();
    assert_eq!(names(directory.path()), ["config.json", "model.safetensors"]);
    check_written(directory.path(), &small);
}

#[test]
fn an_interrupted_writer_leaves_old_weights_or_none() {
    let old = [spec("old.a", DType::F32, &[8]), spec("old.b", DType::F32, &[8])];
    let new = [spec("new.a", DType::BF16, &[16]), spec("new.b", DType::I64, &[4])];
    let options = |hook| WeightsOptions { shard_bytes: 32, replace: true, disk_hook: hook };
    let (mut num_operations, mut num_old, mut num_none) = (0, 0, 0);
    loop {
        let directory = scratch();
        write(directory.path(), &old, options(None)).unwrap();
        let count = AtomicUsize::new(0);
        let hook: DiskHook = Arc::new(move |_, _| {
            let place = count.fetch_add(1, Ordering::Relaxed);
            if place < num_operations {
                Ok(DiskEffect::Done)
            } else {
                Err(std::io::Error::other("interrupted"))
            }
        });
        match write(directory.path(), &new, options(Some(hook))) {
            Ok(_) => break,
            // Only the removal of temporary files remains.
            Err(_) if directory.path().join("model.safetensors.index.json").exists() && num_none > 0 => {
                check_written(directory.path(), &new);
            }
            Err(error) => {
                assert!(error.to_string().contains("interrupted"), "{error}");
                match WeightsDirectory::open(directory.path()) {
                    Ok(weights) if weights.tensor("old.a").is_some() => {
                        check_written(directory.path(), &old);
                        num_old += 1;
                    }
                    // Every file has its final name; only the index is missing.
                    Ok(_) => check_written(directory.path(), &new),
                    Err(error) => {
                        assert!(error.is_user_error(), "{error}");
                        num_none += 1;
                    }
                }
            }
        }
        num_operations += 1;
    }
    assert!(num_old >= 6 && num_none >= 3, "{num_old} {num_none} of {num_operations}");
}

#[test]
fn nothing_is_there_until_all_is_written() {
    let directory = scratch();
    let specs = [spec("a", DType::F32, &[4]), spec("b", DType::F32, &[4])];
    let create =
        || WeightsWriter::create(directory.path(), specs.to_vec(), WeightsOptions::default()).unwrap();
    let mut writer = create();
    writer.write("a", &contents(&specs[0], 0)).unwrap();
    let check = |error: CheckpointError, expected: &str| {
        assert!(matches!(error, CheckpointError::InvalidEntry { .. }), "{error}");
        assert!(error.to_string().contains(expected), "{error}");
    };
    check(
        writer.write("a", &contents(&specs[0], 0)).unwrap_err(),
        "`a` cannot be saved: it is written already",
    );
    check(writer.write("c", &contents(&specs[0], 0)).unwrap_err(), "not announced");
    let wrong = HostArray::zeros(DType::F32, &[2, 2]);
    check(writer.write("b", &wrong).unwrap_err(), "announced as float32[4] and is float32[2, 2]");
    assert!(WeightsDirectory::open(directory.path()).is_err());
    check(writer.finish().unwrap_err(), "`b` cannot be saved: it was announced and not written");
    assert_eq!(names(directory.path()), [""; 0]);
    let twice = [specs[0].clone(), specs[0].clone()].to_vec();
    let create_error =
        |specs| WeightsWriter::create(directory.path(), specs, WeightsOptions::default()).err().unwrap();
    check(create_error(twice), "given twice");
    check(create_error(vec![spec("__metadata__", DType::I8, &[])]), "another use");
    check(create_error(vec![spec("a", DType::I16, &[usize::MAX])]), "too large");
    drop(create());
    assert_eq!(names(directory.path()), [""; 0]);

    // Leftovers of an ended process do not matter.
    fs::create_dir(directory.path().join(".maxtext-weights-tmp")).unwrap();
    fs::write(directory.path().join(".maxtext-weights-tmp/model.safetensors"), "half").unwrap();
    assert_eq!(write(directory.path(), &specs, WeightsOptions::default()).unwrap(), ["model.safetensors"]);
    assert_eq!(names(directory.path()), ["model.safetensors"]);
    check_written(directory.path(), &specs);
}
