//! Stopping a run by a signal.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Instant,
};

use signal_hook::{
    consts::{SIGINT, SIGTERM, SIGUSR1, SIGUSR2},
    iterator::{Handle, Signals},
};

use crate::TrainError;

/// The signals by which people, Kubernetes and schedulers of clusters stop a run. SLURM sends the one that its option
/// `--signal` names, usually SIGUSR1, some time before it sends SIGTERM.
const SIGNALS: [i32; 4] = [SIGINT, SIGTERM, SIGUSR1, SIGUSR2];
/// Those of a run that records stacks, which SIGUSR1 requests and SIGUSR2 takes.
const SIGNALS_BESIDE_STACKS: [i32; 2] = [SIGINT, SIGTERM];

/// Records signals, so that the run ends after the current step. A second SIGINT or SIGTERM ends the process at once.
pub(crate) struct StopSignal {
    received: Arc<AtomicUsize>,
    arrived: Arc<OnceLock<Instant>>,
    listener: Handle,
}

impl StopSignal {
    /// Starts to listen.
    pub fn listen(records_stacks: bool) -> Result<Self, TrainError> {
        let names: &[i32] = if records_stacks { &SIGNALS_BESIDE_STACKS } else { &SIGNALS };
        let received = Arc::new(AtomicUsize::new(0));
        let failed = TrainError::io("listen to", "signals");
        for signal in names.iter().copied() {
            let second = Arc::new(AtomicBool::new(false));
            let register = || {
                if [SIGINT, SIGTERM].contains(&signal) {
                    // The order matters: the first signal finds the flag unset and sets it, the second ends the process.
                    signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, second.clone())?;
                    signal_hook::flag::register(signal, second.clone())?;
                }
                signal_hook::flag::register_usize(signal, received.clone(), signal as usize)
            };
            register().map_err(TrainError::io("listen to", "signals"))?;
        }
        let arrived = Arc::new(OnceLock::new());
        let mut signals = Signals::new(names).map_err(failed)?;
        let (listener, first) = (signals.handle(), Arc::clone(&arrived));
        std::thread::Builder::new()
            .name("signals".to_owned())
            .spawn(move || {
                if signals.forever().next().is_some() {
                    first.get_or_init(Instant::now);
                }
            })
            .map_err(TrainError::io("start", "the thread of signals"))?;
        Ok(Self { received, arrived, listener })
    }

    /// The number of the received signal, if any.
    pub fn received(&self) -> Option<i32> {
        match self.received.load(Ordering::Relaxed) {
            0 => None,
            signal => Some(signal as i32),
        }
    }

    /// The time at which the first signal arrived; now, if the thread that records it has not run yet.
    pub fn arrived(&self) -> Option<Instant> {
        self.received().map(|_| *self.arrived.get_or_init(Instant::now))
    }
}

impl Drop for StopSignal {
    fn drop(&mut self) {
        self.listener.close();
    }
}
