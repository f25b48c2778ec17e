//! GGUF files that the package gguf wrote, and files of ours.

use std::fs;

use mt_checkpoint::{
    CheckpointError, ElementType, GgufFile, GgufTensor, GgufType, GgufValue, GgufWriter, WeightsSource,
};
use mt_shape::DType;

use crate::{
    goldens::{golden, weights},
    support::{names, scratch},
};

#[test]
fn files_of_the_package_are_read() {
    let expected = weights("gguf/all.safetensors");
    for name in ["all", "aligned"] {
        let file = GgufFile::open(&golden(&format!("gguf/{name}.gguf"))).unwrap();
        let value = |key: &str| {
            let found = file.metadata().iter().find(|(known, _)| known == key);
            found.unwrap_or_else(|| panic!("{key}")).1.clone()
        };
        assert_eq!(value("general.architecture").as_text(), Some("llama"));
        for (key, number) in [("a.u8", 200), ("a.u16", 60_000), ("a.u32", 4_000_000_000), ("a.u64", 1 << 63)]
        {
            assert_eq!(value(key).as_u64(), Some(number), "{key}");
        }
        for (key, expected) in [
            ("a.i8", GgufValue::I8(-3)),
            ("a.i16", GgufValue::I16(-30_000)),
            ("a.i32", GgufValue::I32(-2_000_000_000)),
            ("a.i64", GgufValue::I64(-(1 << 62))),
            ("a.f32", GgufValue::F32(0.5)),
            ("a.f64", GgufValue::F64(0.1)),
            ("a.bool", GgufValue::Bool(true)),
            ("a.text", GgufValue::Text("Bär".to_owned())),
            ("a.texts", GgufValue::texts(["one", "two words", ""].map(str::to_owned))),
            ("a.numbers", GgufValue::integers([1, -2, 3])),
        ] {
            assert_eq!(value(key), expected, "{key}");
        }
        assert_eq!(file.tensors().len(), 10);
        if name == "all" {
            for tensor in expected.tensors().iter().filter(|tensor| tensor.name != "wide") {
                assert_eq!(file.read(&tensor.name).unwrap(), expected.read(&tensor.name).unwrap());
            }
        }
        let tensor = |name: &str| file.tensors().iter().find(|tensor| tensor.name == name).unwrap();
        assert_eq!(tensor("q4_0").dtype, ElementType::Other("q4_0".to_owned()));
        assert_eq!((&tensor("q8_0").dims[..], tensor("q8_0").num_bytes), (&[2, 64][..], 4 * 34));
        let error = file.read("q8_0").unwrap_err();
        assert!(error.is_user_error() && error.to_string().contains("`q8_0`"), "{error}");
        let brief = file.read("bfloat16").unwrap();
        assert_eq!((brief.dtype(), brief.dims()), (DType::BF16, &[2, 64][..]));
    }
}

#[test]
fn damaged_files_are_refused() {
    let directory = scratch();
    let contents = fs::read(golden("gguf/all.gguf")).unwrap();
    let path = directory.path().join("model.gguf");
    let check = |contents: &[u8], expected: &str| {
        fs::write(&path, contents).unwrap();
        let error = WeightsSource::open(&path).unwrap_err();
        assert!(error.is_user_error() && error.to_string().contains(expected), "{error}");
    };
    check(b"GGML...", "does not begin with `GGUF`");
    for length in 4..contents.len() {
        // The last tensor is followed by padding.
        if length + 32 <= contents.len() {
            check(&contents[..length], "hint: download it again");
        }
    }
    let version = |version: [u8; 4]| [b"GGUF", &version[..], &contents[8..]].concat();
    check(&version([0, 0, 0, 3]), "big-endian");
    check(&version([1, 0, 0, 0]), "version 1 is not supported");
    check(&version([9, 0, 0, 0]), "version 9 is not supported");
    // Counts that no file holds need no memory.
    let counts = [b"GGUF", &[3, 0, 0, 0][..], &[0xff; 16]].concat();
    check(&counts, "ends within its header");
}

fn tensors() -> Vec<GgufTensor> {
    let tensor =
        |name: &str, kind, dims: &[usize]| GgufTensor { name: name.to_owned(), kind, dims: dims.to_vec() };
    vec![
        tensor("first", GgufType::F32, &[3]),
        tensor("experts", GgufType::Bf16, &[2, 2, 3]),
        tensor("blocks", GgufType::Q8_0, &[2, 32]),
    ]
}

#[test]
fn files_of_ours_are_read_back() {
    let directory = scratch();
    let path = directory.path().join("new/model.gguf");
    let metadata = [
        ("general.architecture".to_owned(), GgufValue::Text("llama".to_owned())),
        ("tokens".to_owned(), GgufValue::texts(["a".to_owned(), "ä".to_owned()])),
        ("scores".to_owned(), GgufValue::floats([0.5, -1.0])),
    ];
    let mut writer = GgufWriter::create(&path, &metadata, tensors(), None).unwrap();
    assert!(!path.exists());
    let floats: Vec<u8> = [1.0_f32, 2.0, 3.0].iter().flat_map(|number| number.to_le_bytes()).collect();
    writer.write("experts", 6, &[1; 12]).unwrap();
    writer.write("blocks", 0, &[7; 68]).unwrap();
    writer.write("first", 0, &floats).unwrap();
    let error = writer.write("experts", 7, &[1; 12]).unwrap_err().to_string();
    assert!(error.contains("do not lie within it"), "{error}");
    assert!(writer.write("other", 0, &[]).is_err());
    writer.write("experts", 0, &[0; 12]).unwrap();
    let written = writer.finish().unwrap();
    assert_eq!(fs::metadata(&path).unwrap().len(), written.num_bytes);
    assert_eq!(names(path.parent().unwrap()), ["model.gguf"]);
    let file = GgufFile::open(&path).unwrap();
    assert_eq!(file.metadata(), metadata);
    assert_eq!(file.read("first").unwrap().to_f64(), [1.0, 2.0, 3.0]);
    assert_eq!(file.read("experts").unwrap().bytes(), [[0; 12], [1; 12]].concat());
    // An existing file is not replaced.
    let error = GgufWriter::create(&path, &metadata, tensors(), None).err().unwrap();
    assert!(matches!(error, CheckpointError::WeightsExist { .. }), "{error}");
}

#[test]
fn incomplete_files_have_no_name() {
    let directory = scratch();
    let path = directory.path().join("model.gguf");
    let writer = GgufWriter::create(&path, &[], tensors(), None).unwrap();
    let error = writer.finish().unwrap_err().to_string();
    assert!(error.contains("not written wholly"), "{error}");
    assert!(names(directory.path()).is_empty());
    let odd = vec![GgufTensor { name: "odd".to_owned(), kind: GgufType::Q8_0, dims: vec![2, 31] }];
    assert!(GgufWriter::create(&path, &[], odd, None).is_err());
}
