//! The weights of the sampler, which may have devices of its own.

use std::{
    ops::Deref,
    sync::{Arc, Mutex, PoisonError},
};

use mt_models::StateArray;
use mt_runtime::{Array, Resharding};

use crate::{TrainError, Trainer};

/// The weights that have moved to the sampler's devices.
#[derive(Default)]
pub(crate) struct Handover {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    resharding: Option<Resharding>,
    /// The weights on the sampler's devices, with the number of steps that had been done.
    moved: Option<(u64, Arc<Vec<Array>>)>,
    /// Whether these weights serve although a further step has begun.
    is_held: bool,
}

/// The parameters with which answers are sampled.
pub enum SamplerParameters<'a> {
    /// Those of the trainer itself.
    Shared(&'a [Array]),
    /// Copies on the sampler's own devices.
    Moved(Arc<Vec<Array>>),
}

impl Deref for SamplerParameters<'_> {
    type Target = [Array];

    fn deref(&self) -> &[Array] {
        match self {
            Self::Shared(arrays) => arrays,
            Self::Moved(arrays) => arrays,
        }
    }
}

impl Trainer {
    /// The parameters for sampling, in the model's order: those of the trainer, or, if the sampler has devices of its own,
    /// their copies there, which are made once after each step.
    ///
    /// # Errors
    /// A step failed and the state is lost, or the weights cannot be moved.
    pub fn sampler_parameters(&self) -> Result<SamplerParameters<'_>, TrainError> {
        let parameters = self.parameters()?;
        let Some(placement) = self.plan.sampler.as_ref() else {
            return Ok(SamplerParameters::Shared(parameters));
        };
        let mut state = self.handover.state.lock().unwrap_or_else(PoisonError::into_inner);
        let State { resharding, moved, is_held } = &mut *state;
        if let Some((_, arrays)) = moved.as_ref().filter(|(step, _)| *is_held || *step == self.next_step) {
            return Ok(SamplerParameters::Moved(arrays.clone()));
        }
        // The old copies make room for the new ones.
        *moved = None;
        let resharding = match resharding {
            Some(known) => known,
            None => {
                let described = |array: &Array| (array.ty().clone(), array.sharding().clone());
                let from: Vec<_> = parameters.iter().map(described).collect();
                let specs = StateArray::parameters(&**self.plan.model());
                let to: Vec<_> = specs.iter().map(|array| array.sharding(placement)).collect();
                let at_once = self.plan.settings.rl.reshard_chunk_size;
                let settings = self.plan.compile_settings();
                resharding.insert(Resharding::new(&self.runtime, &from, &to, at_once, &settings)?)
            }
        };
        let arrays = Arc::new(resharding.run(parameters)?);
        *moved = Some((self.next_step, arrays.clone()));
        Ok(SamplerParameters::Moved(arrays))
    }

    /// Keeps the present parameters for sampling while the next step trains, if the sampler has devices of its own.
    pub(crate) fn hold_sampler_parameters(&self) -> Result<(), TrainError> {
        self.sampler_parameters()?;
        self.handover.state.lock().unwrap_or_else(PoisonError::into_inner).is_held = true;
        Ok(())
    }

    /// Ends what [`Self::hold_sampler_parameters`] began.
    pub(crate) fn release_sampler_parameters(&self) {
        self.handover.state.lock().unwrap_or_else(PoisonError::into_inner).is_held = false;
    }
}
