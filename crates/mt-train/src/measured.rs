//! Programs whose last result is a vector of named values.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    thread::{Scope, ScopedJoinHandle},
};

use mt_runtime::PendingArray;
use mt_shape::DType;
use mt_trace::{Inputs, Output, Tensor};

use crate::{TrainError, metrics::Metrics};

/// Scalars under the names of [`crate::metrics::names`], in the order in which they are recorded.
pub(crate) type NamedTensors<'t> = Vec<(&'static str, Tensor<'t>)>;

/// A program, traced or compiled, and the names of the values that it reports.
pub(crate) struct Measured<P> {
    pub program: P,
    pub names: Vec<&'static str>,
}

impl<P> Measured<P> {
    /// The same names for what the program is made into.
    pub fn try_map<Q, E>(self, make: impl FnOnce(P) -> Result<Q, E>) -> Result<Measured<Q>, E> {
        Ok(Measured { program: make(self.program)?, names: self.names })
    }

    /// Waits for the values that a run of the program reports.
    pub fn read(&self, metrics: PendingArray) -> Result<Metrics, TrainError> {
        let mut named = Metrics::default();
        for (name, value) in self.names.iter().zip(metrics.wait()?.to_f64()) {
            named.set(*name, value);
        }
        Ok(named)
    }
}

/// What compiles a program for batches of so many rows.
pub(crate) type Compile<'env, P> = &'env (dyn Fn(usize) -> Result<P, TrainError> + Sync);

/// A program for each size of batch, compiled when there is a batch of that size, or ahead of it by another thread.
pub(crate) struct BySize<'scope, 'env, P> {
    compile: Compile<'env, P>,
    scope: &'scope Scope<'scope, 'env>,
    compiled: BTreeMap<usize, P>,
    /// The size that is being compiled.
    ahead: Option<(usize, ScopedJoinHandle<'scope, Result<P, TrainError>>)>,
}

impl<'scope, 'env, P: Send + 'scope> BySize<'scope, 'env, P> {
    /// Threads are of `scope`, which waits for the one that still compiles when it ends.
    pub fn new(
        compile: Compile<'env, P>,
        scope: &'scope Scope<'scope, 'env>,
        compiled: impl IntoIterator<Item = (usize, P)>,
    ) -> Self {
        Self { compile, scope, compiled: compiled.into_iter().collect(), ahead: None }
    }

    /// The program for batches of this many rows.
    pub fn of(&mut self, rows: usize) -> Result<&P, TrainError> {
        if let Some((_, thread)) = self.ahead.take_if(|(ahead, _)| *ahead == rows) {
            let program = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            self.compiled.insert(rows, program);
        }
        match self.compiled.entry(rows) {
            Entry::Occupied(known) => Ok(known.into_mut()),
            Entry::Vacant(place) => Ok(place.insert((self.compile)(rows)?)),
        }
    }

    /// Has the program for batches of this many rows compiled while others run.
    pub fn prepare(&mut self, rows: usize) {
        if self.ahead.is_none() && !self.compiled.contains_key(&rows) {
            let compile = self.compile;
            self.ahead = Some((rows, self.scope.spawn(move || compile(rows))));
        }
    }
}

const METRIC: &str = "metric";

/// The values as one vector, so that one copy brings them to the host, and their names.
pub(crate) fn reported<'t>(
    inputs: &Inputs<'t>,
    metrics: &NamedTensors<'t>,
) -> (Output<'t>, Vec<&'static str>) {
    let parts: Vec<Tensor<'t>> =
        metrics.iter().map(|(_, scalar)| scalar.cast(DType::F32).unsqueeze(METRIC)).collect();
    let vector = parts[0].concatenate(&parts[1..], METRIC);
    (inputs.replicated("metrics", vector), metrics.iter().map(|(name, _)| *name).collect())
}

#[cfg(test)]
mod tests {
    use std::{
        sync::Mutex,
        thread::{self, ThreadId},
    };

    use super::*;

    #[test]
    fn the_next_size_is_compiled_beside_the_present_one() {
        let made: Mutex<Vec<(usize, ThreadId)>> = Mutex::default();
        let compile = |rows: usize| {
            made.lock().unwrap().push((rows, thread::current().id()));
            Ok(rows * 10)
        };
        thread::scope(|scope| {
            let mut programs = BySize::new(&compile, scope, [(8, 80)]);
            assert_eq!(*programs.of(2).unwrap(), 20);
            programs.prepare(4);
            programs.prepare(4);
            assert_eq!(*programs.of(2).unwrap(), 20);
            assert_eq!(*programs.of(4).unwrap(), 40);
            programs.prepare(8);
            assert_eq!(*programs.of(8).unwrap(), 80);
        });
        let made = made.into_inner().unwrap();
        assert!(made.iter().map(|(rows, _)| *rows).eq([2, 4]));
        assert_eq!(
            made.iter().map(|(_, by)| *by == thread::current().id()).collect::<Vec<_>>(),
            [true, false]
        );
    }
}
