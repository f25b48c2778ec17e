//! A sandbox for code that a model has written: `bubblewrap`, which hides network, files and processes, and limits on
//! resources, which `prlimit` sets.
//!
//! Code never runs outside of it: where the sandbox cannot be had, there is none ([`Sandbox::open`]).

use std::{
    fs,
    io::{ErrorKind, Read, Write},
    os::unix::process::CommandExt,
    path::Path,
    process::{Command, ExitStatus, Stdio},
    sync::mpsc::sync_channel,
    thread,
    time::{Duration, Instant},
};

use super::child::{self, MOST};

/// The limits of a program in the sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SandboxLimits {
    /// The time by the clock, and of the processor.
    pub time: Duration,
    /// The bytes of address space of each process.
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
}

/// The result of a program.
#[derive(Clone, Debug)]
pub struct Ran {
    /// Its output, up to a limit.
    pub output: Vec<u8>,
    /// `None` if it was ended because of its time or its output.
    pub status: Option<ExitStatus>,
}

const INSTALL: &str = "hint: install the packages `bubblewrap` and `util-linux`, and allow user namespaces; code of a model \
                       runs nowhere else";

/// The user that has no files, as which code of the superuser's run runs. Limits on processes do not hold for the
/// superuser.
const NOBODY: &str = "65534";

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
        let sandbox = Self { limits, is_root };
        let tried = sandbox.command(&["true"]).stdin(Stdio::null()).output();
        let tried = tried.map_err(|error| match error.kind() {
            ErrorKind::NotFound => format!("there is no `{}`\n{INSTALL}", sandbox.first()),
            _ => format!("`{}` cannot be started: {error}\n{INSTALL}", sandbox.first()),
        })?;
        if tried.status.success() {
            return Ok(sandbox);
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
        let mut command = Command::new(self.first());
        let mut add = |words: &str| {
            command.args(words.split_whitespace());
        };
        if self.is_root {
            add(&format!("--reuid {NOBODY} --regid {NOBODY} --clear-groups --no-new-privs -- bwrap"));
        }
        add("--unshare-user --unshare-all --die-with-parent --new-session --clearenv");
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
            "prlimit --cpu={seconds} --as={memory} --nproc={processes} --fsize={files} --nofile=256 --core=0 --"
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
        let rest = until.saturating_duration_since(Instant::now());
        let mut output = received.recv_timeout(rest);
        let is_flood = output.as_ref().is_ok_and(|output| output.len() as u64 > MOST);
        let mut status = None;
        while output.is_ok() && !is_flood && status.is_none() && Instant::now() < until {
            status = process.try_wait()?;
            if status.is_none() {
                thread::sleep(Duration::from_millis(2));
            }
        }
        child::end(&mut process);
        if output.is_err() {
            output = received.recv_timeout(Duration::from_secs(1));
        }
        Ok(Ran { output: output.unwrap_or_default(), status })
    }
}
