//! The compiler's output for a program, with or without devices to run it on.

use std::{fmt, ptr::NonNull, sync::Arc};

use crate::{
    Error, NamedValue, Plugin,
    plugin::{array, named_values},
    sys,
};

/// A compiled program.
pub struct CompiledProgram {
    plugin: Plugin,
    raw: NonNull<sys::Executable>,
    name: Arc<str>,
}

// SAFETY: PJRT executables may be used from any thread.
unsafe impl Send for CompiledProgram {}
// SAFETY: as above.
unsafe impl Sync for CompiledProgram {}

/// The memory that a program needs on each device, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    pub code: u64,
    pub arguments: u64,
    pub outputs: u64,
    /// The bytes of outputs that reuse donated arguments.
    pub aliased: u64,
    pub temporaries: u64,
    /// The same in host memory, for offloaded values.
    pub host_arguments: u64,
    pub host_outputs: u64,
    pub host_aliased: u64,
    pub host_temporaries: u64,
    /// The compiler's own estimate of the peak; 0 if it gives none.
    pub peak: u64,
}

impl MemoryUse {
    /// The bytes that one device must hold while the program runs.
    pub fn on_device(&self) -> u64 {
        (self.arguments + self.outputs + self.temporaries + self.code).saturating_sub(self.aliased)
    }
}

impl CompiledProgram {
    /// Takes over a handle.
    ///
    /// # Safety
    /// `raw` is a valid executable of `plugin` and belongs to the caller. Its client, if it has one, lives longer.
    pub(crate) unsafe fn from_raw(raw: NonNull<sys::Executable>, plugin: &Plugin, name: &str) -> Self {
        Self { plugin: plugin.clone(), raw, name: name.into() }
    }

    /// The name given at compilation.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn shared_name(&self) -> Arc<str> {
        self.name.clone()
    }

    /// The executable as bytes, for [`crate::Client::load_executable`] of the same plugin on a machine of the same kind.
    ///
    /// # Errors
    /// The platform does not support serialization.
    pub fn serialize(&self) -> Result<Vec<u8>, Error> {
        let mut arguments = sys::ExecutableSerialize::new();
        arguments.executable = self.raw.as_ptr();
        // SAFETY: the executable is valid. The bytes live until the deleter is called, once, on their owner.
        unsafe {
            self.plugin.call(&mut arguments).map_err(|error| error.in_program(self.name()))?;
            let bytes = arguments.serialized_bytes.cast::<u8>();
            let bytes = array(bytes, arguments.serialized_bytes_size).to_vec();
            if let Some(deleter) = arguments.deleter {
                deleter(arguments.serialized_executable);
            }
            Ok(bytes)
        }
    }

    /// The memory that the program needs on each device.
    ///
    /// # Errors
    /// The platform does not report it.
    pub fn memory(&self) -> Result<MemoryUse, Error> {
        let mut arguments = sys::ExecutableGetCompiledMemoryStats::new();
        arguments.executable = self.raw.as_ptr();
        // SAFETY: the executable is valid.
        unsafe { self.plugin.call(&mut arguments) }.map_err(|error| error.in_program(self.name()))?;
        let bytes = |value: i64| value.max(0) as u64;
        Ok(MemoryUse {
            code: bytes(arguments.generated_code_size),
            arguments: bytes(arguments.argument_size),
            outputs: bytes(arguments.output_size),
            aliased: bytes(arguments.alias_size),
            temporaries: bytes(arguments.temp_size),
            host_arguments: bytes(arguments.host_argument_size),
            host_outputs: bytes(arguments.host_output_size),
            host_aliased: bytes(arguments.host_alias_size),
            host_temporaries: bytes(arguments.host_temp_size),
            peak: bytes(arguments.peak_memory),
        })
    }

    /// The compiler's estimates, such as `flops`. A loop's body counts once.
    ///
    /// # Errors
    /// The platform gives no estimates.
    pub fn cost_analysis(&self) -> Result<Vec<(String, NamedValue)>, Error> {
        let mut arguments = sys::ExecutableGetCostAnalysis::new();
        arguments.executable = self.raw.as_ptr();
        // SAFETY: the executable is valid; the properties live as long as it does.
        unsafe {
            self.plugin.call(&mut arguments).map_err(|error| error.in_program(self.name()))?;
            Ok(named_values(arguments.properties, arguments.num_properties))
        }
    }

    /// The program after optimization, and the format of these bytes, such as `hlo_with_config`, a protocol buffer.
    ///
    /// # Errors
    /// The platform does not keep the optimized program.
    pub fn optimized_program(&self) -> Result<(String, Vec<u8>), Error> {
        let mut program = sys::Program::new();
        let mut arguments = sys::ExecutableOptimizedProgram::new();
        arguments.executable = self.raw.as_ptr();
        arguments.program = &raw mut program;
        let plugin = &self.plugin;
        // SAFETY: the executable and the program are valid. The first call sets the size, the second fills as many
        // bytes; the format is a string of the plugin's.
        unsafe {
            plugin.call(&mut arguments).map_err(|error| error.in_program(self.name()))?;
            let mut code = vec![0_u8; (*arguments.program).code_size];
            (*arguments.program).code = code.as_mut_ptr().cast();
            plugin.call(&mut arguments).map_err(|error| error.in_program(self.name()))?;
            let format = crate::plugin::text((*arguments.program).format, (*arguments.program).format_size);
            Ok((format, code))
        }
    }
}

impl Drop for CompiledProgram {
    fn drop(&mut self) {
        let mut arguments = sys::ExecutableDestroy::new();
        arguments.executable = self.raw.as_ptr();
        // SAFETY: the handle is valid and is not used again.
        unsafe { self.plugin.call_plain(&mut arguments) };
    }
}

impl fmt::Debug for CompiledProgram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CompiledProgram({})", self.name)
    }
}
