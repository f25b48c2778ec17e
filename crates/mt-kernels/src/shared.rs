//! Tasks that threads of a pool share, and threads that wait for further tasks.
//!
//! Generating a token takes dozens of calls in close succession, each of some ten microseconds. Waking a thread takes
//! as long as a call. So after its tasks a thread waits for a moment, and the next call hands it tasks without the
//! pool.

use std::{
    ffi::c_void,
    panic::{AssertUnwindSafe, catch_unwind},
    ptr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

/// The time for which a thread waits for further tasks before it returns to its pool.
const STAY: Duration = Duration::from_micros(50);

/// The most threads that wait at one time.
const MOST_WAITING: usize = 64;

/// A slot for one waiting thread: null, [`IS_WAITING`] while a thread waits, or the tasks that it has received, as an
/// `Arc`.
type Place = AtomicPtr<Shared>;

const IS_WAITING: *mut Shared = ptr::without_provenance_mut(1);

static PLACES: [Place; MOST_WAITING] = [const { AtomicPtr::new(ptr::null_mut()) }; MOST_WAITING];

/// The tasks of one call. Threads hold them through an `Arc`, because a thread may arrive after the call has returned.
pub(crate) struct Shared {
    /// Dereferenced only by threads that have entered.
    task: *const (dyn Fn(usize) + Sync),
    count: usize,
    next: AtomicUsize,
    /// The number of other threads at work, and the bit [`CLOSED`] once no thread may enter.
    entered: AtomicUsize,
    panicked: AtomicBool,
    /// The slots in which the threads of this call may wait afterwards. Their number is the number of requested
    /// threads, so no more threads wait than there are processors.
    places: &'static [Place],
}

const CLOSED: usize = 1 << (usize::BITS - 1);

// SAFETY: any thread may call the task, and the caller of `share` waits while threads use it.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    /// Runs tasks until none is left.
    fn work(&self) {
        // SAFETY: the caller of `share` waits for all threads that have entered before the task ends.
        let task = unsafe { &*self.task };
        let done = catch_unwind(AssertUnwindSafe(|| {
            while let index = self.next.fetch_add(1, Ordering::Relaxed)
                && index < self.count
            {
                task(index);
            }
        }));
        if done.is_err() {
            self.panicked.store(true, Ordering::Relaxed);
        }
    }

    fn enter(&self) -> bool {
        let enter = |entered: usize| (entered & CLOSED == 0).then_some(entered + 1);
        self.entered.fetch_update(Ordering::Acquire, Ordering::Relaxed, enter).is_ok()
    }
}

/// Runs `task` for each index below `count` on this thread and up to `others` more. Waiting threads receive the tasks
/// directly; for the others, `schedule` must have [`join`] called with its argument on another thread. Returns when all
/// tasks are done.
pub(crate) fn share(
    others: usize,
    count: usize,
    task: &(dyn Fn(usize) + Sync),
    schedule: &dyn Fn(Arc<Shared>),
) {
    let places = &PLACES[..others.min(MOST_WAITING)];
    let shared = Arc::new(Shared {
        // SAFETY: only the lifetime changes, and the end of this function waits for all threads that use the task.
        task: unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), *const (dyn Fn(usize) + Sync)>(task) },
        count,
        next: AtomicUsize::new(0),
        entered: AtomicUsize::new(0),
        panicked: AtomicBool::new(false),
        places,
    });
    let handed = places.iter().filter(|place| hand_over(place, &shared)).count();
    for _ in handed..others {
        schedule(shared.clone());
    }
    shared.work();
    shared.entered.fetch_or(CLOSED, Ordering::Acquire);
    let mut waits = 0_u32;
    while shared.entered.load(Ordering::Acquire) != CLOSED {
        waits += 1;
        // On a busy machine, a thread that has entered may need this thread's processor.
        if waits.is_multiple_of(256) { std::thread::yield_now() } else { std::hint::spin_loop() }
    }
    assert!(!shared.panicked.load(Ordering::Relaxed), "a task panicked");
}

/// Hands the tasks to the thread that waits in this slot; returns whether one does.
fn hand_over(place: &Place, shared: &Arc<Shared>) -> bool {
    if place.load(Ordering::Relaxed) != IS_WAITING {
        return false;
    }
    let tasks = Arc::into_raw(shared.clone()).cast_mut();
    let handed = place.compare_exchange(IS_WAITING, tasks, Ordering::Release, Ordering::Relaxed).is_ok();
    if !handed {
        // SAFETY: no thread has taken it.
        drop(unsafe { Arc::from_raw(tasks) });
    }
    handed
}

/// The function that a scheduled thread runs.
///
/// # Safety
/// `shared` is a pointer that [`share`] passed to `schedule`, and is used once.
pub(crate) unsafe extern "C" fn join(shared: *mut c_void) {
    // SAFETY: what the caller promises.
    let mut shared = unsafe { Arc::from_raw(shared.cast_const().cast::<Shared>()) };
    loop {
        if shared.enter() {
            shared.work();
            shared.entered.fetch_sub(1, Ordering::Release);
        }
        let places = shared.places;
        drop(shared);
        match wait(places) {
            Some(more) => shared = more,
            None => return,
        }
    }
}

/// Waits for further tasks in one of these slots, if one is free.
fn wait(places: &[Place]) -> Option<Arc<Shared>> {
    let take = |place: &Place| {
        place.compare_exchange(ptr::null_mut(), IS_WAITING, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    };
    let place = places.iter().find(|place| take(place))?;
    let handed = |tasks: *mut Shared| {
        place.store(ptr::null_mut(), Ordering::Relaxed);
        // SAFETY: the thread that stored the pointer gave up its reference, and only this thread waits in this slot.
        unsafe { Arc::from_raw(tasks) }
    };
    let start = Instant::now();
    loop {
        for _ in 0..64 {
            let tasks = place.load(Ordering::Acquire);
            if tasks != IS_WAITING {
                return Some(handed(tasks));
            }
            std::hint::spin_loop();
        }
        if start.elapsed() > STAY {
            let left =
                place.compare_exchange(IS_WAITING, ptr::null_mut(), Ordering::Acquire, Ordering::Acquire);
            return left.err().map(handed);
        }
        // Another thread of the program may need this processor.
        std::thread::yield_now();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs calls in close succession, with occasional pauses. Every scheduled task starts a thread.
    #[test]
    fn all_tasks_of_all_calls_are_run_once() {
        let run = || {
            for call in 0..2000_usize {
                let count = 1 + call % 7;
                let done: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
                let task = |index: usize| {
                    done[index].fetch_add(1, Ordering::Relaxed);
                };
                share(call % 4, count, &task, &|tasks| {
                    let address = Arc::into_raw(tasks).expose_provenance();
                    // SAFETY: each is run once.
                    std::thread::spawn(move || unsafe { join(ptr::with_exposed_provenance_mut(address)) });
                });
                assert!(done.iter().all(|times| times.load(Ordering::Relaxed) == 1), "call {call}");
                if call % 50 == 0 {
                    std::thread::sleep(2 * STAY);
                }
            }
        };
        // Two concurrent callers hand tasks to any waiting thread.
        std::thread::scope(|scope| {
            scope.spawn(run);
            run();
        });
    }

    #[test]
    fn a_panic_is_passed_on_to_the_caller() {
        let failed = catch_unwind(|| {
            share(0, 3, &|index| assert!(index != 1, "the second"), &|_| unreachable!("nobody is called"));
        });
        assert!(failed.is_err());
    }
}
