//! Listings of every kind of checkpoint, and their differences.

use std::fs;

use mt_checkpoint::{
    CheckpointError, ElementType, ListingDiff, SourceKind, TensorSpec, Totals, ValueDifference,
    WeightsOptions, WeightsSource, WeightsWriter,
};
use mt_shape::{DType, HostArray};

use crate::{
    goldens::golden,
    support::{KERNEL, Run, expected_arrays, scratch},
};

fn source(name: &str) -> WeightsSource {
    WeightsSource::open(&golden(name)).unwrap()
}

#[test]
fn every_kind_of_source_is_listed() {
    let run = Run::with_steps(&[3]);
    let check = |source: &WeightsSource, kind: SourceKind, num_tensors: usize| {
        let listing = source.listing().unwrap();
        assert_eq!((listing.kind, listing.tensors.len()), (kind, num_tensors));
        let mut sum = Totals::default();
        for tensor in &listing.tensors {
            assert!(tensor.place.exists(), "{}", tensor.place.display());
            sum.tensors += 1;
            sum.elements += tensor.num_elements();
            sum.bytes += tensor.bytes;
            if tensor.dtype.known().is_some() {
                let array = source.read(&tensor.name).unwrap();
                assert_eq!(array.dims(), tensor.dims);
                assert_eq!(array.bytes().len() as u64, tensor.bytes);
            }
        }
        assert_eq!(listing.totals(), sum);
        let bytes: Vec<u64> = listing.by_dtype().iter().map(|(_, totals)| totals.bytes).collect();
        assert!(bytes.is_sorted_by(|left, right| left >= right));
        assert_eq!(bytes.iter().sum::<u64>(), sum.bytes);
        assert_eq!(listing.by_entry().iter().map(|(_, totals)| totals.tensors).sum::<usize>(), num_tensors);
        assert!(source.read("no such tensor").is_err());
        listing
    };
    let names = |names: Vec<(String, Totals)>| names.into_iter().map(|(name, _)| name).collect::<Vec<_>>();

    let sharded = check(&source("sharded"), SourceKind::Safetensors, 8);
    assert_eq!(names(sharded.by_entry()), ["model", "lm_head"]);
    check(&source("mixed.safetensors"), SourceKind::Safetensors, 20);
    check(&source("float8.safetensors"), SourceKind::Safetensors, 2);
    check(&source("nested.pth"), SourceKind::Torch, 4);
    let slices = check(&source("consolidated"), SourceKind::Torch, 4);
    assert_eq!(slices.tensors[2].name, "consolidated.01/layers.0.wo.weight");
    assert_eq!(names(slices.by_entry()), ["consolidated.00", "consolidated.01"]);
    for path in [run.directory.path().to_owned(), run.checkpoints(), run.checkpoints().join("3/items")] {
        let listing = check(&WeightsSource::open(&path).unwrap(), SourceKind::Orbax, 5);
        assert_eq!(listing.step, Some(3));
        assert_eq!(listing.other_items, ["exact"]);
        let kernel = listing.tensors.iter().find(|tensor| tensor.name == KERNEL).unwrap();
        assert_eq!((kernel.dims.as_slice(), kernel.bytes), ([8, 2, 6].as_slice(), 8 * 2 * 6 * 4));
        assert_eq!(listing.by_dtype()[0].0, ElementType::Known(DType::F32));
    }
}

#[test]
fn files_are_known_by_their_contents_too() {
    let directory = scratch();
    for (golden_name, kind) in
        [("mixed.safetensors", SourceKind::Safetensors), ("views.pth", SourceKind::Torch)]
    {
        let path = directory.path().join("0123abcd");
        fs::copy(golden(golden_name), &path).unwrap();
        assert_eq!(WeightsSource::open(&path).unwrap().listing().unwrap().kind, kind);
    }
}

#[test]
fn other_paths_are_refused() {
    let directory = scratch();
    let file = directory.path().join("notes.txt");
    fs::write(&file, "some text").unwrap();
    for path in [directory.path(), &file] {
        let error = WeightsSource::open(path).unwrap_err();
        assert!(error.is_user_error() && matches!(error, CheckpointError::NoWeights { .. }), "{error}");
        let message = error.to_string();
        for fragment in
            ["neither a Hugging Face directory", "Meta's", "run or checkpoint", "hint: give one of these"]
        {
            assert!(message.contains(fragment), "{message}");
        }
    }
    let error = WeightsSource::open(&directory.path().join("missing")).unwrap_err();
    assert!(error.is_user_error() && error.to_string().contains("does not exist"), "{error}");
}

fn written(arrays: &[(&str, HostArray)]) -> (tempfile::TempDir, WeightsSource) {
    let directory = scratch();
    let spec = |(name, array): &(&str, HostArray)| TensorSpec {
        name: (*name).to_owned(),
        dtype: array.dtype(),
        dims: array.dims().to_vec(),
    };
    let specs = arrays.iter().map(spec).collect();
    let mut writer = WeightsWriter::create(directory.path(), specs, WeightsOptions::default()).unwrap();
    for (name, array) in arrays {
        writer.write(name, array).unwrap();
    }
    writer.finish().unwrap();
    let source = WeightsSource::open(directory.path()).unwrap();
    (directory, source)
}

