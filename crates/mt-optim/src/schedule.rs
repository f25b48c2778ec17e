//! Learning rates over time.

use mt_shape::DType;
use mt_trace::Tensor;

/// Linear warm-up from 0 to the peak, then a decay shape, then 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    pub peak: f64,
    pub warmup_steps: u64,
    /// The number of steps before the learning rate becomes 0, including warm-up.
    pub total_steps: u64,
    /// The fraction of the peak at the end of the decay.
    pub final_fraction: f64,
    pub shape: ScheduleShape,
}

/// The shape between warm-up and the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScheduleShape {
    /// Half a cosine that reaches its end in the last step.
    Cosine,
    /// A line that reaches its end in the last step.
    Linear,
    /// Constant at the peak.
    Constant,
    /// Constant at the peak, then a line over the last `fall_steps` steps.
    StableThenLinear { fall_steps: u64 },
    /// Constant at the peak, then half a cosine over the last `fall_steps` steps.
    StableThenCosine { fall_steps: u64 },
}

impl Schedule {
    /// The learning rate at `step`, an integer scalar that counts from 0.
    #[track_caller]
    pub fn at<'t>(&self, step: Tensor<'t>) -> Tensor<'t> {
        let step = step.cast(DType::F32);
        let region = step.region();
        let number = |value: f64| region.full(DType::F32, &[], value);
        let (warmup, total) = (self.warmup_steps as f64, self.total_steps as f64);
        let rise = step * (self.peak / warmup.max(1.0));
        let last = self.peak * self.final_fraction;
        let cosine = |start: f64| {
            let intervals = total - start - 1.0;
            // In MaxText a cosine of one step takes its last value, a line of one step its first.
            let progress = if intervals > 0.0 { (step - start) * (1.0 / intervals) } else { number(1.0) };
            let share = ((progress * std::f64::consts::PI).cos() + 1.0) * 0.5;
            share * (self.peak - last) + last
        };
        let line = |start: f64| {
            let progress = (step - start) * (1.0 / (total - 1.0 - start).max(1.0));
            progress * (last - self.peak) + self.peak
        };
        let after_stable = |fall_steps: u64, fall: &dyn Fn(f64) -> Tensor<'t>| {
            let start = total - fall_steps as f64;
            step.less(start).select(number(self.peak), fall(start))
        };
        let fall = match self.shape {
            ScheduleShape::Cosine => cosine(warmup),
            ScheduleShape::Linear => line(warmup),
            ScheduleShape::Constant => number(self.peak),
            ScheduleShape::StableThenLinear { fall_steps } => after_stable(fall_steps, &line),
            ScheduleShape::StableThenCosine { fall_steps } => after_stable(fall_steps, &cosine),
        };
        let rising = step.less(warmup).select(rise, fall);
        step.less(total).select(rising, number(0.0))
    }
}
