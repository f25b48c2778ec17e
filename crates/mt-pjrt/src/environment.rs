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