#[test]
fn equal_sources_do_not_differ() {
    for (left, right) in [("nested.pth", "nested.safetensors"), ("views.pth", "views.safetensors")] {
        let diff = ListingDiff::of(&source(left), &source(right), true).unwrap();
        assert!(diff.is_empty(), "{diff:?}");
        assert_eq!((diff.num_equal(), diff.num_same), (diff.values.len(), diff.values.len()));
        assert!(ListingDiff::of(&source(left), &source(right), false).unwrap().values.is_empty());
    }
    let float8 = source("float8.safetensors");
    let diff = ListingDiff::of(&float8, &float8, true).unwrap();
    assert_eq!((diff.num_same, diff.values.len()), (2, 2));
    // Tensors with unreadable element types are compared by their listed properties.
    let unreadable = source("unreadable.pth");
    let diff = ListingDiff::of(&unreadable, &unreadable, true).unwrap();
    assert_eq!((diff.num_same, diff.values.len()), (2, 1));
}

#[test]
fn differences_are_listed_and_measured() {
    let f32s = |dims: &[usize], values: &[f32]| HostArray::from_slice(DType::F32, dims, values).unwrap();
    let nan = f32::NAN;
    let (_left, left) = written(&[
        ("equal", f32s(&[2], &[1.0, nan])),
        ("near", f32s(&[2, 2], &[1.0, -8.0, 3.0, 0.5])),
        ("not a number", f32s(&[2], &[1.0, 2.0])),
        ("infinite", f32s(&[3], &[f32::INFINITY, f32::NEG_INFINITY, 1.0])),
        ("zeros", f32s(&[1], &[0.0])),
        ("reshaped", f32s(&[2, 3], &[0.0; 6])),
        ("converted", f32s(&[2], &[0.5, 1.0])),
        ("left", f32s(&[1], &[1.0])),
        ("large", HostArray::from_slice(DType::I64, &[2], &[1 << 60, 5_i64]).unwrap()),
    ]);
    let (_right, right) = written(&[
        ("equal", f32s(&[2], &[1.0, -nan])),
        ("near", f32s(&[2, 2], &[1.0, -10.0, 3.0, 0.25])),
        ("not a number", f32s(&[2], &[1.0, nan])),
        ("infinite", f32s(&[3], &[f32::INFINITY, f32::INFINITY, 1.0])),
        ("zeros", f32s(&[1], &[-0.0])),
        ("reshaped", f32s(&[3, 2], &[0.0; 6])),
        ("converted", HostArray::from_slice(DType::BF16, &[2], &[0x3f00_u16, 0x3f81]).unwrap()),
        ("right", f32s(&[1], &[1.0])),
        ("large", HostArray::from_slice(DType::I64, &[2], &[(1 << 60) + 1, 5_i64]).unwrap()),
    ]);
    let diff = ListingDiff::of(&left, &right, true).unwrap();
    let only = |tensors: &[mt_checkpoint::ListedTensor]| {
        tensors.iter().map(|tensor| tensor.name.clone()).collect::<Vec<_>>()
    };
    assert_eq!(
        (only(&diff.only_left), only(&diff.only_right)),
        (vec!["left".to_owned()], vec!["right".to_owned()])
    );
    assert_eq!(diff.shapes.len(), 1);
    assert_eq!(
        (diff.shapes[0].left.dims.as_slice(), diff.shapes[0].right.dims.as_slice()),
        ([2, 3].as_slice(), [3, 2].as_slice())
    );
    assert_eq!(diff.dtypes.len(), 1);
    assert_eq!(diff.dtypes[0].right.dtype, DType::BF16.into());
    assert_eq!((diff.num_same, diff.num_equal(), diff.is_empty()), (6, 2, false));
    let check =
        |name: &str, num_different: u64, max_absolute: f64, max_relative: f64, position: Option<u64>| {
            let found = diff.values.iter().find(|value| value.name == name).unwrap();
            let num_elements = found.num_elements;
            let name = name.to_owned();
            assert_eq!(
                *found,
                ValueDifference { name, num_elements, num_different, max_absolute, max_relative, position }
            );
        };
    check("equal", 0, 0.0, 0.0, None);
    check("zeros", 0, 0.0, 0.0, None);
    check("near", 2, 2.0, 0.5, Some(1));
    check("not a number", 1, f64::INFINITY, f64::INFINITY, Some(1));
    check("infinite", 1, f64::INFINITY, f64::INFINITY, Some(1));
    check("converted", 1, 0.0078125, 0.0078125 / 1.0078125, Some(1));
    check("large", 1, 0.0, 0.0, None);
}

#[test]
fn runs_are_compared_with_each_other() {
    let run = Run::with_steps(&[3, 4]);
    let open = |step: u64| WeightsSource::open(&run.checkpoints().join(step.to_string())).unwrap();
    let diff = ListingDiff::of(&open(3), &open(4), true).unwrap();
    assert_eq!((diff.num_same, diff.num_equal()), (expected_arrays(3).len(), 0));
    let step = diff.values.iter().find(|value| value.name == "step").unwrap();
    assert_eq!((step.max_absolute, step.max_relative), (1.0, 0.25));
    assert!(ListingDiff::of(&open(4), &open(4), true).unwrap().is_empty());
}
