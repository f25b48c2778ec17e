//! Learning rates over time.

use mt_shape::DType;
use mt_trace::Tensor;

/// Linear from 0 to the peak, then half a cosine down to a share of the peak, then 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WarmupCosine {
    pub peak: f64,
    pub warmup_steps: u64,
    /// The steps of the rise and the fall together.
    pub total_steps: u64,
    /// The share of the peak at the end of the fall.
    pub final_fraction: f64,
}

impl WarmupCosine {
    /// The learning rate at `step`, an integer scalar that counts from 0.
    #[track_caller]
    pub fn at<'t>(&self, step: Tensor<'t>) -> Tensor<'t> {
        let step = step.cast(DType::F32);
        let region = step.region();
        let number = |value: f64| region.full(DType::F32, &[], value);
        let (warmup, total) = (self.warmup_steps as f64, self.total_steps as f64);
        let rise = step * (self.peak / warmup.max(1.0));
        let progress = (step - warmup) * (1.0 / (total - warmup).max(1.0));
        let cosine = ((progress * std::f64::consts::PI).cos() + 1.0) * 0.5;
        let last = self.peak * self.final_fraction;
        let fall = cosine * (self.peak - last) + last;
        let rising = step.less(warmup).select(rise, fall);
        step.less(total).select(rising, number(0.0))
    }
}
