//! The environment variables that plugins read.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

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

/// The environment variable with libtpu's arguments.
const LIBTPU_ARGUMENTS: &str = "LIBTPU_INIT_ARGS";

/// The environment does not let libtpu dump schedules.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ScheduleDumpError {
    /// The user has libtpu dump something else.
    #[error("`LIBTPU_INIT_ARGS` sets `{flag}`, which the dump of schedules sets too")]
    Taken { flag: &'static str },
    /// libtpu separates its arguments by spaces.
    #[error("the path `{0}` has a space, which libtpu's arguments may not have")]
    Space(PathBuf),
    /// Another thread may read the environment.
    #[error("libtpu's arguments can only be set before threads start")]
    Threads,
}

/// Has libtpu write the final schedule of each operation that it compiles to a file in `directory`, which it creates. The
/// user's own arguments in `LIBTPU_INIT_ARGS` remain. Call this before threads start and before the plugin is loaded.
///
/// # Errors
/// The user's arguments dump something else, the path has a space, or there are several threads.
pub fn dump_schedules(directory: &Path) -> Result<(), ScheduleDumpError> {
    let given = env::var(LIBTPU_ARGUMENTS).unwrap_or_default();
    let arguments = with_schedules(&given, directory)?;
    if !is_single_threaded() {
        return Err(ScheduleDumpError::Threads);
    }
    // SAFETY: no other thread reads or changes the environment.
    unsafe { env::set_var(LIBTPU_ARGUMENTS, arguments) };
    Ok(())
}

/// Libtpu's arguments with those for a dump of schedules.
fn with_schedules(given: &str, directory: &Path) -> Result<String, ScheduleDumpError> {
    let path = directory.to_string_lossy();
    if path.contains(char::is_whitespace) {
        return Err(ScheduleDumpError::Space(directory.to_owned()));
    }
    let flags = [
        ("--xla_jf_dump_to", &*path),
        ("--xla_jf_dump_llo_text", "true"),
        ("--xla_jf_dump_llo_pass_label_regex", "final_bundles"),
    ];
    let mut arguments: Vec<String> = given.split_whitespace().map(str::to_owned).collect();
    for (flag, value) in flags {
        let is_it = |argument: &String| {
            let name = argument.split('=').next().unwrap_or_default();
            name.trim_start_matches('-') == flag.trim_start_matches('-')
        };
        if arguments.iter().any(is_it) {
            return Err(ScheduleDumpError::Taken { flag });
        }
        arguments.push(format!("{flag}={value}"));
    }
    Ok(arguments.join(" "))
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

    #[test]
    fn arguments_of_libtpu_are_kept_beside_those_of_a_dump() {
        let directory = Path::new("/tmp/schedules");
        let own = "--xla_jf_dump_to=/tmp/schedules --xla_jf_dump_llo_text=true \
                   --xla_jf_dump_llo_pass_label_regex=final_bundles";
        assert_eq!(with_schedules("", directory).unwrap(), own);
        let given = " --xla_tpu_scoped_vmem_limit_kib=65536  --other";
        let merged = with_schedules(given, directory).unwrap();
        assert_eq!(merged, format!("--xla_tpu_scoped_vmem_limit_kib=65536 --other {own}"));
        let taken = ScheduleDumpError::Taken { flag: "--xla_jf_dump_to" };
        assert_eq!(with_schedules("-xla_jf_dump_to=/elsewhere", directory), Err(taken));
        let space = Path::new("/tmp/my schedules");
        assert_eq!(with_schedules("", space), Err(ScheduleDumpError::Space(space.to_owned())));
        // The test runs in a thread beside the main thread.
        assert_eq!(dump_schedules(directory), Err(ScheduleDumpError::Threads));
    }
}
