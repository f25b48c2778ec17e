use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
    mpsc,
};

use mt_checkpoint::{
    ArraySource, Checkpoint, CheckpointError, Empty, Entry, ExpectedArray, ExtraItem, ManagerOptions, Region,
    SaveRequest, SourceError, StorageFormat, StoredValue, Value,
};
use mt_shape::{DType, HostArray};
use serde_json::json;

use crate::support::{
    KERNEL, PLAIN, Run, Sharded, array, check_state, exact_array, formats, names, request, slice, synchronous,
};

#[test]
fn a_state_is_restored_exactly() {
    for format in formats() {
        for (asynchronous, threads) in [(false, 1), (false, 3), (true, 1), (true, 3)] {
            let run = Run::new();
            let options = ManagerOptions { asynchronous, threads, format, ..ManagerOptions::default() };
            let mut manager = run.manager(options);
            assert_eq!(manager.latest().unwrap(), None);
            let saved = manager.save(7, request(7)).unwrap();
            let report = saved.or(manager.wait_until_finished().unwrap()).unwrap();
            assert_eq!(report.step, 7);
            assert!(report.bytes > 0);
            assert_eq!(manager.steps().unwrap(), [7]);

            let checkpoint = Checkpoint::open(manager.directory(), 7).unwrap().with_threads(threads);
            check_state(&checkpoint, 7);
            assert_eq!(checkpoint.custom_metadata(), json!({"scan_layers": true}).as_object().unwrap());
            assert!(checkpoint.has_manifest());
            assert_eq!(checkpoint.json_files("iter").unwrap(), ["process_0-of-1.json"]);
            assert_eq!(checkpoint.read_json("iter", "other.json").unwrap(), None);
            let order: Vec<_> = checkpoint.entries().iter().map(|entry| entry.name.as_str()).collect();
            assert_eq!(order[3..], ["opt_state.0.count", "opt_state.1", "opt_state.2", "step"]);
            assert_eq!(checkpoint.entries()[4].value, StoredValue::Empty(Empty::None));
            assert_eq!(checkpoint.entries()[3].key, ["opt_state".into(), 0.into(), "count".into()]);
        }
    }
}

#[test]
fn every_element_type_and_any_slice_is_read() {
    formats().into_iter().for_each(check_slices);
}

fn check_slices(format: StorageFormat) {
    let run = Run::new();
    let mut manager = run.manager(ManagerOptions { format, ..synchronous() });
    let arrays: Vec<HostArray> = DType::ALL
        .into_iter()
        .enumerate()
        .map(|(seed, dtype)| array(dtype, &[7, 5, 3], seed as u64))
        .collect();
    let entries = arrays
        .iter()
        .map(|array| {
            let value = Value::Array(Box::new(Sharded::new(array.clone(), &[2, 5, 2])));
            Entry::new(vec![array.dtype().name().into()], value)
        })
        .collect();
    manager.save(1, SaveRequest { entries, ..SaveRequest::default() }).unwrap();
    let checkpoint = Checkpoint::open(manager.directory(), 1).unwrap();
    for array in &arrays {
        let name = array.dtype().name();
        assert_eq!(checkpoint.array(name).unwrap(), (array.dtype(), array.dims()));
        assert_eq!(&checkpoint.read_all(name).unwrap(), array);
        for region in [[0..7, 0..5, 0..3], [3..4, 1..4, 2..3], [1..6, 4..5, 0..2], [2..2, 0..5, 0..3]] {
            assert_eq!(checkpoint.read(name, &region).unwrap(), slice(array, &region), "{name} {region:?}");
        }
    }
    let error = checkpoint.read("float32", &[0..8, 0..5, 0..3]).unwrap_err();
    assert!(matches!(error, CheckpointError::OutOfBounds { .. }), "{error}");
    let error = checkpoint.read("float32", &[0..1, 0..1]).unwrap_err();
    assert!(matches!(error, CheckpointError::OutOfBounds { .. }), "{error}");
    let error = checkpoint.read_all("float33").unwrap_err();
    assert!(matches!(error, CheckpointError::NoSuchArray { .. }), "{error}");
}

