//! Where an iterator is.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::error::{DataError, Result};

/// The version of the layout below and of the order of batches that it points into.
pub(crate) const STATE_VERSION: u32 = 1;

/// Everything needed to go on exactly where an iterator was: small, the same on every host, and valid for any number of
/// hosts, threads and rows in a batch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct IteratorState {
    /// Version of the format.
    pub version: u32,
    /// Epoch of the next document.
    pub epoch: u64,
    /// Position of the next document in that epoch's order.
    pub document: u64,
    /// How many positions of that document earlier rows have used.
    pub token: u64,
    /// How many of the rows that start there have been used; rows that are filled together start at the same document.
    pub skip_rows: u64,
    /// Rows produced so far, on all hosts together.
    pub rows: u64,
    /// What the numbers above refer to: hashes and settings by name.
    pub fingerprint: BTreeMap<String, String>,
}

impl IteratorState {
    /// Reads a state from JSON.
    ///
    /// # Errors
    /// Text that is no state.
    pub fn from_json(text: &str) -> Result<Self> {
        serde_json::from_str(text).map_err(|error| DataError::StateDamaged { reason: error.to_string() })
    }

    /// The state as one line of JSON.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("numbers and strings are representable in JSON")
    }

    /// Refuses a state that refers to something else than `fingerprint`.
    pub(crate) fn check(&self, fingerprint: &BTreeMap<String, String>) -> Result<()> {
        if self.version != STATE_VERSION {
            let reason = format!("its version is {}, and this program reads {STATE_VERSION}", self.version);
            return Err(DataError::StateDamaged { reason });
        }
        let parts = fingerprint.keys().chain(self.fingerprint.keys());
        for part in parts {
            let then = self.fingerprint.get(part).map_or("absent", String::as_str);
            let now = fingerprint.get(part).map_or("absent", String::as_str);
            if then != now {
                return Err(DataError::StateMismatch {
                    part: part.clone(),
                    then: then.into(),
                    now: now.into(),
                });
            }
        }
        Ok(())
    }
}
