//! The environment variables that plugins read.

use std::{env, fs};

use crate::Platform;

/// Sets the environment variables that plugins read and that have no option: less logging, and no wait for a cloud's
/// metadata service where there is no TPU. Variables that are set already stay.
///
/// To be called first in `main`. Once a second thread runs, the environment must not change any more, so that this
/// then does nothing and returns `false`.
pub fn prepare_environment() -> bool {
    if !is_single_threaded() {
        return false;
    }
    let set = |name: &str, value: &str| {
        if env::var_os(name).is_none() {
            // SAFETY: no other thread exists that could read or change the environment meanwhile.
            unsafe { env::set_var(name, value) };
        }
    };
    set("TF_CPP_MIN_LOG_LEVEL", "2");
    if !Platform::Tpu.is_present() {
        let absent = [
            ("TPU_SKIP_MDS_QUERY", "1"),
            // Without TPUs there is nothing that several processes could not share.
            ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"),
            // What the metadata service would say, so that libtpu does not complain of its absence; programs are
            // compiled for the topology that is named, whatever stands here.
            ("TPU_ACCELERATOR_TYPE", "v5p-8"),
            ("TPU_WORKER_HOSTNAMES", "localhost"),
            ("TPU_WORKER_ID", "0"),
            ("TPU_MIN_LOG_LEVEL", "3"),
            ("TPU_STDERR_LOG_LEVEL", "3"),
        ];
        absent.iter().for_each(|(name, value)| set(name, value));
    }
    true
}

/// Starts the program again with an allocator that asks the system for large pages, where that is what it takes to get
/// them; otherwise returns. XLA allocates the temporaries of each execution anew, and on two cores a twelfth of a
/// training step went into handing out their memory in pages of 4 kB.
///
/// glibc reads this setting once, before `main`. To be called before anything has been done.
pub fn restart_with_large_pages() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        use std::{os::unix::process::CommandExt, process::Command};

        const TUNABLES: &str = "GLIBC_TUNABLES";
        let pages = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
        if !pages.contains("[madvise]") || env::var_os(TUNABLES).is_some() || !is_single_threaded() {
            return;
        }
        let mut arguments = env::args_os();
        let mut command = Command::new("/proc/self/exe");
        if let Some(name) = arguments.next() {
            command.arg0(name);
        }
        // Returns only if the program cannot be started, and then it goes on as it is.
        let _ = command.args(arguments).env(TUNABLES, "glibc.malloc.hugetlb=1").exec();
    }
}

fn is_single_threaded() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    status.lines().any(|line| line.strip_prefix("Threads:").is_some_and(|count| count.trim() == "1"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_set_while_other_threads_run() {
        // The test itself runs beside the main thread.
        assert!(!prepare_environment());
    }
}
