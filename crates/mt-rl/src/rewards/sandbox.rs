//! A sandbox for code that a model has written: `bubblewrap`, which hides network, files and processes, and limits on
//! resources, which `prlimit` sets.
//!
//! Code never runs outside of it: where the sandbox cannot be had, there is none ([`Sandbox::open`]).

use std::{
    env, fs,
    io::{ErrorKind, Read, Write},
    os::unix::process::CommandExt,
    path::Path,
    process::{Command, ExitStatus, Stdio},
    sync::{
        Arc,
        mpsc::{RecvTimeoutError, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

use super::{
    child::{self, MOST},
    confinement::{CallFilter, resident_bytes},
};

/// The limits of a program in the sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SandboxLimits {
    /// The time by the clock, and of the processor.
    pub time: Duration,
    /// The bytes of address space of each process, and of memory of all processes together.
    pub memory: u64,
    pub processes: u64,
    /// The bytes of each file, and of all files together.
    pub files: u64,
}

/// A sandbox that has been tried.
#[derive(Clone, Debug)]
pub struct Sandbox {
    limits: SandboxLimits,
    is_root: bool,
    /// Whether this `bwrap` can forbid further namespaces.
    has_last_namespace: bool,
    filter: Arc<CallFilter>,
}

/// The result of a program.
#[derive(Clone, Debug)]
pub struct Ran {
    /// Its output, up to a limit.
    pub output: Vec<u8>,
    /// `None` if it was ended because of its time, its output or its memory.
    pub status: Option<ExitStatus>,
}

const INSTALL: &str = "hint: install the packages `bubblewrap` and `util-linux`, and allow user namespaces; code of a model \
                       runs nowhere else";

/// The user that has no files, as which code of the superuser's run runs. Limits on processes do not hold for the
/// superuser.
const NOBODY: &str = "65534";

/// Opens the filter of system calls as a file that `bwrap` inherits.
const WITH_FILTER: &str = "exec 9<\"$1\" || exit; shift; exec \"$@\"";

/// The time between two looks at a program.
const LOOK: Duration = Duration::from_millis(4);

/// The looks at a program for each look at its memory.
const LOOKS_AT_MEMORY: u32 = 5;

/// Directories of the system, which are programs and libraries or links to them.
const SYSTEM: [&str; 4] = ["bin", "sbin", "lib", "lib64"];

impl Sandbox {
    /// Tries the sandbox.
    ///
    /// # Errors
    /// The reason why it cannot be used, with a hint.
    pub fn open(limits: SandboxLimits) -> Result<Self, String> {
        // The superuser's files are otherwise readable in the sandbox's own view of them.
        let is_root = rustix::process::geteuid().is_root();
        let filter = CallFilter::create()
            .map_err(|error| format!("the filter of system calls cannot be written: {error}"))?;
        let mut sandbox = Self { limits, is_root, has_last_namespace: true, filter: Arc::new(filter) };
        sandbox.try_once().or_else(|_| {
            // Before version 0.8, `bwrap` does not know the option.
            sandbox.has_last_namespace = false;
            sandbox.try_once()
        })?;
        Ok(sandbox)
    }

    /// Runs a program that does nothing.
    fn try_once(&self) -> Result<(), String> {
        for needed in [self.first(), "prlimit"] {
            let found =
                Command::new(needed).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
            found.map_err(|error| match error.kind() {
                ErrorKind::NotFound => format!("there is no `{needed}`\n{INSTALL}"),
                _ => format!("`{needed}` cannot be started: {error}\n{INSTALL}"),
            })?;
        }
        let tried = self.command(&["true"]).stdin(Stdio::null()).output();
        let tried = tried.map_err(|error| format!("`sh` cannot be started: {error}"))?;
        if tried.status.success() {
            return Ok(());
        }
        let text = String::from_utf8_lossy(&tried.stderr);
        let reason = text.trim().lines().last().unwrap_or_default();
        Err(format!("`bwrap` cannot run a program ({}): {reason}\n{INSTALL}", tried.status))
    }

    /// The first program of the command.
    fn first(&self) -> &'static str {
        if self.is_root { "setpriv" } else { "bwrap" }
    }

    /// The command that runs a program in the sandbox.
    fn command(&self, program: &[&str]) -> Command {
        let SandboxLimits { time, memory, processes, files } = self.limits;
        let seconds = time.as_secs_f64().ceil().max(1.0) as u64;
        let mut command = Command::new("sh");
        // The first process of the sandbox keeps the environment with which `bwrap` starts, where code could read it.
        command.env_clear().env("PATH", env::var_os("PATH").unwrap_or_default());
        command.args(["-c", WITH_FILTER, "sh"]).arg(self.filter.path()).arg(self.first());
        let mut add = |words: &str| {
            command.args(words.split_whitespace());
        };
        if self.is_root {
            add(&format!("--reuid {NOBODY} --regid {NOBODY} --clear-groups --no-new-privs -- bwrap"));
        }
        if self.has_last_namespace {
            add("--disable-userns");
        }
        add("--seccomp 9 --unshare-user --unshare-all --die-with-parent --new-session --clearenv");
        add("--setenv PATH /usr/bin:/bin --setenv HOME /tmp --setenv LANG C.UTF-8");
        add(&format!("--uid {NOBODY} --gid {NOBODY} --cap-drop ALL --hostname sandbox"));
        command.args(["--ro-bind", "/usr", "/usr"]);
        for name in SYSTEM {
            let path = Path::new("/").join(name);
            match fs::read_link(&path) {
                Ok(target) => command.arg("--symlink").arg(target).arg(path),
                Err(_) if path.is_dir() => command.arg("--ro-bind").arg(&path).arg(path),
                Err(_) => &mut command,
            };
        }
        let mut add = |words: &str| {
            command.args(words.split_whitespace());
        };
        add(&format!(
            "--proc /proc --dev /dev --size {files} --tmpfs /dev/shm --size {files} --tmpfs /tmp --chdir /tmp"
        ));
        add("--remount-ro /dev --remount-ro / --");
        // Set here, the limit on processes counts those of this sandbox alone.
        add(&format!(
            "prlimit --cpu={seconds} --as={memory} --nproc={processes} --fsize={files} --nofile=64 --core=0 --"
        ));
        command.args(program);
        command
    }

    /// Runs a program with an input, until it ends, its time is over, or it has written too much.
    ///
    /// # Errors
    /// The program cannot be started.
    pub fn run(&self, program: &[&str], input: &[u8]) -> std::io::Result<Ran> {
        let mut process = self
            .command(program)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()?;
        let until = Instant::now() + self.limits.time;
        let mut to = process.stdin.take().expect("the input is piped");
        let from = process.stdout.take().expect("the output is piped");
        let input = input.to_vec();
        // Programs that do not read, or go on writing, hold up these threads only until they are ended.
        thread::spawn(move || {
            let _ = to.write_all(&input);
        });
        let (sender, received) = sync_channel(1);
        thread::spawn(move || {
            let mut output = Vec::new();
            let _ = from.take(MOST + 1).read_to_end(&mut output);
            let _ = sender.send(output);
        });
        let (mut output, mut status) = (None, None);
        let mut looks = 0_u32;
        while Instant::now() < until {
            match output.as_ref() {
                None => match received.recv_timeout(LOOK) {
                    Ok(text) => output = Some(text),
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => output = Some(Vec::new()),
                },
                Some(text) if text.len() as u64 > MOST => break,
                Some(_) => {
                    status = process.try_wait()?;
                    if status.is_some() {
                        break;
                    }
                    thread::sleep(LOOK);
                }
            }
            looks += 1;
            if looks.is_multiple_of(LOOKS_AT_MEMORY) && resident_bytes(process.id()) > self.limits.memory {
                break;
            }
        }
        child::end(&mut process);
        let output = output.or_else(|| received.recv_timeout(Duration::from_secs(1)).ok());
        Ok(Ran { output: output.unwrap_or_default(), status })
    }
}
