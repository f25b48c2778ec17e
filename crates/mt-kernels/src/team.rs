//! Threads that share the work of one call.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Threads that share the tasks of a call.
pub trait Team: Sync {
    /// The threads that can work at once, including the caller's.
    fn num_threads(&self) -> usize;

    /// Runs `task` for each index below `count`, on the caller's thread and others, and returns when all tasks are
    /// done. The assignment of tasks to threads is unspecified.
    fn for_each(&self, count: usize, task: &(dyn Fn(usize) + Sync));
}

/// A team of only the caller's thread.
pub struct Alone;

impl Team for Alone {
    fn num_threads(&self) -> usize {
        1
    }

    fn for_each(&self, count: usize, task: &(dyn Fn(usize) + Sync)) {
        (0..count).for_each(task);
    }
}

/// Threads that are started for each call, for tests and measurements.
pub struct ScopedThreads(pub usize);

impl Team for ScopedThreads {
    fn num_threads(&self) -> usize {
        self.0
    }

    fn for_each(&self, count: usize, task: &(dyn Fn(usize) + Sync)) {
        let next = AtomicUsize::new(0);
        let work = || {
            while let index = next.fetch_add(1, Ordering::Relaxed)
                && index < count
            {
                task(index);
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..self.0.min(count) {
                scope.spawn(work);
            }
            work();
        });
    }
}
