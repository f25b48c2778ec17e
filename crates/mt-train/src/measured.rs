//! Programs whose last result is a vector of named values.

use std::collections::{BTreeMap, btree_map::Entry};

use mt_runtime::{Executable, PendingArray};
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

/// A program for each size of batch, compiled when there is a batch of that size.
pub(crate) struct BySize<'a> {
    compile: Box<dyn Fn(usize) -> Result<Measured<Executable>, TrainError> + 'a>,
    compiled: BTreeMap<usize, Measured<Executable>>,
}

impl<'a> BySize<'a> {
    pub fn new(compile: impl Fn(usize) -> Result<Measured<Executable>, TrainError> + 'a) -> Self {
        Self { compile: Box::new(compile), compiled: BTreeMap::new() }
    }

    /// The program for batches of this many rows.
    pub fn of(&mut self, rows: usize) -> Result<&Measured<Executable>, TrainError> {
        match self.compiled.entry(rows) {
            Entry::Occupied(known) => Ok(known.into_mut()),
            Entry::Vacant(place) => Ok(place.insert((self.compile)(rows)?)),
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