#[test]
fn arrays_beside_the_state_are_read_like_it() {
    let run = Run::with_steps(&[5]);
    let step = run.checkpoints().join("5");
    let moved = run.directory.path().join("moved");
    // With a manifest, by the path of the state, and moved elsewhere without a manifest.
    for path in [step.clone(), step.join("items"), moved.clone()] {
        if path == moved {
            std::fs::rename(step.join("items"), &moved).unwrap();
        }
        let checkpoint = Checkpoint::open_path(&path).unwrap().with_threads(2);
        let exact = checkpoint.item("exact").unwrap().unwrap();
        let whole = exact_array(5);
        assert_eq!(exact.array(KERNEL).unwrap(), (DType::F32, whole.dims()));
        assert_eq!(exact.read(KERNEL, &[3..6, 1..2, 2..5]).unwrap(), slice(&whole, &[3..6, 1..2, 2..5]));
        assert_ne!(checkpoint.read_all(KERNEL).unwrap(), whole);
        let names: Vec<_> = exact.entries().iter().map(|entry| entry.name.as_str()).collect();
        assert_eq!(names, [KERNEL]);
        assert!(matches!(exact.read_all("step").unwrap_err(), CheckpointError::NoSuchArray { .. }));
        for name in ["", ".", "..", "step", "iter", "items", "exact/..", KERNEL] {
            assert!(checkpoint.item(name).unwrap().is_none(), "{name}");
        }
    }
}

#[test]
fn fetching_first_includes_the_arrays_beside_the_state() {
    let run = Run::new();
    let mut manager = run.manager(synchronous());
    manager.save(8, SaveRequest { fetch_first: true, ..request(8) }).unwrap();
    check_state(&Checkpoint::open(manager.directory(), 8).unwrap(), 8);
    manager.save(9, SaveRequest { extra_items: vec![], ..request(9) }).unwrap();
    let checkpoint = Checkpoint::open(manager.directory(), 9).unwrap();
    assert!(checkpoint.item("exact").unwrap().is_none() && checkpoint.item_names().unwrap().is_empty());
}

#[test]
fn large_shards_are_read_in_slices() {
    let run = Run::new();
    let mut manager = run.manager(ManagerOptions { format: PLAIN, ..ManagerOptions::default() });
    let large = array(DType::F32, &[6144, 1024], 1);
    let entries = vec![Entry::new(vec!["w".into()], large.clone())];
    manager.save(1, SaveRequest { entries, ..SaveRequest::default() }).unwrap();
    manager.wait_until_finished().unwrap();
    let checkpoint = Checkpoint::open(manager.directory(), 1).unwrap();
    assert_eq!(checkpoint.read_all("w").unwrap(), large);
    assert_eq!(checkpoint.read("w", &[2047..2050, 3..6]).unwrap(), slice(&large, &[2047..2050, 3..6]));

    // Damage in the last inner chunk does not affect a reader of the first one.
    let file = checkpoint.path().join("w/c/0/0");
    let mut contents = std::fs::read(&file).unwrap();
    let near_end = contents.len() - 1000;
    contents[near_end] ^= 1;
    std::fs::write(&file, contents).unwrap();
    assert_eq!(checkpoint.read("w", &[0..1, 0..8]).unwrap(), slice(&large, &[0..1, 0..8]));
    assert!(checkpoint.read_all("w").unwrap_err().is_corruption());
    assert!(checkpoint.verify().unwrap_err().is_corruption());
}

/// A prime number of elements cannot be divided into inner chunks. Such large boxes are decoded as streams.
#[test]
fn boxes_that_cannot_be_divided_are_streamed() {
    const LENGTH: usize = 16_777_259;
    let numbers: Vec<u32> = (0..LENGTH as u32).map(|index| index / 1000).collect();
    let array = HostArray::from_slice(DType::U32, &[LENGTH], &numbers).unwrap();
    for zarr3 in [true, false] {
        let run = Run::new();
        let format = StorageFormat { zarr3, ..StorageFormat::default() };
        let mut manager = run.manager(ManagerOptions { format, ..synchronous() });
        let entries = vec![Entry::new(vec!["w".into()], array.clone())];
        manager.save(1, SaveRequest { entries, ..SaveRequest::default() }).unwrap();
        let checkpoint = Checkpoint::open(manager.directory(), 1).unwrap();
        assert!(checkpoint.read_all("w").unwrap() == array);
        let ends = [0..2, 5_000_000..5_000_009, LENGTH - 3..LENGTH];
        for range in ends {
            let part = checkpoint.read("w", std::slice::from_ref(&range)).unwrap();
            assert_eq!(part.as_slice::<u32>().unwrap(), &numbers[range]);
        }
        let directory = checkpoint.path().join("ocdbt.process_0/d");
        let file = std::fs::read_dir(directory).unwrap().next().unwrap().unwrap().path();
        let mut contents = std::fs::read(&file).unwrap();
        let middle = contents.len() / 2;
        contents[middle] ^= 1;
        std::fs::write(&file, contents).unwrap();
        let error = checkpoint.read_all("w").unwrap_err();
        assert!(error.is_corruption() && error.to_string().contains("array `w`"), "{error}");
    }
}

