//! Positions of data whose state is the number of prepared steps.

use mt_data::{DataError, Position};
use serde::{Deserialize, Serialize};

const VERSION: u32 = 1;

/// The steps that have been prepared from data with a fingerprint.
#[derive(Serialize, Deserialize)]
pub(crate) struct StepPosition {
    version: u32,
    step: u64,
    fingerprint: String,
}

impl StepPosition {
    pub fn stored(step: u64, fingerprint: String) -> Position {
        let position = Self { version: VERSION, step, fingerprint };
        serde_json::to_value(position).expect("numbers and strings are representable in JSON")
    }

    /// The step of a position in the data that has the fingerprint `now`. Errors call the data `name`.
    ///
    /// # Errors
    /// The position is damaged, of another version, or one in other data.
    pub fn step(position: &Position, now: String, name: &str) -> Result<u64, DataError> {
        let damaged = |reason: String| DataError::StateDamaged { reason };
        let before: Self =
            serde_json::from_value(position.clone()).map_err(|error| damaged(error.to_string()))?;
        if before.version != VERSION {
            let version = before.version;
            return Err(damaged(format!("its version is {version}, and this program reads {VERSION}")));
        }
        if before.fingerprint != now {
            return Err(DataError::StateMismatch {
                property: name.to_owned(),
                then: before.fingerprint,
                now,
            });
        }
        Ok(before.step)
    }
}
