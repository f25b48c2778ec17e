//! Batches that grow.

use super::DataGroup;
use crate::{
    config::Config,
    error::{ConfigError, Problem},
};

/// How many sequences the batch of each step has, on all devices together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchSchedule {
    /// The first step of each size, and the size; the first of them begins at step 0.
    stages: Vec<(u64, usize)>,
}

impl BatchSchedule {
    /// The sequences of a step, counted from 0.
    pub fn rows_at(&self, step: u64) -> usize {
        let after = self.stages.partition_point(|(first, _)| *first <= step);
        self.stages[after.max(1) - 1].1
    }

    /// The sequences of a step once batches have grown.
    pub fn full_rows(&self) -> usize {
        self.stages[self.stages.len() - 1].1
    }

    /// The step from which on batches have grown.
    pub fn end_step(&self) -> u64 {
        self.stages[self.stages.len() - 1].0
    }
}

impl DataGroup {
    /// The sequences of each step: those that are trained on for one after the other's gradients are added up, and
    /// fewer of them at first if batches grow, each size until it has had its share of `global_rampup_samples`.
    ///
    /// # Errors
    /// The devices together have no whole number of sequences.
    pub fn batch_schedule(&self, num_devices: usize) -> Result<BatchSchedule, ConfigError> {
        let accumulated = |rows: usize| rows * self.gradient_accumulation_steps;
        let mut stages = Vec::new();
        let full = accumulated(self.micro_batch(num_devices)?);
        let mut step = 0_u64;
        if let Some((start, increment)) = self.ramp(num_devices)? {
            let (mut rows, increment) = (accumulated(start), accumulated(increment));
            let num_increments = ((full - rows) / increment).max(1);
            let samples = self.global_rampup_samples as f64 / num_increments as f64;
            while rows < full {
                stages.push((step, rows));
                step += (samples / rows as f64).ceil() as u64;
                rows += increment;
            }
        }
        stages.push((step, full));
        Ok(BatchSchedule { stages })
    }

    /// The sequences that are trained on at a time, in the batches of each size, with the key that says so.
    pub(super) fn micro_batches(
        &self,
        num_devices: usize,
    ) -> Result<Vec<(&'static str, &crate::Origin, usize)>, ConfigError> {
        let mut sizes = vec![("per_device_batch_size", &self.batch_origin, self.micro_batch(num_devices)?)];
        if let Some((start, increment)) = self.ramp(num_devices)? {
            sizes.push(("per_device_batch_size_start", &self.ramp_start_origin, start));
            sizes.push(("per_device_batch_size_increment", &self.ramp_increment_origin, increment));
        }
        Ok(sizes)
    }

    /// The sequences of the first batches and of an increment, on all devices together, if batches grow.
    fn ramp(&self, num_devices: usize) -> Result<Option<(usize, usize)>, ConfigError> {
        if !self.enable_rampup_batch_size {
            return Ok(None);
        }
        let whole = |key, size, origin| super::data::whole_batch(key, size, origin, num_devices);
        let start =
            whole("per_device_batch_size_start", self.per_device_batch_size_start, &self.ramp_start_origin)?;
        let increment = whole(
            "per_device_batch_size_increment",
            self.per_device_batch_size_increment,
            &self.ramp_increment_origin,
        )?;
        Ok(Some((start, increment)))
    }

