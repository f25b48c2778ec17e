use std::fs;

use mt_checkpoint::{
    Checkpoint, CheckpointError, CheckpointManager, ManagerOptions, RunLock, checkpoints_directory,
    complete_steps, latest_valid, open_latest,
};

use crate::support::{KERNEL, Run, check_state, formats, names, request, synchronous};

#[test]
fn a_checkpoint_is_found_from_any_of_its_directories() {
    let run = Run::with_steps(&[3, 20]);
    let checkpoints = run.checkpoints();
    fs::create_dir(checkpoints.join("30.orbax-checkpoint-tmp")).unwrap();
    fs::create_dir(checkpoints.join("040")).unwrap();
    fs::write(checkpoints.join("50"), "a file").unwrap();
    assert_eq!(complete_steps(&checkpoints).unwrap(), [3, 20]);
    let paths = [
        (run.directory.path().to_owned(), 20),
        (checkpoints.clone(), 20),
        (checkpoints.join("3"), 3),
        (checkpoints.join("3/items"), 3),
        (checkpoints.join("3/../20/items/.."), 20),
    ];
    for (path, step) in paths {
        let checkpoint = Checkpoint::open_path(&path).unwrap();
        assert_eq!(checkpoint.step(), Some(step), "{}", path.display());
        assert!(checkpoint.has_manifest());
        check_state(&checkpoint, step);
    }
    for (path, directory) in [
        (run.directory.path(), Some(&checkpoints)),
        (&checkpoints, Some(&checkpoints)),
        (&checkpoints.join("3"), None),
        (&checkpoints.join("3/items"), None),
        (&checkpoints.join("50"), None),
        (&checkpoints.join("9"), None),
    ] {
        assert_eq!(checkpoints_directory(path).unwrap().as_ref(), directory, "{}", path.display());
    }
}

#[test]
fn what_is_no_checkpoint_is_a_user_error() {
    let run = Run::with_steps(&[3]);
    let checkpoints = run.checkpoints();
    let check = |error: CheckpointError, expected: &str| {
        assert!(error.is_user_error(), "{error}");
        assert!(error.to_string().contains(expected), "{error}");
    };
    check(Checkpoint::open(&checkpoints, 4).unwrap_err(), "complete steps are `3`");
    check(Checkpoint::open_path(&checkpoints.join("9")).unwrap_err(), "does not exist");
    check(Checkpoint::open_path(&checkpoints.join("3/commit_success.txt")).unwrap_err(), "not a directory");
    let empty = tempfile::tempdir().unwrap();
    check(Checkpoint::open_path(empty.path()).unwrap_err(), "no complete step");
    assert!(open_latest(empty.path()).unwrap().is_none());
    assert!(open_latest(&empty.path().join("none")).unwrap().is_none());
}

#[test]
fn a_directory_with_the_name_of_another_step_is_refused() {
    for format in formats() {
        let run = Run::with_steps_in(format, &[3, 11]);
        let checkpoints = run.checkpoints();
        let copied = checkpoints.join("500");
        fs::rename(checkpoints.join("11"), &copied).unwrap();
        let check = |error: CheckpointError| {
            assert!(error.is_user_error(), "{error}");
            let message = error.to_string();
            assert!(message.contains("500` is named as step 500, but holds step 11"), "{message}");
        };
        check(Checkpoint::open(&checkpoints, 500).unwrap_err());
        check(Checkpoint::open_path(&copied).unwrap_err());
        // A path of items names no step.
        assert_eq!(Checkpoint::open_path(&copied.join("items")).unwrap().step(), Some(11));
        check(Checkpoint::open_path(run.directory.path()).unwrap_err());
        check(open_latest(&checkpoints).unwrap_err());
        // A name that is not a number claims no step.
        fs::rename(&copied, checkpoints.join("best")).unwrap();
        check_state(&Checkpoint::open_path(&checkpoints.join("best")).unwrap(), 11);
        assert_eq!(open_latest(&checkpoints).unwrap().unwrap().step, 3);
    }
}

#[test]
fn a_second_run_on_the_same_directory_is_refused() {
    let run = Run::new();
    let error = RunLock::acquire(run.directory.path()).unwrap_err();
    assert!(error.is_user_error());
    let process = std::process::id();
    assert!(error.to_string().contains(&format!("(process {process})")), "{error}");
    let Run { lock, directory } = run;
    drop(lock);
    let lock = RunLock::acquire(directory.path()).unwrap();
    assert_eq!(lock.directory(), directory.path());
}

#[test]
fn a_provisional_lock_removes_what_it_created() {
    let root = tempfile::tempdir().unwrap();
    let runs = root.path().join("runs");
    let run = runs.join("first");
    let lock = RunLock::acquire(&run).unwrap().provisional();
    fs::create_dir_all(run.join("checkpoints")).unwrap();
    drop(lock);
    assert!(!runs.exists(), "the run's directory and the one above it");

    let mut lock = RunLock::acquire(&run).unwrap().provisional();
    lock.keep();
    drop(lock);
    assert!(run.is_dir(), "a run that began");
    drop(RunLock::acquire(&run).unwrap().provisional());
    assert!(run.is_dir(), "a directory that was there");
    drop(RunLock::acquire(&runs.join("second")).unwrap());
    assert!(runs.join("second").is_dir(), "a lock that is not provisional");

    let third = runs.join("third");
    fs::write(runs.join("note"), "kept").unwrap();
    fs::remove_dir_all(&run).unwrap();
    drop(RunLock::acquire(&third).unwrap().provisional());
    assert!(!third.exists() && runs.join("note").is_file(), "nothing else is removed");
}