#[test]
fn retention_keeps_the_newest() {
    let run = Run::new();
    let mut manager = run.manager(ManagerOptions { max_to_keep: Some(2), ..synchronous() });
    let mut deleted = Vec::new();
    for step in [0, 9, 10, 100] {
        deleted.extend(manager.save(step, request(step)).unwrap().unwrap().deleted);
    }
    assert_eq!(deleted, [0, 9]);
    assert_eq!(names(manager.directory()), ["10", "100"]);
    // A step that was not the newest is not deleted by its own save.
    manager.save(5, request(5)).unwrap();
    assert_eq!(manager.steps().unwrap(), [5, 10, 100]);
}

#[test]
fn requests_that_cannot_be_stored_are_refused() {
    let run = Run::new();
    let mut manager = run.manager(synchronous());
    let mut check = |entries: Vec<Entry>, expected: &str| {
        let error = manager.save(1, SaveRequest { entries, ..SaveRequest::default() }).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
    };
    let scalar = || HostArray::zeros(DType::F32, &[]);
    check(vec![Entry::new(vec!["a/b".into()], scalar())], "`a/b`");
    check(vec![Entry::new(vec![], scalar())], "name");
    let same =
        vec![Entry::new(vec!["a.b".into()], scalar()), Entry::new(vec!["a".into(), "b".into()], scalar())];
    check(same, "same name");
    check(vec![Entry::new(vec!["a".into()], HostArray::zeros(DType::F32, &[3, 0]))], "no elements");
    let sharded = |shards: Vec<Region>| {
        let source = Sharded { array: HostArray::zeros(DType::F32, &[4]), shards };
        vec![Entry::new(vec!["a".into()], Value::Array(Box::new(source)))]
    };
    #[allow(clippy::single_range_in_vec_init)]
    {
        check(sharded(vec![vec![0..3]]), "do not form a regular grid");
        check(sharded(vec![vec![0..1], vec![1..4]]), "do not form a regular grid");
        check(sharded(vec![vec![0..2], vec![0..2]]), "are the same");
        check(sharded(vec![vec![0..2], vec![2..5]]), "within");
        check(sharded(vec![]), "do not form a regular grid");
    }
    for taken in [
        "step",
        "_METADATA",
        "d",
        "manifest.ocdbt",
        "ocdbt.process_0",
        "commit_success.txt",
        "",
        "..",
        "a/b",
        "exact",
    ] {
        let mut request = request(1);
        request.extra_items.push(ExtraItem { item: taken.to_owned(), entries: vec![] });
        let error = manager.save(1, request).unwrap_err();
        assert!(
            error.to_string().contains(&format!("`{taken}` cannot be saved: the item's name")),
            "{error}"
        );
    }
    assert!(names(manager.directory()).is_empty());

    manager.save(1, request(1)).unwrap();
    let error = manager.save(1, request(1)).unwrap_err();
    assert!(matches!(error, CheckpointError::StepExists { step: 1, .. }), "{error}");
}

#[test]
fn a_step_is_visible_only_after_its_gate_opens() {
    let run = Run::new();
    let mut manager = run.manager(ManagerOptions::default());
    let (open, opened) = mpsc::channel::<bool>();
    let gate = move || match opened.recv() {
        Ok(true) => Ok(()),
        _ => Err("the loss of step 3 is not finite".into()),
    };
    manager.save(3, SaveRequest { commit_gate: Some(Box::new(gate)), ..request(3) }).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(100));
    assert_eq!(manager.steps().unwrap(), [0; 0]);
    assert_eq!(manager.poll().unwrap(), None);
    open.send(true).unwrap();
    assert_eq!(manager.wait_until_finished().unwrap().unwrap().step, 3);
    assert_eq!(manager.steps().unwrap(), [3]);

    let refuse = || Err("the loss of step 4 is not finite".into());
    manager.save(4, SaveRequest { commit_gate: Some(Box::new(refuse)), ..request(4) }).unwrap();
    let error = manager.wait_until_finished().unwrap_err();
    assert!(matches!(error, CheckpointError::Refused { step: 4, .. }), "{error}");
    assert_eq!(names(manager.directory()), ["3"]);
    assert_eq!(manager.wait_until_finished().unwrap(), None);
}

