//! Linear maps.

use mt_derive::Tree;
use mt_trace::Tensor;

/// A linear map without bias. Its kernel's leading axes are contracted.
#[derive(Clone, Debug, Tree)]
pub struct Linear<L> {
    pub kernel: L,
}

impl<'t> Linear<Tensor<'t>> {
    /// Multiplies by the kernel in the activation's type and sums over the axes `over`.
    ///
    /// # Shapes
    /// `[…, over] -> […, kernel's other axes]`
    #[track_caller]
    pub fn forward(&self, x: Tensor<'t>, over: &[&'static str]) -> Tensor<'t> {
        self.kernel.cast(x.dtype()).dot(x, over)
    }
}
