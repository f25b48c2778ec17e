//! Stacks of all threads, at an interval and on request, to find out why a run hangs.

use std::{
    fs::{self, OpenOptions},
    io::Write as _,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use mt_runtime::{ThreadStack, thread_stacks};
use signal_hook::consts::{SIGQUIT, SIGUSR1};

use crate::{Observer, TrainError, events};

/// The time between two looks at the signals and the clock.
const TICK: Duration = Duration::from_millis(100);

/// A thread that appends the stacks of all threads to a file. Dropping it ends the thread.
pub(crate) struct StackRecorder {
    stops: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl StackRecorder {
    /// Records stacks at each interval, and on SIGUSR1 and SIGQUIT.
    ///
    /// # Errors
    /// The system refuses a signal handler or a thread.
    pub fn start(path: &Path, interval: Duration, observer: &Observer) -> Result<Self, TrainError> {
        let requested = Arc::new(AtomicBool::new(false));
        for signal in [SIGUSR1, SIGQUIT] {
            signal_hook::flag::register(signal, requested.clone())
                .map_err(TrainError::io("listen to", "signals"))?;
        }
        let stops = Arc::new(AtomicBool::new(false));
        let watch = Watch {
            path: path.to_owned(),
            interval,
            observer: observer.clone(),
            requested,
            stops: stops.clone(),
        };
        let thread = thread::Builder::new().name("stacks".to_owned()).spawn(move || watch.run());
        Ok(Self { stops, thread: Some(thread.map_err(TrainError::io("start", "a thread"))?) })
    }
}

impl Drop for StackRecorder {
    fn drop(&mut self) {
        self.stops.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A failure to record stacks is no failure of the run.
            let _ = thread.join();
        }
    }
}

struct Watch {
    path: PathBuf,
    interval: Duration,
    observer: Observer,
    requested: Arc<AtomicBool>,
    stops: Arc<AtomicBool>,
}

impl Watch {
    fn run(self) {
        let start = Instant::now();
        let mut next = self.interval;
        let mut is_first = true;
        while !self.stops.load(Ordering::Relaxed) {
            let is_requested = self.requested.swap(false, Ordering::Relaxed);
            if is_requested || start.elapsed() >= next {
                next = start.elapsed() + self.interval;
                match self.record(start.elapsed()) {
                    Ok(()) if is_requested || is_first => {
                        let text = format!("the stacks of all threads are in `{}`", self.path.display());
                        events::note(&self.observer, text);
                    }
                    Ok(()) => {}
                    Err(error) => {
                        let text = format!("cannot record stacks in `{}`: {error}", self.path.display());
                        events::warn(&self.observer, text);
                    }
                }
                is_first = false;
            }
            thread::sleep(TICK);
        }
    }

    fn record(&self, elapsed: Duration) -> std::io::Result<()> {
        let text = shown(&thread_stacks()?, elapsed);
        self.path.parent().map_or(Ok(()), fs::create_dir_all)?;
        OpenOptions::new().create(true).append(true).open(&self.path)?.write_all(text.as_bytes())
    }
}

/// Stacks as text, the innermost function first.
fn shown(stacks: &[ThreadStack], elapsed: Duration) -> String {
    let process = std::process::id();
    let mut text =
        format!("process {process}, after {:.1} s: {} threads\n", elapsed.as_secs_f64(), stacks.len());
    for ThreadStack { id, name, frames } in stacks {
        text += &format!("\nthread {id} `{name}`\n");
        match frames {
            Some(frames) => frames.iter().for_each(|frame| text += &format!("    {frame}\n")),
            None => text += "    (it does not answer)\n",
        }
    }
    text + "\n"
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::Event;

    /// Sleeps until `stops` is set, in a function that no caller contains and that calls nothing last.
    #[inline(never)]
    fn sleeps_until_stopped(stops: &AtomicBool) -> usize {
        let mut count = 0;
        while !stops.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(10));
            count += 1;
        }
        count
    }

    #[test]
    fn stacks_are_recorded_at_an_interval() {
        let stops = Arc::new(AtomicBool::new(false));
        let sleeper = thread::spawn({
            let stops = stops.clone();
            move || sleeps_until_stopped(&stops)
        });
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("run/stacks.txt");
        let notices: Arc<Mutex<Vec<String>>> = Arc::default();
        let log = notices.clone();
        let observer: Observer = Arc::new(move |event| {
            if let Event::Notice(notice) = event {
                log.lock().unwrap().push(notice.to_string());
            }
        });
        let recorder = StackRecorder::start(&path, Duration::from_millis(1), &observer).unwrap();
        let count = || fs::read_to_string(&path).unwrap_or_default().matches("process ").count();
        let start = Instant::now();
        while count() < 3 {
            assert!(start.elapsed() < Duration::from_secs(60), "{:?}", notices.lock().unwrap());
            thread::sleep(Duration::from_millis(10));
        }
        drop(recorder);
        stops.store(true, Ordering::Relaxed);
        assert!(sleeper.join().unwrap() > 0);
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.contains("sleeps_until_stopped"), "{text}");
        assert_eq!(notices.lock().unwrap().len(), 1);
    }
}