#[test]
fn a_dropped_manager_commits_nothing_more() {
    let run = Run::new();
    let mut manager = run.manager(ManagerOptions::default());
    let (open, opened) = mpsc::channel::<()>();
    let (end, ended) = mpsc::channel::<()>();
    let gate = move || {
        let _end = end;
        Ok(opened.recv()?)
    };
    manager.save(1, SaveRequest { commit_gate: Some(Box::new(gate)), ..request(1) }).unwrap();
    drop(manager);
    open.send(()).unwrap();
    assert!(ended.recv().is_err());
    while !names(&run.checkpoints()).is_empty() {
        std::thread::sleep(std::time::Duration::from_millis(2));
        assert_eq!(mt_checkpoint::complete_steps(&run.checkpoints()).unwrap(), [0; 0]);
    }
}

#[test]
fn an_error_in_the_background_is_returned_by_the_next_call() {
    struct Broken;
    impl ArraySource for Broken {
        fn dtype(&self) -> DType {
            DType::F32
        }
        fn dims(&self) -> &[usize] {
            &[]
        }
        fn shards(&self) -> Vec<Region> {
            vec![vec![]]
        }
        fn fetch(&mut self, _: usize) -> Result<HostArray, SourceError> {
            Err("the device is gone".into())
        }
    }
    let broken = || SaveRequest {
        entries: vec![Entry::new(vec!["a".into()], Value::Array(Box::new(Broken)))],
        ..SaveRequest::default()
    };
    let run = Run::new();
    let mut manager = run.manager(ManagerOptions::default());
    manager.save(1, broken()).unwrap();
    let error = manager.save(2, request(2)).unwrap_err();
    assert!(matches!(error, CheckpointError::Fetch { step: 1, .. }), "{error}");
    assert!(!error.is_user_error());
    assert!(names(manager.directory()).is_empty());
    manager.save(2, request(2)).unwrap();
    manager.wait_until_finished().unwrap();
    // Fetching first reports the failure at once.
    let error = manager.save(3, SaveRequest { fetch_first: true, ..broken() }).unwrap_err();
    assert!(matches!(error, CheckpointError::Fetch { step: 3, .. }), "{error}");
}

#[test]
fn shards_are_fetched_one_at_a_time_or_all_first() {
    struct Counted(Sharded, Arc<AtomicUsize>);
    impl ArraySource for Counted {
        fn dtype(&self) -> DType {
            self.0.dtype()
        }
        fn dims(&self) -> &[usize] {
            self.0.dims()
        }
        fn shards(&self) -> Vec<Region> {
            self.0.shards()
        }
        fn fetch(&mut self, shard: usize) -> Result<HostArray, SourceError> {
            self.1.fetch_add(1, Ordering::SeqCst);
            self.0.fetch(shard)
        }
    }
    let run = Run::new();
    let mut manager = run.manager(ManagerOptions::default());
    let whole = array(DType::I64, &[6, 4], 3);
    let count = Arc::new(AtomicUsize::new(0));
    let (open, opened) = mpsc::channel::<()>();
    let entries = || {
        let source = Counted(Sharded::new(whole.clone(), &[2, 2]), Arc::clone(&count));
        vec![Entry::new(vec!["a".into()], Value::Array(Box::new(source)))]
    };
    let request = SaveRequest {
        entries: entries(),
        extra_items: vec![ExtraItem { item: "exact".to_owned(), entries: entries() }],
        commit_gate: Some(Box::new(move || Ok(opened.recv()?))),
        fetch_first: true,
        ..SaveRequest::default()
    };
    manager.save(1, request).unwrap();
    assert_eq!(count.load(Ordering::SeqCst), 12);
    open.send(()).unwrap();
    manager.wait_until_finished().unwrap();
    assert_eq!(count.load(Ordering::SeqCst), 12);
    assert_eq!(Checkpoint::open(manager.directory(), 1).unwrap().read_all("a").unwrap(), whole);
}

#[test]
fn a_checkpoint_of_another_shape_is_one_message() {
    let run = Run::with_steps(&[1]);
    let checkpoint = Checkpoint::open(&run.checkpoints(), 1).unwrap();
    let expected = |name: &str, dims: &[usize]| ExpectedArray {
        name: name.to_owned(),
        dtype: DType::I32,
        dims: dims.to_vec(),
    };
    let error = checkpoint.compare(&[expected("step", &[]), expected("extra", &[2])]).check().unwrap_err();
    assert!(error.is_user_error());
    let message = error.to_string();
    for fragment in ["`extra`, int32[2]", "`opt_state.0.count`", "(4)", "scan_layers"] {
        assert!(message.contains(fragment), "{message}");
    }
}
