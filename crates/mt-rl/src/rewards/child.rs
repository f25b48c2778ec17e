//! Child processes that answer a line with a line, and never hold up the run.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    os::unix::process::CommandExt,
    process::{self, ChildStdin, Command, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, sync_channel},
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process_group};

/// The longest line that is read of a process.
pub(super) const MOST: u64 = 1 << 20;

/// The lines of a process that wait to be read.
const WAITING: usize = 64;

/// A running process. It and its own children end with this value.
pub(crate) struct Child {
    process: process::Child,
    input: Option<ChildStdin>,
    lines: Receiver<Result<String, String>>,
}

/// Ends a process that leads a process group, with the processes that it has started.
pub(super) fn end(process: &mut process::Child) {
    // A process that has ended may have left others behind, until it is waited for.
    let _ = kill_process_group(Pid::from_child(process), Signal::KILL);
    let _ = process.kill();
    let _ = process.wait();
}

impl Child {
    /// Starts a process in a process group of its own.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(command: &mut Command) -> io::Result<Self> {
        let started = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn();
        let mut process = started?;
        let output = process.stdout.take().expect("the output is piped");
        let input = process.stdin.take();
        let (sender, lines) = sync_channel(WAITING);
        thread::spawn(move || {
            let mut output = BufReader::new(output);
            loop {
                let mut line = Vec::new();
                let read = output.by_ref().take(MOST).read_until(b'\n', &mut line);
                let message = match read {
                    Ok(0) => return,
                    Ok(_) if !line.ends_with(b"\n") && line.len() as u64 == MOST => {
                        Err(format!("its line is longer than {MOST} bytes"))
                    }
                    Ok(_) => String::from_utf8(line).map_err(|_| "its line is not UTF-8 text".to_owned()),
                    Err(error) => Err(format!("its output cannot be read: {error}")),
                };
                let is_end = message.is_err();
                // A process that writes further lines waits here, until it is ended.
                if sender.send(message).is_err() || is_end {
                    return;
                }
            }
        });
        Ok(Self { process, input, lines })
    }

    /// The line with which the process answers a line, or the reason why there is none.
    pub fn ask(&mut self, line: &str, limit: Duration) -> Result<String, String> {
        let until = Instant::now() + limit;
        let mut input = self.input.take().ok_or("its input is closed")?;
        // The process may not read, so that another thread waits for it.
        let line = format!("{line}\n");
        let (done, written) = sync_channel(1);
        thread::spawn(move || {
            let result = input.write_all(line.as_bytes()).and_then(|()| input.flush());
            let _ = done.send(result.map(|()| input));
        });
        let rest = || until.saturating_duration_since(Instant::now());
        let late = || format!("it gave no answer within {} s", limit.as_secs_f64());
        match written.recv_timeout(rest()) {
            Ok(Ok(input)) => self.input = Some(input),
            Ok(Err(_)) => return Err(self.ending().unwrap_or_else(|| "it closed its input".to_owned())),
            Err(_) => return Err(late()),
        }
        match self.lines.recv_timeout(rest()) {
            Ok(line) => line,
            Err(RecvTimeoutError::Timeout) => Err(late()),
            Err(RecvTimeoutError::Disconnected) => {
                Err(self.ending().unwrap_or_else(|| "it closed its output".to_owned()))
            }
        }
    }

    /// How the process ended, if it did.
    fn ending(&mut self) -> Option<String> {
        // The end of the output may precede that of the process.
        for _ in 0..20 {
            if let Ok(Some(status)) = self.process.try_wait() {
                return Some(format!("it ended ({status})"));
            }
            thread::sleep(Duration::from_millis(5));
        }
        None
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.input = None;
        end(&mut self.process);
    }
}