    /// Whether batches that grow come to their full size.
    pub(super) fn check_ramp(&self, config: &Config, problems: &mut Vec<Problem>) {
        if !self.enable_rampup_batch_size {
            return;
        }
        let stated = |key| config.stated(key);
        let (start, full) = (self.per_device_batch_size_start, self.per_device_batch_size);
        let increment = self.per_device_batch_size_increment;
        if start == 0.0 || start >= full {
            problems.push(Problem::inconsistent(
                format!(
                    "batches are to grow, but {} and {}",
                    stated("per_device_batch_size_start"),
                    stated("per_device_batch_size")
                ),
                "start with fewer sequences than there are to be, but some, or leave out `enable_rampup_batch_size`",
            ));
            return;
        }
        if increment == 0.0 {
            problems.push(Problem::inconsistent(
                format!("{}, so that batches never grow", stated("per_device_batch_size_increment")),
                format!(
                    "grow by some sequences at a time, such as `per_device_batch_size_increment={start}`"
                ),
            ));
            return;
        }
        let increments = (full - start) / increment;
        if (increments - increments.round()).abs() > 1e-6 {
            let whole = increments.floor().max(1.0);
            problems.push(Problem::inconsistent(
                format!(
                    "{}, {} and {}, so that batches would grow {increments} times",
                    stated("per_device_batch_size_start"),
                    stated("per_device_batch_size"),
                    stated("per_device_batch_size_increment")
                ),
                format!(
                    "let them grow a whole number of times: `per_device_batch_size_increment={}` for {whole}",
                    (full - start) / whole
                ),
            ));
        }
        if self.global_rampup_samples == 0 {
            problems.push(Problem::inconsistent(
                format!("{}, so that no batch is small", stated("global_rampup_samples")),
                "say after how many sequences batches have their full size, or leave out `enable_rampup_batch_size`",
            ));
        }
        if self.reuse_example_batch > 0 {
            problems.push(Problem::inconsistent(
                format!(
                    "{} and {}, but a batch that is used again does not grow",
                    stated("enable_rampup_batch_size"),
                    stated("reuse_example_batch")
                ),
                "leave out one of them",
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::{Config, DataGroup, Request};

    fn group(keys: &[&str]) -> (Config, DataGroup) {
        let mut request = Request::default();
        request.arguments.push("dataset_type=synthetic".to_owned());
        request.arguments.extend(keys.iter().map(|key| (*key).to_owned()));
        let config = Config::resolve(&request).unwrap();
        let group = DataGroup::from_config(&config).unwrap();
        (config, group)
    }

    const GROWING: [&str; 5] = [
        "enable_rampup_batch_size=true",
        "per_device_batch_size_start=2",
        "per_device_batch_size_increment=1",
        "per_device_batch_size=6",
        "global_rampup_samples=400",
    ];

    #[test]
    fn sizes_follow_each_other_as_the_derived_keys_say() {
        // On 2 devices 4, 6, 8, 10 sequences for 100 each: 25 + 17 + 13 + 10 steps.
        let (_, data) = group(&GROWING);
        let schedule = data.batch_schedule(2).unwrap();
        let sizes = [(0, 4), (24, 4), (25, 6), (41, 6), (42, 8), (54, 8), (55, 10), (64, 10), (65, 12)];
        for (step, rows) in sizes {
            assert_eq!(schedule.rows_at(step), rows, "step {step}");
        }
        assert_eq!((schedule.rows_at(u64::MAX), schedule.full_rows(), schedule.end_step()), (12, 12, 65));

        let accumulated =
            [&GROWING[..], &["gradient_accumulation_steps=3", "num_cpu_devices=2", "hardware=cpu"]];
        let (config, data) = group(&accumulated.concat());
        let schedule = data.batch_schedule(2).unwrap();
        assert_eq!((schedule.rows_at(0), schedule.full_rows()), (12, 36));
        let derived = |name| config.entry(name).value.as_u64();
        assert_eq!(derived("rampup_end_step"), Some(schedule.end_step()));
        assert_eq!(derived("global_batch_size_to_load_start"), Some(12));
        assert_eq!(derived("global_batch_size_to_load"), Some(36));
        assert_eq!(derived("micro_batch_size_to_train_on"), Some(12));
    }

    #[test]
    fn without_growth_all_steps_have_the_same_size() {
        let (_, data) = group(&["per_device_batch_size=0.5", "gradient_accumulation_steps=2"]);
        let schedule = data.batch_schedule(8).unwrap();
        assert_eq!((schedule.rows_at(0), schedule.rows_at(9), schedule.end_step()), (8, 8, 0));
        assert_eq!(data.eval_global_batch(8).unwrap(), 4);
    }
}
