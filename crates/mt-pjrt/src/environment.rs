//! The environment variables that plugins read.

use std::{env, fs};

use crate::Platform;

/// Sets environment variables that plugins read and for which they have no option: less logging, and no waiting for a
/// cloud's metadata service on machines without TPUs. Variables that are already set keep their value.
///
/// Call this first in `main`. The environment must not change after a second thread has started, so the function then
/// does nothing and returns `false`.
pub fn prepare_environment() -> bool {
    if !is_single_threaded() {
        return false;
    }
    let set = |name: &str, value: &str| {
        if env::var_os(name).is_none() {
            // SAFETY: no other thread reads or changes the environment.
            unsafe { env::set_var(name, value) };
        }
    };
    set("TF_CPP_MIN_LOG_LEVEL", "2");
    if !Platform::Tpu.is_present() {
        let absent = [
            ("TPU_SKIP_MDS_QUERY", "1"),
            // Without TPUs, several processes do not contend for devices.
            ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"),
            // Replaces the metadata service's answer, whose absence libtpu would report. The value does not affect
            // programs, which are compiled for the named topology.
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

fn is_single_threaded() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    status.lines().any(|line| line.strip_prefix("Threads:").is_some_and(|count| count.trim() == "1"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_set_while_other_threads_run() {
        // The test runs in a thread beside the main thread.
        assert!(!prepare_environment());
    }
}
