//! Documents that cannot be read.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::DataError;

/// The treatment of documents that cannot be read.
#[derive(Debug, Clone, Default, PartialEq)]
pub enum Damage {
    /// The run stops with the error.
    #[default]
    Stop,
    /// The document counts as empty, so that the others keep their order.
    Skip(Skipped),
}

/// Counts skipped documents, and reports them.
#[derive(Clone)]
pub struct Skipped(Arc<Counter>);

struct Counter {
    count: AtomicU64,
    report: Box<dyn Fn(&DataError, u64) + Send + Sync>,
}

impl Skipped {
    /// `report` receives the error of each skipped document, and the number of documents skipped so far. It is called from
    /// several threads. Documents that are read again, after an iterator has been restored, count again.
    pub fn new(report: impl Fn(&DataError, u64) + Send + Sync + 'static) -> Self {
        Self(Arc::new(Counter { count: AtomicU64::new(0), report: Box::new(report) }))
    }
}

impl Damage {
    pub(crate) fn skips(&self) -> bool {
        matches!(self, Self::Skip(_))
    }

    /// Reports an error; returns it if it does not concern a document alone, or stops the run.
    pub(crate) fn skip(&self, error: DataError) -> Result<(), DataError> {
        match self {
            Self::Skip(Skipped(counter)) if error.is_of_document() => {
                let count = counter.count.fetch_add(1, Ordering::Relaxed) + 1;
                (counter.report)(&error, count);
                Ok(())
            }
            _ => Err(error),
        }
    }
}

impl fmt::Debug for Skipped {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Skipped({})", self.0.count.load(Ordering::Relaxed))
    }
}

impl PartialEq for Skipped {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}
