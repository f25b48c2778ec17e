//! Steps that are kept, moved aside or given up.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use mt_checkpoint::{Checkpoint, CheckpointError, ManagerOptions, complete_steps, latest_valid_of};

use crate::support::{Run, check_state, names, request, scratch, synchronous};

#[test]
fn steps_move_aside() {
    let (run, aside) = (Run::new(), scratch());
    let old = aside.path().join("old");
    let options = ManagerOptions { max_to_keep: Some(1), aside: Some(old.clone()), ..synchronous() };
    let mut manager = run.manager(options);
    for step in 1..=3 {
        manager.save(step, request(step)).unwrap();
    }
    assert_eq!(manager.steps().unwrap(), [3]);
    assert_eq!(complete_steps(&old).unwrap(), [1, 2]);
    check_state(&Checkpoint::open(&old, 2).unwrap(), 2);
    assert_eq!(names(&run.checkpoints()), ["3"]);
}

#[test]
fn steps_move_to_another_disk() {
    // One of the two directories is in memory where there is such a file system, and then they are on two.
    let (run, aside) = (Run::new(), tempfile::tempdir().unwrap());
    let options =
        ManagerOptions { max_to_keep: Some(1), aside: Some(aside.path().to_owned()), ..synchronous() };
    let mut manager = run.manager(options);
    for step in 1..=2 {
        manager.save(step, request(step)).unwrap();
    }
    assert_eq!((manager.steps().unwrap(), names(aside.path())), (vec![2], vec!["1".to_owned()]));
    check_state(&Checkpoint::open(aside.path(), 1).unwrap(), 1);
    assert_eq!(names(&run.checkpoints()), ["2"]);
}

#[test]
fn the_best_steps_are_remembered() {
    let run = Run::new();
    let options = || ManagerOptions { max_to_keep: Some(1), keep_best: 1, ..synchronous() };
    let mut manager = run.manager(options());
    for (step, loss) in [(1, 2.0), (2, 1.0), (3, 3.0)] {
        assert_eq!(manager.is_among_best(loss).unwrap(), step < 3, "{step}");
        manager.record_evaluation(step, loss).unwrap();
        manager.save(step, request(step)).unwrap();
    }
    assert_eq!(manager.steps().unwrap(), [2, 3]);
    manager.record_evaluation(3, f64::NAN).unwrap();
    drop(manager);
    let mut manager = run.manager(options());
    manager.save(4, request(4)).unwrap();
    assert_eq!(manager.steps().unwrap(), [2, 4]);
    assert!(!manager.is_among_best(1.5).unwrap() && manager.is_among_best(0.5).unwrap());
}

#[test]
fn a_save_is_given_up_at_its_deadline() {
    let run = Run::with_steps(&[1]);
    let is_slow = Arc::new(AtomicBool::new(true));
    let slow = Arc::clone(&is_slow);
    let hook: mt_checkpoint::DiskHook = Arc::new(move |_, _| {
        if slow.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(mt_checkpoint::DiskEffect::Done)
    });
    let options = ManagerOptions { disk_hook: Some(hook), ..ManagerOptions::default() };
    let mut manager = run.manager(options);
    manager.save(2, request(2)).unwrap();
    let began = Instant::now();
    let error = manager.wait_until(began + Duration::from_millis(120)).unwrap_err();
    assert!(matches!(error, CheckpointError::Cancelled { step: 2 }), "{error}");
    assert!(began.elapsed() < Duration::from_secs(1));
    assert!(manager.is_idle());
    assert_eq!(manager.steps().unwrap(), [1]);
    drop(manager);
    is_slow.store(false, Ordering::Relaxed);
    // The writer ends before its next change. A process would end here, and with it the writer.
    while names(&run.checkpoints()) != ["1"] {
        assert!(began.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut manager = run.manager(ManagerOptions::default());
    manager.save(3, request(3)).unwrap();
    assert!(manager.wait_until(Instant::now() + Duration::from_secs(60)).unwrap().is_some());
    assert_eq!(manager.steps().unwrap(), [1, 3]);
}

#[test]
fn the_newest_of_several_directories_is_found() {
    let (local, persistent) = (Run::with_steps(&[2, 4]), Run::with_steps(&[3, 4]));
    let directories = [local.checkpoints(), persistent.checkpoints()];
    let directories = [directories[0].as_path(), directories[1].as_path()];
    let newest = || {
        let latest = latest_valid_of(&directories, |checkpoint| {
            checkpoint.verify()?;
            Ok(checkpoint.path().to_owned())
        });
        let latest = latest.unwrap().unwrap();
        let skipped: Vec<_> = latest.skipped.iter().map(|skipped| skipped.path.clone()).collect();
        (latest.step, latest.value.starts_with(local.directory.path()), skipped)
    };
    assert_eq!(newest(), (4, true, vec![]));
    let damage = |run: &Run, step: u64| {
        let path = run.checkpoints().join(step.to_string());
        std::fs::write(path.join("commit_success.txt"), "x").unwrap();
        path
    };
    let first = damage(&local, 4);
    assert_eq!(newest(), (4, false, vec![first.clone()]));
    let second = damage(&persistent, 4);
    assert_eq!(newest(), (3, false, vec![first, second]));
}
