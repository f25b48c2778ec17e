//! The stacks of all threads of this process.
//!
//! A thread's stack can be walked from outside only by a process that traces this one, which containers often forbid.
//! So a signal interrupts the threads, one after another, and each walks its own stack in the handler. The handler
//! allocates nothing and takes no lock: it stores the addresses of frames, which the caller turns into names.

use std::{
    ffi::{c_int, c_void},
    fs, io, mem, process, ptr,
    sync::{
        Mutex, OnceLock, PoisonError,
        atomic::{AtomicI32, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// The signal that interrupts threads.
const SIGNAL: c_int = libc::SIGUSR2;

/// Frames beyond this number are left out.
const MOST_FRAMES: usize = 128;

/// The time that a thread has to answer. One that waits in the kernel without regard to signals does not.
const PATIENCE: Duration = Duration::from_millis(500);

/// The thread that is to walk its stack; 0 once it has.
static REQUESTED: AtomicI32 = AtomicI32::new(0);
static NUM_FRAMES: AtomicUsize = AtomicUsize::new(0);
static FRAMES: [AtomicUsize; MOST_FRAMES] = [const { AtomicUsize::new(0) }; MOST_FRAMES];

/// A thread and its stack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThreadStack {
    /// The system's number of the thread.
    pub id: i32,
    pub name: String,
    /// The functions from the innermost to the outermost; none if the thread does not answer.
    pub frames: Option<Vec<String>>,
}

/// Takes the stacks of all threads. The first call installs a handler for SIGUSR2, which stays.
///
/// # Errors
/// The handler cannot be installed, or the system does not list the threads.
pub fn thread_stacks() -> io::Result<Vec<ThreadStack>> {
    static ONE_CALLER: Mutex<()> = Mutex::new(());
    let _guard = ONE_CALLER.lock().unwrap_or_else(PoisonError::into_inner);
    install_handler()?;
    let mut threads: Vec<i32> = fs::read_dir("/proc/self/task")?
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect();
    threads.sort_unstable();
    let stack = |id: i32| {
        let name = fs::read_to_string(format!("/proc/self/task/{id}/comm")).unwrap_or_default();
        let frames = addresses_of(id).map(|addresses| addresses.into_iter().map(name_of).collect());
        ThreadStack { id, name: name.trim().to_owned(), frames }
    };
    Ok(threads.into_iter().map(stack).collect())
}

fn install_handler() -> io::Result<()> {
    static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
    let install = || {
        // SAFETY: all fields are integers, sets of bits or nullable pointers, for which zero is a valid value.
        let mut action = unsafe { mem::zeroed::<libc::sigaction>() };
        action.sa_sigaction = walk as *const () as libc::sighandler_t;
        // Calls of the system that the signal interrupts go on.
        action.sa_flags = libc::SA_RESTART;
        // SAFETY: the handler calls only functions that are safe in a signal handler; the earlier action is not needed.
        match unsafe { libc::sigaction(SIGNAL, &raw const action, ptr::null_mut()) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error().raw_os_error().unwrap_or(0)),
        }
    };
    INSTALLED.get_or_init(install).map_err(io::Error::from_raw_os_error)
}

/// Stores the addresses of the frames of the thread that the signal interrupted.
extern "C" fn walk(_: c_int) {
    // SAFETY: the call has no arguments and cannot fail.
    let own = unsafe { libc::gettid() };
    // The answer to an earlier request may come late.
    if REQUESTED.load(Ordering::Acquire) != own {
        return;
    }
    let mut count = 0;
    let store = |frame: &backtrace::Frame| {
        // The outermost frame of a thread returns nowhere.
        if frame.ip().is_null() {
            return false;
        }
        FRAMES[count].store(frame.ip() as usize, Ordering::Relaxed);
        count += 1;
        count < MOST_FRAMES
    };
    // SAFETY: one thread at a time is requested, so no other one walks its stack.
    unsafe { backtrace::trace_unsynchronized(store) };
    NUM_FRAMES.store(count, Ordering::Relaxed);
    REQUESTED.store(0, Ordering::Release);
}

/// The addresses of a thread's frames; none if it does not answer.
fn addresses_of(thread: i32) -> Option<Vec<usize>> {
    REQUESTED.store(thread, Ordering::Release);
    // SAFETY: the call sends a signal that has a handler to a thread of this process, or fails if the thread has ended.
    let sent = unsafe { libc::syscall(libc::SYS_tgkill, process::id() as c_int, thread, SIGNAL) } == 0;
    let start = Instant::now();
    while sent && REQUESTED.load(Ordering::Acquire) != 0 && start.elapsed() < PATIENCE {
        thread::sleep(Duration::from_micros(200));
    }
    // A thread that answers from now on is too late.
    let has_answered = REQUESTED.swap(0, Ordering::Acquire) == 0;
    let frames = &FRAMES[..NUM_FRAMES.load(Ordering::Relaxed)];
    has_answered.then(|| frames.iter().map(|frame| frame.load(Ordering::Relaxed)).collect())
}

/// The function at an address.
fn name_of(address: usize) -> String {
    let mut name = None;
    // A frame's address is where its callee returns to, which may already belong to another function.
    backtrace::resolve((address - 1) as *mut c_void, |symbol| {
        name = name.take().or_else(|| symbol.name().map(|name| format!("{name:#}")));
    });
    name.unwrap_or_else(|| format!("{address:#x}"))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[inline(never)]
    fn waits_for_a_message(messages: &mpsc::Receiver<()>) {
        let _ = messages.recv();
        std::hint::black_box(());
    }

    #[inline(never)]
    fn computes_until(messages: &mpsc::Receiver<()>) {
        while messages.try_recv() == Err(mpsc::TryRecvError::Empty) {
            std::hint::black_box(());
        }
    }

    #[test]
    fn stacks_of_waiting_and_computing_threads_have_names() {
        let spawn = |name: &str, work: fn(&mpsc::Receiver<()>)| {
            let (stop, messages) = mpsc::channel();
            let thread = thread::Builder::new().name(name.to_owned()).spawn(move || work(&messages)).unwrap();
            (stop, thread)
        };
        let waiting = spawn("waiting", waits_for_a_message);
        let computing = spawn("computing", computes_until);
        thread::sleep(Duration::from_millis(50));
        let stacks = thread_stacks().unwrap();
        let check = |name: &str, function: &str| {
            let stack = stacks.iter().find(|stack| stack.name == name).unwrap();
            let frames = stack.frames.as_ref().unwrap();
            assert!(frames.iter().any(|frame| frame.contains(function)), "{frames:#?}");
        };
        check("waiting", "waits_for_a_message");
        check("computing", "computes_until");
        assert!(stacks.iter().any(|stack| {
            stack
                .frames
                .as_ref()
                .is_some_and(|frames| frames.iter().any(|frame| frame.contains("thread_stacks")))
        }));
        for (stop, thread) in [waiting, computing] {
            drop(stop);
            thread.join().unwrap();
        }
    }
}
