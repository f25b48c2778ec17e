//! Linear maps.

use mt_derive::Tree;
use mt_trace::Tensor;

/// A linear map, with or without bias. Its kernel's leading axes are contracted.
#[derive(Clone, Debug, Tree)]
pub struct Linear<L> {
    pub kernel: L,
    /// Over the kernel's other axes.
    pub bias: Option<L>,
}

impl<L> Linear<L> {
    /// A linear map without bias.
    pub fn without_bias(kernel: L) -> Self {
        Self { kernel, bias: None }
    }
}

impl<'t> Linear<Tensor<'t>> {
    /// Multiplies by the kernel in the activation's type, sums over the axes `over`, and adds the bias.
    ///
    /// # Shapes
    /// `[…, over] -> […, kernel's other axes]`
    #[track_caller]
    pub fn forward(&self, x: Tensor<'t>, over: &[&'static str]) -> Tensor<'t> {
        let product = self.kernel.cast(x.dtype()).dot(x, over);
        match self.bias {
            Some(bias) => product + bias.cast(x.dtype()),
            None => product,
        }
    }
}
