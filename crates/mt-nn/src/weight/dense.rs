//! Weights of one array.

use mt_shape::DType;
use mt_trace::Tensor;

use super::WeightFormat;
use crate::ParamSpec;

/// One array of floating-point numbers.
pub static DENSE: Dense = Dense;

/// The array is at the weight's own path.
pub(super) const NAME: &str = "";

/// The format of [`DENSE`].
#[derive(Debug)]
pub struct Dense;

impl WeightFormat for Dense {
    fn name(&self) -> &'static str {
        "dense"
    }

    fn specs(&self, dense: ParamSpec, _num_inputs: usize) -> Vec<(&'static str, ParamSpec)> {
        vec![(NAME, dense)]
    }

    fn dense<'t>(&self, arrays: &[Tensor<'t>], dtype: DType) -> Tensor<'t> {
        arrays[0].cast(dtype)
    }

    fn table<'t>(&self, arrays: &[Tensor<'t>]) -> Tensor<'t> {
        arrays[0]
    }
}
