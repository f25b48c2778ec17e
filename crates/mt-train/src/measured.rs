//! Programs whose last result is a vector of named values.

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
