//! Preparation of batches while the device works.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::batch::Batch;
use crate::error::{DataError, Result};
use crate::stream::{BatchSource, Position};

type Item = Result<Option<(Batch, Position)>>;

/// The result of waiting for a batch.
#[derive(Debug)]
pub enum Awaited {
    /// The batch, and the position after it.
    Batch(Batch, Position),
    /// The last epoch is over.
    Ended,
    /// The caller gave up.
    GivenUp,
}

/// The time between two questions whether the caller gives up.
const POLL: Duration = Duration::from_millis(50);

/// Runs a [`BatchSource`] on its own thread, a bounded number of batches ahead.
///
/// Each batch comes with the position after it, so a checkpoint saves the position of the batches that were used rather
/// than of those that were prepared. Dropping the prefetcher stops the thread and waits for it, unless the caller gave up
/// waiting for a batch.
#[derive(Debug)]
pub struct Prefetcher {
    receiver: Option<Receiver<Item>>,
    thread: Option<JoinHandle<()>>,
    waited: Duration,
    ended: bool,
}

impl Prefetcher {
    /// Starts the thread. At most `depth` batches wait to be taken. `rows` yields the rows of each batch on all hosts
    /// together; later batches have the size of the last one.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn new(
        source: impl BatchSource + 'static,
        depth: usize,
        rows: impl Iterator<Item = usize> + Send + 'static,
    ) -> Result<Self> {
        let (sender, receiver) = sync_channel(depth.max(1));
        let thread = std::thread::Builder::new()
            .name("data".into())
            .spawn(move || produce(source, rows, &sender))
            .map_err(|error| DataError::Worker { reason: error.to_string() })?;
        Ok(Self { receiver: Some(receiver), thread: Some(thread), waited: Duration::ZERO, ended: false })
    }

    /// The next batch and the position after it, or `None` after the last epoch.
    ///
    /// # Errors
    /// The source's errors. Each is returned once, after the batches that precede it.
    #[allow(
        clippy::should_implement_trait,
        reason = "an iterator's item would have the result the wrong way round"
    )]
    pub fn next(&mut self) -> Item {
        Ok(match self.next_unless(|_| false)? {
            Awaited::Batch(batch, position) => Some((batch, position)),
            Awaited::Ended | Awaited::GivenUp => None,
        })
    }

    /// As [`Prefetcher::next`], but calls `gives_up` several times a second, with the time waited so far. Once it returns
    /// true, no batch is waited for any more, and there are no further batches.
    ///
    /// # Errors
    /// As [`Prefetcher::next`].
    pub fn next_unless(&mut self, mut gives_up: impl FnMut(Duration) -> bool) -> Result<Awaited> {
        let Some(receiver) = self.receiver.as_ref().filter(|_| !self.ended) else {
            return Ok(Awaited::Ended);
        };
        let start = Instant::now();
        let mut timeout = Duration::ZERO;
        let item = loop {
            match receiver.recv_timeout(timeout) {
                Ok(item) => break item,
                Err(RecvTimeoutError::Disconnected) => break Ok(None),
                Err(RecvTimeoutError::Timeout) if gives_up(start.elapsed()) => {
                    self.ended = true;
                    // The thread ends with its batch, or with the process.
                    self.thread = None;
                    return Ok(Awaited::GivenUp);
                }
                Err(RecvTimeoutError::Timeout) => timeout = POLL,
            }
        };
        if timeout > Duration::ZERO {
            self.waited += start.elapsed();
        }
        self.ended = !matches!(item, Ok(Some(_)));
        Ok(item?.map_or(Awaited::Ended, |(batch, position)| Awaited::Batch(batch, position)))
    }

    /// The time for which [`Prefetcher::next`] has waited since the last call of this function.
    pub fn take_waited(&mut self) -> Duration {
        std::mem::take(&mut self.waited)
    }
}

fn produce(mut source: impl BatchSource, mut rows: impl Iterator<Item = usize>, sender: &SyncSender<Item>) {
    loop {
        let item = catch_unwind(AssertUnwindSafe(|| {
            if let Some(rows) = rows.next() {
                source.set_batch_rows(rows)?;
            }
            let batch = source.next_batch()?;
            Ok(batch.map(|batch| (batch, source.position())))
        }))
        .unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<&str>().map(|text| text.to_string());
            let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
            Err(DataError::Worker { reason: text.unwrap_or_else(|| "it panicked".into()) })
        });
        let is_last = !matches!(item, Ok(Some(_)));
        // The receiver is gone once the prefetcher is dropped.
        if sender.send(item).is_err() || is_last {
            return;
        }
    }
}

impl Drop for Prefetcher {
    fn drop(&mut self) {
        // A thread that waits for room in the queue wakes up when the receiver is dropped.
        self.receiver = None;
        if let Some(thread) = self.thread.take() {
            // A panic has already been reported as an error.
            _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A source whose first batch takes long.
    struct Slow;

    impl BatchSource for Slow {
        fn next_batch(&mut self) -> Result<Option<Batch>> {
            std::thread::sleep(Duration::from_secs(60));
            Ok(None)
        }

        fn set_batch_rows(&mut self, _rows: usize) -> Result<()> {
            Ok(())
        }

        fn position(&self) -> Position {
            Position::Null
        }

        fn seek(&mut self, _position: &Position) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn the_caller_need_not_wait_for_a_batch() {
        let began = Instant::now();
        let mut batches = Prefetcher::new(Slow, 1, [1].into_iter()).unwrap();
        let awaited = batches.next_unless(|waited| waited > Duration::from_millis(200)).unwrap();
        assert!(matches!(awaited, Awaited::GivenUp), "{awaited:?}");
        assert!(batches.take_waited() < Duration::from_secs(30));
        assert!(matches!(batches.next(), Ok(None)));
        drop(batches);
        assert!(began.elapsed() < Duration::from_secs(30));
    }
}