#[test]
fn an_unwritable_directory_is_a_user_error() {
    let run = Run::new();
    let file = run.directory.path().join("file");
    fs::write(&file, "").unwrap();
    let error = RunLock::acquire(&file.join("run")).unwrap_err();
    assert!(error.is_user_error() && error.to_string().contains("cannot write to"), "{error}");
    let Err(error) = CheckpointManager::open(file.join("checkpoints"), &run.lock, ManagerOptions::default())
    else {
        panic!("a file was taken for a directory");
    };
    assert!(error.is_user_error() && error.to_string().contains("base_output_directory"), "{error}");
}

#[test]
fn leftovers_of_dead_runs_are_removed() {
    let run = Run::with_steps(&[3]);
    let checkpoints = run.checkpoints();
    fs::create_dir_all(checkpoints.join("4.orbax-checkpoint-tmp/items.orbax-checkpoint-tmp/step/c")).unwrap();
    fs::rename(checkpoints.join("3"), checkpoints.join("3.delete.orbax-checkpoint-tmp")).unwrap();
    fs::create_dir(checkpoints.join("notes")).unwrap();
    let mut manager = run.manager(synchronous());
    assert_eq!(names(&checkpoints), ["notes"]);
    manager.save(4, request(4)).unwrap();
    assert_eq!(manager.latest().unwrap(), Some(4));
}

/// With one checkpoint kept and a step saved after the other, readers always find a complete one.
#[test]
fn readers_follow_a_run_that_deletes_its_steps() {
    let run = Run::with_steps(&[0]);
    let checkpoints = run.checkpoints();
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..3)
            .map(|_| {
                scope.spawn(|| {
                    let mut num_read = 0;
                    while !done.load(std::sync::atomic::Ordering::Relaxed) {
                        let latest = open_latest(&checkpoints).unwrap().unwrap();
                        assert!(latest.skipped.is_empty(), "{:?}", latest.skipped);
                        let read = |checkpoint: &Checkpoint| checkpoint.read_all(KERNEL).map(drop);
                        let latest = latest_valid(&checkpoints, read).unwrap().unwrap();
                        assert!(latest.skipped.is_empty(), "{:?}", latest.skipped);
                        Checkpoint::open_path(&checkpoints).unwrap();
                        num_read += 1;
                    }
                    num_read
                })
            })
            .collect();
        let mut manager = run.manager(ManagerOptions { max_to_keep: Some(1), ..synchronous() });
        for step in 1..400 {
            manager.save(step, request(step)).unwrap();
        }
        done.store(true, std::sync::atomic::Ordering::Relaxed);
        let num_read: usize = readers.into_iter().map(|reader| reader.join().unwrap()).sum();
        assert!(num_read > 20, "{num_read}");
    });
}

#[test]
fn paths_of_runs_mean_the_newest_undamaged_step() {
    let run = Run::with_steps(&[3, 4, 5]);
    let checkpoints = run.checkpoints();
    let tree = checkpoints.join("5/items/_METADATA");
    let contents = fs::read(&tree).unwrap();
    fs::write(&tree, &contents[..contents.len() - 1]).unwrap();
    for path in [run.directory.path(), &checkpoints] {
        let checkpoint = Checkpoint::open_path(path).unwrap();
        assert_eq!(checkpoint.step(), Some(4));
        let [skipped] = checkpoint.skipped() else { panic!("{:?}", checkpoint.skipped()) };
        assert_eq!(skipped.step, 5);
        assert!(skipped.reason.to_string().contains("items/_METADATA"), "{}", skipped.reason);
    }
    assert_eq!(open_latest(&checkpoints).unwrap().unwrap().value.skipped().len(), 1);
    assert!(Checkpoint::open_path(&checkpoints.join("5")).unwrap_err().is_corruption());
    assert!(Checkpoint::open_path(&checkpoints.join("3")).unwrap().skipped().is_empty());
}

#[test]
fn a_checkpoint_lists_all_its_damages() {
    for format in formats() {
        let run = Run::with_steps_in(format, &[3]);
        let step = run.checkpoints().join("3");
        let checkpoint = Checkpoint::open_path(&step).unwrap();
        assert!(checkpoint.find_damages().unwrap().is_empty() && checkpoint.num_bytes().unwrap() > 3000);
        for file in ["commit_success.txt", "iter/process_0-of-1.json", "items/_METADATA"] {
            let mut contents = fs::read(step.join(file)).unwrap();
            contents[5] ^= 1;
            fs::write(step.join(file), contents).unwrap();
        }
        let damages = checkpoint.find_damages().unwrap();
        assert_eq!(damages.len(), 3, "{damages:?}");
        assert!(damages.iter().all(CheckpointError::is_corruption));
    }
}
