//! Limits besides those of namespaces and processes: a filter of system calls that hold memory outside of any process, and the
//! memory of all processes of a sandbox together.

use std::{
    env,
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::fd::AsRawFd,
    path::{Path, PathBuf},
    process,
    sync::atomic::{AtomicU64, Ordering},
};

/// The architecture of system calls, as the kernel numbers it, and the calls that are refused.
#[cfg(target_arch = "x86_64")]
const REFUSED: (u32, &[u32]) = (
    0xc000_003e,
    &[
        29, 30, 64, 68, // shmget, shmat, semget, msgget
        101, 310, 311, // ptrace, process_vm_readv, process_vm_writev
        240, // mq_open
        248, 249, 250, // add_key, request_key, keyctl
        298, 321, 323, 425, // perf_event_open, bpf, userfaultfd, io_uring_setup
        319, 447, // memfd_create, memfd_secret
    ],
);
#[cfg(target_arch = "aarch64")]
const REFUSED: (u32, &[u32]) = (
    0xc000_00b7,
    &[
        194, 196, 190, 186, // shmget, shmat, semget, msgget
        117, 270, 271, // ptrace, process_vm_readv, process_vm_writev
        180, // mq_open
        217, 218, 219, // add_key, request_key, keyctl
        241, 280, 282, 425, // perf_event_open, bpf, userfaultfd, io_uring_setup
        279, 447, // memfd_create, memfd_secret
    ],
);

/// Numbers from here on are the calls of another interface (x32), whose other numbers mean the same.
const OTHER_INTERFACE: u32 = 0x4000_0000;

/// A filter of system calls, in a file without a name that `bwrap` reads.
#[derive(Debug)]
pub(super) struct CallFilter {
    file: File,
}

impl CallFilter {
    /// Writes the filter.
    pub fn create() -> io::Result<Self> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let name = format!("maxtext-{}-{}.filter", process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let path = env::temp_dir().join(name);
        let mut file = OpenOptions::new().read(true).write(true).create_new(true).open(&path)?;
        fs::remove_file(&path)?;
        file.write_all(&filter())?;
        Ok(Self { file })
    }

    /// A path by which child processes open the filter from its beginning.
    pub fn path(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", process::id(), self.file.as_raw_fd()).into()
    }
}

/// The filter as instructions of the kernel's packet filters: refused calls fail with `EPERM`, and calls of another
/// architecture end the process.
fn filter() -> Vec<u8> {
    const LOAD: u16 = 0x20;
    const IS_EQUAL: u16 = 0x15;
    const IS_AT_LEAST: u16 = 0x35;
    const RETURN: u16 = 0x06;
    const NUMBER: u32 = 0;
    const ARCHITECTURE: u32 = 4;
    const END: u32 = 0x8000_0000;
    const ALLOW: u32 = 0x7fff_0000;
    const NOT_PERMITTED: u32 = 0x0005_0001;
    let (architecture, calls) = REFUSED;
    let mut program: Vec<(u16, u8, u8, u32)> = vec![
        (LOAD, 0, 0, ARCHITECTURE),
        (IS_EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, END),
        (LOAD, 0, 0, NUMBER),
        (IS_AT_LEAST, calls.len() as u8 + 1, 0, OTHER_INTERFACE),
    ];
    for (place, call) in calls.iter().enumerate() {
        program.push((IS_EQUAL, (calls.len() - place) as u8, 0, *call));
    }
    program.extend([(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, NOT_PERMITTED)]);
    let bytes = program.into_iter().flat_map(|(code, yes, no, value)| {
        let [low, high] = code.to_ne_bytes();
        let [a, b, c, d] = value.to_ne_bytes();
        [low, high, yes, no, a, b, c, d]
    });
    bytes.collect()
}

/// The bytes of memory that a process and its descendants hold. Processes that end meanwhile do not count.
pub(super) fn resident_bytes(process: u32) -> u64 {
    let directory = Path::new("/proc").join(process.to_string());
    let status = fs::read_to_string(directory.join("status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kilobytes = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    let Ok(threads) = fs::read_dir(directory.join("task")) else { return 0 };
    let children = threads.flatten().map(|thread| {
        let children = fs::read_to_string(thread.path().join("children")).unwrap_or_default();
        children.split_whitespace().filter_map(|child| child.parse().ok()).map(resident_bytes).sum::<u64>()
    });
    kilobytes.unwrap_or(0) * 1024 + children.sum::<u64>()
}
