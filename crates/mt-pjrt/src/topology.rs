//! Hardware that is only compiled for.

use std::{fmt, ptr::NonNull};

use crate::{
    CompileOptions, CompiledProgram, Error, NamedValue, Plugin,
    client::non_null,
    plugin::{array, named_values, text},
    sys,
};

/// Devices for which a plugin can compile without having them.
pub struct Topology {
    plugin: Plugin,
    raw: NonNull<sys::TopologyDescription>,
    platform_name: String,
    devices: Vec<TopologyDevice>,
}

// SAFETY: a topology does not change, and PJRT functions may be called from any thread.
unsafe impl Send for Topology {}
// SAFETY: as above.
unsafe impl Sync for Topology {}

/// A device of a topology.
#[derive(Clone, Debug, PartialEq)]
pub struct TopologyDevice {
    pub id: i32,
    /// For example `TPU v5p`.
    pub kind: String,
    /// The plugin's attributes of the device, such as `coords` and `slice_index`.
    pub attributes: Vec<(String, NamedValue)>,
}

impl TopologyDevice {
    /// The device's slice; 0 if there is only one.
    pub fn slice(&self) -> usize {
        let slice = self.attributes.iter().find(|(name, _)| name == "slice_index");
        match slice {
            Some((_, NamedValue::Integer(index))) => usize::try_from(*index).unwrap_or(0),
            _ => 0,
        }
    }

    /// The device's coordinates in the network of its slice, if the plugin reports them.
    pub fn coordinates(&self) -> Option<Vec<i64>> {
        coordinates(&self.attributes)
    }
}

/// The coordinates among the attributes of a device.
pub(crate) fn coordinates(attributes: &[(String, NamedValue)]) -> Option<Vec<i64>> {
    attributes.iter().find_map(|(name, value)| match value {
        NamedValue::Integers(coordinates) if name == "coords" => Some(coordinates.clone()),
        _ => None,
    })
}

impl Topology {
    /// The topology that the plugin calls `name`, such as `v5p:4x4x4`, with plugin-specific options.
    ///
    /// # Errors
    /// The plugin does not know the topology.
    pub fn new(plugin: &Plugin, name: &str, options: &[(String, NamedValue)]) -> Result<Self, Error> {
        let raw_options: Vec<sys::NamedValue> =
            options.iter().map(|(name, value)| value.to_raw(name)).collect();
        let mut arguments = sys::TopologyCreate::new();
        arguments.topology_name = name.as_ptr().cast();
        arguments.topology_name_size = name.len();
        arguments.create_options = raw_options.as_ptr();
        arguments.num_options = raw_options.len();
        // SAFETY: the name and the options outlive the call.
        unsafe { plugin.call(&mut arguments) }?;
        let raw = non_null(arguments.topology, "TopologyCreate")?;
        let mut topology =
            Self { plugin: plugin.clone(), raw, platform_name: String::new(), devices: Vec::new() };
        topology.describe()?;
        Ok(topology)
    }

    fn describe(&mut self) -> Result<(), Error> {
        let mut name = sys::TopologyPlatformName::new();
        name.topology = self.raw.as_ptr();
        let mut devices = sys::TopologyDeviceDescriptions::new();
        devices.topology = self.raw.as_ptr();
        // SAFETY: the topology is valid, and the string and the array live as long as it does.
        let descriptions = unsafe {
            self.plugin.call(&mut name)?;
            self.platform_name = text(name.name, name.name_size);
            self.plugin.call(&mut devices)?;
            array(devices.descriptions, devices.num_descriptions)
        };
        for description in descriptions {
            let mut id = sys::DeviceDescriptionId::new();
            id.description = *description;
            let mut kind = sys::DeviceDescriptionKind::new();
            kind.description = *description;
            let mut attributes = sys::DeviceDescriptionAttributes::new();
            attributes.description = *description;
            // SAFETY: the description is valid, and its string and array live as long as it does.
            let device = unsafe {
                self.plugin.call(&mut id)?;
                self.plugin.call(&mut kind)?;
                self.plugin.call(&mut attributes)?;
                TopologyDevice {
                    id: id.id,
                    kind: text(kind.kind, kind.kind_size),
                    attributes: named_values(attributes.attributes, attributes.num_attributes),
                }
            };
            self.devices.push(device);
        }
        Ok(())
    }

    /// The name of the platform, such as `tpu`.
    pub fn platform_name(&self) -> &str {
        &self.platform_name
    }

    /// The devices, in the order in which the plugin lists them.
    pub fn devices(&self) -> &[TopologyDevice] {
        &self.devices
    }

    /// Compiles a program given as StableHLO text. Errors mention `name`; the devices of `options` are indices among
    /// [`Self::devices`].
    ///
    /// # Errors
    /// The text is not a valid program, or it does not fit the devices.
    pub fn compile(
        &self,
        name: &str,
        stablehlo: &str,
        options: &CompileOptions,
    ) -> Result<CompiledProgram, Error> {
        if let Some(device) = options.devices.iter().find(|device| **device >= self.devices.len()) {
            let count = self.devices.len();
            return Err(Error::Argument(format!("the topology has no device {device}, but {count} devices")));
        }
        let device_ids: Vec<i64> = self.devices.iter().map(|device| i64::from(device.id)).collect();
        let encoded = options.encode(&device_ids);
        let program = sys::Program::stablehlo(stablehlo);
        let mut arguments = sys::Compile::new();
        arguments.topology = self.raw.as_ptr();
        arguments.program = &raw const program;
        arguments.compile_options = encoded.as_ptr().cast();
        arguments.compile_options_size = encoded.len();
        // SAFETY: the topology is valid; the program and the options outlive the call.
        unsafe { self.plugin.call(&mut arguments) }.map_err(|error| error.in_program(name))?;
        let raw = non_null(arguments.executable, "Compile")?;
        // SAFETY: the handle was just created for this call, and has no client.
        Ok(unsafe { CompiledProgram::from_raw(raw, &self.plugin, name) })
    }
}

impl Drop for Topology {
    fn drop(&mut self) {
        let mut arguments = sys::TopologyDestroy::new();
        arguments.topology = self.raw.as_ptr();
        // SAFETY: the topology is valid and is not used again.
        unsafe { self.plugin.call_plain(&mut arguments) };
    }
}

impl fmt::Debug for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Topology({}, {} devices)", self.platform_name, self.devices.len())
    }
}
