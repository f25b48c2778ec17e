//! The devices of trainer and sampler in reinforcement learning.

use mt_shape::Placement;

use super::{PlacementGroup, RlGroup};
use crate::{
    config::Config,
    error::{ConfigError, Problem},
};

/// The devices on which a run trains and those on which it samples. They may overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceSplit {
    /// The number of devices that train: the first ones.
    pub trainer: usize,
    /// The number of devices that sample: the last ones.
    pub sampler: usize,
    /// The number of all devices.
    pub all: usize,
}

impl DeviceSplit {
    /// The first device that samples.
    pub fn first_of_sampler(&self) -> usize {
        self.all - self.sampler
    }
}

impl RlGroup {
    /// The devices of trainer and sampler; `None` if both take turns on all devices.
    ///
    /// # Errors
    /// A fraction of the devices is none.
    pub fn device_split(&self, all: usize) -> Result<Option<DeviceSplit>, ConfigError> {
        if !self.use_rl || !self.fractions_are_given || all == 1 {
            return Ok(None);
        }
        let share = |fraction: f64| (fraction * all as f64 + 1e-9) as usize;
        let (trainer, sampler) = (share(self.trainer_devices_fraction), share(self.sampler_devices_fraction));
        for (key, fraction, number) in [
            ("trainer_devices_fraction", self.trainer_devices_fraction, trainer),
            ("sampler_devices_fraction", self.sampler_devices_fraction, sampler),
        ] {
            if number == 0 {
                return Err(Problem::inconsistent(
                    format!("`{key}` is `{fraction}`, which of {all} devices is none"),
                    "use a larger fraction, or leave both fractions out to train and sample by turns on all devices",
                )
                .into());
            }
        }
        Ok(Some(DeviceSplit { trainer, sampler, all }).filter(|_| trainer < all || sampler < all))
    }

    /// The placement of the sampler on its devices.
    ///
    /// # Errors
    /// The sizes of the mesh axes do not match the number of devices.
    pub fn sampler_placement(
        &self,
        placement: &PlacementGroup,
        split: DeviceSplit,
    ) -> Result<Placement, ConfigError> {
        let mut sizes = [
            ("data", self.rollout_data_parallelism),
            ("tensor", self.rollout_tensor_parallelism),
            ("expert", self.rollout_expert_parallelism),
        ];
        // The first open axis takes the remaining devices.
        let set: i64 = sizes.iter().map(|(_, size)| (*size).max(1)).product();
        let mut rest = (split.sampler as i64 / set.max(1)).max(1);
        for (_, size) in &mut sizes {
            if *size < 1 {
                (*size, rest) = (rest, 1);
            }
        }
        if sizes.iter().map(|(_, size)| *size).product::<i64>() != split.sampler as i64 {
            let product = sizes.map(|(axis, size)| format!("{size} along `{axis}`"));
            return Err(Problem::inconsistent(
                format!("the sampler has {} devices, but splits them into {}", split.sampler, product.join(" × ")),
                "choose `rollout_data_parallelism`, `rollout_tensor_parallelism` and `rollout_expert_parallelism` whose \
                 product is the number of devices; -1 takes the remaining ones",
            )
            .into());
        }
        let sizes = sizes.map(|(axis, size)| (axis, size as usize));
        placement.on_devices(split.first_of_sampler(), &sizes)
    }

    /// Refuses settings of the sampler's devices if it has none of its own.
    pub(super) fn check_devices_of_sampler(&self, config: &Config, problems: &mut Vec<Problem>) {
        if self.fractions_are_given {
            return;
        }
        let sizes = [
            ("rollout_data_parallelism", self.rollout_data_parallelism),
            ("rollout_tensor_parallelism", self.rollout_tensor_parallelism),
            ("rollout_expert_parallelism", self.rollout_expert_parallelism),
        ];
        let split = sizes.into_iter().find(|(_, size)| *size > 1).map(|(key, _)| key);
        let key = split.or(self.reshard_chunk_size.map(|_| "reshard_chunk_size"));
        if let Some(key) = key {
            problems.push(Problem::inconsistent(
                format!(
                    "{}, but trainer and sampler take turns on the same devices, with one placement",
                    config.stated(key)
                ),
                format!(
                    "give both devices of their own with `trainer_devices_fraction` and `sampler_devices_fraction`, or \
                     leave out `{key}`"
                ),
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::{PresetCommand, Request, TrainConfig};

    fn config(keys: &[&str]) -> TrainConfig {
        let fixed = ["hf_train_files=a.jsonl", "tokenizer_type=byte", "vocab_size=260", "steps=3"];
        let arguments = fixed.iter().chain(keys).map(|word| (*word).to_owned()).collect();
        let request = Request { arguments, ..Request::default() }.for_command(PresetCommand::named("rl"));
        TrainConfig::from_config(&crate::Config::resolve(&request).unwrap()).unwrap()
    }

    #[test]
    fn devices_are_divided_by_fractions() {
        let split = |keys: &[&str], all: usize| {
            let split = config(keys).rl.device_split(all).unwrap();
            split.map(|split| (split.trainer, split.sampler, split.first_of_sampler()))
        };
        assert_eq!(split(&[], 8), None);
        let quarters = ["trainer_devices_fraction=0.75", "sampler_devices_fraction=0.25"];
        assert_eq!(split(&quarters, 8), Some((6, 2, 6)));
        assert_eq!(split(&quarters, 1), None);
        assert_eq!(split(&["trainer_devices_fraction=0.5"], 8), Some((4, 4, 4)));
        assert_eq!(split(&["trainer_devices_fraction=1", "sampler_devices_fraction=1"], 8), None);
        assert_eq!(split(&["trainer_devices_fraction=1"], 8), Some((8, 4, 4)));
        let error = config(&["sampler_devices_fraction=0.1"]).rl.device_split(8).unwrap_err().to_string();
        assert!(error.contains("`sampler_devices_fraction` is `0.1`, which of 8 devices is none"), "{error}");
    }

    #[test]
    fn samplers_have_a_mesh_of_their_own() {
        let made = |keys: &[&str]| {
            let config = config(&[&["trainer_devices_fraction=0.5"], keys].concat());
            let split = config.rl.device_split(8).unwrap().unwrap();
            config.rl.sampler_placement(&config.placement, split)
        };
        let sizes = |keys: &[&str]| {
            let placement = made(keys).unwrap();
            assert_eq!(placement.mesh().devices(), [4, 5, 6, 7]);
            ["data", "tensor"].map(|axis| placement.mesh().axis_size(axis).unwrap_or(1))
        };
        assert_eq!(sizes(&[]), [4, 1]);
        assert_eq!(sizes(&["rollout_tensor_parallelism=2"]), [2, 2]);
        assert_eq!(sizes(&["rollout_data_parallelism=1"]), [1, 4]);
        let error = made(&["rollout_tensor_parallelism=3"]).unwrap_err().to_string();
        assert!(error.contains("has 4 devices") && error.contains("3 along `tensor`"), "{error}");
    }
}
