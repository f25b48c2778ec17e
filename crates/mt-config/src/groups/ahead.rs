//! Absent hardware, for which programs are compiled ahead of time.

use std::path::PathBuf;

use mt_shape::{DeviceAttributes, Topology};

use super::{Hardware, PlacementGroup, group};
use crate::{
    CompileTopology,
    config::Config,
    error::{ConfigError, Problem},
    origin::Origin,
};

group! {
    /// The absent hardware for which programs are compiled or costs are estimated.
    pub struct AheadGroup {
        compile_topology: Option<String>,
        compile_topology_num_slices: i64,
        compiled_trainstep_file: Option<PathBuf>,
    }
    besides {
        topology_origin: Origin = |config, _| Some(config.entry("compile_topology").origin.clone()),
        slices_origin: Origin =
            |config, _| Some(config.entry("compile_topology_num_slices").origin.clone()),
    }
}

/// Slices of absent hardware.
#[derive(Clone, Debug, PartialEq)]
pub struct AbsentHardware {
    /// The topology of one slice.
    pub slice: CompileTopology,
    pub num_slices: usize,
}

impl AheadGroup {
    fn check(&self, config: &Config, problems: &mut Vec<Problem>) {
        if self.compile_topology_num_slices == 0 {
            problems.push(Problem::inconsistent(
                format!("{}, which leaves no device", config.stated("compile_topology_num_slices")),
                "use 1 for one slice, or leave it out",
            ));
        }
    }

    /// The hardware, if `compile_topology` names any.
    ///
    /// # Errors
    /// No hardware has this name (the error lists the nearest names), or several slices of GPUs are requested.
    pub fn hardware(&self) -> Result<Option<AbsentHardware>, ConfigError> {
        let Some(name) = &self.compile_topology else { return Ok(None) };
        let slice = CompileTopology::find(name).map_err(|problem| match *problem {
            Problem::Inconsistent { message, hint } => {
                Problem::inconsistent(format!("{message} ({})", self.topology_origin), hint)
            }
            other => other,
        })?;
        let num_slices = usize::try_from(self.compile_topology_num_slices).unwrap_or(1);
        if num_slices > 1 && slice.chip.hardware == Hardware::Gpu {
            return Err(Problem::inconsistent(
                format!(
                    "`compile_topology_num_slices` is `{num_slices}` ({}), but `compile_topology` is `{name}` ({}), a machine of GPUs, and slices are of TPUs",
                    self.slices_origin, self.topology_origin
                ),
                "leave out `compile_topology_num_slices`, or name a TPU, such as `v5p-128`",
            )
            .into());
        }
        Ok(Some(AbsentHardware { slice, num_slices }))
    }
}

impl AbsentHardware {
    /// The slice of each device, in device order: all devices of one slice precede those of the next.
    pub fn slices(&self) -> Vec<i64> {
        let of_slice = self.slice.devices_per_slice();
        (0..self.num_slices).flat_map(|slice| std::iter::repeat_n(slice as i64, of_slice)).collect()
    }

    /// The topology of all devices.
    ///
    /// # Errors
    /// `num_slices` requests another number of slices.
    pub fn topology(&self, placement: &PlacementGroup) -> Result<Topology, ConfigError> {
        let (number, slices) = (self.slices().len(), Some(self.slices()));
        placement.topology(number, &DeviceAttributes { slices, ..DeviceAttributes::default() })
    }
}

#[cfg(test)]
mod tests {
    use crate::{AheadGroup, Config, Request};

    fn group(arguments: &[&str]) -> AheadGroup {
        let arguments = arguments.iter().map(|argument| (*argument).to_owned()).collect();
        let config = Config::resolve(&Request { arguments, ..Request::default() }).unwrap();
        AheadGroup::from_config(&config).unwrap()
    }

    #[test]
    fn slices_of_absent_hardware() {
        assert_eq!(group(&[]).hardware().unwrap(), None);
        let hardware = group(&["compile_topology=v5e-4"]).hardware().unwrap().unwrap();
        assert_eq!((hardware.num_slices, hardware.slices()), (1, vec![0; 4]));
        let two = group(&["compile_topology=v5e-4", "compile_topology_num_slices=2"]);
        assert_eq!(two.hardware().unwrap().unwrap().slices(), [0, 0, 0, 0, 1, 1, 1, 1]);
        let message = group(&["compile_topology=v5x-128"]).hardware().unwrap_err().to_string();
        assert!(message.contains("there is no hardware named `v5x-128` (command line)"), "{message}");
        let machines = group(&["compile_topology=h100-8", "compile_topology_num_slices=2"]);
        let message = machines.hardware().unwrap_err().to_string();
        assert!(message.contains("a machine of GPUs, and slices are of TPUs"), "{message}");
    }
}
