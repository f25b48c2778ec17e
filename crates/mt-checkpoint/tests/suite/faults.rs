//! Failures reported by the disk.

use std::{
    collections::HashSet,
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

use mt_checkpoint::{Checkpoint, CheckpointError, DiskHook, DiskOperation, ManagerOptions, StorageFormat};

use crate::support::{Run, check_state, formats, names, request, synchronous};

/// Lets `permitted` changes pass, then fails one with `kind`.
fn fail_after(permitted: usize, kind: io::ErrorKind) -> DiskHook {
    let left = Mutex::new(Some(permitted));
    Arc::new(move |_: DiskOperation, _: &Path| {
        let mut left = left.lock().unwrap();
        match *left {
            Some(0) => {
                *left = None;
                Err(io::Error::from(kind))
            }
            Some(count) => {
                *left = Some(count - 1);
                Ok(())
            }
            None => Ok(()),
        }
    })
}

#[test]
fn a_full_disk_fails_the_save_and_leaves_the_step_before_it() {
    // In the background, where the code path is the same, every fifth change suffices.
    for (format, (asynchronous, stride)) in
        formats().into_iter().flat_map(|format| [(format, (false, 1)), (format, (true, 5))])
    {
        let mut num_failures = 0;
        for permitted in (0..).step_by(stride) {
            let run = Run::with_steps(&[1]);
            let disk_hook = Some(fail_after(permitted, io::ErrorKind::StorageFull));
            let options =
                ManagerOptions { asynchronous, disk_hook, format, max_to_keep: Some(1), ..synchronous() };
            let mut manager = run.manager(options);
            let saved =
                manager.save(2, request(2)).and_then(|report| Ok(report.or(manager.wait_until_finished()?)));
            let steps = manager.steps().unwrap();
            for &step in &steps {
                check_state(&Checkpoint::open(manager.directory(), step).unwrap(), step);
            }
            let Err(error) = saved else {
                assert_eq!(steps, [2]);
                break;
            };
            num_failures += 1;
            let is_of_disk = matches!(error, CheckpointError::Io { .. } | CheckpointError::DiskFull { .. });
            assert!(is_of_disk && !error.is_user_error(), "{error}");
            assert!(error.to_string().contains("hint: free some space"), "{error}");
            // One checkpoint is kept, so no more of them can be given up.
            assert!(!error.to_string().contains("max_num_checkpoints_to_keep"), "{error}");
            // A failed save leaves no files; after the commit only the deletion of the old step can have failed.
            if steps == [1] {
                assert_eq!(names(manager.directory()), ["1"]);
                manager.save(2, request(2)).unwrap();
                manager.wait_until_finished().unwrap();
                assert_eq!(manager.steps().unwrap(), [2]);
            } else {
                assert!(steps.contains(&2), "{steps:?}");
            }
        }
        assert!(num_failures * stride > 40, "{num_failures}");
    }
}

#[test]
fn everything_is_flushed_before_the_commit() {
    formats().into_iter().for_each(check_order_of_flushes);
}

fn check_order_of_flushes(format: StorageFormat) {
    let log: Arc<Mutex<Vec<(DiskOperation, PathBuf)>>> = Arc::default();
    let hook: DiskHook = {
        let log = Arc::clone(&log);
        Arc::new(move |operation, path| {
            log.lock().unwrap().push((operation, path.to_owned()));
            Ok(())
        })
    };
    let run = Run::new();
    let mut manager = run.manager(ManagerOptions { disk_hook: Some(hook), format, ..synchronous() });
    manager.save(5, request(5)).unwrap();
    let log = log.lock().unwrap();
    let step = run.checkpoints().join("5");
    let commit = log
        .iter()
        .position(|(operation, path)| *operation == DiskOperation::Rename && *path == step)
        .unwrap();

    // Flushed paths are compared by their final names: items are renamed once before the step is.
    let final_name = |path: &Path| PathBuf::from(path.to_string_lossy().replace(".orbax-checkpoint-tmp", ""));
    let mut dirty = HashSet::new();
    let mut created = HashSet::new();
    for (operation, path) in &log[..commit] {
        let name = final_name(path);
        let parent = name.parent().unwrap().to_owned();
        match operation {
            DiskOperation::Write => dirty.extend([name, parent]),
            DiskOperation::CreateDirectory => {
                // Directories between the item and a chunk are created along with the last one.
                for directory in name.ancestors().take_while(|directory| directory.starts_with(&step)) {
                    if created.insert(directory.to_owned()) {
                        dirty.extend([directory.to_owned(), directory.parent().unwrap().to_owned()]);
                    }
                }
            }
            DiskOperation::Rename => drop(dirty.insert(parent)),
            DiskOperation::Sync => drop(dirty.remove(&name)),
            DiskOperation::Remove => {}
        }
    }
    // The parent of the step is flushed right after the commit, which makes the commit durable.
    assert_eq!(dirty, HashSet::from([run.checkpoints()]));
    assert_eq!(log[commit + 1..], [(DiskOperation::Sync, run.checkpoints())]);
}

#[test]
fn a_full_disk_of_a_run_with_several_checkpoints_suggests_keeping_fewer() {
    let run = Run::with_steps(&[1, 2]);
    let disk_hook = Some(fail_after(5, io::ErrorKind::StorageFull));
    let mut manager = run.manager(ManagerOptions { disk_hook, ..synchronous() });
    let message = manager.save(3, request(3)).unwrap_err().to_string();
    assert!(message.contains("`max_num_checkpoints_to_keep`"), "{message}");
    assert!(message.contains("checkpoints before step 3 are intact"), "{message}");
}
