//! Stopping a run by a signal.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use signal_hook::consts::{SIGINT, SIGTERM};

use crate::TrainError;

/// Records SIGINT and SIGTERM, so that the run ends after the current step. A second signal ends the process at once.
pub(crate) struct StopSignal {
    received: Arc<AtomicUsize>,
}

impl StopSignal {
    /// Starts to listen.
    pub fn listen() -> Result<Self, TrainError> {
        let received = Arc::new(AtomicUsize::new(0));
        for signal in [SIGINT, SIGTERM] {
            let second = Arc::new(std::sync::atomic::AtomicBool::new(false));
            let register = || {
                // The order matters: the first signal finds the flag unset and sets it, the second ends the process.
                signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, second.clone())?;
                signal_hook::flag::register(signal, second.clone())?;
                signal_hook::flag::register_usize(signal, received.clone(), signal as usize)
            };
            register().map_err(TrainError::io("listen to", "signals"))?;
        }
        Ok(Self { received })
    }

    /// The number of the received signal, if any.
    pub fn received(&self) -> Option<i32> {
        match self.received.load(Ordering::Relaxed) {
            0 => None,
            signal => Some(signal as i32),
        }
    }
}
